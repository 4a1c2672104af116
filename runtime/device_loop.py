"""The loop on a GPU: buffers made once, one captured sequence per forward pass, progress read late.

A pass is the transformer (an engine), csd_verify, csd_advance, csd_record; where the engine has its own tail (the
TensorRT plugin, or the functions) only csd_record follows it. Both turns of the state are captured once and replayed;
the noise of all passes and the pictures lie on the device, so the host has nothing to do between two passes. It reads
the positions a few passes late, to know which picture is finished: it may wait for the device, the device never waits
for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from csd_ops.contract import CONTROLS, RESULTS, STATE, cache_names, grammar_table
from csd_ops.errors import InputError
from csd_ops.kernels import ADVANCE, CODES, JUDGED, NOISE, PICTURE, RECORD, VERIFY, Shape, evaluate
from engines.nvidia.device import Device, DeviceArray, Reading
from engines.protocol import Engine
from runtime.decoder import Decoded, Setup, Start

DEPTH = 4  # passes that may be queued beyond the last one known


class DeviceLoop:
    """See runtime.decoder.Loop.

    Args:
        device: the GPU, or what stands for it.
        window: the engine of the windows.
        prompt: the engine of the prompts; the same one where it takes any width.
        setup: what to decode.
        codes: vectors of the image codes, float32 [V, E].
        capacity: S that the engine was built for; None: as the setup needs.
        longest_prompt: ids per prompt pass that the engine takes; longer prompts take several passes.
        captured: replay a captured sequence; off: queue every part anew.
    """

    def __init__(
        self,
        device: Device,
        window: Engine,
        prompt: Engine,
        setup: Setup,
        codes: np.ndarray,
        *,
        capacity: int | None = None,
        longest_prompt: int | None = None,
        captured: bool = True,
    ) -> None:
        self.device, self.setup, self.passes = device, setup, 0
        self._prompt_engine, self._window_engine = prompt, window
        self.own_tail = "next_position" in window.outputs
        self._chunk = min(longest_prompt or setup.prompt, max(setup.prompt - 1, 1))
        manifest = setup.manifest
        capacity = capacity or setup.capacity
        if capacity < setup.capacity:
            raise InputError(f"expected an engine of capacity {setup.capacity}, found {capacity}; build it again")
        sizes = self.sizes = setup.sizes | {"E": codes.shape[1]}
        self.states = [self._buffers(STATE, sizes) for _ in range(2)]
        self.controls = self._buffers(CONTROLS | CODES, sizes)
        self.results = self._buffers(JUDGED | RESULTS | NOISE | PICTURE | {"passes": ("int64", ("B",))}, sizes)
        shape = (setup.rows, manifest.key_value_heads, capacity, manifest.head_size)
        cache_dtype = window.inputs["key_0"].dtype
        self.cache = {name: device.allocate(shape, cache_dtype) for name in cache_names(manifest.layers)}
        for name, values in (
            ("settings", setup.settings.vector()),
            ("guidance", setup.weights),
            ("grammar", setup.grammar),
            ("codes", codes),
        ):
            device.write(self.controls[name], values)
        self._prompt = self._prompt_buffers()
        self._turn = 0
        self._step = 0
        self._readings: deque[tuple[int, Reading]] = deque()
        self._readers = [device.reader(state["position"], DEPTH + 2) for state in self.states]
        self.rest()
        self._steps = [self._sequence(turn) for turn in range(2)]
        for step in self._steps:  # engines settle in their first calls; nothing may be captured before
            step()
        device.finish()
        if captured:
            self._steps = [device.capture(step) for step in self._steps]
        self.captured = captured

    def _buffers(self, table: Mapping[str, tuple[str, Shape]], sizes: dict[str, int]) -> dict[str, DeviceArray]:
        return {
            name: self.device.allocate(tuple(evaluate(size, sizes) for size in shape), dtype)
            for name, (dtype, shape) in table.items()
        }

    def _sequence(self, turn: int) -> Callable[[], None]:
        """What one pass queues."""
        state, following = self.states[turn], self.states[1 - turn]
        fed = {**state, **self.controls, **self.results}
        after = {f"next_{name}": array for name, array in following.items()}
        parts = [self._bind(self._window_engine, fed, {**after, **self.results})]
        if not self.own_tail:
            parts.append(self.device.launcher(VERIFY, fed, self.sizes))
            parts.append(self.device.launcher(ADVANCE, {**fed, **after}, self.sizes))
        parts.append(self.device.launcher(RECORD, fed, self.sizes))

        def sequence() -> None:
            for part in parts:
                part()

        return sequence

    def _bind(self, engine: Engine, given: dict[str, Any], results: dict[str, Any]) -> Callable[[], None]:
        after = {f"next_{name}": array for name, array in self.cache.items()}
        known = {**given, **self.cache}
        return engine.bind(
            {name: known[name] for name in engine.inputs},
            {name: {**results, **after}[name] for name in engine.outputs},
        )

    # ---- prompts -------------------------------------------------------------------------------------------------

    def _prompt_buffers(self) -> dict[str, Any]:
        """Buffers of the widest prompt pass; what it computes beside the caches is dropped."""
        tokens = self.setup.manifest.image_tokens
        sizes = self.sizes | {"W": self._chunk, "T": tokens + self._chunk}
        given = self._buffers(STATE | CONTROLS | CODES if self.own_tail else {"ids": STATE["ids"]}, sizes)
        needs = RESULTS if self.own_tail else {"logits": RESULTS["logits"]}
        dropped = self._buffers(needs, sizes)
        if self.own_tail:
            dropped |= {f"next_{name}": array for name, array in self._buffers(STATE, sizes).items()}
            self.device.write(given["grammar"], grammar_table({}, tokens, self._chunk))
            for name in ("settings", "guidance", "codes"):
                given[name] = self.controls[name]
        return {"given": given, "dropped": dropped}

    def prompts(self, rows: Sequence[tuple[int, np.ndarray]]) -> None:
        """In chunks, each written behind the one before; a row that is complete writes beyond its end, unseen."""
        state, given, chunk = self.states[self._turn], self._prompt["given"], self._chunk
        widest = max(len(ids) for _, ids in rows)
        run = self._bind(self._prompt_engine, {**given, "length": state["length"]}, self._prompt["dropped"])
        for start in range(0, widest, chunk):
            ids = np.zeros(given["ids"].shape, np.int64)
            for row, all_ids in rows:
                part = all_ids[start : start + chunk]
                ids[row, : len(part)] = part
                self.device.write(state["length"][row], np.array(min(start, len(all_ids))))
            self.device.write(given["ids"], ids)
            run()
            self.passes += 1

    # ---- windows -------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Every position at the end of its image."""
        ends = np.full(self.setup.batch, self.setup.manifest.image_tokens)
        for state in self.states:
            for array in state.values():
                self.device.fill_zero(array)
            self.device.write(state["position"], ends)
        self._readings.clear()
        self._step = 0

    def begin(self, image: int, start: Start) -> None:
        """Queue a picture's first window into the state that the next pass reads."""
        write, state, vocabulary = self.device.write, self.states[self._turn], self.setup.manifest.image_vocabulary
        for group in range(self.setup.groups):
            row = group * self.setup.batch + image
            write(state["ids"][row], start.ids[group])
            write(state["length"][row], start.length[group])
        write(state["position"][image], np.array(0))
        write(state["kind"][image], start.kind)
        write(state["draft_probs"][image], start.draft_probs)
        laws = state["history_probs"][image]
        write(laws, np.full(laws.shape, 1.0 / vocabulary))
        self.device.fill_zero(state["history_ids"][image])
        write(self.results["noise"][image], start.noise)
        write(self.results["gumbels"][image], start.gumbels)
        write(self.controls["uniforms"][image], start.noise[0])
        if self.sizes["N"] > 1:
            write(self.controls["gumbel"][image], start.gumbels[: self.setup.window])
        self.device.fill_zero(self.results["passes"][image])

    def step(self) -> None:
        """Replay one pass and queue the copy of its positions."""
        self._steps[self._turn]()
        self.passes += 1
        self._step += 1
        self._turn = 1 - self._turn
        self._readings.append((self._step, self._readers[self._turn]()))

    def positions(self) -> list[tuple[int, np.ndarray]]:
        """All readings that have come in; the host waits only where more than DEPTH passes are queued."""
        told = []
        while self._readings and (len(self._readings) > DEPTH or self._readings[0][1].done()):
            step, reading = self._readings.popleft()
            told.append((step, reading.wait()))
        return told

    def picture(self, image: int) -> Decoded:
        """Copy a finished picture; passes still queued leave it as it is."""
        names = ("picture_tokens", "picture_pass", "picture_kind", "picture_draft", "picture_measures", "passes")
        readings = [self.device.reader(self.results[name][image])() for name in names]
        tokens, pass_of, kind, draft, measures, passes = (reading.wait() for reading in readings)
        return Decoded(0, tokens, pass_of, kind, draft, measures, int(passes) + 1)
