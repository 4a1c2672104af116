"""Where a bundle runs: the CPU, TensorRT, TensorRT-RTX, or ONNX Runtime on CUDA. The rest need not know.

`cpu` works everywhere. The GPU backends need a driver and their extra; `auto` takes a plan that fits from the bundle if
there is one and a GPU, and the CPU otherwise. What was taken stands in `provider`, which every report shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from csd_ops.errors import CsdError, InputError, MachineError
from engines.machine import multiplies_bytes, processor
from engines.onnx_runtime import OnnxRuntimeEngine
from engines.protocol import Engine
from runtime.bundle import IMAGE_DECODER, STEP, Bundle
from runtime.decoder import Loop, Setup
from runtime.host_loop import HostLoop

if TYPE_CHECKING:
    from engines.nvidia.device import CudaDevice
    from engines.nvidia.plan import Card

BACKENDS = ("auto", "cpu", "tensorrt", "rtx", "cuda")


class Backend(Protocol):
    """Makes loops, and pixels from tokens."""

    provider: str  # what really runs, for reports
    threads: int  # of one operator; 0 on a GPU

    def loop(self, setup: Setup) -> Loop:
        """A loop for this setup."""
        ...

    def decode_image(self, tokens: np.ndarray) -> np.ndarray:
        """Image tokens int64 [n, N] to pixels uint8 [n, height, width, 3]."""
        ...


def open_backend(name: str, bundle: Bundle, *, threads: int | None = None, wait: str = "brief") -> Backend:
    """The backend of that name.

    Raises:
        InputError: an unknown name, or a bundle that has no plan for it.
        MachineError: the machine has not what it needs.
    """
    if name not in BACKENDS:
        raise InputError(f"expected an engine of {', '.join(BACKENDS)}, found {name!r}; choose one of them")
    if name == "auto":
        name = _best(bundle)
    if name == "cpu":
        return CpuBackend(bundle, threads, wait)
    return CudaBackend(bundle) if name == "cuda" else TensorRtBackend(bundle, name)


def _best(bundle: Bundle) -> str:
    """The target of the bundle's plans if this machine can run one, else the CPU."""
    if not (bundle.folder / "engines").is_dir():
        return "cpu"
    try:
        from engines.nvidia.device import describe_gpu
        from engines.nvidia.plan import cards
        from engines.nvidia.toolchain import find_toolchain

        describe_gpu()
        for card in cards(bundle.folder):
            find_toolchain(card.target)
            return card.target
    except (CsdError, ImportError):
        pass
    return "cpu"


class CpuImageDecoder:
    """The image decoder with ONNX Runtime on the CPU: whatever the step runs on, and in any of its precisions."""

    def __init__(self, bundle: Bundle, threads: int | None = None, wait: str = "brief") -> None:
        self._manifest = bundle.manifest
        self._engine = OnnxRuntimeEngine(bundle.path(IMAGE_DECODER), threads=threads, wait=wait)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Image tokens int64 [n, N] to pixels uint8 [n, height, width, 3]."""
        manifest = self._manifest
        pixels = np.empty((len(tokens), manifest.height, manifest.width, 3), np.uint8)
        codes = np.ascontiguousarray(manifest.grid(tokens).reshape(len(tokens), -1), np.int64)
        (source,), (target,) = self._engine.inputs, self._engine.outputs
        for index in range(len(tokens)):
            self._engine.bind({source: codes[index : index + 1]}, {target: pixels[index : index + 1]})()
        return pixels


@dataclass
class CpuBackend:
    """ONNX Runtime on the CPU."""

    bundle: Bundle
    threads_wanted: int | None = None
    wait: str = "brief"

    def __post_init__(self) -> None:
        if self.bundle.manifest.precision == "bf16":
            raise InputError(
                f"expected a bundle in fp32, fp16, int8, int4 or w8a8 for the CPU, found bf16 in {self.bundle.folder}: "
                "ONNX Runtime has no bfloat16 products there; export it again, or build an engine with `csd build`"
            )
        if self.bundle.manifest.precision == "w8a8" and not multiplies_bytes():
            raise InputError(
                f"expected a processor with VNNI for {self.bundle.folder}, found {processor()[0]}, whose products of "
                "bytes overflow without a word; export the checkpoint with --precision int8"
            )
        options: Any = {"threads": self.threads_wanted, "wait": self.wait}
        engine = OnnxRuntimeEngine(self.bundle.path(STEP), **options)
        self.step: Engine = engine
        self._image_decoder = CpuImageDecoder(self.bundle, **options)
        self.provider, self.threads = engine.provider, engine.threads

    def loop(self, setup: Setup) -> Loop:
        """The whole step in one call, on the host."""
        return HostLoop(self.step, setup)

    def decode_image(self, tokens: np.ndarray) -> np.ndarray:
        """See Backend."""
        return self._image_decoder(tokens)


@dataclass
class TensorRtBackend:
    """Plans of the bundle, on the GPU."""

    bundle: Bundle
    target: str
    threads: int = 0
    _loops: list[tuple[Setup, Loop]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from engines.nvidia.device import describe_gpu
        from engines.nvidia.plan import cards
        from engines.nvidia.toolchain import find_toolchain

        self.toolchain = find_toolchain(self.target)
        self.gpu = describe_gpu()
        if not cards(self.bundle.folder):
            raise InputError(
                f"expected a plan in {self.bundle.folder / 'engines'}, found none; build one with "
                f"`csd build {self.bundle.folder} --target {self.target}`"
            )
        self.provider = f"{self.toolchain.kind.module} {self.toolchain.version}, {self.gpu.name}"
        self._device: CudaDevice | None = None
        self._decoder: Callable[[np.ndarray], np.ndarray] | None = None
        self._cpu: CpuImageDecoder | None = None

    def _wanted(self, setup: Setup) -> Any:
        from engines.nvidia.builder import settings_of
        from engines.nvidia.plan import Wanted
        from runtime.build import bundle_identity

        return Wanted(
            target=self.target,
            version=self.toolchain.version,
            compute_capability=self.gpu.compute_capability,
            free_memory=self.gpu.free_memory,
            bundle=bundle_identity(self.bundle),
            window=setup.window,
            prompt=setup.prompt,
            rows=setup.rows,
            settings=settings_of(setup.settings),
        )

    def loop(self, setup: Setup) -> Loop:
        """The plan that fits, captured; the loop before is used again where nothing but the pictures has changed."""
        from engines.nvidia.engine import PROMPT, WINDOW, TensorRtPlan
        from engines.nvidia.plan import choose, image_decoder, read_plan
        from runtime.device_loop import DeviceLoop

        card = choose(self.bundle.folder, self._wanted(setup))
        setup = replace(setup, prompt=card.prompt)
        for known, loop in self._loops:
            if known == setup:
                return loop
        device = self._open_device(card)
        plan = TensorRtPlan(self.toolchain, card, read_plan(self.bundle.folder, card), device)
        window = plan.context(WINDOW)
        made = DeviceLoop(
            device,
            window,
            plan.context(PROMPT),
            setup,
            read_codes(self.bundle),
            capacity=card.capacity,
            longest_prompt=card.prompt,
        )
        self._open_decoder(image_decoder(self.bundle.folder, self._wanted(setup)), device)
        pixels = "GPU" if self._decoder else "CPU"
        self.provider = f"{window.provider}, {'CUDA graph' if made.captured else 'queued'}, pixels on the {pixels}"
        self._loops = [(setup, made)]
        return made

    def _open_device(self, card: Card) -> CudaDevice:
        from engines.nvidia.device import CudaDevice

        if self._device is None:
            self._device = CudaDevice(read_kernels(self.bundle, card, self.gpu.compute_capability))
        return self._device

    def _open_decoder(self, card: Card | None, device: CudaDevice) -> None:
        """The image decoder's plan with buffers for one picture; none where the bundle has no plan that fits."""
        if card is None or self._decoder is not None:
            return
        from engines.nvidia.engine import TensorRtPlan
        from engines.nvidia.plan import read_plan

        manifest = self.bundle.manifest
        engine = TensorRtPlan(self.toolchain, card, read_plan(self.bundle.folder, card), device).context(0)
        codes = device.allocate((1, manifest.codes), "int64")
        pixels = device.allocate((1, manifest.height, manifest.width, 3), "uint8")
        (source,), (target,) = engine.inputs, engine.outputs
        run, read = engine.bind({source: codes}, {target: pixels}), device.reader(pixels)

        def decode(values: np.ndarray) -> np.ndarray:
            device.write(codes, values)
            run()
            return read().wait()

        self._decoder = decode

    def decode_image(self, tokens: np.ndarray) -> np.ndarray:
        """With the bundle's plan, or on the CPU where it has none that fits; `provider` says which."""
        if self._decoder is None:
            if self._cpu is None:
                self._cpu = CpuImageDecoder(self.bundle)
            return self._cpu(tokens)
        codes = self.bundle.manifest.grid(tokens).reshape(len(tokens), 1, -1)
        return np.concatenate([self._decoder(picture) for picture in codes])


@dataclass
class CudaBackend:
    """ONNX Runtime's CUDA provider for the transformer, the kernels for the rest, on one stream."""

    bundle: Bundle
    threads: int = 0

    def __post_init__(self) -> None:
        from engines.nvidia.device import CudaDevice

        self.device = CudaDevice()
        self.provider = f"ONNX Runtime CUDAExecutionProvider, {self.bundle.manifest.precision}, {self.device.name}"
        self._image_decoder = CpuImageDecoder(self.bundle)

    def loop(self, setup: Setup) -> Loop:
        """The step up to its logits with ONNX Runtime, then the kernels. Queued: ONNX Runtime is not captured."""
        import tempfile

        from engines.nvidia.graph import Tail, step_copy
        from runtime.device_loop import DeviceLoop

        with tempfile.TemporaryDirectory() as folder:
            model, path = step_copy(
                self.bundle.path(STEP),
                capacity=setup.capacity,
                precision=self.bundle.manifest.precision,
                tail=Tail.KERNEL,
                folder=Path(folder),
            )
            engine = OnnxRuntimeEngine(model.SerializeToString(), weights=path.parent, stream=self.device.handle)
        return DeviceLoop(self.device, engine, engine, setup, read_codes(self.bundle), captured=False)

    def decode_image(self, tokens: np.ndarray) -> np.ndarray:
        """On the CPU."""
        return self._image_decoder(tokens)


def read_codes(bundle: Bundle) -> np.ndarray:
    """Vectors of the image codes, float32 [V, E], from the step graph."""
    try:
        from engines.nvidia.graph import load_graph, read_initializer
    except ImportError:
        raise MachineError("expected onnx to read the bundle's graph, found none; install `csd-toolkit[gpu]`") from None
    path = bundle.path(STEP)
    return read_initializer(load_graph(path), "codes", path)


def read_kernels(bundle: Bundle, card: Card, capability: tuple[int, int]) -> bytes | None:
    """The kernels' PTX that was built with the plan, whole; None: compile them here."""
    from engines.nvidia.builder import kernels_name

    name = f"{capability[0]}.{capability[1]}"
    if name not in card.kernels:
        return None
    path: Path = bundle.folder / "engines" / kernels_name(name)
    code = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(code).hexdigest() != card.kernels[name]:
        raise InputError(f"expected the kernels of {card.name} in {path}, found others; run `csd build` again")
    return code
