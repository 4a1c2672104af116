"""Small attention graphs, right and broken, for the checks of parsed networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, HEAD_SIZE, CAPACITY = 2, 64, 32
WIDTH = HEADS * HEAD_SIZE


def attention_graph(fault: str = "") -> onnx.ModelProto:
    """hidden [R, W, H, D] as ids' embeddings, one cache pair, one attention, logits.

    Faults: "is_causal", "nonpad", "no mask", "two consumers", "no update", "other output", "other dtype".
    """
    generator = np.random.default_rng(0)
    value = helper.make_tensor_value_info
    cache = ["R", HEADS, CAPACITY, HEAD_SIZE]
    cache_type = TensorProto.FLOAT16 if fault == "other dtype" else TensorProto.FLOAT
    inputs = [
        value("ids", TensorProto.INT64, ["R", "W"]),
        value("length", TensorProto.INT64, ["R"]),
        value("key_0", TensorProto.FLOAT, cache),
        value("value_0", TensorProto.FLOAT, cache),
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, ["R", "W", WIDTH]),
        value("next_key_0", TensorProto.FLOAT, cache),
        value("next_value_0", cache_type, cache),
    ]
    numbers = {
        "table": generator.normal(size=(16, WIDTH)).astype(np.float32),
        "heads": np.array([0, 0, HEADS, HEAD_SIZE]),
        "flat": np.array([0, 0, WIDTH]),
        "zero": np.array(0),
        "one": np.array(1),
        "window": np.array([1]),
        "slots": np.arange(CAPACITY),
        "rows": np.array([1, 2, 3]),
        "last": np.array([1]),
        "axes": np.array([1, 3]),
    }

    def node(kind: str, given: list[str], made: list[str], **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(kind, given, made, name=made[0], **attributes)

    nodes = [
        node("Gather", ["table", "ids"], ["hidden"]),
        node("Reshape", ["hidden", "heads"], ["split"]),
        node("Transpose", ["split"], ["q"], perm=[0, 2, 1, 3]),
        node("Shape", ["ids"], ["width_list"], start=1, end=2),
        node("Squeeze", ["width_list"], ["width"]),
        node("Range", ["zero", "width", "one"], ["steps"]),
        node("Unsqueeze", ["length", "last"], ["length_column"]),
        node("Add", ["length_column", "steps"], ["positions"]),
        node("Unsqueeze", ["positions", "axes"], ["positions_4d"]),
        node("LessOrEqual", ["slots", "positions_4d"], ["mask"]),
    ]
    if fault == "no update":
        nodes += [
            node("Add", ["key_0", "key_0"], ["next_key_0"]),
            node("TensorScatter", ["value_0", "q", "length"], ["next_value_0"], axis=-2, mode="linear"),
        ]
    else:
        nodes += [
            node("TensorScatter", ["key_0", "q", "length"], ["next_key_0"], axis=-2, mode="linear"),
            node("TensorScatter", ["value_0", "q", "length"], ["next_value_0"], axis=-2, mode="linear"),
        ]
    given = ["q", "next_key_0", "next_value_0"]
    attributes: dict[str, Any] = {"scale": 0.125}
    if fault == "is_causal":
        attributes["is_causal"] = 1
    elif fault == "nonpad":
        numbers["width_all"] = np.array(0)
        nodes += [node("Add", ["length", "width"], ["filled"])]
        given += ["", "", "", "filled"]
    elif fault != "no mask":
        given += ["mask"]
    nodes += [node("Attention", given, ["attended"], **attributes)]
    result = "attended"
    if fault == "two consumers":
        nodes += [
            node("ReduceSum", ["key_0", "rows"], ["noise"], keepdims=1),
            node("Add", ["attended", "noise"], ["disturbed"]),
        ]
        result = "disturbed"
    nodes += [
        node("Transpose", [result], ["joined"], perm=[0, 2, 1, 3]),
        node("Reshape", ["joined", "flat"], ["logits"]),
    ]
    if fault == "other output":
        outputs.append(value("positions", TensorProto.INT64, ["R", "W"]))
    initializers = [numpy_helper.from_array(array, name) for name, array in numbers.items()]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
