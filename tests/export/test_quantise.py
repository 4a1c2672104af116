"""bfloat16, int8 and int4: what is written, how far off it is, and who may run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from csd_ops.errors import InputError
from export import export_checkpoint
from export.families import KNOWN
from export.parity import GREEDY, TOLERANCE, ParityError
from export.quantise import BLOCK, pack
from runtime import ImageModel
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
