"""The command as a user meets it: files, JSON, exit codes, one sentence for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image


def csd(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    import os

    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200"}
    command = [sys.executable, "-m", "runtime.command_line", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def test_generate_writes_picture_map_and_json(tmp_path: Path) -> None:
    done = csd("generate", "apple on white", "-o", "a.png", "--map", "m.png", "--json", "--seed", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert {"preset", "seed", "tokens", "forward_passes", "seconds", "provider", "files"} <= figures.keys()
    assert figures["seed"] == 5 and figures["tokens"] == 256 and figures["provider"] == "CPUExecutionProvider"
    assert sorted(figures["files"]) == ["a.png", "m.png"]
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (64, 64)


def test_generate_numbers_several_pictures_and_says_what_ran(tmp_path: Path) -> None:
    done = csd("generate", "cat on pink", "-o", "c.png", "--count", "2", "--preset", "sjd", cwd=tmp_path)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-1.png", "c-2.png"]
    for part in ("512 tokens in", "forward passes", "tokens per pass", "lossless", "sjd", "CPUExecutionProvider"):
        assert part in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", ""),
        ("generate", "cat", "--preset", "fast"),
        ("generate", "cat", "--delta", "2"),
        ("generate", "cat", "--preset", "sjd", "--lambda", "1"),
        ("generate", "cat", "--window", "0"),
        ("generate", "cat", "--seed", "-1"),
        ("generate", "cat", "--set", "k"),
        ("generate", "cat", "-o", "nowhere/x.png"),
        ("generate", "cat", "-o", "x.txt"),
        ("generate", "cat", "--bundle", "missing"),
        ("inspect", "missing"),
        ("export", "missing", "-o", "out"),
        ("export", ".", "-o", "out", "--precision", "fp8"),
        ("generate", "cat", "--wait", "never"),
        ("bench", "missing"),
        ("bench", "--presets", "fast"),
        ("bench", "--presets", "csd:x"),
        ("bench", "--presets", "csd:99"),
        ("bench", "--baseline", "missing"),
        ("bench", "--baseline", ".", "--baselines", "fast"),
        ("bench", "--prompts", "missing.txt"),
        ("bench", "--trace", "nowhere/trace.json", "--presets", "ar"),
        ("tune", "missing"),
        ("tune", "--windows", "8,wide"),
        ("tune", "--preset", "fast"),
        ("tune", "--prompts", "missing.txt"),
        ("sweep", "--prompts", "missing.txt"),
        ("sweep", "--prompts", "empty.txt"),
        ("sweep", "--prompts", "binary.txt"),
        ("sweep", "--prompts", "good.txt", "-v", "fast"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "empty.txt").write_text("# nothing\n\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "good.txt").write_text("cat\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = csd(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("csd: expected ") and ", found" in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing is left behind"


def test_inspect_and_presets_print(tmp_path: Path) -> None:
    assert "16 x 16 codes, 256 tokens" in csd("inspect").stdout
    shown = csd("presets").stdout
    assert "csd-paper" in shown and "sjd-gumbel" in shown


def test_sweep_resumes_and_refuses_another_setup(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("cat on pink\nstar on gray\n")
    common = ("sweep", "--prompts", "p.txt", "-o", "out", "-v", "ar", "-v", "csd delta=0.35,0.65 window=8")
    assert csd(*common, cwd=tmp_path).returncode == 0
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 6
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("\n") == 5 and "| ar | 1 |" in table
    torn = "\n".join(lines[:3]) + '\n{"variant": "ar", "num'
    (tmp_path / "out" / "results.jsonl").write_text(torn)
    assert csd(*common, cwd=tmp_path).returncode == 0
    again = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert again[:3] == lines[:3] and len(again) == 6
    keys = ("variant", "prompt", "forward_passes", "distortion")
    picked = [sorted(tuple(json.loads(line)[key] for key in keys) for line in found) for found in (lines, again)]
    assert picked[0] == picked[1]
    other = csd(*common, "--seed", "9", cwd=tmp_path)
    assert other.returncode == 2 and "same seed" in other.stderr
    assert (tmp_path / "out" / "results.jsonl").read_text().splitlines() == again
    with Image.open(tmp_path / "out" / "pareto.png") as plot:
        assert plot.width > 500
