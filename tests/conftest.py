"""Shared fixtures: bundles exported once per session, and the rule for tests that need a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import hypothesis
import pytest

from runtime import ImageModel
from runtime.model import DEMO

# The same cases every time; `pytest --hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", max_examples=4000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def _missing_gpu() -> str | None:
    """Why no CUDA device can be used; None if one can."""
    if shutil.which("nvidia-smi") is None:
        return "needs an NVIDIA GPU: no driver on this machine"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs an NVIDIA GPU: libcuda.so.1 does not load"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "needs an NVIDIA GPU: the driver sees none"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, with the reason, where there is no GPU."""
    reason = _missing_gpu()
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def _untuned(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No window that somebody tuned on this machine."""
    os.environ["CSD_TUNED"] = str(tmp_path_factory.mktemp("tuned") / "tuned.json")


@pytest.fixture(scope="session")
def demo() -> ImageModel:
    """The shipped demo model."""
    return ImageModel.open(DEMO, threads=2)


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 4 codes and 4 tokens: every picture can be enumerated."""
    from tests.models import write_tiny_janus

    return write_tiny_janus(tmp_path_factory.mktemp("toy") / "checkpoint")


@pytest.fixture(scope="session")
def toy_bundle(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its bundle."""
    from export import export_checkpoint

    folder = tmp_path_factory.mktemp("toy_bundle") / "bundle"
    export_checkpoint(toy_checkpoint, folder)
    return folder


@pytest.fixture(scope="session")
def toy(toy_bundle: Path) -> ImageModel:
    """It, opened."""
    return ImageModel.open(toy_bundle, threads=1)
