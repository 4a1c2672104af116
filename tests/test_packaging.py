"""What a user meets first: imports, the command, the scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).parents[1]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)


def test_import_runtime_stays_lean() -> None:
    code = (
        "import sys, runtime, runtime.command_line, engines.onnx_runtime, csd_ops.reference; "
        "heavy = {'torch', 'transformers', 'onnx', 'onnxscript', 'matplotlib', 'scipy', "
        "'onnxruntime', 'PIL', 'tokenizers'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert python("-c", code).stdout.strip() == "[]"


def test_drawing_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from runtime import ImageModel; "
        "ImageModel.open().generate('apple on white', preset='csd'); "
        "print(sorted({'torch', 'transformers', 'onnx', 'onnxscript'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout.strip() == "[]"


def test_command_names_its_commands() -> None:
    shown = python("-m", "runtime.command_line", "--help").stdout
    for command in ("generate", "inspect", "presets", "export", "sweep"):
        assert command in shown


def test_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == runtime.__version__


@pytest.mark.parametrize("name", ["scripts/demo", "scripts/test", ".ci/run"])
def test_scripts_are_sound(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / name)]).returncode == 0
