"""`csd build` and `csd compare` as a user sees them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx")

from runtime.bundle import open_bundle
from runtime.compare import Comparison, Difference, compare_engines, describe
from runtime.model import DEMO
from tests.runtime.test_command_line import csd


@pytest.fixture(scope="module")
def demo_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "demo"
    shutil.copytree(DEMO, folder)
    return folder


def test_build_says_what_was_built(demo_copy: Path) -> None:
    done = csd("build", str(demo_copy), "--target", "rtx", "--precision", "fp16", "--window", "16", "--verify")
    assert done.returncode == 0, done.stderr
    assert "building demo in fp16: 0.008 GB of weights, about 0.03 GB of memory" in done.stderr
    plain = " ".join(done.stdout.split())
    for words in ("attention │ fused", "tail │ kernel", "30 in half", "pictures at once: 1", "against ONNX Runtime"):
        assert words in plain, plain
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "tensorrt"], "install `csd-toolkit[tensorrt]`"),
        (["--target", "rtx", "--window", "900"], "expected window from 1 to 64, found 900"),
        (["--target", "rtx", "--tail", "plugin"], "has no plugins; choose one"),
    ],
)
def test_build_refusals(demo_copy: Path, arguments: list[str], words: str) -> None:
    done = csd("build", str(demo_copy), *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("csd: expected ")


def test_build_on_the_plain_runtime(demo_copy: Path, tmp_path: Path) -> None:
    """Without the extra's packages: here hidden by modules that fail to import as absent ones do."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['onnx'] = None\n", "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "runtime.command_line", "build", str(demo_copy)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
    )
    assert done.returncode == 2 and done.stderr.strip() == (
        "csd: expected onnx to build engines, found none; install `csd-toolkit[rtx]`"
    )


@pytest.mark.parametrize("engine", ["rtx", "tensorrt", "cuda"])
def test_a_gpu_engine_without_its_machine(demo_copy: Path, engine: str, tmp_path: Path) -> None:
    done = csd("generate", "heart", "-b", str(demo_copy), "--engine", engine, "-o", str(tmp_path / "a.png"))
    if done.returncode == 0:
        pytest.skip("this machine has it")
    assert done.returncode == 2 and "csd: expected" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_auto_takes_the_cpu_where_there_is_no_gpu(demo_copy: Path, tmp_path: Path) -> None:
    done = csd("generate", "heart", "-b", str(demo_copy), "-o", str(tmp_path / "a.png"), "--json")
    assert done.returncode == 0 and '"provider": ' in done.stdout


def test_unknown_engine(tmp_path: Path) -> None:
    done = csd("generate", "heart", "--engine", "tpu", "-o", str(tmp_path / "a.png"))
    assert done.returncode == 2 and "expected an engine of auto, cpu, tensorrt, rtx, cuda, found 'tpu'" in done.stderr


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_compare_with_onnx_runtime(precision: str) -> None:
    comparison = compare_engines(open_bundle(DEMO), engine="network", precision=precision, windows=3)
    assert comparison.passed and comparison.windows == 3
    assert {difference.output for difference in comparison.outputs} >= {"logits", "next_key_0", "next_value_3"}
    assert "interpreted" in comparison.engine and "CPUExecutionProvider" in comparison.against


def test_compare_with_eager() -> None:
    checkpoint = Path("export/demo")
    comparison = compare_engines(
        open_bundle(DEMO), engine="network", against="eager", checkpoint=checkpoint, windows=3, window=5
    )
    assert comparison.passed and "eager" in comparison.against
    assert len(comparison.outputs) == 9


def test_compare_layer_by_layer() -> None:
    comparison = compare_engines(open_bundle(DEMO), engine="network", layers=True, windows=2, window=3)
    assert comparison.passed and len(comparison.layers) > 100
    assert {"rotary", "attention", "gelu"} <= {difference.output for difference in comparison.layers}


def test_compare_exits_with_1_where_engines_differ() -> None:
    done = csd("compare", "--engine", "network", "--precision", "fp16", "--tolerance", "1e-9", "--windows", "2")
    assert done.returncode == 1 and "OFF" in done.stdout


def test_the_first_layer_that_is_off_is_named() -> None:
    outputs = [Difference("logits", 1.0, 0.1, 1e-4)]
    layers = [Difference("a", 0.0, 0.0, 1e-4), Difference("b", 0.5, 0.2, 1e-4), Difference("c", 0.5, 0.3, 1e-4)]
    tables = describe(Comparison("one", "other", 1, outputs, layers))
    assert "the first that is off is b" in str(tables[1].title)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "eager"], "expected the checkpoint to compare with, found none; pass --checkpoint DIR"),
        (["--against", "jax"], "expected against of onnxruntime, eager, found 'jax'"),
        (["--layers", "--against", "eager", "--checkpoint", "export/demo"], "leave --layers out"),
        (["--engine", "rtx"], "csd: expected"),
    ],
)
def test_compare_refusals(arguments: list[str], words: str) -> None:
    done = csd("compare", *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
