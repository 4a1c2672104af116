"""Weight-only int8 and int4 for the CPU: products become MatMulNBits, which widens the weights as it multiplies.

Weights are rounded in blocks of 32 along the inputs, symmetrically: w = scale (q - zero), zero the middle of the range.
Embeddings, norms, biases, caches, softmax and everything after the head stay float32.
"""

from __future__ import annotations

from dataclasses import replace

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from export.step import Traced

BLOCK = 32
BITS = {"int8": 8, "int4": 4}
ACCURACY = 4  # of MatMulNBits: activations are rounded to 8 bits by row, which its fast kernels want


def quantise(traced: Traced, bits: int) -> Traced:
    """The traced graph with its products in MatMulNBits.

    A weight that is not multiplied exactly once, or whose inputs are no whole blocks, stays as it is.
    """
    graph = traced.model.graph
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    weights = []
    for weight in traced.weights:
        users = readers[weight.initializer]
        tensor = tensors[weight.initializer]
        product = len(users) == 1 and users[0].op_type == "MatMul" and users[0].input[1] == weight.initializer
        if not (product and weight.transposed and tensor.dims[0] % BLOCK == 0):
            weights.append(weight)
            continue
        inputs, outputs = tensor.dims
        node, scales = users[0], f"{weight.initializer}_scales"
        node.op_type, node.domain = "MatMulNBits", "com.microsoft"
        node.input.append(scales)
        for name, value in (("K", inputs), ("N", outputs), ("bits", bits), ("block_size", BLOCK)):
            node.attribute.append(helper.make_attribute(name, value))
        node.attribute.append(helper.make_attribute("accuracy_level", ACCURACY))
        blocks = inputs // BLOCK
        tensor.data_type = TensorProto.UINT8
        tensor.dims[:] = [outputs, blocks, BLOCK * bits // 8]
        graph.initializer.append(TensorProto(name=scales, data_type=TensorProto.FLOAT, dims=[outputs, blocks]))
        weights.append(replace(weight, transposed=False, bits=bits, scales=scales))
    traced.model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return Traced(traced.model, weights)


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
