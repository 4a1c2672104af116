"""Parsed networks: broken graphs are refused, and what is kept equals ONNX Runtime by interpretation."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("tensorrt_rtx")

from csd_ops.errors import InputError
from engines.nvidia.graph import StepSizes, Tail, load_graph, retype, step_copy
from engines.nvidia.interpreter import interpret
from engines.nvidia.network import check_network, parse
from engines.nvidia.toolchain import Toolchain, find_toolchain
from engines.nvidia.verification import (
    VerificationError,
    reference_session,
    verify_image_decoder,
    verify_step,
)
from engines.onnx_runtime import OnnxRuntimeEngine
from runtime.model import DEMO
from tests.engines.graphs import CAPACITY, HEAD_SIZE, HEADS, attention_graph


@pytest.fixture(scope="module")
def rtx() -> Toolchain:
    return find_toolchain("rtx")


def test_a_sound_graph_passes(rtx: Toolchain) -> None:
    model = attention_graph()
    check_network(parse(rtx, model, Path("x.onnx")), model)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("is_causal", "expected attention with a mask of its own, found attended with is_causal"),
        ("nonpad", "found attended without one (a nonpad_kv_seqlen is dropped by the parser)"),
        ("no mask", "expected attention with a mask, found attended without one"),
        ("two consumers", "expected key_0 to be read by its update alone, found also noise"),
        ("no update", "expected next_key_0 to be an update of key_0 in place, found another layer"),
    ],
)
def test_broken_graphs_are_refused(rtx: Toolchain, fault: str, words: str) -> None:
    model = attention_graph(fault)
    with pytest.raises(InputError) as refusal:
        check_network(parse(rtx, model, Path("x.onnx")), model)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("name", "expected the outputs of the graph, found a difference in other, positions"),
        ("dtype", "expected output positions of int32, found int64"),
        ("shape", "expected input key_0 of shape [-1, 3, 32, 64], found [-1, 2, 32, 64]"),
    ],
)
def test_other_inputs_and_outputs_are_refused(rtx: Toolchain, change: str, words: str) -> None:
    model = attention_graph("other output")
    parsed = parse(rtx, model, Path("x.onnx"))
    contract = copy.deepcopy(model)
    if change == "name":
        contract.graph.output[-1].name = "other"
    elif change == "dtype":
        contract.graph.output[-1].type.tensor_type.elem_type = onnx.TensorProto.INT32
    else:
        contract.graph.input[2].type.tensor_type.shape.dim[1].dim_value = 3
    with pytest.raises(InputError) as refusal:
        check_network(parsed, contract)
    assert words in str(refusal.value)


def given(length: int = 5) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    cache = (1, HEADS, CAPACITY, HEAD_SIZE)
    return {
        "ids": generator.integers(0, 16, (1, 4)),
        "length": np.array([length]),
        "key_0": generator.normal(size=cache).astype(np.float32),
        "value_0": generator.normal(size=cache).astype(np.float32),
    }


def difference(rtx: Toolchain, fault: str, reference: str) -> float:
    found = interpret(parse(rtx, attention_graph(fault), Path("x.onnx")), given())["logits"]
    (expected,) = reference_session(attention_graph(reference), Path()).run(["logits"], given())
    return float(np.abs(found - expected).max())


def test_interpretation_equals_onnx_runtime(rtx: Toolchain) -> None:
    assert difference(rtx, "", reference="") < 1e-5


def test_interpretation_shows_what_the_parser_lost(rtx: Toolchain) -> None:
    """nonpad_kv_seqlen parses and builds; ONNX Runtime honours it, TensorRT's network does not."""
    assert difference(rtx, "nonpad", reference="nonpad") > 0.01


def test_causal_attention_is_wrong_behind_a_cache(rtx: Toolchain) -> None:
    """It counts positions from the window's start, in ONNX Runtime and in TensorRT alike."""
    assert difference(rtx, "is_causal", reference="is_causal") < 1e-5
    assert difference(rtx, "is_causal", reference="") > 0.01


def test_writes_past_the_cache_are_refused(rtx: Toolchain) -> None:
    parsed = parse(rtx, attention_graph(), Path("x.onnx"))
    with pytest.raises(InputError, match="expected writes inside the cache of 32 slots, found 30"):
        interpret(parsed, given(length=30))


def test_wrong_positions_are_noticed(rtx: Toolchain, tmp_path: Path) -> None:
    """The reference counts positions from 1: every mask and every rotation is off by one."""
    graph = DEMO / "step.onnx"
    model, path = step_copy(graph, capacity=384, precision="fp32", tail=Tail.KERNEL, folder=tmp_path)
    parsed = parse(rtx, model, path)
    wrong = copy.deepcopy(model)
    add = next(node for node in wrong.graph.node if node.op_type == "Add" and "unsqueeze" in node.input[0])
    steps = add.input[1]
    shifted = onnx.helper.make_node("Add", [steps, "one_more"], ["steps_shifted"], name="shift")
    wrong.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1), "one_more"))
    add.input[1] = "steps_shifted"
    wrong.graph.node.insert(list(wrong.graph.node).index(add), shifted)
    agreement = verify_step(
        parsed,
        reference_session(wrong, path.parent),
        StepSizes.of(load_graph(graph)),
        window=4,
        prompt=5,
        image_tokens=256,
    )
    with pytest.raises(VerificationError, match="expected logits of the parsed network within 1e-04"):
        agreement.check("fp32")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_retyped_graph_is_near_the_original(tmp_path: Path, precision: str) -> None:
    """Half precision of weights and activations; the angles of positions stay float32."""
    model = load_graph(DEMO / "step.onnx")
    path = retype(model, DEMO / "step.onnx", precision, tmp_path)
    assert path.parent == tmp_path and (tmp_path / "step.weights").is_file()
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    half = onnx.TensorProto.FLOAT16 if precision == "fp16" else onnx.TensorProto.BFLOAT16
    assert kinds["embedding"] == half and kinds["head.vision_head.bias"] == half
    assert next(kind for name, kind in kinds.items() if name.endswith("inv_freq")) == onnx.TensorProto.FLOAT
    assert kinds["codes"] == onnx.TensorProto.FLOAT
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    assert len(casts) == 4, "positions, the two tables of angles, logits"
    assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_the_copy_for_plugins_has_no_function_bodies(tmp_path: Path) -> None:
    """A function of the same name would be taken instead of the plugin."""
    options = {"capacity": 384, "precision": "fp16", "folder": tmp_path}
    model, _ = step_copy(DEMO / "step.onnx", tail=Tail.PLUGIN, **options)  # type: ignore[arg-type]
    assert not model.functions
    kinds = [(node.domain, node.op_type) for node in model.graph.node]
    assert kinds[-2:] == [("csd", "Verify"), ("csd", "Advance")]
    cut, _ = step_copy(DEMO / "step.onnx", tail=Tail.KERNEL, **options)  # type: ignore[arg-type]
    assert not cut.functions and not [node for node in cut.graph.node if node.domain]
    assert {value.name for value in cut.graph.input} == {
        "ids",
        "length",
        *(f"{part}_{layer}" for part in ("key", "value") for layer in range(4)),
    }


def test_a_graph_in_memory_runs_on_onnx_runtime(tmp_path: Path) -> None:
    """As the CUDA backend opens it: cut, weights left where they are."""
    model, path = step_copy(DEMO / "step.onnx", capacity=64, precision="fp32", tail=Tail.KERNEL, folder=tmp_path)
    engine = OnnxRuntimeEngine(model.SerializeToString(), weights=path.parent)
    caches = {name: np.zeros((1, 4, 64, 64), np.float32) for name in engine.inputs if name[-1].isdigit()}
    logits = np.empty((1, 3, 1024), np.float32)
    given = {"ids": np.array([[1, 2, 3]]), "length": np.array([0]), **caches}
    engine.bind(given, {"logits": logits, **{f"next_{name}": cache for name, cache in caches.items()}})()
    assert np.isfinite(logits).all() and caches["key_0"][:, :, :3].any() and not caches["key_0"][:, :, 3:].any()


def test_there_and_back_is_the_same_graph(tmp_path: Path) -> None:
    model = load_graph(DEMO / "step.onnx")
    path = retype(model, DEMO / "step.onnx", "fp32", tmp_path)
    assert path == DEMO / "step.onnx" and model == load_graph(DEMO / "step.onnx"), "nothing to change"


def test_image_decoder_with_other_weights_is_noticed(rtx: Toolchain) -> None:
    model = load_graph(DEMO / "image_decoder.onnx")
    parsed = parse(rtx, model, DEMO / "image_decoder.onnx")
    wrong = copy.deepcopy(model)
    onnx.load_external_data_for_model(wrong, str(DEMO))
    bias = next(tensor for tensor in wrong.graph.initializer if tensor.name.endswith("conv_out.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 0.1, bias.name))
    with pytest.raises(VerificationError, match="expected pixels of the parsed image decoder within 1"):
        verify_image_decoder(parsed, reference_session(wrong, DEMO), "fp32")
