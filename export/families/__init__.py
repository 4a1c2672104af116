"""The model families the exporter knows: one file each, the same skeleton (export.families.base)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from csd_ops.errors import InputError
from export.families.base import Family

# model_type of config.json -> module that defines `FAMILY`
KNOWN = {
    "janus": "export.families.janus",
    "chameleon": "export.families.lumina",
    "emu3": "export.families.emu3",
}
# and of other layouts of the same families
LAYOUTS = {"multi_modality": "export.families.janus_original"}


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's config.json."""
    path = checkpoint / "config.json"
    if not checkpoint.is_dir():
        raise InputError(f"expected a checkpoint folder, found none at {checkpoint}; name the folder with config.json")
    if not path.is_file():
        raise InputError(f"expected config.json in {checkpoint}, found none; name a checkpoint in transformers' layout")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"expected JSON in {path}, found: {error}; download the checkpoint again") from None
    if not isinstance(config, dict):
        raise InputError(f"expected an object in {path}, found {type(config).__name__}; download the checkpoint again")
    return config


def find_family(checkpoint: Path) -> Family:
    """The family of a checkpoint by its model_type; InputError names the known ones."""
    import importlib

    found = read_config(checkpoint).get("model_type")
    known = KNOWN | LAYOUTS
    if found not in known:
        raise InputError(
            f"expected a checkpoint of {', '.join(known)} in {checkpoint}, found model_type {found!r}; "
            "this family cannot be exported"
        )
    family: Family = importlib.import_module(known[found]).FAMILY
    return family
