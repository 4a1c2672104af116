"""The decode loop: prompt ids in, image tokens out, one engine call per forward pass.

All buffers are made and bound once. The step graph maps one decoding state to the next (csd_ops.contract), so the
loop only fills in this pass's uniforms, calls, and notes what was committed. The state has two copies, read and
written in turn; the caches have one, bound as input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from csd_ops.contract import (
    CONTROLS,
    FREE,
    MEASURES,
    NOTHING,
    RESULTS,
    SETTINGS_SIZE,
    STATE,
    UNIFORMS,
    Coupling,
    Fresh,
    Kind,
    Settings,
    cache_names,
    grammar_table,
)
from csd_ops.errors import InputError
from engines.protocol import Engine
from runtime.bundle import Manifest

CAPACITY_BUCKET = 64  # cache slots are allocated in multiples of this
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


@dataclass
class _Slot:
    """One picture in the making."""

    request: int
    decoded: Decoded
    generator: np.random.Generator
    position: int = 0
    gumbel: np.ndarray | None = None


@dataclass(frozen=True)
class Request:
    """A picture to decode: prompt ids of its guidance rows and the seed of its noise."""

    rows: tuple[np.ndarray, ...]  # G arrays, int64 [L_g]
    seed: int


@dataclass
class Decoder:
    """Decodes a list of requests, `batch` pictures at a time, each at its own pace.

    Args:
        engine: runs the step graph.
        manifest: the model's sizes and grammar.
        settings: the numbers of the acceptance rule, coupling and truncation.
        window: W, tokens fed per forward pass and picture.
        guidance: guidance weight w, q from w z_cond + (1 - w) z_uncond; None: one row per picture, no guidance.
        batch: pictures decoded together.
        prompt: longest prompt, ids.
    """

    engine: Engine
    manifest: Manifest
    settings: Settings
    window: int
    guidance: float | None
    batch: int
    prompt: int
    passes: int = field(default=0, init=False)  # engine calls made

    def __post_init__(self) -> None:
        manifest = self.manifest
        if not 1 <= self.window <= manifest.max_window:
            raise InputError(
                f"expected a window from 1 to {manifest.max_window}, found {self.window}; choose one inside"
            )
        self.groups = 1 if self.guidance is None else 2
        rows = self.groups * self.batch
        needed = self.prompt + manifest.image_tokens + max(self.window, self.prompt)
        self.capacity = -(-needed // CAPACITY_BUCKET) * CAPACITY_BUCKET
        if self.prompt + manifest.image_tokens > manifest.context:
            raise InputError(
                f"expected prompt and image within {manifest.context} positions, found "
                f"{self.prompt} + {manifest.image_tokens}; shorten the prompt"
            )
        forced = {int(position): identifier for position, identifier in manifest.forced.items()}
        self._grammar = grammar_table(forced, manifest.image_tokens, self.window)
        dtype = np.float16 if manifest.precision == "fp16" else np.float32
        cache_shape = (rows, manifest.key_value_heads, self.capacity, manifest.head_size)
        # Zeroed: an unused slot is masked, but 0 * NaN would not be
        self._cache = {name: np.zeros(cache_shape, dtype) for name in cache_names(manifest.layers)}
        self._sizes = {
            "R": rows,
            "B": self.batch,
            "G": self.groups,
            "W": self.window,
            "V": manifest.image_vocabulary,
            "C": manifest.columns,
            "T": len(self._grammar),
            "N": manifest.image_vocabulary if self.settings.coupling == Coupling.GUMBEL else 1,
        }
        self._states = [self._buffers(STATE, self._sizes) for _ in range(2)]
        self._controls = self._buffers(CONTROLS, self._sizes)
        results = {name: RESULTS[name] for name in ("committed", "tokens", "measures")}
        self._results = self._buffers(results, self._sizes)
        self._fill_controls(self._controls, self._grammar)
        self._steps = [self._bind(self._states[turn], self._states[1 - turn]) for turn in range(2)]
        self._turn = 0

    @staticmethod
    def _buffers(table: dict[str, tuple[str, tuple[str, ...]]], sizes: dict[str, int]) -> dict[str, np.ndarray]:
        def size(dim: str) -> int:
            return int(dim) if dim.isdigit() else sizes[dim]

        return {name: np.zeros([size(dim) for dim in shape], dtype) for name, (dtype, shape) in table.items()}

    def _fill_controls(self, controls: dict[str, np.ndarray], grammar: np.ndarray) -> None:
        controls["settings"][:] = self.settings.vector()
        controls["guidance"][:] = (1.0,) if self.guidance is None else (self.guidance, 1.0 - self.guidance)
        controls["grammar"][:] = grammar
        assert controls["settings"].size == SETTINGS_SIZE

    def _bind(self, state: dict[str, np.ndarray], following: dict[str, np.ndarray]) -> Callable[[], None]:
        return self.engine.bind(
            {**state, **self._controls, **self._cache},
            {
                **{f"next_{name}": array for name, array in following.items()},
                **{f"next_{name}": array for name, array in self._cache.items()},
                **self._results,
            },
        )

    def decode(
        self, requests: Sequence[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Decoded]:
        """Decode every request; `on_progress(request, tokens decided)` is called after every pass.

        A slot whose picture is finished takes the next request at once: its prompt's pass leaves the other pictures
        as they are, since what it writes beyond their length is overwritten before it is ever attended to.
        """
        waiting = list(enumerate(requests))[::-1]
        finished: list[Decoded | None] = [None] * len(requests)
        slots: list[_Slot | None] = [None] * self.batch
        self._rest()
        while waiting or any(slots):
            if waiting and None in slots:
                self._admit(slots, waiting)
            self._step(slots)
            for index, slot in enumerate(slots):
                if slot is None:
                    continue
                if on_progress:
                    on_progress(slot.request, slot.position)
                if slot.position == self.manifest.image_tokens:
                    finished[slot.request] = slot.decoded
                    slots[index] = None
        return [decoded for decoded in finished if decoded is not None]

    def _rest(self) -> None:
        """No slot has a picture: everything at the end of an image, so that nothing is committed."""
        state = self._states[self._turn]
        for array in state.values():
            array.fill(0)
        state["position"].fill(self.manifest.image_tokens)

    def _admit(self, slots: list[_Slot | None], waiting: list[tuple[int, Request]]) -> None:
        """Put waiting requests into free slots: one pass over their prompts, all but each prompt's last id."""
        state = self._states[self._turn]
        fresh = []
        for index in range(self.batch):
            if slots[index] is None and waiting:
                number, request = waiting.pop()
                slots[index] = self._new_slot(number, request)
                fresh.append((index, request))
        widest = max(len(row) for _, request in fresh for row in request.rows) - 1
        for index, request in fresh:
            for group in range(len(request.rows)):
                state["length"][group * self.batch + index] = 0
        if widest:
            self._run_prompts(fresh, widest)
        for index, request in fresh:
            self._first_window(index, request, slots[index])

    def _new_slot(self, number: int, request: Request) -> _Slot:
        tokens = self.manifest.image_tokens
        decoded = Decoded(
            request.seed,
            np.zeros(tokens, np.int64),
            np.zeros(tokens, np.int64),
            np.zeros(tokens, np.int64),
            np.zeros(tokens, np.int64),
            np.zeros((tokens, len(MEASURES)), np.float32),
        )
        slot = _Slot(number, decoded, np.random.default_rng(request.seed))
        if self.settings.coupling == Coupling.GUMBEL:  # noise belongs to the absolute position
            padded = np.zeros((tokens + self.window, self.manifest.image_vocabulary), np.float32)
            padded[:tokens] = slot.generator.gumbel(size=(tokens, padded.shape[1]))
            slot.gumbel = padded
        return slot

    def _run_prompts(self, fresh: list[tuple[int, Request]], widest: int) -> None:
        """Fill the caches with the prompts; every output but the caches is dropped."""
        sizes = self._sizes | {"W": widest, "N": 1, "T": self.manifest.image_tokens + widest}
        state, controls = self._buffers(STATE, sizes), self._buffers(CONTROLS, sizes)
        self._fill_controls(controls, grammar_table({}, self.manifest.image_tokens, widest))
        state["length"][:] = self._states[self._turn]["length"]
        for index, request in fresh:
            for group, row in enumerate(request.rows):
                state["ids"][group * self.batch + index, : len(row) - 1] = row[:-1]
        caches = {f"next_{name}": array for name, array in self._cache.items()}
        self.engine.bind({**state, **controls, **self._cache}, caches)()
        self.passes += 1

    def _first_window(self, index: int, request: Request, slot: _Slot | None) -> None:
        """The state before a picture's first window: csd_ops.reference.first_state, for one slot."""
        assert slot is not None
        state, vocabulary, window = self._states[self._turn], self.manifest.image_vocabulary, self.window
        rules = self._grammar[:window]
        kind = np.where(rules >= 0, int(Kind.FORCED), int(Kind.FRESH))
        kind[rules == NOTHING] = Kind.ABSENT
        if rules[-1] == FREE:
            kind[-1] = Kind.ABSENT
        drafts = np.where(rules >= 0, rules, slot.generator.integers(0, vocabulary, window))
        for group, row in enumerate(request.rows):
            at = group * self.batch + index
            state["ids"][at, 0] = row[-1]
            state["ids"][at, 1:] = drafts[:-1]
            state["length"][at] = len(row) - 1
        state["position"][index] = 0
        state["kind"][index] = kind
        laws = state["draft_probs"][index]
        laws.fill(0)
        free = kind == Kind.FRESH
        if self.settings.fresh in (Fresh.UNIFORM, Fresh.LAW_LEFT, Fresh.LAW_ABOVE):
            laws[free] = 1.0 / vocabulary
        else:
            laws[free, drafts[free]] = 1.0
        state["history_probs"][index] = 1.0 / vocabulary
        state["history_ids"][index] = 0

    def _step(self, slots: list[_Slot | None]) -> None:
        """One forward pass of all pictures."""
        state = self._states[self._turn]
        uniforms = self._controls["uniforms"]
        for index, slot in enumerate(slots):
            if slot is not None:
                slot.generator.random(out=uniforms[index], dtype=np.float32)
                if slot.gumbel is not None:
                    self._controls["gumbel"][index] = slot.gumbel[slot.position : slot.position + self.window]
        np.clip(uniforms, _LOWEST, _HIGHEST, out=uniforms)
        self._steps[self._turn]()
        self.passes += 1
        self._turn = 1 - self._turn
        for index, slot in enumerate(slots):
            if slot is not None:
                self._note(index, slot, state)

    def _note(self, index: int, slot: _Slot, fed: dict[str, np.ndarray]) -> None:
        """Write down what the pass decided for one picture."""
        decoded, start = slot.decoded, slot.position
        count = int(self._results["committed"][index])
        decided = slice(start, start + count)
        decoded.tokens[decided] = self._results["tokens"][index, :count]
        decoded.measures[decided] = self._results["measures"][index, :count]
        decoded.kind[decided] = fed["kind"][index, :count]
        drafts = fed["ids"][index, 1 : count + 1]
        decoded.draft[start : start + len(drafts)] = drafts
        decoded.pass_of[decided] = decoded.passes
        decoded.passes += 1
        slot.position = start + count


assert UNIFORMS == ("accept", "sample", "fresh")
