"""Plans that do not fit are refused with a sentence before TensorRT sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from csd_ops.errors import InputError, MachineError
from engines.nvidia.device import Gpu, check_driver
from engines.nvidia.plan import (
    FOLDER,
    PORTABLE,
    Card,
    Wanted,
    choose,
    image_decoder,
    read_card,
    read_plan,
    unfit,
    write_card,
)

CARD = Card(
    what="step",
    target="rtx",
    version="1.7.1.116",
    compute_capability="8.9",
    precision="fp16",
    window=16,
    prompt=64,
    capacity=384,
    batch=2,
    rows=4,
    tail="kernel",
    preset="",
    bundle="a" * 64,
    plan_size=4,
    plan_sha256="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",  # of b"test"
    device_memory=10**9,
    attention="fused",
    tf32=False,
    seconds=1.5,
)
WANTED = Wanted(
    target="rtx",
    version="1.7.1.116",
    compute_capability=(8, 9),
    free_memory=2 * 10**9,
    bundle="a" * 64,
    window=16,
    prompt=12,
    rows=4,
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / f"{CARD.name}.plan").write_bytes(b"test")
    write_card(folder, CARD)
    return tmp_path


def test_a_plan_that_fits(bundle: Path) -> None:
    assert choose(bundle, WANTED) == CARD
    assert read_plan(bundle, CARD) == b"test"
    assert unfit(CARD, replace(WANTED, rows=2, prompt=64)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute_capability": (8, 6)}, "expected a plan for compute capability 8.6, found one for 8.9"),
        ({"version": "1.8.0"}, "expected a plan of rtx 1.8.0, found one of 1.7.1.116"),
        ({"target": "tensorrt"}, "expected a plan for tensorrt, found one for rtx"),
        ({"precision": "fp32"}, "expected a plan of precision fp32, found one of fp16"),
        ({"window": 40}, "expected a plan for a window of 40, found one for 16"),
        ({"prompt": 65}, "expected a plan for prompts of 65 ids, found one for up to 64"),
        ({"rows": 8}, "expected a plan for 8 rows, found one for up to 4"),
        ({"bundle": "b" * 64}, "expected a plan of this bundle, found one of another"),
        ({"free_memory": 5 * 10**8}, "expected 1.00 GB of free GPU memory, found 0.50 GB"),
    ],
)
def test_a_plan_that_does_not_fit(bundle: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as refusal:
        choose(bundle, replace(WANTED, **change))  # type: ignore[arg-type]
    assert words in str(refusal.value) and "csd build" in str(refusal.value)


def test_portable_plans_and_fixed_settings() -> None:
    portable = replace(CARD, compute_capability=PORTABLE)
    assert unfit(portable, WANTED) is None
    assert "compute capability 7.5" in str(unfit(portable, replace(WANTED, compute_capability=(7, 5))))
    fixed = replace(CARD, tail="function", preset="csd", settings={"delta": 0.65})
    assert unfit(fixed, replace(WANTED, settings={"delta": 0.65})) is None
    assert "found one with those of csd fixed" in str(unfit(fixed, replace(WANTED, settings={"delta": 0.5})))


def test_the_image_decoder_fits_by_machine_and_bundle(bundle: Path) -> None:
    decoder = replace(CARD, what="image_decoder", tail="", attention="none")
    write_card(bundle / FOLDER, decoder)
    assert image_decoder(bundle, replace(WANTED, window=40, prompt=99, rows=2)) == decoder
    assert image_decoder(bundle, replace(WANTED, version="1.8")) is None
    assert choose(bundle, WANTED) == CARD, "the step's plan is another"


def test_no_plan_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found none; build one with `csd build"):
        choose(tmp_path, WANTED)


@pytest.mark.parametrize(
    ("content", "words"), [(b"tes", "expected 4 bytes in"), (b"rest", "expected the checksum of its card for")]
)
def test_a_torn_plan(bundle: Path, content: bytes, words: str) -> None:
    (bundle / FOLDER / f"{CARD.name}.plan").write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_plan(bundle, CARD)


def test_a_missing_plan(bundle: Path) -> None:
    (bundle / FOLDER / f"{CARD.name}.plan").unlink()
    with pytest.raises(InputError, match=r"expected .*\.plan, found none; build the engine again"):
        read_plan(bundle, CARD)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "expected JSON"),
        ("[]", "expected a plan's card of schema 1"),
        ('{"schema": 2}', "expected a plan's card of schema 1 in .*, found 2"),
        ('{"schema": 1}', r"expected what \(str\)"),
    ],
)
def test_a_torn_card(bundle: Path, content: str, words: str) -> None:
    path = bundle / FOLDER / f"{CARD.name}.json"
    path.write_text(content, "utf-8")
    with pytest.raises(InputError, match=words):
        read_card(path)


def test_a_card_under_another_name(bundle: Path) -> None:
    path = bundle / FOLDER / f"{CARD.name}.json"
    document = json.loads(path.read_text("utf-8")) | {"window": 17}
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(InputError, match="expected the card of"):
        read_card(path)


def test_an_old_driver() -> None:
    gpu = Gpu("GPU", (8, 9), 1, 1, driver=12040)
    with pytest.raises(MachineError, match=r"expected a driver for CUDA 13\.0 or newer, found one for 12\.4; update"):
        check_driver(gpu)
    check_driver(replace(gpu, driver=13000))
