"""Draw every preset's pictures of the same prompts and seeds into a folder; what is finished is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csd_ops.errors import InputError, MachineError
from runtime.bundle import MANIFEST, sha256, write_bytes, write_text
from runtime.evaluation.prompts import Prompt
from runtime.evaluation.workers import Drawn, Jobs, Orders

SETUP, LINES = "eval.json", "results.jsonl"


@dataclass(frozen=True)
class Results:
    """A folder of finished pictures. Lines are in the order of presets, then of prompts."""

    folder: Path
    presets: tuple[str, ...]
    lines: dict[str, list[dict[str, Any]]]

    def values(self, preset: str, name: str) -> np.ndarray:
        """One figure of every picture of a preset, float64 [n]."""
        return np.array([line[name] for line in self.lines[preset]], np.float64)

    def pictures(self, preset: str) -> Iterator[np.ndarray]:
        """Pixels uint8 [height, width, 3], one after the other."""
        from PIL import Image

        for line in self.lines[preset]:
            yield np.asarray(Image.open(self.folder / line["picture"]).convert("RGB"))

    def details(self, preset: str) -> Iterator[dict[str, np.ndarray]]:
        """Arrays by token of every picture."""
        for line in self.lines[preset]:
            with np.load(self.folder / line["details"], allow_pickle=False) as arrays:
                yield dict(arrays)


def generate(
    orders: Orders,
    prompts: Sequence[Prompt],
    presets: Sequence[str],
    folder: Path,
    draw: Callable[[Orders, Jobs], Iterator[Drawn]],
    on_progress: Callable[[int, int], None] | None = None,
) -> Results:
    """Draw what is missing in a folder, prompt by prompt all presets in turn, and return all of it.

    A picture is finished when its line is in results.jsonl: picture and details are written before it.

    Raises:
        InputError: the folder holds results of other settings.
        MachineError: it cannot be written.
    """
    setup = {
        "bundle": sha256(orders.bundle / MANIFEST),
        "engine": orders.engine,
        "threads": orders.threads,
        "seed": orders.seed,
        "guidance": orders.guidance,
        "temperature": orders.temperature,
        "top_k": orders.top_k,
        "top_p": orders.top_p,
        "prompts": [[prompt.key, prompt.text] for prompt in prompts],
    }
    lines = _resume(folder, setup)
    wanted = [(preset, number) for number in range(len(prompts)) for preset in _turned(presets, number)]
    missing = [job for job in wanted if job not in lines]
    if on_progress:
        on_progress(len(wanted) - len(missing), len(wanted))
    try:
        with (folder / LINES).open("a", encoding="utf-8") as file:
            for drawn in draw(orders, missing) if missing else ():
                line = _write(folder, drawn, len(prompts))
                file.write(json.dumps(line) + "\n")
                file.flush()
                lines[drawn.preset, drawn.number] = line
                if on_progress:
                    on_progress(sum(job in lines for job in wanted), len(wanted))
    except OSError as error:
        raise MachineError(
            f"expected to write in {folder}, found: {error.strerror or error}; free some space and run again, what is "
            "drawn is kept"
        ) from None
    own = {preset: [lines[preset, number] for number in range(len(prompts))] for preset in presets}
    return Results(folder, tuple(presets), own)


def folder_name(preset: str) -> str:
    """A preset's name as a folder's."""
    return re.sub(r"[^\w.=-]+", "-", preset).strip("-")


def _turned(presets: Sequence[str], number: int) -> Sequence[str]:
    """Another one first each time, so that what the machine does meanwhile falls on all of them."""
    turn = number % len(presets)
    return [*presets[turn:], *presets[:turn]]


def _write(folder: Path, drawn: Drawn, count: int) -> dict[str, Any]:
    """Picture and details into the folder; the line that says so."""
    from io import BytesIO

    from PIL import Image

    name = f"{folder_name(drawn.preset)}/{drawn.number:0{len(str(count - 1))}d}"
    paths = {"picture": f"pictures/{name}.png", "details": f"details/{name}.npz"}
    for path in paths.values():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    picture, details = BytesIO(), BytesIO()
    Image.fromarray(drawn.pixels).save(picture, "png")
    arrays: dict[str, Any] = drawn.details
    np.savez_compressed(details, **arrays)
    write_bytes(folder / paths["picture"], picture.getvalue())
    write_bytes(folder / paths["details"], details.getvalue())
    return drawn.line | paths


def _resume(folder: Path, setup: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Finished lines of a folder with the same setup; a torn line, or one whose files are gone, is dropped."""
    path, results = folder / SETUP, folder / LINES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            before = json.loads(path.read_text("utf-8"))
            changed = [name for name in setup if not isinstance(before, dict) or before.get(name) != setup[name]]
            if changed:
                raise InputError(
                    f"expected results of the same {', '.join(changed)} in {folder}, found another; name another output"
                )
        else:
            write_text(path, json.dumps(setup, indent=1) + "\n")
        text = results.read_text("utf-8") if results.is_file() else ""
    except OSError as error:
        raise MachineError(f"expected to write in {folder}, found: {error.strerror}; name another output") from None
    except ValueError:
        raise InputError(f"expected JSON in {path}, found none; name another output") from None
    lines = {}
    for entry in text.splitlines():
        try:
            line = json.loads(entry)
            if all((folder / line[name]).is_file() for name in ("picture", "details")):
                lines[line["preset"], line["number"]] = line
        except (ValueError, KeyError, TypeError):
            continue
    if results.is_file():
        write_text(results, "".join(json.dumps(line) + "\n" for line in lines.values()))
    return lines
