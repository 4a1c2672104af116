"""bfloat16, int8, int4 and w8a8: what is written, how far off it is, and who may run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from csd_ops.errors import InputError, MachineError
from engines.machine import multiplies_bytes
from export import export_checkpoint
from export.families import KNOWN
from export.parity import GREEDY, TOLERANCE, ParityError
from export.quantise import BLOCK, LEVELS, pack, pack_outputs, quantise
from export.step import Traced, Weight
from runtime import ImageModel
from runtime.bench.floor import graph_work, step_work
from runtime.build import build_engines
from tests.models import write_tiny


@hypothesis_settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([4, 8]), rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_packed_weights_are_within_half_a_step(bits: int, rows: int, blocks: int, seed: int) -> None:
    values = torch.randn(rows, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    values[0, :BLOCK] = 0  # a block of nothing
    packed, scales = pack(values, bits)
    codes = packed.to(torch.int32)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    widened = (codes - 2 ** (bits - 1)) * scales[..., None]
    off = (widened.reshape(values.shape) - values).abs().reshape(rows, blocks, BLOCK)
    assert (off <= scales[..., None] / 2 + 1e-7).all()


@hypothesis_settings(max_examples=40, deadline=None)
@given(outputs=st.integers(1, 5), inputs=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_packed_outputs_are_within_half_a_step(outputs: int, inputs: int, seed: int) -> None:
    values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    values[0] = 0
    packed, scales = pack_outputs(values)
    assert packed.dtype == torch.int8 and packed.shape == (inputs, outputs) and int(packed.min()) >= -LEVELS
    assert ((packed.T * scales[:, None] - values).abs() <= scales[:, None] / 2 + 1e-6).all()


@pytest.fixture(scope="module", params=sorted(KNOWN))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(request.param, tmp_path_factory.mktemp(request.param) / "checkpoint", head_size=64)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_weights_alone_are_quantised(checkpoint: Path, tmp_path: Path, precision: str) -> None:
    # forced: layers of 256 random weights are rounded worse than those of a model
    bundle, parity = export_checkpoint(checkpoint, tmp_path / "bundle", precision=precision, force=True)
    assert 1e-4 < parity.logits < 2 * TOLERANCE[precision]
    graph = onnx.load(bundle.path("step.onnx"), load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulNBits") >= 2 * 7 + 1 and "MatMul" not in kinds[kinds.index("MatMulNBits") :]
    cache = next(value for value in graph.input if value.name == "key_0")
    assert cache.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    made = ImageModel.open(bundle.folder, threads=1).generate("red cat", preset="csd", window=4)
    assert np.isfinite(made.entropy) and made.tokens == bundle.manifest.tokens
    with pytest.raises(InputError, match=f"for TensorRT, found {precision}, which is for the CPU"):
        build_engines(bundle, target="rtx")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision(checkpoint: Path, tmp_path: Path, precision: str) -> None:
    bundle, parity = export_checkpoint(checkpoint, tmp_path / "bundle", precision=precision)
    assert parity.logits < TOLERANCE[precision] and parity.greedy >= GREEDY[precision]
    if precision == "fp16":
        made = ImageModel.open(bundle.folder, threads=1).generate("red cat", preset="csd", window=4)
        assert made.tokens == bundle.manifest.tokens
        return
    with pytest.raises(InputError, match=r"found bf16 in .*: ONNX Runtime has no bfloat16 products there"):
        ImageModel.open(bundle.folder, engine="cpu")
    pytest.importorskip("tensorrt_rtx")
    step, _ = build_engines(bundle, target="rtx", window=4, verify=True)
    assert step.precision == "bf16" and step.attention == "fused"


def test_what_is_too_far_off_is_refused_unless_forced(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOLERANCE, "int4", 1e-6)
    with pytest.raises(ParityError, match="expected logits within 1e-06"):
        export_checkpoint(checkpoint, tmp_path / "bundle", precision="int4")
    assert not (tmp_path / "bundle").exists()
    bundle, parity = export_checkpoint(checkpoint, tmp_path / "bundle", precision="int4", force=True)
    assert parity.logits > 1e-6 and bundle.manifest.precision == "int4"


NEEDS_VNNI = pytest.mark.skipif(not multiplies_bytes(), reason="products of bytes overflow on this processor")


@NEEDS_VNNI
def test_weights_and_activations_are_quantised(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, parity = export_checkpoint(checkpoint, tmp_path / "bundle", precision="w8a8", force=True)
    assert 1e-4 < parity.logits < 2 * TOLERANCE["w8a8"]
    graph = onnx.load(bundle.path("step.onnx"), load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulIntegerToFloat") >= 2 * 7 + 1
    products, size, _ = graph_work(bundle.path("step.onnx"))
    assert size == products > 0 and step_work(bundle).integer
    assert kinds.count("QuantizeLinear") < kinds.count("MatMulIntegerToFloat")  # products of the same share its levels
    model = ImageModel.open(bundle.folder, threads=1)
    drafted = model.generate("red cat", preset="sjd", window=4, temperature=0)
    single = model.generate("red cat", preset="ar", temperature=0)
    assert drafted.tokens == bundle.manifest.tokens
    assert np.array_equal(drafted.decoded[0].tokens, single.decoded[0].tokens)
    monkeypatch.setattr("runtime.backends.multiplies_bytes", lambda: False)
    with pytest.raises(
        InputError, match=r"expected a processor with VNNI for .*, found .*; export .* --precision int8"
    ):
        ImageModel.open(bundle.folder)
    monkeypatch.setattr("export.exporter.multiplies_bytes", lambda: False)
    with pytest.raises(MachineError, match="expected a processor with VNNI to compare w8a8 with PyTorch"):
        export_checkpoint(checkpoint, tmp_path / "again", precision="w8a8")


def product_of(x: np.ndarray, values: torch.Tensor, axes: list[int] | None = None) -> np.ndarray:
    """x times the weights in w8a8, one scale per position or, for a control, per `axes`."""
    outputs, inputs = values.shape
    names = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy"]
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[inputs, outputs])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "one", names[:1], names[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    quantise(Traced(model, [Weight("w", "w", transposed=True)]), "w8a8")
    packed, scales = pack_outputs(values)
    for tensor in model.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(numpy_helper.from_array(packed.contiguous().numpy(), "w"))
        if tensor.name == "w_scales":
            tensor.CopyFrom(numpy_helper.from_array(scales.numpy(), "w_scales"))
        if tensor.name == "w8a8_axis" and axes:
            tensor.CopyFrom(numpy_helper.from_array(np.array(axes), "w8a8_axis"))
    return onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], {"x": x})[0]


@NEEDS_VNNI
def test_a_position_is_rounded_alone() -> None:
    """Beside a position that is a thousand times as large the others stay the same, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(48, 70, generator=generator)
    x = torch.randn(3, 70, generator=generator).numpy()
    x[1] = 0  # and one of nothing
    large = x.copy()
    large[2] *= 1000
    made = product_of(x, values)
    assert np.abs(made - x @ values.T.numpy()).max() < 0.02 * np.abs(made).max() and not made[1].any()
    assert np.array_equal(product_of(large, values)[:2], made[:2])
    assert np.array_equal(product_of(x[:1], values), made[:1])
    together = product_of(large, values, axes=[0, 1])  # negative control: one scale for all
    assert not np.array_equal(together[0], made[0])
