"""Tensors of a checkpoint by name, mapped from its files: safetensors preferred, .bin read with weights alone."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from csd_ops.errors import InputError

Table = Sequence[tuple[str, str | None]]  # pattern of a checkpoint's name -> stock name; None: not needed


@dataclass(frozen=True)
class Stored:
    """One tensor and the file it is in. The tensor is a view of the mapped file."""

    tensor: torch.Tensor
    file: Path


def read_tensors(checkpoint: Path) -> dict[str, Stored]:
    """All tensors of a folder, sharded or not.

    Raises:
        InputError: no weights, a torn file, a shard that the index names and that is not there, or a .bin with anything
            but tensors in it.
    """
    for index, pattern in (
        ("model.safetensors.index.json", "*.safetensors"),
        ("pytorch_model.bin.index.json", "*.bin"),
    ):
        files = sorted(checkpoint.glob(pattern))
        for shard in _indexed(checkpoint / index):
            if shard not in files:
                raise InputError(f"expected the shard {shard}, named in {index}, found none; download it again")
        if files:
            found: dict[str, Stored] = {}
            for file in files:
                found |= {name: Stored(tensor, file) for name, tensor in read_file(file).items()}
            return found
    raise InputError(f"expected safetensors or .bin weights in {checkpoint}, found none; download the checkpoint again")


def _indexed(index: Path) -> list[Path]:
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"expected a weight_map in {index}, found: {error}; download it again") from None
    return [index.parent / Path(str(name)).name for name in sorted(names)]


def read_file(file: Path) -> Mapping[str, torch.Tensor]:
    """Tensors of a file, mapped; all but safetensors is unpickled with weights alone."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        tensors: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        tensors = tensors.get("state_dict", tensors)
        return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    except Exception as error:  # torch and safetensors raise many kinds
        odd = isinstance(error, UnpicklingError)
        first = "something else than tensors" if odd else textwrap.shorten(str(error), 200)
        raise InputError(f"expected a whole file of tensors at {file}, found: {first}; download it again") from None


def rename(tensors: Mapping[str, Stored], table: Table) -> dict[str, Stored]:
    """Stock names for a checkpoint's own, by the first pattern that matches; a name without one stays as it is."""
    renamed = {}
    for name, stored in tensors.items():
        for pattern, target in table:
            if re.match(pattern, name):
                if target is not None:
                    renamed[re.sub(pattern, target, name, count=1)] = stored
                break
        else:
            renamed[name] = stored
    return renamed


def assign(module: nn.Module, tensors: Mapping[str, Stored], checkpoint: Path, ignore: Sequence[str] = ()) -> None:
    """Give the parameters of a module on the meta device their tensors, without a copy.

    Raises:
        InputError: names a tensor that is missing, unexpected or of another shape, with its file. Names that begin with
            one of `ignore` may be missing.
    """
    again = "download the checkpoint again"
    wanted = {name: value for name, value in module.state_dict().items() if not name.startswith(tuple(ignore))}
    for name, value in wanted.items():
        if name not in tensors:
            raise InputError(f"expected the tensor {name} in {checkpoint}, found none (missing); {again}")
        found = tensors[name]
        if found.tensor.shape != value.shape:
            raise InputError(
                f"expected {name} of shape {list(value.shape)} in {found.file}, found mismatched "
                f"{list(found.tensor.shape)}; {again}"
            )
    strange = sorted(tensors.keys() - module.state_dict().keys())
    if strange:
        raise InputError(
            f"expected the tensors of config.json in {tensors[strange[0]].file}, found unexpected {strange[0]} "
            f"(and {len(strange) - 1} more); {again}"
        )
    module.load_state_dict({name: tensors[name].tensor for name in wanted}, strict=False, assign=True)
