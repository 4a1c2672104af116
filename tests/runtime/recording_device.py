"""A device without a GPU: memory is the host's, work is queued and done late, in order, and everything is recorded.

Kernels run as compiled for the host, engines are ONNX Runtime's. Nothing is executed before somebody waits for it, so a
loop that counted on an earlier pass having finished would fail here.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from csd_ops.kernels import Kernel
from engines.nvidia.device import DeviceArray, Reading, check_arguments
from engines.onnx_runtime import OnnxRuntimeEngine
from tests.csd_ops.host_kernels import launch


def as_numpy(array: DeviceArray) -> np.ndarray:
    """The memory behind a device array."""
    raw = (ctypes.c_char * array.nbytes).from_address(array.address)
    return np.frombuffer(raw, array.dtype).reshape(array.shape)


@dataclass
class Work:
    """Something queued."""

    name: str
    addresses: dict[str, int]
    call: Callable[[], None]


class RecordingDevice:
    """See engines.nvidia.device.Device."""

    name = "recording device"

    def __init__(self) -> None:
        self.queue: deque[tuple[int, Work]] = deque()
        self.log: list[str] = []  # names of what was queued, replays as "replay"
        self.memory: dict[int, int] = {}  # address -> bytes
        self.replayed: list[list[Work]] = []
        self.left: list[int] = []  # replays still queued whenever the host had waited for a reading
        self.finishes = 0  # of the host for everything
        self._capturing: list[Work] | None = None
        self._number = count()
        self._done = -1

    def submit(self, name: str, addresses: Mapping[str, int], call: Callable[[], None]) -> int:
        work = Work(name, dict(addresses), call)
        if self._capturing is not None:
            self._capturing.append(work)
            return -1
        number = next(self._number)
        self.queue.append((number, work))
        self.log.append(name)
        return number

    def run_until(self, number: int) -> None:
        while self.queue and self.queue[0][0] <= number:
            done, work = self.queue.popleft()
            work.call()
            self._done = done

    def allocate(self, shape: tuple[int, ...], dtype: str | np.dtype) -> DeviceArray:
        assert self._capturing is None, "allocation while capturing"
        owner = np.zeros(shape, dtype)
        self.memory[owner.ctypes.data] = owner.nbytes
        return DeviceArray(owner.dtype, tuple(shape), owner.ctypes.data, owner)

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        copy = np.array(values, array.dtype)
        assert copy.shape == array.shape, (copy.shape, array.shape)
        self.submit("write", {}, lambda: np.copyto(as_numpy(array), copy))

    def fill_zero(self, array: DeviceArray) -> None:
        self.submit("zero", {}, lambda: as_numpy(array).fill(0))

    def reader(self, array: DeviceArray, count: int = 1) -> Callable[[], Reading]:
        places = [np.empty(array.shape, array.dtype) for _ in range(count)]
        turn = iter(range(10**9))

        def read() -> Reading:
            place = places[next(turn) % count]
            number = self.submit("read", {}, lambda: np.copyto(place, as_numpy(array)))
            return _Reading(self, number, place)

        return read

    def launcher(
        self, kernel: Kernel, arrays: Mapping[str, DeviceArray], sizes: Mapping[str, int]
    ) -> Callable[[], None]:
        check_arguments(kernel, arrays, sizes)
        used = {name: arrays[name] for name in kernel.inputs | kernel.outputs}
        addresses = {name: array.address for name, array in used.items()}
        views = {name: as_numpy(array) for name, array in used.items()}
        return lambda: self.submit(kernel.name, addresses, lambda: launch(kernel, views, sizes)) and None

    def capture(self, sequence: Callable[[], None]) -> Callable[[], None]:
        self._capturing = []
        sequence()
        captured, self._capturing = self._capturing, None
        self.replayed.append(captured)

        def replay() -> None:
            self.submit("replay", {}, lambda: [work.call() for work in captured] and None)

        return replay

    def finish(self) -> None:
        assert self._capturing is None, "waiting while capturing"
        self.finishes += 1
        self.run_until(10**18)


@dataclass
class _Reading:
    device: RecordingDevice
    number: int
    values: np.ndarray

    def done(self) -> bool:
        return self.device._done >= self.number

    def wait(self) -> np.ndarray:
        if not self.done():
            self.device.run_until(self.number)
            self.device.left.append(sum(work.name == "replay" for _, work in self.device.queue))
        return self.values.copy()


class QueuedEngine:
    """An ONNX Runtime engine whose calls are queued on a recording device."""

    def __init__(self, engine: OnnxRuntimeEngine, device: RecordingDevice) -> None:
        self.inputs, self.outputs, self.provider = engine.inputs, engine.outputs, engine.provider
        self._engine, self._device = engine, device

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Callable[[], None]:
        call = self._engine.bind(
            {name: as_numpy(array) for name, array in inputs.items()},
            {name: as_numpy(array) for name, array in outputs.items()},
        )
        addresses = {name: array.address for name, array in {**inputs, **outputs}.items()}
        return lambda: self._device.submit("engine", addresses, call) and None
