"""What the families share in reading a checkpoint: its files, its tokenizer, a stock class from safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from csd_ops.errors import InputError

AGAIN = "download the checkpoint again"


def check_settings(checkpoint: Path) -> None:
    """Refuse a torn generation_config.json: transformers would take its defaults without a word."""
    path = checkpoint / "generation_config.json"
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


def read_stock(checkpoint: Path, name: str, ignore: tuple[str, ...] = ()) -> Any:
    """A stock transformers class from local safetensors, in the precision they are stored in.

    Every missing, unexpected or mis-shaped tensor is an error, but those whose names begin with one of `ignore`.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError, safe_open

    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"expected safetensors weights in {checkpoint}, found none; download or convert the checkpoint"
        )
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"expected a whole safetensors file at {file}, found: {error}; download it again"
            ) from None
    try:
        model, info = getattr(transformers, name).from_pretrained(
            checkpoint,
            dtype="auto",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError, TypeError, KeyError, StrictDataclassError) as error:
        first = " ".join(str(error).split())
        kind = name.removesuffix("ForConditionalGeneration")
        raise InputError(f"expected a {kind} checkpoint in {checkpoint}, found: {first}; download it again") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = [key if isinstance(key, str) else f"{key[0]} {list(key[1])}" for key in info.get(kind) or ()]
        keys = [key for key in keys if not key.startswith(ignore)] if ignore else keys
        if keys:
            raise InputError(
                f"expected the tensors of config.json in {checkpoint}, found {kind.replace('_keys', '')} {min(keys)} "
                f"(and {len(keys) - 1} more); {AGAIN}"
            )
    return model.eval()


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
