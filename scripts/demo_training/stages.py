"""A training stage: counted steps, a progress bar, and a checkpoint from which a killed run goes on exactly."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from demo_training.optimiser import MuonAdam

SAVE_SECONDS = 60.0
REPORT_STEPS = 50


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a work file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """Read a work file; tensors and plain values only."""
    return torch.load(path, weights_only=True) if path.is_file() else None


def run_stage(
    name: str,
    path: Path,
    steps: int,
    modules: torch.nn.Module,
    optimiser: MuonAdam,
    generator: torch.Generator,
    one_step: Callable[[], dict[str, float]],
    on_save: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run `one_step` (loss and gradients) and the optimiser until `steps` are done; returns what `on_save` last gave.

    The work file holds model, optimiser and generator, so that a repeated call continues where the last one ended.
    """
    state = load(path)
    notes: dict[str, Any] = {}
    if state:
        modules.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        generator.set_state(state["generator"])
        notes = state["notes"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(name, total=steps, completed=optimiser.step_count)
        saved = time.monotonic()
        sums: dict[str, float] = {}
        while optimiser.step_count < steps:
            for key, value in one_step().items():
                sums[key] = sums.get(key, 0.0) + value
            optimiser.step()
            done = optimiser.step_count
            progress.update(task, completed=done)
            if done % REPORT_STEPS == 0:
                means = ", ".join(f"{key} {value / REPORT_STEPS:.4f}" for key, value in sums.items())
                progress.console.print(f"{name} {done}/{steps}: {means}")
                sums = {}
            if time.monotonic() - saved > SAVE_SECONDS or done == steps:
                notes = on_save() if on_save else {}
                state = {
                    "model": modules.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "generator": generator.get_state(),
                    "notes": notes,
                }
                save(path, state)
                saved = time.monotonic()
    return notes
