"""`csd bench`: what is measured adds up, and the report can be read by people and programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from csd_ops.errors import InputError
from runtime import ImageModel
from runtime.bench import measure, report
from runtime.bench.eager import BASELINES, Eager
from runtime.bench.floor import Work, floor, step_work
from runtime.bench.roofs import Roofs, measure_roofs
from runtime.contestants import contestant, split_presets
from tests.models import write_tiny_lumina

CHECKPOINT = Path(__file__).parents[3] / "export" / "demo"


@pytest.fixture(scope="module")
def found(demo: ImageModel) -> measure.Report:
    presets = {name: contestant(demo, name) for name in ("csd:16", "csd")}
    return measure.bench(
        demo, ["red apple"], presets, checkpoint=CHECKPOINT, baselines=["eager", "eager-dynamic"], count=2, memory=False
    )


def test_parts_add_up_to_the_whole(found: measure.Report) -> None:
    for trial in found.trials:
        assert set(trial.parts) <= set(measure.PARTS)
        assert sum(trial.parts.values()) == pytest.approx(trial.seconds, rel=0.02)
        assert min(trial.parts.values()) >= 0


def test_histogram_counts_every_token_and_pass(found: measure.Report) -> None:
    own = [trial for trial in found.trials if trial.histogram]
    assert {trial.contestant for trial in own} == {"csd:16", "csd"}
    for trial in own:
        counts = np.array(trial.histogram)
        assert counts @ np.arange(len(counts)) == trial.tokens == 256
        assert counts.sum() == trial.forward_passes - 1, "all but the prompt's"


def test_every_contestant_drew_every_round(found: measure.Report) -> None:
    assert found.contestants == ["eager", "eager-dynamic", "csd:16", "csd"]
    for name in found.contestants:
        assert [trial.number for trial in found.of(name)] == [0, 1]
        assert found.median(name) > 0


def test_the_step_takes_a_few_times_its_floor(found: measure.Report) -> None:
    """Rates and steps are measured one after the other, so a busy machine may slow either: the order of size counts."""
    assert set(found.floors) == {"csd:16", "csd"}
    for name, least in found.floors.items():
        assert least.seconds / 4 < found.step(name) < 100 * least.seconds


def test_report_as_json_table_and_plot(found: measure.Report, tmp_path: Path) -> None:
    text = json.dumps(found.as_json(), allow_nan=False)
    summary = json.loads(text)["summary"]
    assert summary["csd"]["seconds"]["p50"] <= summary["csd"]["seconds"]["p99"]
    assert sum(summary["csd"]["tokens_per_pass_histogram"]) > 0
    assert summary["eager"]["milliseconds_per_pass"]["verify"] is None, "eager has no such part"
    rows = report.markdown(found).splitlines()
    assert len({row.count("|") for row in rows}) == 1 and len(rows) == 6
    assert any("floor of a step" in line for line in report.notes(found))
    report.plot(found, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_trace_names_every_pass(demo: ImageModel, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    measure.trace(demo, contestant(demo, "csd:16"), "red apple", path, guidance=1.5)
    events = json.loads(path.read_text("utf-8"))
    passes = [event["name"] for event in events if event.get("cat") == "pass"]
    assert passes[0] == "prompt" and passes[1].startswith("pass 1: ")
    assert sum(int(name.split()[2]) for name in passes[1:]) == 256
    assert any(event.get("cat") == "Node" for event in events), "ONNX Runtime's operators"


def test_compiled_baseline_is_known_and_other_families_are_refused(demo: ImageModel, tmp_path: Path) -> None:
    assert "eager-compiled" in BASELINES
    folder = write_tiny_lumina(tmp_path / "lumina")
    with pytest.raises(InputError, match="expected a Janus checkpoint as baseline, found chameleon"):
        Eager(folder, demo, 1)


def test_work_is_that_of_the_checkpoint(demo: ImageModel) -> None:
    """Every matrix of transformer and head once; the embedding is looked up, not read."""
    products = 0
    with safe_open(CHECKPOINT / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            shape = tensors.get_slice(name).get_shape()
            body = "language_model.layers" in name or "generation_head" in name
            products += int(np.prod(shape)) if body and len(shape) == 2 else 0
    work = step_work(demo.bundle)
    assert products > 3e6
    assert (work.products, work.weight_bytes) == (products, 4 * products)
    manifest = demo.bundle.manifest
    assert work.cache_bytes == 2 * 4 * manifest.layers * manifest.key_value_heads * manifest.head_size


def test_floor_is_the_nearer_roof() -> None:
    roofs = Roofs(copy=1e9, product=1e12, integer_product=4e12, threads=1)
    work = Work(weight_bytes=10**9, products=10**9, cache_bytes=1000, attention=1000)
    assert floor(work, roofs, rows=2, window=1, length=500).bound == "bytes"
    assert floor(work, roofs, rows=2, window=1, length=500).seconds == pytest.approx(1.001)
    wide = floor(work, roofs, rows=2, window=1000, length=500)
    assert wide.bound == "products" and wide.seconds == pytest.approx(2 * 2 * 1000 * (1e9 + 5e5) / 1e12)
    integer = floor(replace(work, integer=True), roofs, rows=2, window=1000, length=500)
    assert integer.seconds == pytest.approx(max(wide.seconds / 4, 1.001))


def test_roofs_of_this_machine() -> None:
    found = measure_roofs(1, 1 << 22)
    assert 1e8 < found.copy < 1e13 and 1e8 < found.product < 1e14
    assert 1e8 < found.integer_product < 1e15


def test_contestants(demo: ImageModel) -> None:
    assert contestant(demo, "csd:8").window == 8
    assert contestant(demo, "default") == demo.preset()
    assert split_presets("ar,csd(delta=0.35,lambda=1):8,ar") == ["ar", "csd(delta=0.35,lambda=1):8"]
    changed = contestant(demo, "csd(delta=0.35):8")
    assert changed.window == 8 and changed.settings().delta == 0.35
    with pytest.raises(InputError, match=r"expected a preset such as csd, csd:16 or .*, found 'csd:x'"):
        contestant(demo, "csd:x")
