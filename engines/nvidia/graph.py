"""The TensorRT copy of a bundle's graph: fixed capacity, chosen precision, and a tail that TensorRT can run.

The copy is made in memory and its weights stay where they are: external data is referred to, and only rewritten where
the precision changes. The bundle's own file is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from csd_ops.contract import DOMAIN, Settings, cache_names
from csd_ops.errors import InputError
from csd_ops.specialise import specialised_tail

PRECISIONS = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


class Tail(StrEnum):
    """Who runs verification and window logic after the logits."""

    PLUGIN = "plugin"  # TensorRT, by the kernels embedded in the engine
    KERNEL = "kernel"  # the runtime launches the kernels after the engine, on the same stream
    FUNCTION = "function"  # TensorRT, by the ONNX functions, specialised for one preset


@dataclass(frozen=True)
class StepSizes:
    """The sizes that a step graph has in itself, read from its inputs and outputs."""

    layers: int
    key_value_heads: int
    head_size: int
    image_vocabulary: int
    columns: int
    code_width: int
    precision: str

    @classmethod
    def of(cls, model: onnx.ModelProto) -> StepSizes:
        """Read them; InputError when this is no step graph."""
        values = {value.name: value.type.tensor_type for value in (*model.graph.input, *model.graph.output)}
        codes = next((tensor for tensor in model.graph.initializer if tensor.name == "codes"), None)
        layers = sum(name.startswith("key_") for name in values)
        wanted = {"logits", "history_ids", *cache_names(layers)}
        if not layers or codes is None or not wanted <= values.keys():
            raise InputError("expected a step graph with caches, logits and codes, found another; export it again")
        names = {kind: name for name, kind in PRECISIONS.items()}
        cache = values["key_0"]
        return cls(
            layers=layers,
            key_value_heads=cache.shape.dim[1].dim_value,
            head_size=cache.shape.dim[3].dim_value,
            image_vocabulary=values["logits"].shape.dim[2].dim_value,
            columns=values["history_ids"].shape.dim[1].dim_value,
            code_width=codes.dims[1],
            precision=names[cache.elem_type],
        )


def load_graph(path: Path) -> onnx.ModelProto:
    """The graph without its weights."""
    return onnx.load(str(path), load_external_data=False)


def step_copy(
    path: Path, *, capacity: int, precision: str, tail: Tail, folder: Path, settings: Settings | None = None
) -> tuple[onnx.ModelProto, Path]:
    """The step graph for TensorRT, and the path its external data is relative to.

    Args:
        path: the bundle's step graph.
        capacity: S, cache slots; TensorRT asks for a number.
        precision: of weights, activations and caches; logits and all after them are float32.
        tail: KERNEL cuts the graph after the logits; PLUGIN keeps csd::Verify and csd::Advance without their bodies,
            so that TensorRT looks them up among its plugins: a function of the same name would win; FUNCTION takes the
            bodies, with `settings` as constants.
        folder: where weights are written if the precision changes.
        settings: of the preset that a FUNCTION tail is made for.
    """
    model = load_graph(path)
    sizes = StepSizes.of(model)
    graph = model.graph
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "S":
                dim.dim_value = capacity
    codes = read_initializer(model, "codes", path)
    path = retype(model, path, precision, folder)
    if tail == Tail.PLUGIN:
        del model.functions[:]
        return model, path
    results = [value for value in graph.output if value.name != "logits"]
    inputs = {value.name for value in graph.input}
    keep_outputs(model, ["logits", *(f"next_{name}" for name in cache_names(sizes.layers))])
    if tail == Tail.FUNCTION:
        assert settings is not None
        end = specialised_tail(sizes.image_vocabulary, sizes.columns, codes, settings).graph
        _make_room(model, end)
        graph.node.extend(end.node)
        graph.initializer.extend(end.initializer)
        present = {value.name for value in graph.input} | {"logits"}
        assert {value.name for value in end.input} <= inputs | {"logits"}
        graph.input.extend(value for value in end.input if value.name not in present)
        _replace(graph.output, results)
    return model, path


def _make_room(model: onnx.ModelProto, other: onnx.GraphProto) -> None:
    """Rename what is inside the body where the other graph has the same names for its own."""
    graph = model.graph
    shared = {value.name for value in (*graph.input, *graph.output)}
    taken = {name for node in other.node for name in (node.name, *node.output)}
    taken |= {tensor.name for tensor in other.initializer}

    def free(name: str) -> str:
        return f"body_{name}" if name in taken and name not in shared else name

    for node in graph.node:
        node.name = free(node.name)
        node.input[:] = map(free, node.input)
        node.output[:] = map(free, node.output)
    for tensor in graph.initializer:
        tensor.name = free(tensor.name)


def read_initializer(model: onnx.ModelProto, name: str, path: Path) -> np.ndarray:
    """A weight's values."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    return numpy_helper.to_array(tensor, base_dir=str(path.parent))


def decoder_copy(path: Path, *, precision: str, folder: Path) -> tuple[onnx.ModelProto, Path]:
    """The image decoder for TensorRT, and the path its external data is relative to."""
    model = load_graph(path)
    return model, retype(model, path, precision, folder)


def keep_outputs(model: onnx.ModelProto, names: Iterable[str]) -> None:
    """Cut the graph down to what these outputs need, in place."""
    graph, wanted = model.graph, set(names)
    needed, kept = set(wanted), []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed |= set(node.input)
    _replace(graph.node, kept[::-1])
    _replace(graph.output, [value for value in graph.output if value.name in wanted])
    _replace(graph.input, [value for value in graph.input if value.name in needed])
    _replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in needed])
    if not any(node.domain == DOMAIN for node in graph.node):
        del model.functions[:]


def _replace(field: Any, values: Sequence[Any]) -> None:
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)


def retype(model: onnx.ModelProto, path: Path, precision: str, folder: Path) -> Path:
    """Change the float type of weights, activations and caches in place; returns what external data is relative to.

    Hidden states begin where a table of weights is gathered and end after the last node that reads a weight; there
    they are cast to float32, as logits and pixels are. What is computed from positions alone (the rotary angles)
    stays float32 and is cast where it meets hidden states.
    """
    if precision not in PRECISIONS:
        raise InputError(f"expected precision of {', '.join(PRECISIONS)}, found {precision!r}; choose one of them")
    graph, target = model.graph, PRECISIONS[precision]
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in PRECISIONS.values()}
    body = [node for node in graph.node if node.domain != DOMAIN]
    embeddings = [node for node in body if node.op_type == "Gather" and node.input[0] in weights]
    source = weights[embeddings[0].input[0]].data_type
    _name_biases(model, weights)
    if source == target:
        return path
    caches = {value.name for value in graph.input if value.name.startswith(("key_", "value_"))}
    hidden = set(caches)  # tensors of the target type
    floats = _float_tensors(model)
    last = max(i for i, node in enumerate(body) if any(name in weights and weights[name].dims for name in node.input))
    changed: set[str] = set()
    copies: dict[tuple[str, int], str] = {}
    nodes: list[onnx.NodeProto] = []

    def as_type(name: str, to: int) -> str:
        if (name, to) not in copies:
            copies[name, to] = f"{name}_as_{TensorProto.DataType.Name(to).lower()}"
            nodes.append(helper.make_node("Cast", [name], [copies[name, to]], to=to, name=copies[name, to]))
        return copies[name, to]

    for index, node in enumerate(body):
        inside = index <= last and (node in embeddings or any(name in hidden for name in node.input))
        if node.op_type == "Cast":
            to = next(attribute for attribute in node.attribute if attribute.name == "to")
            if to.i == source != TensorProto.FLOAT:  # the bundle's own cast of the angles
                to.i = target
                hidden.update(node.output)
        elif inside:
            for place, name in enumerate(node.input[:1] if node.op_type == "Resize" else node.input):
                if name in weights:  # not the scales of Resize, which are float32 always
                    changed.add(name)
                elif name in floats and name not in hidden:
                    node.input[place] = as_type(name, target)
            hidden.update(name for name in node.output if name in floats)
        else:
            for place, name in enumerate(node.input):
                if name in hidden and node.op_type != "Shape":
                    node.input[place] = as_type(name, TensorProto.FLOAT)
        nodes.append(node)
    for value in (*graph.input, *graph.output):
        if value.name.removeprefix("next_") in caches:
            value.type.tensor_type.elem_type = target
        elif value.name in hidden:  # a result: float32 whatever is inside
            inner = f"{value.name}_hidden"
            for node in nodes:
                node.output[:] = [inner if name == value.name else name for name in node.output]
            nodes.append(
                helper.make_node("Cast", [inner], [value.name], to=TensorProto.FLOAT, name=f"{value.name}_cast")
            )
    nodes += [node for node in graph.node if node.domain == DOMAIN]
    _replace(graph.node, nodes)
    del graph.value_info[:]
    return _write_weights(model, path, changed, target, folder)


def _name_biases(model: onnx.ModelProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Give every LayerNormalization its bias of zeros: TensorRT's parser would make one that cannot be read back."""
    for node in model.graph.node:
        if node.op_type == "LayerNormalization" and len(node.input) == 2 and node.input[1] in weights:
            scale = weights[node.input[1]]
            name = f"{node.output[0]}_bias"
            zeros = np.zeros(tuple(scale.dims), helper.tensor_dtype_to_np_dtype(scale.data_type))
            model.graph.initializer.append(numpy_helper.from_array(zeros, name))
            weights[name] = model.graph.initializer[-1]
            node.input.append(name)


def _float_tensors(model: onnx.ModelProto) -> set[str]:
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    return {value.name for value in values if value.type.tensor_type.elem_type in PRECISIONS.values()}


def _write_weights(model: onnx.ModelProto, path: Path, changed: set[str], target: int, folder: Path) -> Path:
    """Convert the changed weights one by one into a file in `folder`; the others are read into the model."""
    written = folder / f"{path.stem}.weights"
    dtype = helper.tensor_dtype_to_np_dtype(target)
    with written.open("wb") as file:
        for tensor in model.graph.initializer:
            if uses_external_data(tensor):
                load_external_data_for_tensor(tensor, str(path.parent))
                tensor.data_location = TensorProto.DEFAULT
                del tensor.external_data[:]
            if tensor.name not in changed:
                continue
            values = numpy_helper.to_array(tensor).astype(np.float32).astype(dtype)
            tensor.data_type = target
            for field in ("float_data", "int32_data", "raw_data"):
                tensor.ClearField(field)
            _refer(tensor, written.name, file.tell(), values.nbytes)
            file.write(values.tobytes())
    return folder / path.name


def _refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
