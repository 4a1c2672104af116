"""Ids on the hub: the shared cache without a network, names, revisions, and what cannot be had."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from csd_ops.errors import InputError
from export import export_checkpoint
from export.hub import fetch
from tests.models import write_tiny_janus

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one repository, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--some-team--Tiny-Janus"
    write_tiny_janus(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository


def test_an_id_is_exported_from_the_cache(cache: Path, tmp_path: Path) -> None:
    bundle, _ = export_checkpoint("some-team/Tiny-Janus", tmp_path / "bundle")
    assert bundle.manifest.name == "Tiny-Janus"


def test_bin_files_are_taken_where_there_are_no_safetensors(cache: Path) -> None:
    snapshot = cache / "snapshots" / COMMIT
    torch.save(load_file(snapshot / "model.safetensors"), snapshot / "pytorch_model.bin")
    (snapshot / "model.safetensors").unlink()
    assert fetch("some-team/Tiny-Janus", COMMIT) == snapshot


def test_a_folder_is_taken_as_it_is(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(cache / "snapshots" / COMMIT, tmp_path / "some-team" / "Tiny-Janus"))
    assert fetch("some-team/Tiny-Janus").resolve() == folder
    with pytest.raises(InputError, match="expected a hub id with the revision main, found the folder"):
        fetch("some-team/Tiny-Janus", "main")


@pytest.mark.parametrize(("name", "revision"), [("some-team/Other", None), ("some-team/Tiny-Janus", "v2")])
def test_what_the_cache_lacks_is_told(cache: Path, tmp_path: Path, name: str, revision: str | None) -> None:
    with pytest.raises(InputError, match=rf"expected {name}.* from the hub or in its cache .*, found neither") as told:
        export_checkpoint(name, tmp_path / "bundle", revision=revision)
    assert "\n" not in str(told.value) and f"`hf download {name}`" in str(told.value)
    assert not (tmp_path / "bundle").exists()
