"""Checkpoints that contradict themselves and machines that cannot write: one sentence each, nothing left behind."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from csd_ops.errors import InputError, MachineError
from export import export_checkpoint


def _set(checkpoint: Path, file: str, *keys: str, to: object) -> None:
    document = json.loads((checkpoint / file).read_text("utf-8"))
    part = document
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = to
    (checkpoint / file).write_text(json.dumps(document), "utf-8")


def _change_tensors(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


HEAD = "model.generation_head.vision_head.weight"
CONTRADICTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor of another shape": (
        lambda c: _change_tensors(c, lambda tensors: tensors.update({HEAD: tensors[HEAD][:3].copy()})),
        "found mismatched [3, 16]",
    ),
    "a stray tensor": (
        lambda c: _change_tensors(c, lambda tensors: tensors.update(stray=tensors[HEAD].copy())),
        "unexpected stray",
    ),
    "heads unlike the tensors": (
        lambda c: _set(c, "config.json", "text_config", "num_key_value_heads", to=1),
        "expected model.language_model.layers.0.self_attn.k_proj.weight of shape",
    ),
    "a word for a number": (lambda c: _set(c, "config.json", "text_config", "hidden_size", to="big"), "hidden_size"),
    "no text model": (lambda c: _set(c, "config.json", "text_config", to="none"), "text_config"),
    "another token count": (
        lambda c: _set(c, "config.json", "vision_config", "num_image_tokens", to=9),
        "num_image_tokens of 4",
    ),
    "no room for a prompt": (
        lambda c: _set(c, "config.json", "text_config", "max_position_embeddings", to=4),
        "max_position_embeddings",
    ),
    "torn generation settings": (lambda c: (c / "generation_config.json").write_text("{"), "generation_config.json"),
    "another image token": (
        lambda c: _set(c, "generation_config.json", "generation_kwargs", "boi_token_id", to=4),
        "boi_token_id 4",
    ),
    "another padding token": (lambda c: _set(c, "generation_config.json", "pad_token_id", to=6), "pad_token_id 6"),
    "a tokenizer that puts no first token": (
        lambda c: _set(c, "tokenizer.json", "post_processor", to=None),
        "bos_token_id 1",
    ),
    "empty weights": (lambda c: (c / "model.safetensors").write_bytes(b""), "model.safetensors"),
}


@pytest.mark.parametrize("name", list(CONTRADICTIONS))
def test_contradictions_are_refused(toy_checkpoint: Path, tmp_path: Path, name: str) -> None:
    checkpoint = Path(shutil.copytree(toy_checkpoint, tmp_path / "checkpoint"))
    spoil, found = CONTRADICTIONS[name]
    spoil(checkpoint)
    with pytest.raises(InputError) as caught:
        export_checkpoint(checkpoint, tmp_path / "out")
    message = str(caught.value)
    assert found in message and message.startswith("expected") and ";" in message and "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_full_disk_is_told(toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("export.exporter.shutil.copyfile", full)
    with pytest.raises(MachineError, match=r"No space left on device; check"):
        export_checkpoint(toy_checkpoint, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "export.image_decoder", None)
    with pytest.raises(MachineError, match=r"install `csd-toolkit\[export\]`"):
        export_checkpoint(toy_checkpoint, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_told_before_anything_is_read(tmp_path: Path) -> None:
    from tests.models import write_tiny_janus

    checkpoint = write_tiny_janus(tmp_path / "checkpoint")
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.truncate(4 * 10**12)  # sparse: it takes no disk
    with pytest.raises(MachineError, match=r"expected about 1501\.3 GB of free memory to export 4000\.0 GB, found"):
        export_checkpoint(checkpoint, tmp_path / "bundle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_disk_is_compared_with_what_a_bundle_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export import exporter

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    free = shutil.disk_usage(tmp_path).free
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(free)
    monkeypatch.setattr(exporter, "free_memory", lambda: None)  # a machine that does not say
    with pytest.raises(MachineError, match=r"expected up to .* GB of free disk at"):
        exporter.check_room(checkpoint, tmp_path, "fp32")
