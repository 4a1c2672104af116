#!/usr/bin/env python
"""Train the demo model: a tiny Janus that draws 48 emoji on 8 colours. Resumes after a kill; `--help` says how."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import typer
from demo_training.codes import fit_codes, tokenise
from demo_training.model import save_checkpoint
from demo_training.pictures import FINAL_GRAIN, Renderer, contact_sheet
from demo_training.stages import load, save
from demo_training.training import assemble, train_decoder, train_encoder, train_language_model
from rich import print as show

PACKAGE = "emoji-datasource-google@16.0.0"


class Stage(StrEnum):
    """What can be run alone; decoder and language model need only the codes and may run side by side."""

    ALL = "all"
    CODES = "codes"
    DECODER = "decoder"
    ENCODER = "encoder"
    LANGUAGE = "language"
    GRAIN = "grain"
    SAVE = "save"


def main(
    work: Annotated[Path, typer.Option(help="Folder for data and resumable state.")] = Path("demo_work"),
    output: Annotated[Path, typer.Option(help="Checkpoint folder to write.")] = Path("export/demo"),
    emoji: Annotated[Path | None, typer.Option(help=f"Unpacked {PACKAGE}; without it npm fetches it.")] = None,
    stage: Annotated[Stage, typer.Option(help="Run one stage alone.")] = Stage.ALL,
    guidance: Annotated[float, typer.Option(help="Guidance written into the generation configuration.")] = 1.5,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch.")] = 2,
) -> None:
    """Train what is not trained yet and write the checkpoint."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    package = emoji or fetch(work)
    renderer = Renderer(package)
    codes = load(work / "codes.pt")
    if codes is None:
        show("codes: k-means over patches, a few seconds")
        codes = fit_codes(renderer)
        save(work / "codes.pt", codes)
        preview(renderer, codes, work / "codes.png")
    if stage in (Stage.ALL, Stage.DECODER):
        show("decoder", train_decoder(renderer, codes, work))
    if stage in (Stage.ALL, Stage.ENCODER):
        show("encoder", train_encoder(renderer, codes, work))
    if stage in (Stage.ALL, Stage.LANGUAGE):
        show("language model", train_language_model(renderer, codes, work))
    if stage in (Stage.ALL, Stage.GRAIN):
        notes = train_language_model(Renderer(package, FINAL_GRAIN), codes, work, final=True)
        (work / "validation.json").write_text(json.dumps(notes, indent=1), "utf-8")
        show("final grain", notes)
    if stage in (Stage.ALL, Stage.SAVE):
        save_checkpoint(assemble(codes, work), output, guidance)
        show(f"wrote {output}")


def fetch(work: Path) -> Path:
    """Download the emoji package with npm and unpack what is used."""
    package = work / "package"
    if not (package / "emoji.json").is_file():
        if shutil.which("npm") is None:
            raise SystemExit(f"expected npm to fetch {PACKAGE}, found none; unpack it yourself and pass --emoji")
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=work, check=True, stdout=subprocess.DEVNULL)
        archive = next(work.glob("emoji-datasource-google-*.tgz"))
        with tarfile.open(archive) as file:
            wanted = ("package/emoji.json", "package/img/google/64/", "package/README.md")
            file.extractall(work, [m for m in file.getmembers() if m.name.startswith(wanted)], filter="data")
    return package


@torch.no_grad()
def preview(renderer: Renderer, codes: dict[str, torch.Tensor], path: Path) -> None:
    """Pictures above what their codes alone can show."""
    numbers = torch.arange(48)
    pictures = renderer.draw(numbers, numbers % 8, torch.Generator().manual_seed(7)).pixels
    tokens = tokenise(pictures, codes["centroids"])
    flat = codes["centroids"][tokens].transpose(1, 2)
    shown = torch.nn.functional.fold(flat, 64, 4, stride=4)
    rows = [torch.cat([pictures[i : i + 12], shown[i : i + 12]]) for i in range(0, 48, 12)]
    contact_sheet(torch.cat(rows), 12).save(path)


if __name__ == "__main__":
    typer.run(main)
