"""The decode loop's state machine: requests in, image tokens out, `batch` pictures at a time, each at its own pace.

What a pass is and where it runs is a Loop's business: HostLoop (one engine call, NumPy buffers) or DeviceLoop (a
captured sequence on a GPU). A loop may report progress late; the decoder never needs it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from csd_ops.contract import (
    FREE,
    MEASURES,
    NOTHING,
    UNIFORMS,
    Coupling,
    Fresh,
    Kind,
    Settings,
    cache_capacity,
    grammar_table,
)
from csd_ops.errors import InputError
from runtime.bundle import Manifest

_LOWEST = np.float32(2.0**-23)
_HIGHEST = np.float32(1 - 2.0**-23)


@dataclass
class Decoded:
    """One picture's tokens and what is known of each of them, N = image tokens."""

    seed: int
    tokens: np.ndarray  # int64 [N]
    pass_of: np.ndarray  # int64 [N], the forward pass (from 1, the prompt's is 0) that decided the token
    kind: np.ndarray  # int64 [N], what stood in its slot: contract.Kind
    draft: np.ndarray  # int64 [N], the draft that was verified, where kind >= FRESH
    measures: np.ndarray  # float32 [N, 6], contract.MEASURES
    passes: int = 1  # forward passes, the prompt's included

    def measure(self, name: str) -> np.ndarray:
        """One measure of every token, float32 [N]; forced tokens are 0."""
        return np.where(self.free, self.measures[:, MEASURES.index(name)], 0)

    @property
    def surprise(self) -> np.ndarray:
        """-log q(token) in nats, [N], q the law the token was decided under."""
        accepted = (self.kind >= Kind.FRESH) & (self.draft == self.tokens)
        return np.where(accepted, self.measure("draft_surprise"), self.measure("replacement_surprise"))

    @property
    def free(self) -> np.ndarray:
        """Where the model decided, bool [N]: all but the forced tokens."""
        return self.kind != Kind.FORCED

    @property
    def excess(self) -> np.ndarray:
        """-log q(token) - H(q) of the free tokens, nats: its mean is 0 for an exact sampler."""
        return (self.surprise - self.measure("entropy"))[self.free]

    def mean(self, name: str) -> float:
        """Mean of a measure over the free tokens."""
        return float(self.measure(name)[self.free].mean())

    @property
    def accepted(self) -> np.ndarray:
        """How many tokens the pass that decided each token decided, int64 [N]."""
        return np.bincount(self.pass_of, minlength=self.passes)[self.pass_of]


@dataclass(frozen=True)
class Request:
    """A picture to decode: prompt ids of its guidance rows and the seed of its noise."""

    rows: tuple[np.ndarray, ...]  # G arrays, int64 [L_g]
    seed: int


@dataclass(frozen=True)
class Setup:
    """What a loop makes its buffers from.

    Args:
        manifest: the model's sizes and grammar.
        settings: the numbers of the acceptance rule, coupling and truncation.
        window: W, tokens fed per forward pass and picture.
        guidance: guidance weight w, q from w z_cond + (1 - w) z_uncond; None: one row per picture, no guidance.
        batch: pictures decoded together.
        prompt: longest prompt, ids.

    Raises:
        InputError: a window or a prompt that the model has no room for.
    """

    manifest: Manifest
    settings: Settings
    window: int
    guidance: float | None
    batch: int
    prompt: int

    def __post_init__(self) -> None:
        manifest = self.manifest
        if not 1 <= self.window <= manifest.max_window:
            raise InputError(
                f"expected a window from 1 to {manifest.max_window}, found {self.window}; choose one inside"
            )
        if self.prompt + manifest.image_tokens > manifest.context:
            raise InputError(
                f"expected prompt and image within {manifest.context} positions, found "
                f"{self.prompt} + {manifest.image_tokens}; shorten the prompt"
            )

    @property
    def groups(self) -> int:
        """Guidance rows per picture."""
        return 1 if self.guidance is None else 2

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.groups * self.batch

    @property
    def capacity(self) -> int:
        """S, cache slots of a row."""
        return cache_capacity(self.prompt, self.manifest.image_tokens, self.window)

    @cached_property
    def grammar(self) -> np.ndarray:
        """FREE, NOTHING or the forced id of every position, int64 [T]."""
        forced = {int(position): identifier for position, identifier in self.manifest.forced.items()}
        return grammar_table(forced, self.manifest.image_tokens, self.window)

    @cached_property
    def weights(self) -> np.ndarray:
        """Of the guidance rows, float32 [G]."""
        return np.array((1.0,) if self.guidance is None else (self.guidance, 1.0 - self.guidance), np.float32)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The contract's symbols, and I image tokens, P most passes of a picture."""
        manifest = self.manifest
        return {
            "R": self.rows,
            "B": self.batch,
            "G": self.groups,
            "W": self.window,
            "V": manifest.image_vocabulary,
            "C": manifest.columns,
            "T": len(self.grammar),
            "N": manifest.image_vocabulary if self.settings.coupling == Coupling.GUMBEL else 1,
            "I": manifest.image_tokens,
            "P": manifest.image_tokens,
        }

    def start(self, request: Request) -> Start:
        """A picture's first window and its noise: csd_ops.reference.first_state, for one image."""
        vocabulary, window, tokens = self.manifest.image_vocabulary, self.window, self.manifest.image_tokens
        generator = np.random.default_rng(request.seed)
        gumbels = np.zeros((tokens + window, self.sizes["N"]), np.float32)
        if self.settings.coupling == Coupling.GUMBEL:  # noise belongs to the absolute position
            gumbels[:tokens] = generator.gumbel(size=(tokens, vocabulary))
        rules = self.grammar[:window]
        kind = np.where(rules >= 0, int(Kind.FORCED), int(Kind.FRESH))
        kind[rules == NOTHING] = Kind.ABSENT
        if rules[-1] == FREE:
            kind[-1] = Kind.ABSENT
        drafts = np.where(rules >= 0, rules, generator.integers(0, vocabulary, window))
        laws = np.zeros((window, vocabulary), np.float32)
        free = kind == Kind.FRESH
        if self.settings.fresh in (Fresh.UNIFORM, Fresh.LAW_LEFT, Fresh.LAW_ABOVE):
            laws[free] = 1.0 / vocabulary
        else:
            laws[free, drafts[free]] = 1.0
        noise = generator.random((self.sizes["P"], window, len(UNIFORMS)), dtype=np.float32)
        np.clip(noise, _LOWEST, _HIGHEST, out=noise)
        return Start(
            ids=np.stack([np.concatenate([row[-1:], drafts[:-1]]) for row in request.rows]),
            length=np.array([len(row) - 1 for row in request.rows]),
            kind=kind,
            draft_probs=laws,
            noise=noise,
            gumbels=gumbels,
        )


@dataclass(frozen=True)
class Start:
    """What a loop puts into a free slot. The history of laws is uniform, and everything else 0."""

    ids: np.ndarray  # int64 [G, W]
    length: np.ndarray  # int64 [G], prompt ids in the cache
    kind: np.ndarray  # int64 [W]
    draft_probs: np.ndarray  # float32 [W, V]
    noise: np.ndarray  # float32 [P, W, 3], the uniforms of every pass
    gumbels: np.ndarray  # float32 [I + W, N], the Gumbel noise of every position


class Loop(Protocol):
    """Forward passes of a batch of slots, somewhere."""

    passes: int  # engine calls made, prompts included

    def rest(self) -> None:
        """No slot has a picture: every position at the end of an image, so that nothing is committed."""
        ...

    def prompts(self, rows: Sequence[tuple[int, np.ndarray]]) -> None:
        """Fill the caches of some rows with prompt ids, from their beginning; the other rows stay as they are."""
        ...

    def begin(self, image: int, start: Start) -> None:
        """Put a picture's first window into a slot."""
        ...

    def step(self) -> None:
        """One forward pass of all slots."""
        ...

    def positions(self) -> list[tuple[int, np.ndarray]]:
        """What is known by now of passes not yet told: (number of the pass, positions [B] after it)."""
        ...

    def picture(self, image: int) -> Decoded:
        """What was decided in a slot that has finished; its seed is left 0."""
        ...


@dataclass
class _Slot:
    """One picture in the making."""

    request: int
    since: int  # passes made before its first


@dataclass
class Decoder:
    """Decodes lists of requests on a loop."""

    setup: Setup
    loop: Loop

    def decode(
        self, requests: Sequence[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Decoded]:
        """Decode every request; `on_progress(request, tokens decided)` is called as passes become known.

        A slot whose picture is finished takes the next request: its prompt's pass leaves the other pictures as they
        are, since what it writes beyond their length is overwritten before it is ever attended to.
        """
        loop, tokens = self.loop, self.setup.manifest.image_tokens
        waiting = list(enumerate(requests))[::-1]
        finished: list[Decoded | None] = [None] * len(requests)
        slots: list[_Slot | None] = [None] * self.setup.batch
        loop.rest()
        step = 0
        while waiting or any(slots):
            if waiting and None in slots:
                self._admit(slots, waiting, step)
            loop.step()
            step += 1
            for number, positions in loop.positions():
                for image, slot in enumerate(slots):
                    if slot is None or number <= slot.since:  # told of the picture before it
                        continue
                    if on_progress:
                        on_progress(slot.request, int(positions[image]))
                    if positions[image] == tokens:
                        decoded = loop.picture(image)
                        decoded.seed = requests[slot.request].seed
                        finished[slot.request] = decoded
                        slots[image] = None
        return [decoded for decoded in finished if decoded is not None]

    def _admit(self, slots: list[_Slot | None], waiting: list[tuple[int, Request]], step: int) -> None:
        """Put waiting requests into free slots: one pass over their prompts, all but each prompt's last id."""
        fresh = []
        for image in range(self.setup.batch):
            if slots[image] is None and waiting:
                number, request = waiting.pop()
                slots[image] = _Slot(number, step)
                fresh.append((image, request))
        rows = [
            (group * self.setup.batch + image, row[:-1])
            for image, request in fresh
            for group, row in enumerate(request.rows)
        ]
        self.loop.prompts(rows)
        for image, request in fresh:
            self.loop.begin(image, self.setup.start(request))


assert UNIFORMS == ("accept", "sample", "fresh")
