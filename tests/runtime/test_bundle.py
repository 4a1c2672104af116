"""Bundles are checked when opened, and written whole or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from csd_ops.errors import CsdError, InputError, MachineError
from runtime.bundle import MANIFEST, open_bundle, writing_bundle


@pytest.fixture
def bundle(toy_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_bundle, tmp_path / "bundle"))


def edit(path: Path, change: Callable[[dict], object]) -> None:
    document = json.loads((path / MANIFEST).read_text("utf-8"))
    change(document)
    (path / MANIFEST).write_text(json.dumps(document), "utf-8")


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))


SPOILED = {
    "no folder": (lambda b: shutil.rmtree(b), "expected a bundle folder"),
    "no manifest": (lambda b: (b / MANIFEST).unlink(), f"expected {MANIFEST}"),
    "torn manifest": (lambda b: truncate(b / MANIFEST), "expected JSON"),
    "not a manifest": (lambda b: (b / MANIFEST).write_text("[]"), "no schema version"),
    "newer schema": (lambda b: edit(b, lambda d: d.update(schema=99)), "update csd-toolkit"),
    "missing size": (lambda b: edit(b, lambda d: d["model"].pop("rows")), "expected rows (int)"),
    "size of zero": (lambda b: edit(b, lambda d: d["model"].update(layers=0)), "at least 1"),
    "missing file": (lambda b: (b / "step.onnx").unlink(), "step.onnx, found none"),
    "truncated file": (lambda b: truncate(b / "step.onnx.data"), "bytes in"),
    "changed file": (lambda b: flip(b / "step.onnx.data"), "checksum"),
    "path outside": (lambda b: edit(b, lambda d: d["files"].update({"../x": {}})), "files inside"),
    "forced outside": (lambda b: edit(b, lambda d: d["model"].update(forced={"99": 1})), "forced tokens"),
}


@pytest.mark.parametrize("name", list(SPOILED))
def test_spoiled_bundles_are_refused(bundle: Path, name: str) -> None:
    spoil, message = SPOILED[name]
    spoil(bundle)
    with pytest.raises(InputError) as caught:
        open_bundle(bundle)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_link_out_of_the_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    shutil.move(bundle / "tokenizer.json", outside)
    (bundle / "tokenizer.json").symlink_to(outside)
    with pytest.raises(InputError, match="leaves it"):
        open_bundle(bundle)


def test_writing_replaces_whole_or_not_at_all(bundle: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in bundle.iterdir())
    with pytest.raises(KeyboardInterrupt), writing_bundle(bundle) as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert sorted(path.name for path in bundle.iterdir()) == before
    with writing_bundle(bundle) as folder:
        (folder / MANIFEST).write_text("{}")
    assert [path.name for path in bundle.iterdir()] == [MANIFEST]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"], "nothing is left beside it"


def test_a_killed_writer_leaves_the_previous_bundle(bundle: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from runtime.bundle import writing_bundle\n"
        "with writing_bundle(sys.argv[1]) as folder:\n"
        "    (folder / 'half').write_text('x'); os.kill(os.getpid(), 9)"
    )
    before = (bundle / MANIFEST).read_bytes()
    for place in (bundle, tmp_path / "new"):
        assert subprocess.run([sys.executable, "-c", code, str(place)]).returncode == -9
    assert (bundle / MANIFEST).read_bytes() == before and not (tmp_path / "new").exists()
    dead = next(tmp_path.glob(".bundle.*")).name
    bundle.rename(tmp_path / f"{dead}.previous")  # as if killed between the two renames
    with pytest.raises(KeyboardInterrupt), writing_bundle(bundle):
        raise KeyboardInterrupt
    assert (bundle / MANIFEST).read_bytes() == before
    assert not list(tmp_path.glob(".bundle*"))


@pytest.mark.parametrize("kind", ["file", "other files", "unwritable"])
def test_bad_outputs_are_refused(tmp_path: Path, kind: str) -> None:
    target = {"file": tmp_path / "file", "other files": tmp_path / "folder", "unwritable": Path("/proc/none/bundle")}[
        kind
    ]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letter.txt").write_text("mine")
    with pytest.raises(CsdError, match="name another output") as caught, writing_bundle(target):
        pass
    assert isinstance(caught.value, InputError | MachineError)
    assert (tmp_path / "folder" / "letter.txt").read_text() == "mine"
