"""What TensorRT's parser made of a graph: checked before it is built, and described for the report.

A build that succeeds proves nothing: TensorRT's parser drops `nonpad_kv_seqlen` and turns `is_causal` into a mask that
is wrong behind a cache, without a word. So the parsed network itself is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from csd_ops.errors import InputError
from engines.nvidia.toolchain import Toolchain

REMEDY = "export the bundle again with this version"


@dataclass(frozen=True)
class Parsed:
    """A network, what keeps it alive, and the graph it was parsed from."""

    toolchain: Toolchain
    builder: Any
    network: Any
    parser: Any
    model: onnx.ModelProto
    path: Path  # what the model's external data is relative to

    def layers(self) -> Iterator[Any]:
        """Every layer, cast to its interface where the checks need one."""
        trt = self.toolchain.trt
        interfaces = {
            trt.LayerType.ATTENTION_INPUT: trt.IAttentionInputLayer,
            trt.LayerType.KV_CACHE_UPDATE: trt.IKVCacheUpdateLayer,
        }
        for index in range(self.network.num_layers):
            layer = self.network.get_layer(index)
            if layer.type in interfaces:
                layer.__class__ = interfaces[layer.type]
            yield layer

    def attentions(self) -> list[Any]:
        """The IAttention of every attention layer."""
        attention = self.toolchain.trt.LayerType.ATTENTION_INPUT
        return [layer.attention for layer in self.layers() if layer.type == attention]

    def inputs(self) -> dict[str, Any]:
        """Network inputs by name."""
        return {tensor.name: tensor for tensor in map(self.network.get_input, range(self.network.num_inputs))}

    def outputs(self) -> dict[str, Any]:
        """Network outputs by name."""
        return {tensor.name: tensor for tensor in map(self.network.get_output, range(self.network.num_outputs))}


def parse(toolchain: Toolchain, model: onnx.ModelProto, path: Path) -> Parsed:
    """Parse a graph, strongly typed. `path` is what its external data is relative to."""
    trt = toolchain.trt
    toolchain.logger.errors.clear()
    builder = trt.Builder(toolchain.logger)
    flags = trt.NetworkDefinitionCreationFlag.__members__
    wanted = ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS")  # TensorRT-RTX has no plugins and not the second flag
    network = builder.create_network(sum(1 << int(flags[name]) for name in wanted if name in flags))
    parser = trt.OnnxParser(network, toolchain.logger)
    if not parser.parse(model.SerializeToString(), str(path)):
        told = [parser.get_error(index) for index in range(parser.num_errors)]
        first = " ".join(told[0].desc().split()) if told else "no reason given"
        raise InputError(f"expected a graph that {toolchain.kind.module} {toolchain.version} parses, found: {first}")
    return Parsed(toolchain, builder, network, parser, model, path)


def check_network(parsed: Parsed, model: onnx.ModelProto) -> None:
    """Refuse a network that would decode something else than the graph says.

    Raises:
        InputError: an attention without a mask or with a causal one; a cache that is not updated in place, or that
            anything but its update reads; inputs or outputs other than the graph's.
    """
    trt = parsed.toolchain.trt
    check_contract(parsed, model)
    for attention in parsed.attentions():
        if attention.causal_kind != trt.CausalMaskKind.NONE:
            raise InputError(
                f"expected attention with a mask of its own, found {attention.name} with is_causal, which counts "
                f"positions from the window's start; {REMEDY}"
            )
        if attention.mask is None:
            raise InputError(
                f"expected attention with a mask, found {attention.name} without one (a nonpad_kv_seqlen is "
                f"dropped by the parser); {REMEDY}"
            )
    _check_caches(parsed)


def _check_caches(parsed: Parsed) -> None:
    trt = parsed.toolchain.trt
    caches = {name for name in parsed.inputs() if name.startswith(("key_", "value_"))}
    readers: dict[str, list[Any]] = {name: [] for name in caches}
    writers = {}
    for layer in parsed.layers():
        if layer.type == trt.LayerType.SHAPE:
            continue  # asks for sizes only
        for index in range(layer.num_inputs):
            tensor = layer.get_input(index)
            if tensor is not None and tensor.name in readers:
                readers[tensor.name].append(layer)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            writers[layer.get_output(0).name] = layer
    for name in sorted(caches):
        update = writers.get(f"next_{name}")
        if update is None or update.get_input(0).name != name:
            raise InputError(f"expected next_{name} to be an update of {name} in place, found another layer; {REMEDY}")
        if len(readers[name]) != 1:
            others = ", ".join(layer.name for layer in readers[name] if layer.name != update.name)
            raise InputError(f"expected {name} to be read by its update alone, found also {others}; {REMEDY}")


def check_contract(parsed: Parsed, model: onnx.ModelProto) -> None:
    """Refuse a network whose inputs and outputs differ from the graph's in name, dtype, rank or a fixed size."""
    trt = parsed.toolchain.trt
    dtypes = {
        TensorProto.FLOAT: trt.float32,
        TensorProto.FLOAT16: trt.float16,
        TensorProto.BFLOAT16: trt.bfloat16,
        TensorProto.INT64: trt.int64,
        TensorProto.BOOL: trt.bool,
        TensorProto.UINT8: trt.uint8,
    }
    for what, found, values in (
        ("input", parsed.inputs(), model.graph.input),
        ("output", parsed.outputs(), model.graph.output),
    ):
        expected = {value.name: value.type.tensor_type for value in values}
        if found.keys() != expected.keys():
            odd = sorted(found.keys() ^ expected.keys())
            raise InputError(f"expected the {what}s of the graph, found a difference in {', '.join(odd)}; {REMEDY}")
        for name, kind in expected.items():
            tensor = found[name]
            if tensor.dtype != dtypes.get(kind.elem_type):
                wanted = TensorProto.DataType.Name(kind.elem_type).lower()
                raise InputError(f"expected {what} {name} of {wanted}, found {tensor.dtype.name.lower()}; {REMEDY}")
            sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
            fits = len(sizes) == len(tensor.shape) and all(
                size in (-1, given) or given == -1 for size, given in zip(sizes, tensor.shape, strict=True)
            )
            if not fits:
                raise InputError(f"expected {what} {name} of shape {sizes}, found {list(tensor.shape)}; {REMEDY}")


def let_decompose(parsed: Parsed) -> None:
    """Let TensorRT split attention into products and a softmax where it has no fused kernel.

    The property exists on the parsed layer alone: ONNX Runtime and the checker refuse it as a node attribute.
    """
    for attention in parsed.attentions():
        attention.decomposable = True


def layer_dtypes(parsed: Parsed) -> dict[str, dict[str, int]]:
    """How many layers of each kind write each dtype: what strongly typed really means for this network."""
    counts: dict[str, Counter[str]] = {}
    for layer in parsed.layers():
        if layer.num_outputs:
            counts.setdefault(layer.type.name.lower(), Counter())[layer.get_output(0).dtype.name.lower()] += 1
    return {kind: dict(sorted(counter.items())) for kind, counter in sorted(counts.items())}
