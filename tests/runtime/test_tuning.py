"""`csd tune`: the fastest window is stored for this machine, and `generate` uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from csd_ops.errors import InputError
from runtime import ImageModel
from runtime.command_line import closing_line
from runtime.tuning import Tuned, fastest, keep, store, tune


def row(window: int, seconds: float) -> Tuned:
    return Tuned(window, seconds, 50.0, 1.0, 5.0, 2.0)


@pytest.fixture
def stored(demo: ImageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    monkeypatch.setenv("CSD_TUNED", str(tmp_path / "config" / "tuned.json"))
    return demo.bundle, "csd", demo.backend.provider, demo.backend.threads


def test_generate_takes_the_stored_window(demo: ImageModel, stored: tuple) -> None:
    plain = demo.preset().window
    assert demo.generate("red apple").preset.window == plain
    path = keep(*stored, [row(1, 3.0), row(12, 1.0), row(16, 2.0)])
    assert path == store() and path.is_file()
    made = demo.generate("red apple")
    assert (made.preset.window, made.preset.tuned) == (12, True)
    assert "window 12 (tuned)" in closing_line(made)
    assert demo.generate("red apple", window=8).preset.window == 8, "what the user says goes"
    assert demo.generate("red apple", preset="sjd").preset.window == 16, "of another preset"
    keep(*stored, None)
    assert demo.generate("red apple").preset.window == plain


def test_another_machine_is_not_tuned(demo: ImageModel, stored: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(*stored, [row(12, 1.0)])
    monkeypatch.setattr("runtime.tuning.processor", lambda: ("another", 64))
    assert not demo.tuned(demo.preset()).tuned


def test_tune_measures_every_window(demo: ImageModel) -> None:
    rows = tune(demo, ["red apple", "cat on pink"], windows=(8, 99), count=2)
    assert [row.window for row in rows] == [1, 8], "1 for comparison; 99 is over the model's most"
    one, eight = rows
    assert one.tokens_per_pass == pytest.approx(256 / 257) and one.break_even == 1
    assert eight.tokens_per_pass > 2 and eight.break_even > 0.5
    assert eight.seconds == pytest.approx(eight.milliseconds * eight.forward_passes / 1e3, rel=0.3)
    assert fastest(rows) in rows


@pytest.mark.parametrize("text", ["[]", "{", json.dumps({"a": {"window": "12"}}), json.dumps({"a": 1})])
def test_a_broken_file_is_refused(demo: ImageModel, stored: tuple, text: str) -> None:
    store().parent.mkdir(parents=True)
    store().write_text(text, "utf-8")
    with pytest.raises(InputError, match=r"expected tuned windows in .*; delete it and run `csd tune` again"):
        demo.generate("red apple")
