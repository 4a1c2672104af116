"""The baseline: transformers' own `generate`, eager, with a choice of cache, or with the transformer compiled."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from csd_ops.errors import InputError, MachineError
from runtime.prompt import PromptEncoder

if TYPE_CHECKING:
    from runtime.model import ImageModel

# Name -> what it is. The first is what a user gets who changes nothing.
BASELINES = {
    "eager": "transformers `generate`, its static cache",
    "eager-dynamic": "transformers `generate`, DynamicCache",
    "eager-compiled": "transformers `generate`, static cache, transformer under torch.compile",
}


def check_checkpoint(checkpoint: Path) -> None:
    """InputError unless it is a folder with a Janus configuration: the family `generate` draws pictures with."""
    path = checkpoint / "config.json"
    try:
        family = json.loads(path.read_text("utf-8"))["model_type"]
    except OSError:
        raise InputError(f"expected a checkpoint folder as baseline, found no {path}; name another") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"expected a model_type in {path}, found none; download the checkpoint again") from None
    if family != "janus":
        raise InputError(
            f"expected a Janus checkpoint as baseline, found {family} in {checkpoint}: transformers draws pictures "
            "with `generate` for Janus alone; leave --baseline out"
        )


class Eager:
    """transformers' Janus in float32, sampling with guidance as its generation configuration says.

    Raises:
        InputError: not a Janus checkpoint.
        MachineError: no torch or transformers.
    """

    def __init__(self, checkpoint: Path, model: ImageModel, threads: int) -> None:
        check_checkpoint(checkpoint)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            import torch
            from transformers import JanusForConditionalGeneration
        except ImportError as error:
            raise MachineError(
                f"expected the packages of the export extra, found no {error.name}; install `csd-toolkit[export]`"
            ) from None
        torch.set_num_threads(threads)
        self._torch, self._encoder = torch, PromptEncoder(model.bundle)
        self.model = JanusForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True
        ).eval()
        self._offset = model.bundle.manifest.image_vocabulary
        self.spent = {"transformer": 0.0, "image decode": 0.0}
        body = self.model.model.language_model
        self._plain: Any = body.forward
        self._compiled: Any = None

    def draw(self, name: str, prompt: str, guidance: float, seed: int) -> np.ndarray:
        """One picture, uint8 [1, height, width, 3]; adds what its parts took to `spent`."""
        torch = self._torch
        if name == "eager-compiled" and self._compiled is None:
            self._compiled = torch.compile(self._plain, dynamic=False)
        forward = self._compiled if name == "eager-compiled" else self._plain
        self.model.model.language_model.forward = self._timed("transformer", forward)
        more = {}
        if name == "eager-dynamic":
            from transformers.cache_utils import DynamicCache

            more["cache"] = DynamicCache()
        ids = torch.from_numpy(self.ids(prompt))
        torch.manual_seed(seed)
        with torch.no_grad():
            tokens = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_mode="image",
                do_sample=True,
                top_k=0,
                guidance_scale=guidance,
                **more,
            )
            pixels = self._timed("image decode", self.model.decode_image_tokens)(tokens)
            levels: np.ndarray = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
        return levels

    def ids(self, prompt: str) -> np.ndarray:
        """The prompt's ids as the checkpoint's tokenizer numbers them, int64 [1, L]."""
        return self._encoder.encode(prompt)[0][None] - self._offset

    def _timed(self, part: str, call: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments, **named)
            self.spent[part] += time.perf_counter() - began
            return result

        return timed
