"""The guard of the hot loop: a step allocates nothing that grows with the model, and copies no cache and no weights."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from runtime import ImageModel
from runtime.backends import CpuBackend
from runtime.decoder import Request, Setup
from runtime.host_loop import HostLoop

SMALL = 16_384  # bytes: the interpreter's own; a row of laws of this window has 64 kB, the caches 5 MB


def make_loop(demo: ImageModel, window: int = 16) -> HostLoop:
    preset = demo.preset(window=window)
    setup = Setup(demo.bundle.manifest, preset.settings(), preset.window, 1.5, 1, 4)
    assert isinstance(demo.backend, CpuBackend)
    loop = HostLoop(demo.backend.step, setup)
    loop.rest()
    rows = tuple(np.array([1025, 1030, 1026], np.int64) for _ in range(2))
    loop.prompts([(row, ids[:-1]) for row, ids in enumerate(rows)])
    loop.begin(0, setup.start(Request(rows, 0)))
    return loop


def peak(step: Callable[[], None], steps: int = 8) -> int:
    """Most bytes over those held before, of Python's and NumPy's allocations."""
    for _ in range(3):
        step()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for _ in range(steps):
        step()
    most = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return most


def test_a_step_allocates_nothing(demo: ImageModel) -> None:
    assert peak(make_loop(demo).step) < SMALL


@pytest.mark.parametrize("what", ["draft_probs", "cache"])
def test_a_copy_would_be_noticed(demo: ImageModel, what: str) -> None:
    loop = make_loop(demo)

    def step() -> None:
        loop.step()
        (loop.state["draft_probs"] if what == "draft_probs" else loop.cache["key_0"]).copy()

    assert peak(step) > SMALL


def test_caches_are_read_and_written_in_place(demo: ImageModel) -> None:
    loop = make_loop(demo)
    bound: list[tuple[int, int]] = []

    class Watching:
        def bind(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> Callable[[], None]:
            bound.extend((inputs[name].ctypes.data, outputs[f"next_{name}"].ctypes.data) for name in loop.cache)
            return lambda: None

    loop.engine = Watching()  # type: ignore[assignment]
    loop._bind(loop.states[0], loop.states[1])
    assert len(bound) == 8 and all(read == written for read, written in bound)


def calls(step: Callable[[], None]) -> int:
    """Calls of functions, Python's and C's, in one step."""
    count = 0

    def count_call(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count


def test_what_the_host_does_in_a_step_does_not_grow(demo: ImageModel) -> None:
    """Its time, 0.01 ms, is that of so many calls; they are the same for every window."""
    found = {}
    for window in (1, 16, 64):
        loop = make_loop(demo, window)
        loop.step()
        found[window] = min(calls(loop.step) for _ in range(4))
    assert len(set(found.values())) == 1 and found[16] < 60, found
