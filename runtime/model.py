"""Bundle in, pictures out: the Python API of the runtime."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from csd_ops.errors import InputError
from runtime.backends import Backend, CpuBackend, open_backend
from runtime.bundle import Bundle, open_bundle
from runtime.decoder import Decoded, Decoder, Request, Setup
from runtime.presets import Preset, adjust, find_preset
from runtime.prompt import PromptEncoder
from runtime.tuning import tuned_window

if TYPE_CHECKING:
    from PIL.Image import Image

DEMO = Path(__file__).parent / "demo"


@dataclass(frozen=True)
class Generation:
    """What `generate` made and how. `seconds` runs from prompt to pixels; forward passes include the prompt's."""

    prompts: list[str]
    pixels: np.ndarray  # uint8 [n, height, width, 3]
    decoded: list[Decoded]
    preset: Preset
    guidance: float | None
    seconds: float
    decode_seconds: float  # of them, from tokens to pixels
    engine_calls: int
    provider: str
    threads: int

    @property
    def images(self) -> list[Image]:
        """The pictures as Pillow images."""
        from PIL import Image

        return [Image.fromarray(pixels) for pixels in self.pixels]

    @property
    def tokens(self) -> int:
        """Image tokens of all pictures."""
        return sum(len(decoded.tokens) for decoded in self.decoded)

    @property
    def forward_passes(self) -> int:
        """Forward passes of all pictures, each picture counting those it took part in."""
        return sum(decoded.passes for decoded in self.decoded)

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens that a forward pass decided for a picture."""
        return self.tokens / self.forward_passes

    @property
    def distortion(self) -> float:
        """Mean per token of TV(law of the token, target law), exact for the rule that ran; 0 is lossless."""
        return float(np.mean([decoded.mean("distortion") for decoded in self.decoded]))

    @property
    def entropy(self) -> float:
        """Mean entropy of the law that each token was decided under, nats."""
        return float(np.mean([decoded.mean("entropy") for decoded in self.decoded]))

    @property
    def excess(self) -> float:
        """Mean of -log q(token) - H(q), nats: 0 within its error for an exact sampler, positive for a relaxed one."""
        return float(np.mean([decoded.excess.mean() for decoded in self.decoded]))

    def summary(self) -> dict[str, Any]:
        """The closing figures as plain values, for JSON."""
        return {
            "preset": self.preset.name,
            "lossless": self.preset.lossless,
            "window": self.preset.window,
            "guidance": self.guidance,
            "prompts": self.prompts,
            "seed": self.decoded[0].seed,
            "tokens": self.tokens,
            "forward_passes": self.forward_passes,
            "tokens_per_pass": round(self.tokens_per_pass, 3),
            "distortion_per_token": round(self.distortion, 6),
            "distortion_per_picture": round(self.distortion * self.tokens / len(self.decoded), 4),
            "entropy": round(self.entropy, 4),
            "seconds": round(self.seconds, 4),
            "provider": self.provider,
            "threads": self.threads,
        }


@dataclass
class ImageModel:
    """An opened bundle with its engines.

    >>> model = ImageModel.open()                      # the demo model
    >>> model.generate("red apple", seed=1).images[0].save("apple.png")
    """

    bundle: Bundle
    engine: str = "auto"
    threads: int | None = None
    wait: str = "brief"
    backend: Backend = field(init=False)
    _encoder: PromptEncoder = field(init=False)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str] | None = None,
        *,
        engine: str = "auto",
        threads: int | None = None,
        wait: str = "brief",
        verify: bool = True,
    ) -> ImageModel:
        """Open a bundle (None: the demo model shipped with the package). InputError when it is not whole.

        `engine` is cpu, tensorrt, rtx, cuda or auto (a plan of the bundle that fits this machine's GPU, else cpu).
        On the CPU, `threads` None takes all cores; between operators they wait passively, briefly awake or actively
        (`wait`: passive, brief, active): the more, the faster where nothing else wants the cores. `verify` off skips
        the checksums.
        """
        return cls(open_bundle(DEMO if folder is None else folder, verify=verify), engine, threads, wait)

    def __post_init__(self) -> None:
        self._encoder = PromptEncoder(self.bundle)
        self.backend = open_backend(self.engine, self.bundle, threads=self.threads, wait=self.wait)

    def preset(self, name: str | None = None, **changes: Any) -> Preset:
        """The preset of that name (None: the one this bundle recommends) with other numbers where given."""
        chosen = name or self.bundle.manifest.recommended.get("preset", "csd")
        return adjust(find_preset(chosen, self.bundle.manifest.family), **changes)

    def tuned(self, preset: Preset) -> Preset:
        """The preset with the window that `csd tune` stored for this bundle and machine; as it is if it stored none."""
        if preset.window == 1 or not isinstance(self.backend, CpuBackend):
            return preset
        window = tuned_window(self.bundle, preset.name, self.backend.provider, self.backend.threads)
        return preset if window is None else replace(preset, window=window, tuned=True)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        preset: str | Preset | None = None,
        seed: int = 0,
        count: int = 1,
        guidance: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        batch: int = 1,
        on_progress: Callable[[int, int], None] | None = None,
        **changes: Any,
    ) -> Generation:
        """Draw `count` pictures of each prompt; picture i of the call uses seed + i.

        Args:
            prompts: one text or several.
            preset: a name, a Preset, or None for the bundle's own. A name's window is the one that `csd tune` found
                fastest on this machine, if it was asked.
            seed: same seed, settings and batch: same picture.
            count: pictures per prompt.
            guidance: weight w of q from w z_cond + (1 - w) z_uncond; 1 is without guidance. None: the bundle's.
            temperature: 0 is greedy. None: the bundle's, as for top_k (0: off) and top_p (1: off).
            top_k: keep the k likeliest tokens.
            top_p: keep the likeliest tokens up to this mass.
            batch: pictures decoded together, each at its own pace.
            on_progress: called with (tokens decided, tokens in all) after every forward pass.
            changes: numbers of the preset: window, delta, lambda_, coupling, fresh, k, ...

        Raises:
            InputError: a prompt, name or number that does not fit.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            raise InputError("expected at least one prompt, found none; say what to draw")
        _at_least("seed", seed, 0)
        _at_least("count", count, 1)
        _at_least("batch", batch, 1)
        texts = [text for text in texts for _ in range(count)]
        if isinstance(preset, Preset):
            chosen = adjust(preset, **changes)
        elif changes.get("window") is None:
            chosen = self.tuned(self.preset(preset, **changes))
        else:
            chosen = self.preset(preset, **changes)
        recommended = self.bundle.manifest.recommended
        guidance = float(recommended.get("guidance", 1.0) if guidance is None else guidance)
        if not 0 <= guidance <= 100:
            raise InputError(f"expected guidance from 0 to 100, found {guidance:g}; choose one inside")
        settings = chosen.settings(
            temperature=float(recommended.get("temperature", 1.0) if temperature is None else temperature),
            top_k=int(recommended.get("top_k", 0) if top_k is None else top_k),
            top_p=float(recommended.get("top_p", 1.0) if top_p is None else top_p),
        )
        began = time.perf_counter()
        requests = []
        for number, text in enumerate(texts):
            conditional, unconditional = self._encoder.encode(text)
            rows = (conditional,) if guidance == 1 else (conditional, unconditional)
            requests.append(Request(rows, seed + number))
        setup = Setup(
            self.bundle.manifest,
            settings,
            chosen.window,
            None if guidance == 1 else guidance,
            min(batch, len(requests)),
            max(len(row) for request in requests for row in request.rows),
        )
        loop = self.backend.loop(setup)
        before = loop.passes
        decoder = Decoder(setup, loop)
        decoded = decoder.decode(requests, _total(on_progress, len(texts), self.bundle.manifest.image_tokens))
        tokens = time.perf_counter()
        pixels = self.decode_image(np.stack([entry.tokens for entry in decoded]))
        ended = time.perf_counter()
        return Generation(
            prompts=texts,
            pixels=pixels,
            decoded=decoded,
            preset=chosen,
            guidance=None if guidance == 1 else guidance,
            seconds=ended - began,
            decode_seconds=ended - tokens,
            engine_calls=loop.passes - before,
            provider=self.backend.provider,
            threads=self.backend.threads,
        )

    def prompt_length(self, prompt: str) -> int:
        """Ids of a prompt in the bundle's template."""
        return len(self._encoder.encode(prompt)[0])

    def decode_image(self, tokens: np.ndarray) -> np.ndarray:
        """Image tokens int64 [n, N] to pixels uint8 [n, height, width, 3]."""
        return self.backend.decode_image(tokens)


def _total(
    on_progress: Callable[[int, int], None] | None, pictures: int, tokens: int
) -> Callable[[int, int], None] | None:
    """Progress over all pictures from the progress of each."""
    if on_progress is None:
        return None
    decided = [0] * pictures

    def report(request: int, position: int) -> None:
        decided[request] = position
        on_progress(sum(decided), pictures * tokens)

    return report


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"expected {name} of at least {least}, found {value}; choose a larger one")
