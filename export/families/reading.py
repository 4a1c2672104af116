"""What the families share in reading a checkpoint: its files, its tokenizer, a stock class with its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from csd_ops.errors import InputError
from export.families import read_config
from export.families.tensors import Table, assign, read_tensors, rename

AGAIN = "download the checkpoint again"
SETTINGS = "generation_config.json"
OLD: Table = ((r".*rotary_emb\.inv_freq$", None),)  # written by transformers before 4.31


def check_settings(checkpoint: Path) -> None:
    """Refuse a torn generation_config.json: transformers would take its defaults without a word."""
    path = checkpoint / SETTINGS
    try:
        if path.is_file():
            json.loads(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"expected JSON in {path}, found: {error}; {AGAIN}") from None


def read_tokenizer(checkpoint: Path, special: tuple[str, ...] = ()) -> Any:
    """The fast tokenizer; InputError names a special token it lacks."""
    from tokenizers import Tokenizer

    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"expected tokenizer.json in {checkpoint}, found none; {AGAIN}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"expected a tokenizer in {path}, found: {error}; download it again") from None
    for name in special:
        if tokenizer.token_to_id(name) is None:
            raise InputError(
                f"expected the special token {name} in {path}, found none; this tokenizer is of another model"
            )
    return tokenizer


def check_vocabulary(checkpoint: Path, tokenizer: Any, rows: int) -> None:
    """Refuse a tokenizer with more ids than the embedding has rows."""
    if tokenizer.get_vocab_size() > rows:
        raise InputError(
            f"expected at most {rows} ids in {checkpoint / 'tokenizer.json'}, found {tokenizer.get_vocab_size()}; "
            "tokenizer and weights do not belong together"
        )


def skeleton(checkpoint: Path, kind: Any, config: Callable[[], Any]) -> Any:
    """A stock class on the meta device; InputError if its configuration is not one."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        with torch.device("meta"):
            return kind(config())
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, StrictDataclassError) as error:
        first = " ".join(str(error).split())
        raise InputError(
            f"expected the configuration of a {kind.__name__.removesuffix('ForConditionalGeneration')} model in "
            f"{checkpoint / 'config.json'}, found: {first}; {AGAIN}"
        ) from None


def read_stock(checkpoint: Path, name: str, table: Table = (), not_read: Sequence[str] = ()) -> Any:
    """A stock transformers class whose parameters are mapped from the checkpoint, in the precision they are stored in.

    `table` renames tensors of older layouts. Every missing, unexpected or mis-shaped tensor is an error; parts whose
    names begin with one of `not_read` stay on the meta device.
    """
    import transformers

    kind = getattr(transformers, name)
    document = read_config(checkpoint)
    model = skeleton(checkpoint, kind, lambda: kind.config_class.from_dict(document))
    fill(model, checkpoint, table, not_read)
    model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    if (checkpoint / SETTINGS).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint, local_files_only=True)
    return model


def fill(model: Any, checkpoint: Path, table: Table, not_read: Sequence[str]) -> None:
    """Give a skeleton its tensors, and the rotary frequencies, which are computed and not read."""
    assign(model, rename(read_tensors(checkpoint), (*OLD, *table)), checkpoint, not_read)
    for module in [module for module in model.modules() if hasattr(module, "rotary_emb")]:
        module.rotary_emb = type(module.rotary_emb)(module.config)
    model.eval()


def split_table(table: torch.Tensor, start: int, codes: list[int]) -> list[torch.Tensor]:
    """An embedding table whose image ids lie together, as the bundle has it: codes in their order, then the text.

    `codes` are the text ids of the image codes 0..V-1, a permutation of start..start+V-1.
    """
    end = start + len(codes)
    return [table[torch.tensor(codes)], table[:start], table[end:]]


def image_head(head: nn.Linear, codes: list[int]) -> nn.Linear:
    """The rows of a text head that are image codes, in their order."""
    part = nn.Linear(head.in_features, len(codes), bias=False)
    part.weight = nn.Parameter(head.weight[torch.tensor(codes)].clone(), requires_grad=False)
    return part


def check_codes(checkpoint: Path, codes: dict[int, int], expected: int) -> list[int]:
    """The text ids of the image codes in their order; InputError unless they are whole and lie together."""
    ids = [codes[code] for code in sorted(codes)]
    path = checkpoint / "config.json"
    if sorted(codes) != list(range(expected)):
        raise InputError(
            f"expected {expected} image codes in the vocabulary_map of {path}, found {len(codes)}; {AGAIN}"
        )
    if sorted(ids) != list(range(min(ids), min(ids) + expected)):
        raise InputError(f"expected the image ids of {path} to lie together, found gaps; {AGAIN}")
    return ids
