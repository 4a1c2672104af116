"""Captions of COCO, GenEval's lines and text files as prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from csd_ops.errors import InputError
from runtime.evaluation.prompts import read


def coco(path: Path, images: int = 20) -> Path:
    entries = [
        {"id": 100 * image + number, "image_id": image, "caption": f"  picture {image},\n caption {number} "}
        for image in range(images)
        for number in range(5)
    ]
    path.write_text(json.dumps({"images": [], "annotations": entries[::-1]}), "utf-8")
    return path


def test_coco_gives_one_caption_per_image(tmp_path: Path) -> None:
    path = coco(tmp_path / "captions.json")
    prompts = read(path)
    assert [prompt.key for prompt in prompts] == list(range(20))
    assert {prompt.text.split(",")[0] for prompt in prompts} == {f"picture {image}" for image in range(20)}
    assert len({prompt.text.split()[-1] for prompt in prompts}) > 2, "captions are chosen, not the first taken"
    assert read(path) == prompts != read(path, seed=1)
    some = read(path, 7)
    assert len(some) == 7 and set(some) <= set(prompts), "how many images does not change their captions"
    with pytest.raises(InputError, match=r"expected captions of 21 images in .*, found 20; lower --count"):
        read(path, 21)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "expected COCO captions .* found: "),
        ("[]", "expected COCO captions .* found: "),
        ('{"images": []}', "found no annotations"),
        ('{"annotations": [{"image_id": 1}]}', "found no caption"),
        ('{"annotations": [{"image_id": 1, "caption": 3}]}', "found: 3 for a caption"),
        ('{"annotations": []}', "expected captions of 1 images in .*, found 0"),
    ],
)
def test_malformed_captions(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "captions.json").write_text(text)
    with pytest.raises(InputError, match=found) as told:
        read(tmp_path / "captions.json")
    assert "\n" not in str(told.value)


def test_lines_of_geneval(tmp_path: Path) -> None:
    path = tmp_path / "evaluation_metadata.jsonl"
    path.write_text('{"tag": "single_object", "include": [], "prompt": "a photo of a bench"}\n\n{"prompt": "a cow"}\n')
    assert [(prompt.key, prompt.text) for prompt in read(path)] == [(0, "a photo of a bench"), (2, "a cow")]
    path.write_text('{"prompt": "a cow"}\n{"text": "a cow"}\n')
    with pytest.raises(InputError, match="expected an object with `prompt` in line 2 of"):
        read(path)


def test_text_begins_again_where_it_is_short(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("# two\ncat\ndog\n")
    assert [prompt.text for prompt in read(path, 5)] == ["cat", "dog", "cat", "dog", "cat"]
    with pytest.raises(InputError, match="found: No such file"):
        read(tmp_path / "none.json")
