"""TensorRT-RTX builds the graphs of every family on a machine without a GPU, and its network equals ONNX Runtime."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx")

from csd_ops.errors import InputError, MachineError
from engines.nvidia.plan import Card
from export.families import KNOWN
from runtime.build import build_engines
from runtime.bundle import Bundle, open_bundle
from runtime.model import DEMO
from tests.models import write_tiny

PRECISIONS = ("fp32", "fp16", "bf16")
HEAD_SIZES = (64, 128)  # of the published models; fused attention depends on them


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Bundle]:
    """A tiny bundle of every family and head size."""
    from export import export_checkpoint

    made = {}
    for family in sorted(KNOWN):
        for size in HEAD_SIZES:
            folder = tmp_path_factory.mktemp(f"{family}_{size}")
            checkpoint = write_tiny(family, folder / "checkpoint", head_size=size)
            made[family, size], _ = export_checkpoint(checkpoint, folder / "bundle")
    return made


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("family", sorted(KNOWN))
def test_every_family(bundles: dict[tuple[str, int], Bundle], family: str, size: int, precision: str) -> None:
    bundle = bundles[family, size]
    for window in (1, 7, bundle.manifest.max_window):
        step, decoder = build_engines(bundle, target="rtx", precision=precision, window=window, verify=True)
        assert_sound(step, precision)
        assert decoder.attention == "none" and decoder.verified["pixels"] <= 40
    assert_whole(bundle)


def assert_sound(card: Card, precision: str) -> None:
    """Built in the precision asked for, fused where that is possible, nothing of another kind inside."""
    kind = {"fp32": "float", "fp16": "half", "bf16": "bf16"}[precision]
    assert card.attention == ("decomposed" if precision == "fp32" else "fused")
    for layer in ("matrix_multiply", "kv_cache_update", "rotary_embedding", "attention_input"):
        assert set(card.layer_dtypes[layer]) == {kind}, layer
    assert not card.tf32
    assert max(card.verified.values()) <= {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}[precision]


def assert_whole(bundle: Bundle) -> None:
    """Nothing half-written is left, and every plan has its card."""
    names = {path.name for path in (bundle.folder / "engines").iterdir()}
    assert not [name for name in names if name.startswith(".")]
    assert {name[:-5] for name in names if name.endswith(".plan")} == {
        name[:-5] for name in names if name.endswith(".json")
    }


@pytest.fixture
def demo_copy(tmp_path: Path) -> Bundle:
    shutil.copytree(DEMO, tmp_path / "demo")
    return open_bundle(tmp_path / "demo")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_demo_model_whole(demo_copy: Bundle, precision: str) -> None:
    for window in (1, 64):
        step, _ = build_engines(demo_copy, target="rtx", precision=precision, window=window, batch=2, verify=True)
        assert_sound(step, precision)
    open_bundle(demo_copy.folder)  # engines leave the bundle as it was


@pytest.mark.parametrize("preset", ["csd", "gsd", "sjd-gumbel", "csd-paper", "jacobi", "cool"])
def test_function_tails(demo_copy: Bundle, preset: str) -> None:
    """The ONNX functions with a preset's settings, inside the engine: built, and equal to ONNX Runtime."""
    step, _ = build_engines(
        demo_copy, target="rtx", precision="fp32", tail="function", preset=preset, window=16, verify=True
    )
    assert step.tail == "function" and step.preset == preset and step.settings
    assert step.verified["measures"] < 1e-4 and step.verified["next_draft_probs"] < 1e-3


def test_progress_comes_from_tensorrt(demo_copy: Bundle) -> None:
    seen: list[tuple[str, str, int, int]] = []
    build_engines(demo_copy, target="rtx", window=4, on_progress=lambda *phase: seen.append(phase))
    assert {plan for plan, *_ in seen} == {"step", "image_decoder"}
    assert any(done == total > 1 for _, _, done, total in seen)
    assert all(0 <= done <= total for _, _, done, total in seen)


def test_what_cannot_be_built_is_told(demo_copy: Bundle) -> None:
    for options, words in (
        ({"target": "cuda"}, "expected target auto, tensorrt, rtx, found 'cuda'"),
        ({"precision": "int8"}, "expected precision of fp32, fp16, bf16, found 'int8'"),
        ({"tail": "plugin"}, "tensorrt_rtx has no plugins"),
        ({"tail": "kernels"}, "expected tail of plugin, kernel, function, found 'kernels'"),
        ({"window": 65}, "expected window from 1 to 64, found 65"),
        ({"prompt": 0}, None),
        ({"batch": 0}, "expected batch of at least 1, found 0"),
        ({"preset": "best"}, "'best'"),
        ({"compute_capabilities": ["9.9"]}, "expected a compute capability of 7.5, 8.0"),
    ):
        if words is None:
            continue
        with pytest.raises(InputError) as refusal:
            build_engines(demo_copy, **{"target": "rtx"} | options)  # type: ignore[arg-type]
        assert words in str(refusal.value), options
    assert not (demo_copy.folder / "engines").is_dir() or not list((demo_copy.folder / "engines").glob("*.plan"))


def test_missing_tensorrt_names_the_extra(demo_copy: Bundle) -> None:
    with pytest.raises(MachineError, match=r"found no tensorrt \(.*\); install `csd-toolkit\[tensorrt\]`"):
        build_engines(demo_copy, target="tensorrt")


def test_too_little_memory_is_told_before_anything_is_built(demo_copy: Bundle) -> None:
    weights = demo_copy.folder / "step.onnx.data"
    with weights.open("r+b") as file:
        file.truncate(10**13)  # sparse: it takes no disk
    with pytest.raises(
        MachineError, match=r"expected about 20000\.0 GB of free memory to build an engine of 5000\.0 GB"
    ):
        build_engines(demo_copy, target="rtx")
    assert not (demo_copy.folder / "engines").exists()
