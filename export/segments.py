"""A step graph run in pieces, so that comparing a large model takes the memory of one piece and not of the whole.

ONNX Runtime's CPU widens float16 weights when it opens a graph: a whole model would take four bytes a parameter. The
nodes are cut into runs whose weights fit a bound; each run sees all windows before the next one is opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from csd_ops.contract import cache_names
from engines.nvidia.graph import keep_outputs
from engines.nvidia.verification import reference_session
from runtime.bundle import Manifest

PIECE = 2**28  # bytes of a piece's weights in float32


@dataclass(frozen=True)
class Window:
    """What is fed: ids [R, W] at lengths [R]."""

    ids: np.ndarray
    length: np.ndarray


def run_windows(path: Path, manifest: Manifest, windows: Sequence[Window], capacity: int) -> list[np.ndarray]:
    """Logits float32 [R, W, V] of every window, each behind the ones before it in the caches.

    Args:
        path: the step graph; its weights are beside it.
        manifest: the model's sizes.
        windows: in order.
        capacity: cache slots.
    """
    model = onnx.load(str(path), load_external_data=False)
    keep_outputs(model, ["logits", *(f"next_{name}" for name in cache_names(manifest.layers))])
    known: list[dict[str, np.ndarray]] = [{"ids": window.ids, "length": window.length} for window in windows]
    rows = len(windows[0].ids)
    dtype = np.float16 if manifest.precision == "fp16" else np.float32
    for piece, later in _pieces(model):
        session = reference_session(piece, path.parent)
        inputs = [value.name for value in session.get_inputs()]
        outputs = [value.name for value in session.get_outputs()]
        shape = (rows, manifest.key_value_heads, capacity, manifest.head_size)
        caches = {name: np.zeros(shape, dtype) for name in inputs if name.startswith(("key_", "value_"))}
        for values in known:
            found = dict(
                zip(outputs, session.run(outputs, {name: (caches | values)[name] for name in inputs}), strict=True)
            )
            caches = {name: found.get(f"next_{name}", cache) for name, cache in caches.items()}
            values |= {name: value for name, value in found.items() if not name.startswith("next_")}
            for name in [name for name in values if name not in later]:
                del values[name]
        del session
    return [values["logits"] for values in known]


def _pieces(model: onnx.ModelProto) -> Iterator[tuple[onnx.ModelProto, set[str]]]:
    """Runs of nodes as models, and the tensors that are still needed after each."""
    graph = model.graph
    inferred = onnx.shape_inference.infer_shapes(model).graph
    kinds = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    results = {value.name for value in graph.output}
    nodes = list(graph.node)
    start = 0
    while start < len(nodes):
        size, end = 0, start
        while end < len(nodes):
            size += 4 * sum(math.prod(tensors[name].dims) for name in nodes[end].input if name in tensors)
            if size > PIECE and end > start:
                break
            end += 1
        run, rest = nodes[start:end], nodes[end:]
        made = {name for node in run for name in node.output}
        read = {name for node in run for name in node.input if name}
        later = {name for node in rest for name in node.input} | {"logits"}
        given = sorted(read - made - tensors.keys())
        wanted = sorted(made & (later | results))

        def value(name: str) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None)

        piece = helper.make_model(
            helper.make_graph(
                run,
                f"nodes {start} to {end}",
                [value(name) for name in given],
                [value(name) for name in wanted],
                [tensors[name] for name in sorted(read & tensors.keys())],
            ),
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
        )
        yield piece, later
        start = end
