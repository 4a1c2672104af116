"""Exported graphs compute what the checkpoint computes; what cannot be exported is refused and leaves nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from csd_ops.errors import CsdError, InputError
from export import export_checkpoint
from export.families import find_family
from export.parity import ParityError, compare
from runtime.bundle import MANIFEST, open_bundle
from tests.models import SPECIAL, write_tiny_janus, write_tokenizer


@pytest.mark.parametrize(
    ("precision", "shape"),
    [
        ("fp32", {"image_vocabulary": 50, "side": 4, "layers": 2, "width": 64, "heads": 4, "key_value_heads": 2}),
        ("fp16", {"image_vocabulary": 33, "side": 3, "layers": 2, "width": 128, "heads": 2}),
    ],
)
def test_export_equals_pytorch(tmp_path: Path, precision: str, shape: dict[str, int]) -> None:
    """Grouped queries and a head size of 64, ragged lengths, roll-backs: checked by the exporter itself."""
    write_tiny_janus(tmp_path / "checkpoint", **shape)
    bundle, parity = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", precision=precision)
    assert parity.positions > 100 and parity.logits < parity.logits_tolerance and parity.pixels <= 1
    assert bundle.manifest.precision == precision
    assert open_bundle(tmp_path / "bundle").manifest == bundle.manifest


def test_step_graph_has_the_portable_form(toy_bundle: Path) -> None:
    model = onnx.load(toy_bundle / "step.onnx", load_external_data=False)
    operators = [node.op_type for node in model.graph.node]
    assert {opset.version for opset in model.opset_import if opset.domain == ""} == {24}
    assert operators.count("TensorScatter") == 2 and operators.count("Attention") == 1
    for node in model.graph.node:
        if node.op_type == "Attention":
            assert [a.name for a in node.attribute if a.name == "is_causal" and a.i] == []
            assert len([name for name in node.input if name]) == 4, "query, key, value and an explicit mask"
    assert [function.name for function in model.functions if function.domain == "csd"]
    assert not any(node.metadata_props for node in model.graph.node), "no traces of the exporting machine"


def _change_weight(folder: Path) -> None:
    model = onnx.load(folder / "step.onnx")
    largest = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = numpy_helper.to_array(largest).copy()
    values *= 1.05
    largest.CopyFrom(numpy_helper.from_array(values, largest.name))
    onnx.save_model(model, folder / "step.onnx")


def _shift_mask(folder: Path) -> None:
    model = onnx.load(folder / "step.onnx")
    for node in model.graph.node:
        if node.op_type == "LessOrEqual":
            node.op_type = "Less"
    onnx.save_model(model, folder / "step.onnx")


@pytest.mark.parametrize("fault", [_change_weight, _shift_mask])
def test_comparison_notices_a_wrong_graph(
    toy_checkpoint: Path, toy_bundle: Path, tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    folder = Path(shutil.copytree(toy_bundle, tmp_path / "bundle"))
    loaded = find_family(toy_checkpoint).load(toy_checkpoint)
    compare(loaded, folder, "fp32").check("fp32")
    fault(folder)
    with pytest.raises(ParityError):
        compare(loaded, folder, "fp32").check("fp32")


def test_failed_comparison_leaves_the_previous_bundle(
    toy_checkpoint: Path, toy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(toy_bundle, tmp_path / "bundle"))
    before = (folder / MANIFEST).read_bytes()
    monkeypatch.setitem(__import__("export.parity").parity.TOLERANCE, "fp32", 0.0)
    with pytest.raises(ParityError, match="nothing was written"):
        export_checkpoint(toy_checkpoint, folder)
    assert (folder / MANIFEST).read_bytes() == before
    with pytest.raises(ParityError):
        export_checkpoint(toy_checkpoint, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def _rewrite_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BAD = {
    "no folder": (lambda c: shutil.rmtree(c), "checkpoint folder"),
    "no config": (lambda c: (c / "config.json").unlink(), "config.json"),
    "torn config": (lambda c: _truncate(c / "config.json"), "JSON"),
    "another family": (lambda c: _rewrite_config(c, model_type="llama"), "'llama'"),
    "no weights": (lambda c: (c / "model.safetensors").unlink(), "safetensors or .bin weights"),
    "torn weights": (lambda c: _truncate(c / "model.safetensors"), "a whole file of tensors at"),
    "no tokenizer": (lambda c: (c / "tokenizer.json").unlink(), "tokenizer.json"),
    "torn tokenizer": (lambda c: _truncate(c / "tokenizer.json"), "tokenizer"),
    "no image token": (
        lambda c: write_tokenizer(c, [word for word in SPECIAL if word != "<begin_of_image>"]),
        "<begin_of_image>",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_checkpoints_are_refused(toy_checkpoint: Path, tmp_path: Path, name: str) -> None:
    checkpoint = Path(shutil.copytree(toy_checkpoint, tmp_path / "checkpoint"))
    spoil, message = BAD[name]
    spoil(checkpoint)
    with pytest.raises(InputError) as caught:
        export_checkpoint(checkpoint, tmp_path / "out")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_missing_tensor_is_named(toy_checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    checkpoint = Path(shutil.copytree(toy_checkpoint, tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    gone = next(name for name in tensors if "generation_head" in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, checkpoint / "model.safetensors")
    with pytest.raises(CsdError, match="missing"):
        export_checkpoint(checkpoint, tmp_path / "out")


def test_toy_logits_depend_on_the_tokens_before(toy_checkpoint: Path) -> None:
    """The enumerable model is no trivial one."""
    from export.parity import _full_forward

    loaded = find_family(toy_checkpoint).load(toy_checkpoint)
    first, second = (_full_forward(loaded, [5, code, 2, 1])[-1] for code in (0, 3))
    assert np.abs(first - second).max() > 0.2 and first.std() > 0.2
