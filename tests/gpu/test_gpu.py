"""What only a GPU can show. Skipped, with the reason, where there is none; `scripts/gpu` runs all of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from csd_ops.contract import Coupling, Settings
from csd_ops.kernels import ADVANCE, LARGEST_VOCABULARY, VERIFY
from csd_ops.rules import Csd, Gsd
from runtime import ImageModel
from runtime.build import build_engines
from runtime.bundle import Bundle, open_bundle
from runtime.decoder import Decoder, Request, Setup
from runtime.model import DEMO
from tests.csd_ops.backends import EXTREMES, Backend, cases, compare
from tests.csd_ops.cases import Case, generate

if TYPE_CHECKING:
    from engines.nvidia.device import CudaDevice

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def device() -> CudaDevice:
    from engines.nvidia.device import CudaDevice

    return CudaDevice()


@pytest.fixture(scope="session")
def kernels(device: CudaDevice) -> Backend:
    return on_gpu(device)


def on_gpu(device: CudaDevice) -> Backend:
    """Both kernels on the GPU, for one case."""

    def run(case: Case) -> dict[str, np.ndarray]:
        images, window, vocabulary = case.state.draft_probs.shape
        sizes = {"B": images, "W": window, "V": vocabulary, "R": len(case.state.ids), "G": len(case.guidance)}
        sizes |= {"N": case.gumbel.shape[-1], "E": case.codes.shape[1], "C": case.state.history_ids.shape[1]}
        sizes |= {"T": len(case.grammar)}
        arrays = {}
        for kernel in (VERIFY, ADVANCE):
            shapes = kernel.shapes(sizes)
            for name, (dtype, _) in (kernel.inputs | kernel.outputs).items():
                arrays.setdefault(name, device.allocate(shapes[name], dtype))
        for name, value in (case.inputs() | {"codes": case.codes}).items():
            device.write(arrays[name], value)
        for kernel in (VERIFY, ADVANCE):
            device.launcher(kernel, arrays, sizes)()
        outputs = VERIFY.outputs | ADVANCE.outputs
        return {name: device.reader(arrays[name])().wait() for name in outputs}

    return run


@pytest.mark.parametrize("extreme", EXTREMES, ids=lambda extreme: extreme.__name__)
def test_kernel_extremes(kernels: Backend, extreme: Callable[[Backend], None]) -> None:
    extreme(kernels)


def test_kernel_equals_the_reference(kernels: Backend) -> None:
    @hypothesis_settings(max_examples=400, deadline=None)
    @given(case=cases())
    def every(case: Case) -> None:
        compare(kernels, case)

    every()


@pytest.mark.parametrize("vocabulary", [8192, 16384, 32768, LARGEST_VOCABULARY])
@pytest.mark.parametrize("coupling", Coupling)
@pytest.mark.parametrize("rule", [Csd(), Gsd(size=5)], ids=["csd", "gsd"])
def test_kernel_at_the_vocabularies_of_the_models(
    kernels: Backend, vocabulary: int, coupling: Coupling, rule: Csd | Gsd
) -> None:
    if isinstance(rule, Gsd) and vocabulary > 8192:
        pytest.skip("the reference of GSD takes minutes at this size")
    settings = Settings(top_k=2000, top_p=0.95, coupling=coupling, **rule.settings())
    compare(kernels, generate(1, settings, images=2, window=4, vocabulary=vocabulary, columns=2, tokens=64))


def test_kernel_gives_the_same_bits_twice(kernels: Backend) -> None:
    settings = Settings(top_k=500, top_p=0.9, coupling=Coupling.MAXIMAL, **Csd().settings())
    case = generate(1, settings, window=16, vocabulary=16384, columns=4, tokens=64)
    one, other = kernels(case), kernels(case)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# ---- engines -----------------------------------------------------------------------------------------------------


def targets() -> list[str]:
    """The builders that are installed."""
    from csd_ops.errors import CsdError
    from engines.nvidia.toolchain import KINDS, find_toolchain

    found = []
    for name in KINDS:
        try:
            find_toolchain(name)
            found.append(name)
        except CsdError:
            continue
    return found


@pytest.fixture(scope="session", params=targets() or ["none"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Bundle]:
    """The demo model with plans of one builder, both tails where there are plugins."""
    if request.param == "none":
        pytest.skip("needs TensorRT or TensorRT-RTX")
    folder = tmp_path_factory.mktemp(request.param) / "demo"
    shutil.copytree(DEMO, folder)
    bundle = open_bundle(folder)
    for tail in ("kernel", "plugin") if request.param == "tensorrt" else ("kernel",):
        for batch in (1, 2):
            build_engines(bundle, target=request.param, precision="fp16", tail=tail, window=16, batch=batch)
    return request.param, bundle


@pytest.mark.parametrize("against", ["onnxruntime"])
def test_engine_equals_onnx_runtime_on_ragged_lengths(built: tuple[str, Bundle], against: str) -> None:
    from runtime.compare import compare_engines

    target, bundle = built
    comparison = compare_engines(bundle, engine=target, against=against, window=16)
    assert comparison.passed, comparison.outputs
    assert "GPU" in comparison.engine or target in comparison.engine


def setup_of(model: ImageModel) -> tuple[Setup, list[Request]]:
    preset = model.preset("csd", window=16)
    settings = preset.settings(temperature=1.0, top_k=0, top_p=1.0)
    requests = [Request(model._encoder.encode(text), seed) for seed, text in enumerate(["cat on pink", "heart"])]
    longest = max(len(row) for request in requests for row in request.rows)
    return Setup(model.bundle.manifest, settings, 16, 1.5, 2, longest), requests


def test_replay_equals_queueing_every_part(built: tuple[str, Bundle]) -> None:
    from runtime.device_loop import DeviceLoop

    target, bundle = built
    model = ImageModel.open(bundle.folder, engine=target)
    setup, requests = setup_of(model)
    loop = model.backend.loop(setup)
    assert isinstance(loop, DeviceLoop) and loop.captured
    replayed = Decoder(loop.setup, loop).decode(requests)
    loop._steps = [loop._sequence(turn) for turn in range(2)]
    queued = Decoder(loop.setup, loop).decode(requests)
    for one, other in zip(replayed, queued, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_pictures_are_those_of_the_cpu_up_to_rounding(built: tuple[str, Bundle]) -> None:
    target, bundle = built
    prompts = ["cat on pink", "heart", "sunflower on blue", "robot"]
    cpu = ImageModel.open(bundle.folder, engine="cpu").generate(prompts, preset="csd", window=16)
    gpu = ImageModel.open(bundle.folder, engine=target).generate(prompts, preset="csd", window=16)
    assert target.replace("rtx", "tensorrt_rtx") in gpu.provider and "CUDA graph" in gpu.provider
    assert abs(gpu.forward_passes / cpu.forward_passes - 1) < 0.3
    assert abs(gpu.entropy - cpu.entropy) < 0.3


def test_onnx_runtime_on_cuda(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    cpu = ImageModel.open(DEMO, engine="cpu").generate("cat on pink", preset="sjd")
    gpu = ImageModel.open(DEMO, engine="cuda").generate("cat on pink", preset="sjd")
    assert "CUDAExecutionProvider" in gpu.provider
    assert abs(gpu.forward_passes / cpu.forward_passes - 1) < 0.3


def test_compute_sanitizer_finds_nothing() -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    script = (
        "from tests.gpu.test_gpu import *; from engines.nvidia.device import CudaDevice;"
        "run = on_gpu(CudaDevice());"
        "[compare(run, generate(seed, Settings(top_k=5, top_p=0.9, coupling=coupling, **rule.settings()), window=6,"
        " vocabulary=300)) for seed, (coupling, rule) in enumerate(zip(Coupling, (Csd(), Gsd(size=5), Csd())))]"
    )
    for check in ("memcheck", "racecheck", "initcheck"):
        done = subprocess.run(
            [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-c", script],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
