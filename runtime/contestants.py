"""Presets by the names they have in lists: of `csd bench`, `csd eval` and `csd tune`."""

from __future__ import annotations

import re

from csd_ops.errors import InputError
from runtime.model import ImageModel
from runtime.presets import Preset, parse_settings


def split_presets(text: str) -> list[str]:
    """Names of a comma-separated list, each once; commas in parentheses belong to a name."""
    return list(dict.fromkeys(re.split(r",(?![^()]*\))", text)))


def contestant(model: ImageModel, text: str) -> Preset:
    """A preset by its name in a list: `csd`, `csd:16` with a window of 16, `csd(delta=0.35):16`, or `default`.

    `default` is what `generate` takes.
    """
    if text == "default":
        return model.tuned(model.preset())
    parts = re.fullmatch(r"([\w-]+)(?:\(([^()]*)\))?(?::(\d+))?", text)
    if parts is None:
        raise InputError(
            f"expected a preset such as csd, csd:16 or csd(delta=0.35):16, found {text!r}; write the window as a number"
        )
    name, numbers, window = parts.groups()
    changes = parse_settings([pair.strip() for pair in numbers.split(",")] if numbers else [])
    preset = model.preset(name, window=int(window) if window else None, **changes)
    most = model.bundle.manifest.max_window
    if not 1 <= preset.window <= most:
        raise InputError(f"expected a window from 1 to {most}, found {text!r}; choose one inside")
    return preset
