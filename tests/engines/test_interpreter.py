"""The interpreter itself: every kind of layer against ONNX Runtime, then whole graphs over windows and roll-backs.

What is refused before it is interpreted stands in test_networks.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("tensorrt_rtx")

from csd_ops.errors import InputError
from engines.nvidia.graph import Tail, decoder_copy, step_copy
from engines.nvidia.interpreter import interpret
from engines.nvidia.network import Parsed, parse
from engines.nvidia.toolchain import Toolchain, find_toolchain
from engines.nvidia.verification import reference_session
from export import export_checkpoint
from runtime.bundle import STEP
from runtime.model import DEMO
from tests.engines.graphs import CAPACITY, HEAD_SIZE, HEADS, attention_graph
from tests.models import write_tiny_janus

ROWS, SLOTS = 3, 64
HALF_STEP = 2e-3  # float16 has 11 bits: one rounding of a value of size 1 to 4, on either side


@pytest.fixture(scope="module")
def rtx() -> Toolchain:
    return find_toolchain("rtx")


# ---- one layer at a time -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An operator, what it is fed, and which of that are constants."""

    operator: str
    given: Sequence[np.ndarray | None]
    constants: Sequence[int] = ()
    outputs: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)

    def graph(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """A graph of this node alone, and its inputs."""
        names = ["" if array is None else f"x{i}" for i, array in enumerate(self.given)]
        arrays = {name: array for name, array in zip(names, self.given, strict=True) if array is not None}
        constants = {f"x{i}" for i in self.constants}
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in arrays.items()
            if name not in constants
        ]
        made = [f"made_{i}" for i in range(self.outputs)]
        node = helper.make_node(self.operator, names, made, name="node", **self.attributes)
        graph = helper.make_graph(
            [node],
            "one",
            inputs,
            [onnx.ValueInfoProto(name=name) for name in made],
            [numpy_helper.from_array(arrays[name], name) for name in sorted(constants)],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
        model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        return model, {name: array for name, array in arrays.items() if name not in constants}


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def f16(*shape: int) -> np.ndarray:
    return f32(*shape).astype(np.float16)


def i64(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def mask(*shape: int) -> np.ndarray:
    """Every row sees something."""
    seen = f32(*shape) > 0
    seen[..., 0] = True
    return seen


def positive(*shape: int) -> np.ndarray:
    return np.abs(f32(*shape)) + np.float32(0.1)


QUERY, KEY, VALUE = f32(2, 4, 3, 8), f32(2, 4, 7, 8), f32(2, 4, 7, 8) + 1
TIES = np.array([[1, 2, 2, 1, 2]], np.float32)
PLACES = np.array([[0, 2], [1, 3], [3, 0]])

CASES: dict[str, Case] = {
    **{name: Case(name, [positive(2, 3), positive(3)]) for name in ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"]},
    **{
        f"{name} of integers": Case(name, [i64(-7, 7, -8, 5), i64(2, -2, 3, 3)])
        for name in ["Add", "Sub", "Mul", "Div", "Mod", "Less", "Equal", "GreaterOrEqual"]
    },
    **{name: Case(name, [f32(8) > 0, f32(2, 8) > 0]) for name in ["And", "Or", "Xor"]},
    **{name: Case(name, [positive(3, 4)]) for name in ["Exp", "Log", "Sqrt", "Reciprocal", "Sin", "Cos"]},
    **{
        name: Case(name, [f32(3, 4)])
        for name in ["Abs", "Neg", "Erf", "Sign", "Floor", "Ceil", "Relu", "Sigmoid", "Tanh", "Gelu"]
    },
    "Gelu by tanh": Case("Gelu", [f32(3, 4)], attributes={"approximate": "tanh"}),
    "Round to even": Case("Round", [np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], np.float32)]),
    "Not": Case("Not", [f32(8) > 0]),
    "Clip": Case("Clip", [f32(9), np.array(-0.5, np.float32), np.array(0.6, np.float32)], (1, 2)),
    "Where": Case("Where", [f32(3, 1) > 0, f32(3, 4), f32(1, 4)]),
    **{
        f"{name}, keepdims {keep}": Case(name, [f32(2, 3, 4), i64(-1, 0)], (1,), attributes={"keepdims": keep})
        for name in ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"]
        for keep in (0, 1)
    },
    "ReduceMean of halves": Case("ReduceMean", [f16(2, 300), i64(-1)], (1,)),
    "Softmax": Case("Softmax", [f32(2, 3, 4)], attributes={"axis": 1}),
    "ArgMax": Case("ArgMax", [f32(2, 9)], attributes={"axis": -1}),
    "TopK": Case("TopK", [f32(2, 9), i64(3)], (1,), 2),
    "TopK, smallest": Case("TopK", [f32(2, 9), i64(3)], (1,), 2, {"largest": 0}),
    "TopK, ties": Case("TopK", [TIES, i64(2)], (1,), 2),
    **{
        f"CumSum, exclusive {exclusive}, reverse {reverse}": Case(
            "CumSum", [f32(2, 5), np.array(-1)], (1,), attributes={"exclusive": exclusive, "reverse": reverse}
        )
        for exclusive in (0, 1)
        for reverse in (0, 1)
    },
    **{f"Gather, axis {axis}": Case("Gather", [f32(3, 4), PLACES % 3], attributes={"axis": axis}) for axis in (0, -1)},
    "Gather from the end": Case("Gather", [f32(3, 4), i64(-1, -3)]),
    "GatherElements": Case("GatherElements", [f32(3, 4), PLACES], attributes={"axis": 1}),
    "GatherND": Case("GatherND", [f32(3, 4, 5), np.array([[0, 1], [2, 3]])]),
    "GatherND by row": Case("GatherND", [f32(3, 4, 5), np.array([[1], [2], [0]])], attributes={"batch_dims": 1}),
    "ScatterElements": Case("ScatterElements", [f32(3, 4), PLACES, f32(3, 2)], attributes={"axis": 1}),
    "ScatterND": Case("ScatterND", [f32(3, 4), np.array([[0, 1], [2, 3]]), f32(2)]),
    "OneHot": Case("OneHot", [i64(0, 2, 1), i64(4), np.array([-1, 2], np.float32)], (1,)),
    "OneHot, first axis": Case("OneHot", [i64(0, 2), i64(4), np.array([-1, 2], np.float32)], (1,), 1, {"axis": 0}),
    "Range": Case("Range", [np.array(2), np.array(11), np.array(3)], (0, 1, 2)),
    "Trilu": Case("Trilu", [f32(4, 4)], attributes={"upper": 0}),
    "Slice": Case("Slice", [f32(6, 7), i64(1, -3), i64(5, 100), i64(0, 1), i64(2, 1)], (1, 2, 3, 4)),
    "Slice backwards": Case("Slice", [f32(6, 7), i64(-1), i64(-100), i64(1), i64(-1)], (1, 2, 3, 4)),
    "Pad": Case("Pad", [f32(2, 4, 5), i64(1, 0, 0, 0, 2, 1), np.array(7, np.float32)], (1, 2)),
    "Pad with the edge": Case("Pad", [f32(4, 5), i64(1, 2, 0, 1)], (1,), attributes={"mode": "edge"}),
    "Pad around": Case("Pad", [f32(4, 5), i64(1, 2, 0, 1)], (1,), attributes={"mode": "wrap"}),
    "Expand": Case("Expand", [f32(3, 1), i64(2, 3, 4)], (1,)),
    "Concat": Case("Concat", [f32(2, 3), f32(2, 2)], attributes={"axis": -1}),
    "Split": Case("Split", [f32(2, 6)], outputs=3, attributes={"num_outputs": 3, "axis": 1}),
    "Squeeze": Case("Squeeze", [f32(2, 1, 3, 1), i64(1, -1)], (1,)),
    "Unsqueeze": Case("Unsqueeze", [f32(2, 3), i64(0, -1)], (1,)),
    "Transpose": Case("Transpose", [f32(2, 3, 4)], attributes={"perm": [2, 0, 1]}),
    "Reshape": Case("Reshape", [f32(2, 3, 4), i64(0, -1)], (1,)),
    "Shape": Case("Shape", [f32(2, 3, 4)], attributes={"start": 1}),
    "DepthToSpace": Case("DepthToSpace", [f32(1, 8, 2, 3)], attributes={"blocksize": 2}),
    **{
        f"Cast to {to.name}": Case(
            "Cast",
            [np.array([0, 0.5, 2.7, 254.9], np.float32)],
            attributes={"to": helper.np_dtype_to_tensor_dtype(to)},
        )
        for to in map(np.dtype, ("float16", "int32", "int64", "bool", "uint8"))
    },
    "MatMul": Case("MatMul", [f32(2, 3, 4), f32(4, 5)]),
    "MatMul by a vector": Case("MatMul", [f32(3, 4), f32(4)]),
    "Gemm": Case("Gemm", [f32(4, 3), f32(5, 4), f32(5)], attributes={"transA": 1, "transB": 1, "alpha": 0.5}),
    "Conv": Case("Conv", [f32(2, 4, 8, 7), f32(6, 4, 3, 3), f32(6)], (1, 2), attributes={"pads": [1, 1, 1, 1]}),
    "Conv, uneven": Case(
        "Conv", [f32(2, 4, 8, 7), f32(6, 4, 3, 3)], (1,), attributes={"pads": [0, 0, 1, 1], "strides": [2, 1]}
    ),
    "Conv in 3-D": Case(
        "Conv", [f32(1, 4, 5, 6, 7), f32(6, 4, 3, 3, 3)], (1,), attributes={"pads": [2, 1, 1, 0, 1, 1]}
    ),
    "InstanceNormalization": Case("InstanceNormalization", [f32(2, 6, 4, 4), f32(6), f32(6) + 1], (1, 2)),
    "LayerNormalization": Case("LayerNormalization", [f32(2, 3, 6), f32(6), f32(6) + 1], (1, 2)),
    "RMSNormalization": Case("RMSNormalization", [f32(2, 3, 6), f32(6)], (1,)),
    "RMSNormalization of halves": Case("RMSNormalization", [f16(2, 3, 6), f16(6)], (1,)),
    **{
        f"Resize, {how}, {rounding}": Case(
            "Resize",
            [f32(1, 2, 4, 3), None, None, i64(1, 2, 8, 5)],
            (3,),
            attributes={"coordinate_transformation_mode": how, "nearest_mode": rounding},
        )
        for how in ("asymmetric", "half_pixel", "align_corners")
        for rounding in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    },
    **{
        f"RotaryEmbedding, interleaved {interleaved}, {turned} of 8": Case(
            "RotaryEmbedding",
            [f32(2, 3, 5, 8), np.cos(f32(2, 5, turned // 2)), np.sin(f32(2, 5, turned // 2))],
            attributes={"interleaved": interleaved, "rotary_embedding_dim": turned % 8},
        )
        for interleaved in (0, 1)
        for turned in (4, 8)
    },
    "RotaryEmbedding by position": Case(
        "RotaryEmbedding", [f32(2, 3, 5, 8), f32(20, 4), f32(20, 4) + 1, np.arange(10).reshape(2, 5)[::-1] + 7]
    ),
    "Attention": Case("Attention", [QUERY, KEY, VALUE]),
    "Attention, scale": Case("Attention", [QUERY, KEY, VALUE], attributes={"scale": 0.3}),
    "Attention, mask": Case("Attention", [QUERY, KEY, VALUE, mask(2, 1, 3, 7)]),
    "Attention, added mask": Case("Attention", [QUERY, KEY, VALUE, f32(2, 1, 3, 7)]),
    "Attention, causal": Case("Attention", [QUERY, KEY, VALUE], attributes={"is_causal": 1}),
    "Attention, shared keys": Case("Attention", [QUERY, f32(2, 2, 7, 8), f32(2, 2, 7, 8) + 1, mask(2, 1, 3, 7)]),
    "Attention of halves": Case("Attention", [f16(2, 4, 3, 8), f16(2, 4, 7, 8), f16(2, 4, 7, 8), mask(2, 1, 3, 7)]),
    "TensorScatter": Case("TensorScatter", [f32(2, 4, 16, 8), f32(2, 4, 3, 8), i64(13, 2)], attributes={"axis": -2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_onnx_runtime(rtx: Toolchain, name: str) -> None:
    model, given = CASES[name].graph()
    expected = reference_session(model, Path()).run(None, given)
    found = interpret(parse(rtx, model, Path("x.onnx")), given)
    for value, output in zip(expected, model.graph.output, strict=True):
        assert found[output.name].dtype == value.dtype
        tolerance = HALF_STEP if value.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(found[output.name], value, rtol=tolerance, atol=tolerance)


def test_halves_are_computed_in_float32(rtx: Toolchain) -> None:
    """Rounded once, after the layer: within half precision a softmax over so many would be off by 1 %."""
    model, given = Case("Softmax", [f16(4, 300) * 2], attributes={"axis": -1}).graph()
    found = interpret(parse(rtx, model, Path("x.onnx")), given)["made_0"]
    mass = np.exp(given["x0"].astype(np.float64))
    np.testing.assert_allclose(found, mass / mass.sum(-1, keepdims=True), rtol=1e-3, atol=1e-7)


def test_a_layer_that_is_not_known_is_told(rtx: Toolchain) -> None:
    model, given = Case("Einsum", [f32(2, 3), f32(3, 4)], attributes={"equation": "ij,jk->ik"}).graph()
    with pytest.raises(InputError, match=r"expected a layer that the interpreter knows, found einsum \(node\)"):
        interpret(parse(rtx, model, Path("x.onnx")), given)


def test_an_input_that_is_missing_is_told(rtx: Toolchain) -> None:
    model, _ = CASES["Add"].graph()
    with pytest.raises(InputError, match="expected a value for every input, found none for x1"):
        interpret(parse(rtx, model, Path("x.onnx")), {"x0": positive(2, 3)})


# ---- whole graphs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Tokens fed, and where every row writes them."""

    width: int
    length: tuple[int, int, int]


def windows(width: int) -> list[Window]:
    """Ragged; from the third on every row begins before the end of its last window, one of them far before."""
    first, second = (5, 0, 9), (5 + width, width, 9 + width)
    back = (second[0] + width // 2, 2, 10)
    return [
        Window(width, first),
        Window(width, second),
        Window(width, back),
        Window(1, (back[0] + 1, 1, 11)),
        Window(width, (3, 2, 12)),
    ]


@pytest.fixture(scope="module")
def demo_step(rtx: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    folder = tmp_path_factory.mktemp("demo")
    model, path = step_copy(DEMO / STEP, capacity=SLOTS, precision="fp32", tail=Tail.KERNEL, folder=folder)
    return parse(rtx, model, path)


def step_inputs(parsed: Parsed) -> tuple[int, dict[str, np.ndarray]]:
    """How many tokens there are, and caches full of what earlier pictures left: nothing of it may be seen."""
    caches = {}
    for number, value in enumerate(parsed.model.graph.input):
        if value.name.startswith(("key_", "value_")):
            shape = (ROWS, *(dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]))
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            caches[value.name] = np.random.default_rng(number).normal(size=shape).astype(dtype)
    logits = next(value for value in parsed.model.graph.output if value.name == "logits")
    return logits.type.tensor_type.shape.dim[2].dim_value, caches


def worst_error(parsed: Parsed, reference: Any, ours: list[Window], theirs: list[Window]) -> tuple[float, float]:
    """Of logits and of caches, relative to the largest value, over windows in sequence; each side keeps its caches."""
    vocabulary, caches = step_inputs(parsed)
    kinds = {value.name: value.type for value in reference.get_inputs()}
    numpy_kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    others = {name: cache.astype(numpy_kinds[kinds[name]]) for name, cache in caches.items()}
    names = [output.name for output in reference.get_outputs()]
    generator = np.random.default_rng(0)
    worst = {"logits": 0.0, "caches": 0.0}
    for one, other in zip(ours, theirs, strict=True):
        ids = generator.integers(0, vocabulary, (ROWS, one.width))
        found = interpret(parsed, {"ids": ids, "length": np.array(one.length), **caches})
        run = reference.run(names, {"ids": ids, "length": np.array(other.length), **others})
        expected = dict(zip(names, run, strict=True))
        caches = {name: found[f"next_{name}"] for name in caches}
        others = {name: expected[f"next_{name}"] for name in caches}
        for name in names:
            a, b = found[name].astype(np.float64), expected[name].astype(np.float64)
            assert np.isfinite(a).all() and a.shape == b.shape
            key = "logits" if name == "logits" else "caches"
            worst[key] = max(worst[key], float(np.abs(a - b).max() / np.abs(b).max()))
    return worst["logits"], worst["caches"]


@pytest.mark.parametrize("width", [1, 3, 16])
def test_windows_and_roll_backs(demo_step: Parsed, width: int) -> None:
    reference = reference_session(demo_step.model, demo_step.path.parent)
    assert max(worst_error(demo_step, reference, windows(width), windows(width))) < 1e-5


def test_a_window_that_is_not_rolled_back_is_noticed(demo_step: Parsed) -> None:
    """The control of the test above: one row of one window begins where the window before it ended."""
    reference = reference_session(demo_step.model, demo_step.path.parent)
    right = windows(3)
    wrong = [*right[:2], Window(3, (right[2].length[0], 6, 10)), *right[3:]]
    logits, caches = worst_error(demo_step, reference, wrong, right)
    assert logits > 0.01 and caches > 0.01


@pytest.fixture(scope="module")
def half_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, two heads that share keys and values, float16."""
    folder = tmp_path_factory.mktemp("half")
    sizes = {"image_vocabulary": 60, "side": 4, "layers": 2, "width": 128, "heads": 2, "key_value_heads": 1}
    checkpoint = write_tiny_janus(folder / "checkpoint", **sizes)  # type: ignore[arg-type]
    export_checkpoint(checkpoint, folder / "bundle", precision="fp16")
    return folder / "bundle"


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ("fp32", 1e-5),
        ("fp16", 4e-3),  # both sides round after every layer, in other places
        ("bf16", 4e-2),  # ONNX Runtime has no bfloat16: compared with float16, 8 times as fine
    ],
)
@pytest.mark.parametrize("width", [1, 3, 16])
def test_shared_heads_in_every_precision(
    rtx: Toolchain, half_bundle: Path, tmp_path: Path, precision: str, tolerance: float, width: int
) -> None:
    model, path = step_copy(half_bundle / STEP, capacity=SLOTS, precision=precision, tail=Tail.KERNEL, folder=tmp_path)
    parsed = parse(rtx, model, path)
    if precision == "bf16":
        (tmp_path / "fp16").mkdir()
        model, path = step_copy(
            half_bundle / STEP, capacity=SLOTS, precision="fp16", tail=Tail.KERNEL, folder=tmp_path / "fp16"
        )
    reference = reference_session(model, path.parent)
    assert max(worst_error(parsed, reference, windows(width), windows(width))) < tolerance


def test_pixels(rtx: Toolchain, tmp_path: Path) -> None:
    model, path = decoder_copy(DEMO / "image_decoder.onnx", precision="fp32", folder=tmp_path)
    codes = model.graph.input[0]
    shape = (2, codes.type.tensor_type.shape.dim[1].dim_value)
    given = {codes.name: np.random.default_rng(0).integers(0, 1024, shape)}
    (expected,) = reference_session(model, path.parent).run(None, given)
    found = interpret(parse(rtx, model, path), given)[model.graph.output[0].name]
    assert found.dtype == np.uint8 and found.std() > 10
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1


# ---- graphs that mean something else -----------------------------------------------------------------------------


def attention_inputs() -> dict[str, np.ndarray]:
    cache = (2, HEADS, CAPACITY, HEAD_SIZE)
    return {
        "ids": np.arange(8).reshape(2, 4),
        "length": np.array([5, 17]),
        "key_0": f32(*cache),
        "value_0": f32(*cache) + 1,
    }


def attention_errors(rtx: Toolchain, broken: onnx.ModelProto, reference: onnx.ModelProto) -> dict[str, float]:
    """The largest difference of every output."""
    found = interpret(parse(rtx, broken, Path("x.onnx")), attention_inputs())
    names = [value.name for value in reference.graph.output]
    expected = reference_session(reference, Path()).run(names, attention_inputs())
    return {name: float(np.abs(found[name] - value).max()) for name, value in zip(names, expected, strict=True)}


def test_a_sound_attention_is_equal(rtx: Toolchain) -> None:
    assert max(attention_errors(rtx, attention_graph(), attention_graph()).values()) < 1e-5


@pytest.mark.parametrize(
    ("fault", "reference"),
    [
        ("is_causal", ""),  # alone it equals ONNX Runtime: the standard too counts from the window's start
        ("nonpad", "nonpad"),  # dropped by the parser
        ("no mask", ""),
    ],
)
def test_what_attention_sees_shows(rtx: Toolchain, fault: str, reference: str) -> None:
    errors = attention_errors(rtx, attention_graph(fault), attention_graph(reference))
    assert errors.pop("logits") > 0.01
    assert max(errors.values()) == 0, "the caches are right"


@pytest.mark.parametrize("cache", ["key_0", "value_0"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_write_index_shows(rtx: Toolchain, cache: str, shift: int) -> None:
    """Keys and values apart: a cache that is wrong alone must not hide behind the other."""
    broken = attention_graph()
    write = next(node for node in broken.graph.node if node.output[0] == f"next_{cache}")
    write.input[2] = "length_shifted"
    add = helper.make_node("Add", ["length", "shift"], ["length_shifted"], name="length_shifted")
    broken.graph.node.insert(0, add)
    broken.graph.initializer.append(numpy_helper.from_array(np.array([shift]), "shift"))
    errors = attention_errors(rtx, broken, attention_graph())
    wrong = errors.pop(f"next_{cache}")
    assert wrong > 0.01 and errors.pop("logits") > 1e-3
    assert max(errors.values()) == 0, "the other cache is right"


@pytest.mark.parametrize("length", [-1, CAPACITY - 3])
def test_writes_outside_the_cache_are_refused(rtx: Toolchain, length: int) -> None:
    given = attention_inputs() | {"length": np.array([5, length])}
    with pytest.raises(InputError, match=f"expected writes inside the cache of {CAPACITY} slots, found {length}"):
        interpret(parse(rtx, attention_graph(), Path("x.onnx")), given)


# ---- what the interpreter promises -------------------------------------------------------------------------------


def test_the_probe_sees_every_layer_in_the_declared_dtype(demo_step: Parsed) -> None:
    _, caches = step_inputs(demo_step)
    seen: dict[str, np.ndarray] = {}
    layers = []

    def probe(layer: Any, values: list[np.ndarray]) -> None:
        layers.append(layer.name)
        for index, value in enumerate(values):
            tensor = layer.get_output(index)
            assert value.dtype == np.dtype(demo_step.toolchain.trt.nptype(tensor.dtype)), layer.name
            assert tensor.name not in seen, "names tell values apart"
            seen[tensor.name] = value

    given = {"ids": np.zeros((ROWS, 2), np.int64), "length": np.array([0, 4, 8]), **caches}
    found = interpret(demo_step, given, probe)
    assert len(layers) == demo_step.network.num_layers
    assert found.keys() == demo_step.outputs().keys()
    assert all(seen[name] is value for name, value in found.items())


def test_values_are_freed_after_their_last_reader(demo_step: Parsed) -> None:
    """A whole model's activations at once would not fit into memory."""
    _, caches = step_inputs(demo_step)
    made: list[weakref.ref[np.ndarray]] = []
    alive = []

    def probe(layer: Any, values: list[np.ndarray]) -> None:
        made.extend(map(weakref.ref, values))
        alive.append(sum(value() is not None for value in made))

    interpret(demo_step, {"ids": np.zeros((ROWS, 2), np.int64), "length": np.array([0, 4, 8]), **caches}, probe)
    assert alive[-1] < len(made) / 4


def test_inputs_are_left_as_they_were(demo_step: Parsed) -> None:
    """The caches are updated in a copy: both sides of a comparison are given the same ones."""
    _, caches = step_inputs(demo_step)
    before = {name: cache.copy() for name, cache in caches.items()}
    interpret(demo_step, {"ids": np.zeros((ROWS, 2), np.int64), "length": np.array([0, 4, 8]), **caches})
    assert all(np.array_equal(caches[name], before[name]) for name in caches)
