"""Verification and window logic with fixed settings: for engines that cannot choose branches by numbers at run time."""

from __future__ import annotations

import numpy as np
import onnx
import onnxscript.optimizer
from onnx import helper, inliner, numpy_helper

from csd_ops.contract import Form, Settings
from csd_ops.onnx_function import tail_model


def specialised_tail(vocabulary: int, columns: int, codes: np.ndarray, settings: Settings) -> onnx.ModelProto:
    """The tail as a model of plain nodes, logits and state in, next state, judgement and results out.

    What the settings turn off is removed, sizes that depend on them (top-k) are numbers, and the branch for passes
    without any draft is dropped: the general one is right for them too. There is no input `settings`.
    """
    model = inliner.inline_local_functions(tail_model(vocabulary, columns, codes))
    graph = model.graph
    graph.input.remove(next(value for value in graph.input if value.name == "settings"))
    graph.initializer.append(numpy_helper.from_array(settings.vector(), "settings"))
    made = {name: node for node in graph.node for name in node.output}
    graph.initializer.append(helper.make_tensor("with_drafts", onnx.TensorProto.BOOL, [], [True]))
    for node in graph.node:
        if node.op_type == "If" and _reads(node.input[0], "kind", made):
            node.input[0] = "with_drafts"
    model = onnxscript.optimizer.optimize(model, num_iterations=3)
    # What is left asks whether a scale of the window is below 1, which the settings tell for every window
    below = settings.form == Form.AFFINE and (settings.scale < 1 or settings.decay > 0)
    model.graph.initializer.append(helper.make_tensor("scale_below_1", onnx.TensorProto.BOOL, [], [below]))
    for node in model.graph.node:
        if node.op_type == "If":
            node.input[0] = "scale_below_1"
    for node in [node for node in model.graph.node if node.op_type == "Loop"]:
        _unroll(model.graph, node, int(settings.group_size))
    optimised: onnx.ModelProto = onnxscript.optimizer.optimize(model, num_iterations=3)
    return optimised


def _reads(name: str, wanted: str, made: dict[str, onnx.NodeProto]) -> bool:
    """Whether a tensor is computed from the input `wanted`."""
    if name == wanted:
        return True
    node = made.get(name)
    return node is not None and any(_reads(source, wanted, made) for source in node.input)


def _unroll(graph: onnx.GraphProto, loop: onnx.NodeProto, count: int) -> None:
    """Replace a loop without a condition by `count` copies of its body: TensorRT's parser wants none of its kind."""
    body = loop.attribute[0].g
    counter, _condition, *carried = (value.name for value in body.input)
    values = list(loop.input[2:])
    nodes = list(graph.node)
    place = next(index for index, node in enumerate(nodes) if node.name == loop.name)
    unrolled: list[onnx.NodeProto] = []
    for step in range(count):
        number = f"{loop.name}_{step}"
        graph.initializer.append(helper.make_tensor(number, onnx.TensorProto.INT64, [], [step]))
        names = {counter: number} | dict(zip(carried, values, strict=True))
        for inner in body.node:
            if body.output[0].name in inner.output:  # the condition, always true
                continue
            copy = onnx.NodeProto()
            copy.CopyFrom(inner)
            copy.input[:] = [names.get(name, name) for name in inner.input]
            names |= {name: f"{name}_{step}" for name in inner.output}
            copy.output[:] = [names[name] for name in inner.output]
            copy.name = f"{inner.name}_{step}"
            unrolled.append(copy)
        values = [names[value.name] for value in body.output[1:]]
    renamed = dict(zip(values, loop.output, strict=True))
    for node in unrolled:
        node.output[:] = [renamed.get(name, name) for name in node.output]
        node.input[:] = [renamed.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(nodes[:place] + unrolled + nodes[place + 1 :])
