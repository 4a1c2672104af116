"""The floor: the least time one step can take, from the bytes it must read and the operations it must do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csd_ops.errors import MachineError
from runtime.bench.roofs import Roofs
from runtime.bundle import STEP, Bundle, Manifest


@dataclass(frozen=True)
class Work:
    """What one step of a model does, whatever runs it."""

    weight_bytes: int  # of the products' weights, read whole by every step
    products: int  # multiply-accumulates with weights per token fed
    cache_bytes: int  # of keys and values per position and row, all layers
    attention: int  # multiply-accumulates per token fed and position attended to, all layers
    integer: bool = False  # products of bytes

    def bytes(self, rows: int, length: float) -> float:
        """Read by a step of `rows` rows whose caches hold `length` positions."""
        return self.weight_bytes + rows * length * self.cache_bytes

    def operations(self, rows: int, window: int, length: float) -> float:
        """Floating point operations of a step: two per multiply-accumulate."""
        return 2.0 * rows * window * (self.products + self.attention * length)


@dataclass(frozen=True)
class Floor:
    """The least seconds of a step, and which roof it is under."""

    seconds: float
    bound: str  # bytes or products


def floor(work: Work, roofs: Roofs, rows: int, window: int, length: float) -> Floor:
    """Roofline: the larger of bytes over the copy's rate and operations over the product's. Nothing is overlapped."""
    reading = work.bytes(rows, length) / roofs.copy
    rate = roofs.integer_product if work.integer else roofs.product
    multiplying = work.operations(rows, window, length) / rate
    return Floor(max(reading, multiplying), "bytes" if reading >= multiplying else "products")


def body_work(manifest: Manifest, width: int, products: int, weight_bytes: int) -> Work:
    """Work from sizes. As many query values as the model is wide, as in every family here."""
    item = 2 if manifest.precision in ("fp16", "bf16") else 4
    pairs = manifest.layers * manifest.key_value_heads * manifest.head_size
    integer = manifest.precision in ("int8", "int4", "w8a8")
    return Work(weight_bytes, products, 2 * pairs * item, 2 * manifest.layers * width, integer)


def step_work(bundle: Bundle) -> Work:
    """Work of a bundle's step, read off its graph.

    Raises:
        MachineError: no onnx to read it with.
    """
    products, size, width = graph_work(bundle.path(STEP))
    return body_work(bundle.manifest, width, products, size)


def graph_work(path: Path) -> tuple[int, int, int]:
    """Multiply-accumulates per token, bytes of the weights they need, and the model's width."""
    try:
        import onnx
    except ImportError:
        raise MachineError("expected onnx to read the step graph, found none; install `csd-toolkit[bench]`") from None
    graph = onnx.load(str(path), load_external_data=False).graph
    weights: Mapping[str, Any] = {tensor.name: tensor for tensor in graph.initializer}

    def size(name: str) -> int:
        tensor = weights[name]
        bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        return math.prod(tensor.dims) * bits // 8

    products = read = 0
    for node in graph.node:
        held = [name for name in node.input[1:] if name in weights]
        if node.op_type == "MatMulNBits":
            numbers = {attribute.name: attribute.i for attribute in node.attribute}
            products += numbers["K"] * numbers["N"]
            read += sum(size(name) for name in held)
        elif node.op_type in ("MatMul", "Gemm", "MatMulIntegerToFloat") and held:
            products += math.prod(weights[held[0]].dims)
            read += size(held[0])
    return products, read, int(weights["embedding"].dims[1])
