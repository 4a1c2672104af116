"""`csd tune`: which window is fastest on this machine, measured and kept in the user's configuration.

A window of W costs t(W) / t(1) steps of a single token: as many tokens must a pass decide before the window pays. What
a pass does decide grows with W more slowly than its cost does on a CPU, and faster where a step reads weights only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from csd_ops.errors import InputError, MachineError
from engines.machine import processor
from runtime.bundle import MANIFEST, Bundle, sha256, write_text

if TYPE_CHECKING:
    from runtime.model import ImageModel

WINDOWS = (1, 4, 8, 12, 16, 24, 32, 40, 48, 64)


@dataclass(frozen=True)
class Tuned:
    """One window, medians over the prompts."""

    window: int
    seconds: float  # per picture
    forward_passes: float
    milliseconds: float  # per forward pass
    tokens_per_pass: float
    break_even: float  # tokens per pass from which this window is faster than a window of 1


def store() -> Path:
    """Where choices are kept: CSD_TUNED, or csd/tuned.json in the user's configuration folder."""
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(os.environ.get("CSD_TUNED") or Path(folder) / "csd" / "tuned.json")


def key(bundle: Bundle, preset: str, provider: str, threads: int) -> str:
    """What a choice holds for: bundle, preset, processor or GPU, threads."""
    name, cores = processor()
    return " | ".join(
        (sha256(bundle.path(MANIFEST))[:16], preset, name, f"{cores} cores", provider, f"{threads} threads")
    )


def tuned_window(bundle: Bundle, preset: str, provider: str, threads: int) -> int | None:
    """The window chosen for this machine, None if none was."""
    path = store()
    if not path.is_file():
        return None
    found = _read(path).get(key(bundle, preset, provider, threads))
    return int(found["window"]) if found else None


def keep(bundle: Bundle, preset: str, provider: str, threads: int, rows: Sequence[Tuned] | None) -> Path:
    """Store the fastest window, or forget the choice where `rows` is None; the file."""
    path = store()
    known = _read(path) if path.is_file() else {}
    name = key(bundle, preset, provider, threads)
    known.pop(name, None)
    if rows is not None:
        known[name] = {"window": fastest(rows).window, "measured": [asdict(row) for row in rows]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"expected to write {path}, found: {error.strerror}; set CSD_TUNED to another file"
        ) from None
    write_text(path, json.dumps(known, indent=1) + "\n")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text("utf-8"))
        if all(isinstance(entry, dict) and isinstance(entry["window"], int) for entry in known.values()):
            return dict(known)
    except (OSError, ValueError, AttributeError, KeyError):
        pass
    raise InputError(f"expected tuned windows in {path}, found something else; delete it and run `csd tune` again")


def fastest(rows: Sequence[Tuned]) -> Tuned:
    """The row of least seconds."""
    return min(rows, key=lambda row: row.seconds)


def tune(
    model: ImageModel,
    prompts: Sequence[str],
    *,
    preset: str | None = None,
    windows: Sequence[int] = WINDOWS,
    count: int = 5,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Tuned]:
    """Draw `count` pictures at every window in turn, after one round of warm-up; a window of 1 is always measured.

    Raises:
        InputError: a window that the model has no room for.
    """
    windows = sorted({1, *(window for window in windows if window <= model.bundle.manifest.max_window)})
    chosen = model.preset(preset)
    seconds: dict[int, list[float]] = {window: [] for window in windows}
    passes: dict[int, list[int]] = {window: [] for window in windows}
    done = 0
    for number in range(-1, count):
        turn = number % len(windows)
        for window in (*windows[turn:], *windows[:turn]):
            made = model.generate(prompts[number % len(prompts)], preset=chosen, window=window, seed=number + 1)
            done += 1
            if on_progress:
                on_progress(done, (count + 1) * len(windows))
            if number >= 0:
                seconds[window].append(made.seconds - made.decode_seconds)
                passes[window].append(made.forward_passes)
    step = {window: float(np.median(np.divide(seconds[window], passes[window]))) for window in windows}
    tokens = model.bundle.manifest.image_tokens
    return [
        Tuned(
            window,
            float(np.median(seconds[window])),
            float(np.mean(passes[window])),
            step[window] * 1e3,
            tokens / float(np.mean(passes[window])),
            step[window] / step[1],
        )
        for window in windows
    ]
