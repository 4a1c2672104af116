"""`csd export`: the stages as a progress bar, the comparison as a table."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from export.exporter import STAGES, export_checkpoint
from export.hub import fetch


def run(
    checkpoint: str,
    output: Path,
    precision: str,
    size: tuple[int, int] | None,
    image_decoder: Path | None,
    force: bool,
    revision: str | None,
    console: Console,
) -> None:
    """Export, draw the stages, print what was compared."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    fetch(checkpoint, revision)  # shows the hub's own progress
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("export", total=None)

        def on_stage(name: str, number: int, count: int) -> None:
            progress.update(task, description=name, completed=number, total=count)

        def on_write(done: int, count: int) -> None:
            progress.update(task, completed=STAGES.index("write step") + done / count)

        bundle, parity = export_checkpoint(
            checkpoint,
            output,
            precision=precision,
            size=size,
            image_decoder=image_decoder,
            force=force,
            on_stage=on_stage,
            on_write=on_write,
        )
    table = Table(title=f"{bundle.folder}: compared with PyTorch at {parity.positions} positions", title_justify="left")
    for column in ("what", "worst", "tolerance"):
        table.add_column(column)
    table.add_row("logits, relative to the largest", f"{parity.logits:.2e}", f"{parity.logits_tolerance:.0e}")
    table.add_row("same best token", f"{parity.greedy:.2%}", "")
    table.add_row("pixels, of 255", str(parity.pixels), "1")
    console.print(table)
    console.print(f"wrote {bundle.folder}, {bundle.bytes / 1e6:.1f} MB, {bundle.manifest.precision}", soft_wrap=True)
