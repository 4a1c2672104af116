"""Prompts: MS-COCO captions, GenEval's lines, or a text file."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csd_ops.errors import InputError
from runtime.prompt import read_prompts


@dataclass(frozen=True)
class Prompt:
    """A text to draw, and its key in the file it is from: an image id, or a line's number from 0."""

    text: str
    key: int


def read(path: Path, count: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts of a file by its ending: .json is COCO captions, .jsonl lines with `prompt` (GenEval), else text.

    Of COCO every image has one caption, chosen by the seed and the image's id alone, and `count` images are chosen by
    the seed. Of other files the first `count` lines are taken, again from the first if there are fewer.

    Raises:
        InputError: no such file, not what its ending says, or fewer images than `count`.
    """
    if path.suffix == ".json":
        return _captions(path, count, seed)
    if path.suffix == ".jsonl":
        prompts = _lines(path)
    else:
        prompts = [Prompt(text, number) for number, text in enumerate(read_prompts(path))]
    return list(itertools.islice(itertools.cycle(prompts), count or len(prompts)))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "bytes that are not UTF-8"
        raise InputError(f"expected prompts at {path}, found: {reason}; name another file") from None


def _captions(path: Path, count: int | None, seed: int) -> list[Prompt]:
    wrong = f"expected COCO captions (an object with `annotations`, each with image_id and caption) in {path}, found"
    captions: dict[int, list[tuple[int, str]]] = {}
    try:
        for number, entry in enumerate(json.loads(_read(path))["annotations"]):
            own = captions.setdefault(int(entry["image_id"]), [])
            own.append((int(entry.get("id", number)), _text(entry["caption"])))
    except KeyError as error:
        raise InputError(f"{wrong} no {error.args[0]}; name another file") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{wrong}: {' '.join(str(error).split())}; name another file") from None
    images = sorted(captions)
    if not images or len(images) < (count or 1):
        raise InputError(f"expected captions of {count or 1} images in {path}, found {len(images)}; lower --count")
    if count is not None:
        images = sorted(int(image) for image in np.random.default_rng(seed).permutation(images)[:count])

    def choose(image: int) -> str:
        own = sorted(captions[image])
        return own[int(np.random.default_rng([seed, image]).integers(len(own)))][1]

    return [Prompt(choose(image), image) for image in images]


def _lines(path: Path) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(_read(path).splitlines()):
        if not line.strip():
            continue
        try:
            prompts.append(Prompt(_text(json.loads(line)["prompt"]), number))
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"expected an object with `prompt` in line {number + 1} of {path}, found {line[:60]!r}; correct it"
            ) from None
    if not prompts:
        raise InputError(f"expected lines with `prompt` in {path}, found none; name another file")
    return prompts


def _text(value: Any) -> str:
    text = " ".join(value.split()) if isinstance(value, str) else ""
    if not text:
        raise ValueError(f"{value!r} for a caption")
    return text
