"""The training script's stages go on exactly where a kill left them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo_training import stages
from demo_training.optimiser import MuonAdam, orthogonalise


class KilledError(Exception):
    """Stands for the kill."""


def train(path: Path, stop_after: int | None = None) -> torch.Tensor:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5)
    optimiser = MuonAdam([layer.weight], [layer.bias], muon_rate=0.1, adam_rate=0.1, steps=8, warm_up=2, decay=0.1)
    generator = torch.Generator().manual_seed(1)
    made = 0

    def step() -> dict[str, float]:
        nonlocal made
        if made == stop_after:
            raise KilledError
        made += 1
        loss = layer(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        return {"loss": float(loss.detach())}

    stages.run_stage("test", path, 8, layer, optimiser, generator, step)
    return torch.cat([layer.weight.flatten(), layer.bias]).detach()


def test_a_killed_stage_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SAVE_SECONDS", 0.0)
    whole = train(tmp_path / "whole.pt")
    for stop in (3, 2):  # killed twice
        with pytest.raises(KilledError):
            train(tmp_path / "killed.pt", stop)
    assert torch.equal(train(tmp_path / "killed.pt"), whole)
    assert torch.equal(train(tmp_path / "killed.pt"), whole), "a finished stage is not trained again"


def test_muon_steps_are_orthogonal() -> None:
    update = orthogonalise(torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.5 and values.max() < 1.4
