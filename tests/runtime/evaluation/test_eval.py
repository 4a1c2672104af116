"""Drawing resumes and is the same for every kind of worker; scores are torchmetrics'; the command tells problems."""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.functional.multimodal import clip_score
from transformers import CLIPModel, CLIPProcessor
from typer.testing import CliRunner

from csd_ops.errors import InputError, MachineError
from runtime.command_line import app
from runtime.evaluation import metrics
from runtime.evaluation.generate import LINES, generate
from runtime.evaluation.prompts import Prompt
from runtime.evaluation.workers import Drawn, Jobs, Orders, draw_here, draw_in_processes, draw_on_ray
from runtime.model import DEMO

PROMPTS = [Prompt("cat on pink", 0), Prompt("red apple", 1), Prompt("bus on gray", 2)]
PRESETS = ["ar", "csd:16"]


def orders(**changes: Any) -> Orders:
    given = {"guidance": None, "temperature": None, "top_k": None, "top_p": None} | changes
    return Orders(DEMO, "cpu", 1, tuple(prompt.text for prompt in PROMPTS), 5, **given)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval") / "results"
    generate(orders(), PROMPTS, PRESETS, folder, draw_here)
    return folder


def written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.png")}


@pytest.mark.parametrize("kind", ["processes", "ray"])
def test_all_workers_draw_the_same(finished: Path, tmp_path: Path, kind: str) -> None:
    if kind == "ray":
        pytest.importorskip("ray")
    draw = {"processes": partial(draw_in_processes, count=2), "ray": partial(draw_on_ray, count=2, address=None)}[kind]
    results = generate(orders(), PROMPTS, PRESETS, tmp_path / "results", draw)
    assert written(tmp_path / "results") == written(finished) and len(written(finished)) == 6
    assert results.values("csd:16", "forward_passes").mean() < 100 < results.values("ar", "forward_passes").min()
    for details in results.details("csd:16"):
        assert details["pass_of"].max() < 257 and details["accepted"].mean() > 0.5


def test_what_is_finished_is_kept(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "results"))
    lines = (folder / LINES).read_text().splitlines()
    (folder / LINES).write_text("\n".join(lines[:4]) + "\n" + lines[4][:30])  # killed while it wrote the fifth
    gone = json.loads(lines[1])
    (folder / gone["picture"]).unlink()
    drawn: list[tuple[str, int]] = []

    def watch(orders: Orders, jobs: Jobs) -> Iterator[Drawn]:
        drawn.extend(jobs)
        return draw_here(orders, jobs)

    told: list[tuple[int, int]] = []
    generate(orders(), PROMPTS, PRESETS, folder, watch, lambda *progress: told.append(progress))
    expected = [json.loads(line) for line in (lines[1], lines[4], lines[5])]
    assert sorted(drawn) == sorted((line["preset"], line["number"]) for line in expected)
    assert told == [(3, 6), (4, 6), (5, 6), (6, 6)]
    assert written(folder) == written(finished)
    with pytest.raises(InputError, match=r"expected results of the same guidance in .*, found another"):
        generate(orders(guidance=2.0), PROMPTS, PRESETS, folder, draw_here)


def test_a_full_disk_loses_nothing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.evaluation import generate as module

    write, calls = module.write_bytes, []

    def fill(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) > 5:  # of the third picture
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(module, "write_bytes", fill)
    with pytest.raises(MachineError, match="No space left on device; free some space and run again"):
        generate(orders(), PROMPTS, PRESETS, tmp_path / "results", draw_here)
    assert len((tmp_path / "results" / LINES).read_text().splitlines()) == 2


def test_scores_are_those_of_torchmetrics() -> None:
    scorer = metrics.Scorer.open(str(metrics.DEMO_SCORER))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)
    texts = [prompt.text for prompt in PROMPTS]
    found = metrics.scores(scorer.features(pixels), scorer.text(texts))

    class Adapter(CLIPModel):  # what torchmetrics expects of transformers before 5
        def get_image_features(self, *given: Any) -> Any:
            return super().get_image_features(*given).pooler_output

        def get_text_features(self, *given: Any) -> Any:
            return super().get_text_features(*given).pooler_output

    def both() -> tuple[Any, Any]:
        folder = metrics.DEMO_SCORER
        return Adapter.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)

    with torch.no_grad():
        for picture, text, value in zip(pixels, texts, found, strict=True):
            stock = clip_score(torch.from_numpy(picture).permute(2, 0, 1), text, both)
            assert value == pytest.approx(max(float(stock), 0), abs=1e-3)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments])


def test_the_command_writes_a_report_and_tells_what_it_lacks(finished: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(prompt.text for prompt in PROMPTS))
    folder = tmp_path / "results"
    common = ["-p", str(prompts), "--presets", "ar,csd:16", "-o", str(folder), "--seed", "5", "--workers", "1"]
    made = run(*common, "--inception", str(tmp_path / "none.pth"), "--engine", "cpu")
    assert isinstance(made.exception, InputError)
    assert re.search(r"expected Inception's weights .* at .*none\.pth, found none; download", str(made.exception))
    assert written(finished).items() <= written(folder).items()
    page = (folder / "report.html").read_text()
    pictures = re.findall(r'<img src="([^"]+)"', page)
    assert len(pictures) == 3 and all((folder / name).is_file() for name in pictures)
    assert "no CLIP score and no FID" in page and "Not measured: expected Inception" in page
    summary = json.loads((folder / "summary.json").read_text())
    ours = summary["rows"][1]
    assert ours["preset"] == "csd:16" and {"demo score", "demo distance", "diversity"} <= ours["metrics"].keys()
    assert set(ours["p"]) == {"demo score", "demo distance", "diversity"}
    again = run(*common, "--engine", "cpu")
    assert again.exit_code == 0 and "| csd:16 |" in again.output
    other = run(*common, "--engine", "cpu", "--clip", str(tmp_path))
    assert isinstance(other.exception, InputError) and "expected a CLIP model" in str(other.exception)


def test_reference_pictures(tmp_path: Path) -> None:
    scorer = metrics.Scorer.open(str(metrics.DEMO_SCORER))
    with pytest.raises(InputError, match=r"expected a folder of reference pictures at .*, found 0; pass one"):
        metrics.reference_features(scorer, tmp_path)
    for name in ("a.png", "b.jpg"):
        (tmp_path / name).write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"expected a picture at .*a\.png, found"):
        metrics.reference_features(scorer, tmp_path)


def test_weights_without_torch_fidelity(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch_fidelity"):
        pytest.skip("torch-fidelity is installed")
    torch.save({}, tmp_path / "weights.pth")
    with pytest.raises(MachineError, match=r"expected torch-fidelity for FID, .*; install `csd-toolkit\[fid\]`"):
        metrics.Inception.open(tmp_path / "weights.pth")


def test_a_missing_package_is_told_before_anything_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    made = run("-p", str(tmp_path / "prompts.txt"), "-o", str(tmp_path / "results"))
    assert isinstance(made.exception, MachineError)
    assert re.search(r"found no jinja2; install `csd-toolkit\[eval\]`", str(made.exception))
    assert not list(tmp_path.iterdir())
