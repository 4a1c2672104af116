"""Quantised products for the CPU. Embeddings, norms, biases, caches, softmax and all after the head stay float32.

int8, int4: weight-only. Products become MatMulNBits; weights are rounded in blocks of 32 along the inputs,
symmetrically: w = scale (q - zero), zero the middle of the range.

w8a8: products become MatMulIntegerToFloat, which processors with VNNI or AMX multiply several times as fast. Weights
are int8 with one scale per output; what they are multiplied with is rounded to 8 bits with one range per position,
computed as it comes: x = range / 127 (q - 128). Sums of integers are exact and a position's range is its own, so that
its logits depend neither on the rest of the window nor on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from export.step import Traced

BLOCK = 32
BITS = {"int8": 8, "int4": 4}
QUANTISED = (*BITS, "w8a8")
ACCURACY = 4  # of MatMulNBits: activations are rounded to 8 bits in blocks, which its fast kernels want
LEVELS = 127  # of a sign, in w8a8


def quantise(traced: Traced, precision: str) -> Traced:
    """The traced graph with quantised products.

    A weight that is not multiplied exactly once, or for int8 and int4 whose inputs are no whole blocks, stays as it is.
    """
    graph = traced.model.graph
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    weights, products = [], set()
    for weight in traced.weights:
        users, tensor = readers[weight.initializer], tensors[weight.initializer]
        product = len(users) == 1 and users[0].op_type == "MatMul" and users[0].input[1] == weight.initializer
        if not (product and weight.transposed and (precision not in BITS or tensor.dims[0] % BLOCK == 0)):
            weights.append(weight)
            continue
        scales = TensorProto(name=f"{weight.initializer}_scales", data_type=TensorProto.FLOAT)
        if precision in BITS:
            bits = BITS[precision]
            _product_of_blocks(users[0], tensor, scales, bits)
            packed = partial(pack, bits=bits)
            weights.append(replace(weight, transposed=False, scales=scales.name, pack=packed))
        else:
            products.add(users[0].output[0])
            tensor.data_type = TensorProto.INT8
            scales.dims[:] = [tensor.dims[1]]
            weights.append(replace(weight, scales=scales.name, pack=pack_outputs))
        graph.initializer.append(scales)
    if products:
        _integer_products(graph, products)
    traced.model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return Traced(traced.model, weights)


def _product_of_blocks(node: NodeProto, tensor: TensorProto, scales: TensorProto, bits: int) -> None:
    """MatMul to MatMulNBits, in place."""
    inputs, outputs = tensor.dims
    node.op_type, node.domain = "MatMulNBits", "com.microsoft"
    node.input.append(scales.name)
    for name, value in (("K", inputs), ("N", outputs), ("bits", bits), ("block_size", BLOCK)):
        node.attribute.append(helper.make_attribute(name, value))
    node.attribute.append(helper.make_attribute("accuracy_level", ACCURACY))
    tensor.data_type = TensorProto.UINT8
    tensor.dims[:] = [outputs, inputs // BLOCK, BLOCK * bits // 8]
    scales.dims[:] = [outputs, inputs // BLOCK]


def _integer_products(graph: onnx.GraphProto, products: set[str]) -> None:
    """MatMul x w to the product of x's levels and w's; products that share x share its levels."""
    constants = {
        "w8a8_axis": np.array([-1], np.int64),
        "w8a8_least": np.array(1e-9, np.float32),  # so that a position of zeros divides by no zero
        "w8a8_step": np.array(1 / LEVELS, np.float32),
        "w8a8_middle": np.array(128, np.uint8),
    }
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    nodes, known = [], set()

    def add(kind: str, inputs: list[str], output: str, **attributes: object) -> None:
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))

    for node in graph.node:
        (output, *_) = node.output
        if output not in products:
            nodes.append(NodeProto.FromString(node.SerializeToString()))
            continue
        x, weight = node.input
        if x not in known:
            known.add(x)
            add("Abs", [x], f"{x}_size")
            add("ReduceMax", [f"{x}_size", "w8a8_axis"], f"{x}_largest", keepdims=1)
            add("Max", [f"{x}_largest", "w8a8_least"], f"{x}_range")
            add("Div", [x, f"{x}_range"], f"{x}_share")
            add("QuantizeLinear", [f"{x}_share", "w8a8_step", "w8a8_middle"], f"{x}_levels")
        inputs = [f"{x}_levels", weight, "w8a8_step", f"{weight}_scales", "w8a8_middle"]
        add("MatMulIntegerToFloat", inputs, f"{output}_share", domain="com.microsoft")
        add("Mul", [f"{output}_share", f"{x}_range"], output)
    del graph.node[:]
    graph.node.extend(nodes)


def pack(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Weights [N, K] as uint8 [N, K / 32, 32 bits / 8] and scales float32 [N, K / 32]."""
    blocks = values.float().reshape(len(values), -1, BLOCK)
    middle = 2 ** (bits - 1)
    scales = blocks.abs().amax(-1) / (middle - 1)
    scaled = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
    rounded = (scaled.round() + middle).clamp(1, 2 * middle - 1).to(torch.uint8)
    if bits == 4:  # two in a byte, the first in the low half
        rounded = rounded[..., ::2] | rounded[..., 1::2] << 4
    return rounded, scales


def pack_outputs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [N, K] as int8 [K, N] and scales float32 [N]."""
    values = values.float()
    scales = values.abs().amax(1) / LEVELS
    scaled = values / torch.where(scales > 0, scales, 1.0)[:, None]
    return scaled.round().clamp(-LEVELS, LEVELS).to(torch.int8).T, scales
