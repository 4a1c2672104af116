"""The loop on the host: one engine call per forward pass, NumPy buffers bound once.

The step graph maps one decoding state to the next (csd_ops.contract), so a pass is: call, note what was committed, lay
out the next uniforms. The state has two copies, read and written in turn; the caches have one, bound as input and
output. Attention on the CPU costs as much for an empty slot as for a filled one, so the caches begin small and grow by
CAPACITY_STEP slots; between growths nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from csd_ops.contract import CAPACITY_STEP, CONTROLS, MEASURES, RESULTS, STATE, cache_names, grammar_table
from engines.protocol import Engine
from runtime.decoder import Decoded, Setup, Start

Table = dict[str, tuple[str, tuple[str, ...]]]


class HostLoop:
    """See runtime.decoder.Loop. `engine` runs the whole step graph on the host."""

    def __init__(self, engine: Engine, setup: Setup) -> None:
        manifest = setup.manifest
        self.engine, self.setup = engine, setup
        self.passes = 0
        dtype = np.float16 if manifest.precision == "fp16" else np.float32
        cache_shape = (setup.rows, manifest.key_value_heads, 0, manifest.head_size)
        self.capacity = 0  # slots of a row now, at most setup.capacity
        self.cache = {name: np.zeros(cache_shape, dtype) for name in cache_names(manifest.layers)}
        self.states = [buffers(STATE, setup.sizes) for _ in range(2)]
        self.controls = buffers(CONTROLS, setup.sizes)
        self.results = buffers({name: RESULTS[name] for name in ("committed", "tokens", "measures")}, setup.sizes)
        self._fill_controls(self.controls, setup.grammar)
        self.turn = 0
        self._steps: list[Callable[[], None]] = []
        self._starts: list[Start | None] = [None] * setup.batch
        self._pictures: list[Decoded | None] = [None] * setup.batch
        self._told: list[tuple[int, np.ndarray]] = []
        self._step = 0

    def _fill_controls(self, controls: dict[str, np.ndarray], grammar: np.ndarray) -> None:
        controls["settings"][:] = self.setup.settings.vector()
        controls["guidance"][:] = self.setup.weights
        controls["grammar"][:] = grammar

    def reserve(self, slots: int) -> None:
        """Grow the caches to at least so many slots a row, if they are smaller, and bind them anew."""
        if slots <= self.capacity:
            return
        before = self.capacity
        self.capacity = min(-(-slots // CAPACITY_STEP) * CAPACITY_STEP, self.setup.capacity)
        for name, old in self.cache.items():
            # Zeroed: an unused slot is masked, but 0 * NaN would not be
            grown = np.zeros((*old.shape[:2], self.capacity, old.shape[3]), old.dtype)
            grown[:, :, :before] = old
            self.cache[name] = grown
        self._steps = [self._bind(self.states[turn], self.states[1 - turn]) for turn in range(2)]

    def _bind(self, state: dict[str, np.ndarray], following: dict[str, np.ndarray]) -> Callable[[], None]:
        return self.engine.bind(
            {**state, **self.controls, **self.cache},
            {
                **{f"next_{name}": array for name, array in following.items()},
                **{f"next_{name}": array for name, array in self.cache.items()},
                **self.results,
            },
        )

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The state that the next pass reads."""
        return self.states[self.turn]

    def rest(self) -> None:
        """Every position at the end of its image."""
        for array in self.state.values():
            array.fill(0)
        self.state["position"].fill(self.setup.manifest.image_tokens)
        self._step = 0
        self._pictures = [None] * self.setup.batch

    def prompts(self, rows: Sequence[tuple[int, np.ndarray]]) -> None:
        """Every output but the caches is dropped."""
        widest = max(len(ids) for _, ids in rows)
        for row, _ in rows:
            self.state["length"][row] = 0
        self.reserve(int(self.state["length"].max()) + widest)  # the other rows write past their length too
        if not widest:
            return
        tokens = self.setup.manifest.image_tokens
        sizes = self.setup.sizes | {"W": widest, "N": 1, "T": tokens + widest}
        state, controls = buffers(STATE, sizes), buffers(CONTROLS, sizes)
        self._fill_controls(controls, grammar_table({}, tokens, widest))
        state["length"][:] = self.state["length"]
        for row, ids in rows:
            state["ids"][row, : len(ids)] = ids
        caches = {f"next_{name}": array for name, array in self.cache.items()}
        self.engine.bind({**state, **controls, **self.cache}, caches)()
        self.passes += 1

    def begin(self, image: int, start: Start) -> None:
        """Put a picture's first window into the state that the next pass reads."""
        state, tokens = self.state, self.setup.manifest.image_tokens
        for group in range(self.setup.groups):
            row = group * self.setup.batch + image
            state["ids"][row], state["length"][row] = start.ids[group], start.length[group]
        state["position"][image] = 0
        state["kind"][image], state["draft_probs"][image] = start.kind, start.draft_probs
        state["history_probs"][image] = 1.0 / self.setup.manifest.image_vocabulary
        state["history_ids"][image] = 0
        self._starts[image] = start
        ids, pass_of, kind, draft = np.zeros((4, tokens), np.int64)
        measures = np.zeros((tokens, len(MEASURES)), np.float32)
        self._pictures[image] = Decoded(0, ids, pass_of, kind, draft, measures)
        self._lay_out_noise(image, start, 0, 0)
        self.reserve(int(state["length"].max()) + self.setup.window)

    def _lay_out_noise(self, image: int, start: Start, done: int, position: int) -> None:
        self.controls["uniforms"][image] = start.noise[min(done, len(start.noise) - 1)]
        if self.setup.sizes["N"] > 1:
            self.controls["gumbel"][image] = start.gumbels[position : position + self.setup.window]

    def step(self) -> None:
        """Call the engine once and note what it decided."""
        state = self.state
        self._steps[self.turn]()
        self.passes += 1
        self._step += 1
        self.turn = 1 - self.turn
        for image, (start, picture) in enumerate(zip(self._starts, self._pictures, strict=True)):
            if start is not None and picture is not None:
                self._record(image, state, start, picture)
        self._told.append((self._step, self.state["position"]))
        self.reserve(int(self.state["length"].max()) + self.setup.window)

    def _record(self, image: int, fed: dict[str, np.ndarray], start: Start, picture: Decoded) -> None:
        """Note what the pass decided for one picture: csd_ops/kernels.cu, csd_record."""
        begin, count = int(fed["position"][image]), int(self.results["committed"][image])
        decided = slice(begin, begin + count)
        picture.tokens[decided] = self.results["tokens"][image, :count]
        picture.measures[decided] = self.results["measures"][image, :count]
        picture.kind[decided] = fed["kind"][image, :count]
        drafts = fed["ids"][image, 1 : count + 1]
        picture.draft[begin : begin + len(drafts)] = drafts
        picture.pass_of[decided] = picture.passes
        self._lay_out_noise(image, start, picture.passes, begin + count)
        picture.passes += 1

    def positions(self) -> list[tuple[int, np.ndarray]]:
        """The passes since the last call, all of them."""
        told, self._told = self._told, []
        return told

    def picture(self, image: int) -> Decoded:
        """Hand over a finished picture."""
        picture = self._pictures[image]
        assert picture is not None
        self._pictures[image] = None
        return picture


def buffers(table: Table, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Zeroed arrays of a contract's table."""

    def size(dim: str) -> int:
        return int(dim) if dim.isdigit() else sizes[dim]

    return {name: np.zeros([size(dim) for dim in shape], dtype) for name, (dtype, shape) in table.items()}
