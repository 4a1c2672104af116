"""A GPU as the decode loop needs it: buffers at fixed addresses, copies in stream order, launches, a captured sequence.

`Device` is what the loop is written against; `CudaDevice` is the GPU, by cuda.core. The tests' own implementation runs
the same loop on a machine without a GPU and checks addresses, order and the absence of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import Any, Protocol

import numpy as np

from csd_ops.errors import InputError, MachineError
from csd_ops.kernels import THREADS, Kernel

OLDEST_DRIVER = 13000  # CUDA version the driver must speak: the kernels' PTX is of CUDA 13.0


@dataclass(frozen=True)
class DeviceArray:
    """A buffer on the device, or a part of one: dtype, shape and address. `owner` keeps the memory alive."""

    dtype: np.dtype
    shape: tuple[int, ...]
    address: int
    owner: Any

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: int) -> DeviceArray:
        """The part at an index of the first axis."""
        part = prod(self.shape[1:]) * self.dtype.itemsize
        return DeviceArray(self.dtype, self.shape[1:], self.address + index * part, self.owner)


class Reading(Protocol):
    """A copy to the host that is under way."""

    def done(self) -> bool:
        """Whether it has arrived."""
        ...

    def wait(self) -> np.ndarray:
        """Wait for it: the host waits, the device goes on with what was queued after it."""
        ...


class Device(Protocol):
    """What the loop asks of a GPU. Everything is queued on one stream, in the order of the calls."""

    name: str

    def allocate(self, shape: tuple[int, ...], dtype: str | np.dtype) -> DeviceArray:
        """A zeroed buffer."""
        ...

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        """Queue a copy from the host; `values` may change as soon as this returns."""
        ...

    def fill_zero(self, array: DeviceArray) -> None:
        """Queue zeros."""
        ...

    def reader(self, array: DeviceArray, count: int = 1) -> Callable[[], Reading]:
        """Each call queues a copy to the host, into one of `count` places in turn: so many may be under way."""
        ...

    def launcher(
        self, kernel: Kernel, arrays: Mapping[str, DeviceArray], sizes: Mapping[str, int]
    ) -> Callable[[], None]:
        """Check the arguments against the kernel's contract; the returned call queues one launch."""
        ...

    def capture(self, sequence: Callable[[], None]) -> Callable[[], None]:
        """Record what `sequence` queues, without running it; the returned call queues all of it at once."""
        ...

    def finish(self) -> None:
        """Wait until nothing is queued."""
        ...


@dataclass(frozen=True)
class Gpu:
    """What is known of a GPU before anything is allocated on it."""

    name: str
    compute_capability: tuple[int, int]
    free_memory: int  # bytes
    total_memory: int
    driver: int  # CUDA version, 13000 for 13.0


def check_arguments(kernel: Kernel, arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuse arguments whose dtype or shape differs from the kernel's contract."""
    shapes = kernel.shapes(sizes)
    for name, (dtype, _) in (kernel.inputs | kernel.outputs).items():
        if name not in arrays:
            raise InputError(f"expected {name} for {kernel.name}, found none")
        array = arrays[name]
        if array.dtype != np.dtype(dtype) or tuple(array.shape) != shapes[name]:
            raise InputError(
                f"expected {name} of {dtype} {shapes[name]} for {kernel.name}, found {array.dtype} {array.shape}"
            )


def cuda_core() -> Any:
    """The module; MachineError says what to install."""
    try:
        import cuda.core
    except ImportError as error:
        raise MachineError(f"expected cuda.core, found no {error.name}; install `csd-toolkit[rtx]`") from None
    return cuda.core


def describe_gpu(index: int = 0) -> Gpu:
    """The GPU of that number.

    Raises:
        MachineError: no driver, no GPU, or a driver too old.
    """
    core = cuda_core()
    from cuda.bindings import driver

    try:
        error, *_ = driver.cuInit(0)
        if int(error):
            raise RuntimeError(driver.cuGetErrorString(error)[1].decode())
        device = core.Device(index)
        device.set_current()
    except Exception as error:  # cuda.core raises errors of its own, RuntimeError and ValueError
        first = " ".join(str(error).split())
        raise MachineError(
            f"expected an NVIDIA GPU with a driver, found: {first}; install the driver, or use the CPU engine"
        ) from None
    _, version = driver.cuDriverGetVersion()
    _, free, total = driver.cuMemGetInfo()
    capability = device.compute_capability
    gpu = Gpu(str(device.name), (capability.major, capability.minor), int(free), int(total), int(version))
    check_driver(gpu)
    return gpu


def check_driver(gpu: Gpu) -> None:
    """Refuse a driver that cannot load the kernels."""
    if gpu.driver < OLDEST_DRIVER:
        raise MachineError(
            f"expected a driver for CUDA {OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10} or newer, found one for "
            f"{gpu.driver // 1000}.{gpu.driver % 1000 // 10}; update the NVIDIA driver"
        )


class CudaDevice:
    """The GPU, by cuda.core. See Device.

    Args:
        code: the kernels' PTX or machine code for this GPU; None: compile it (needs NVRTC).
        index: the GPU's number.
    """

    def __init__(self, code: bytes | None = None, index: int = 0) -> None:
        self._core = cuda_core()
        self.gpu = describe_gpu(index)
        self.name = self.gpu.name
        self._device = self._core.Device(index)
        self._device.set_current()
        self.stream = self._device.create_stream()
        self._pinned = self._core.LegacyPinnedMemoryResource()
        if code is None:
            from csd_ops.kernels import compile_kernels

            major, minor = self.gpu.compute_capability
            code, _ = compile_kernels(10 * major + minor)
        self._code = self._core.ObjectCode.from_ptx(code)
        self._staged: list[tuple[Any, Any]] = []  # host copies, and the events after which they may go

    @property
    def handle(self) -> int:
        """The stream, for TensorRT and ONNX Runtime."""
        return int(self.stream.handle)

    def allocate(self, shape: tuple[int, ...], dtype: str | np.dtype) -> DeviceArray:
        """A zeroed buffer."""
        kind = np.dtype(dtype)
        size = max(prod(shape) * kind.itemsize, 1)
        try:
            buffer = self._device.allocate(size, stream=self.stream)
        except Exception as error:
            free = describe_gpu(self._device.device_id).free_memory
            raise MachineError(
                f"expected {size / 1e9:.2f} GB of free GPU memory for a buffer, found {free / 1e9:.2f} GB ({error}); "
                "choose a smaller batch or window"
            ) from None
        buffer.fill(0, stream=self.stream)
        return DeviceArray(kind, tuple(shape), int(buffer.handle), buffer)

    def _view(self, array: DeviceArray) -> Any:
        return self._core.Buffer.from_handle(array.address, array.nbytes, owner=array.owner)

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        """Through pinned memory, so that the host goes on at once."""
        data = np.ascontiguousarray(values, array.dtype)
        if data.shape != array.shape:
            raise InputError(f"expected values of shape {array.shape}, found {data.shape}")
        self._staged = [(event, kept) for event, kept in self._staged if not event.is_done]
        staging = self._pinned.allocate(max(data.nbytes, 1))
        _as_numpy(staging, data.dtype, data.shape)[...] = data
        self._view(array).copy_from(staging, stream=self.stream)
        self._staged.append((self.stream.record(), staging))

    def fill_zero(self, array: DeviceArray) -> None:
        """Queue zeros."""
        self._view(array).fill(0, stream=self.stream)

    def reader(self, array: DeviceArray, count: int = 1) -> Callable[[], Reading]:
        """Into pinned memory that is made here, once."""
        options = self._core.EventOptions(blocking_sync=True)
        places = [
            (self._pinned.allocate(max(array.nbytes, 1)), self._device.create_event(options)) for _ in range(count)
        ]
        readings = cycle(
            _CudaReading(event, target, _as_numpy(target, array.dtype, array.shape)) for target, event in places
        )
        source, stream = self._view(array), self.stream

        def read() -> Reading:
            reading = next(readings)
            source.copy_to(reading.target, stream=stream)
            stream.record(reading.event)
            return reading

        return read

    def launcher(
        self, kernel: Kernel, arrays: Mapping[str, DeviceArray], sizes: Mapping[str, int]
    ) -> Callable[[], None]:
        """See Device."""
        check_arguments(kernel, arrays, sizes)
        entry = self._code.get_kernel(kernel.name)
        config = self._core.LaunchConfig(grid=kernel.launch_grid(sizes), block=THREADS)
        arguments = [
            *(arrays[name].address for name in kernel.inputs),
            *(np.int32(value) for value in kernel.scalar_values(sizes)),
            *(arrays[name].address for name in kernel.outputs),
        ]
        launch, stream, alive = self._core.launch, self.stream, dict(arrays)

        def call(_alive: object = alive) -> None:
            launch(stream, config, entry, *arguments)

        return call

    def capture(self, sequence: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph, captured for this thread alone."""
        builder = self.stream.create_graph_builder()
        builder.begin_building("thread_local")
        sequence()
        graph = builder.end_building().complete()
        graph.upload(self.stream)
        launch, stream = graph.launch, self.stream

        def replay() -> None:
            launch(stream)

        return replay

    def finish(self) -> None:
        """Wait until nothing is queued."""
        self.stream.sync()
        self._staged.clear()


@dataclass(frozen=True)
class _CudaReading:
    event: Any
    target: Any
    values: np.ndarray

    def done(self) -> bool:
        return bool(self.event.is_done)

    def wait(self) -> np.ndarray:
        self.event.sync()
        return self.values.copy()


def _as_numpy(buffer: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Pinned memory as an array."""
    import ctypes

    size = prod(shape) * dtype.itemsize
    raw: Any = (ctypes.c_char * size).from_address(int(buffer.handle))
    return np.frombuffer(raw, dtype).reshape(shape)
