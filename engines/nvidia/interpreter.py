"""A parsed TensorRT network run layer by layer in NumPy: what the parser understood, without a GPU.

A successful build does not prove that a graph kept its meaning; this does, by numbers. Values are rounded to the dtype
that the network declares after every layer and computed in float32 in between, so it is a model of the mathematics, not
of the kernels that a GPU will use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import numpy_helper

from csd_ops.errors import InputError
from engines.nvidia.engine import numpy_dtype
from engines.nvidia.network import Parsed

Array = np.ndarray
Run = Callable[[Any, list[Array]], Array | tuple[Array, ...]]


def interpret(
    parsed: Parsed, inputs: Mapping[str, Array], probe: Callable[[Any, list[Array]], None] | None = None
) -> dict[str, Array]:
    """The network's outputs for these inputs.

    Args:
        parsed: the network.
        inputs: by name; bfloat16 as ml_dtypes.bfloat16.
        probe: called with every layer and its outputs.

    Raises:
        InputError: a layer that is not known here, or a cache written past its end.
    """
    trt, network = parsed.toolchain.trt, parsed.network
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    uses = Counter(
        layer.get_input(i).name for layer in layers for i in range(layer.num_inputs) if layer.get_input(i) is not None
    )
    wanted = parsed.outputs().keys()
    values: dict[str, Array] = {}
    for name, tensor in parsed.inputs().items():
        if name not in inputs:
            raise InputError(f"expected a value for every input, found none for {name}")
        values[name] = np.asarray(inputs[name], numpy_dtype(trt, tensor.dtype))
    with np.errstate(all="ignore"):
        for layer in _in_order(layers, set(values)):
            kind = layer.type.name
            if kind not in LAYERS:
                raise InputError(
                    f"expected a layer that the interpreter knows, found {kind.lower()} ({layer.name}); "
                    "verify on a GPU with `csd compare`"
                )
            interface, run = LAYERS[kind]
            layer.__class__ = getattr(trt, interface)
            names = [tensor.name if (tensor := layer.get_input(i)) is not None else "" for i in range(layer.num_inputs)]
            given = [values[name] if name else np.empty(0) for name in names]
            if kind in ("CONSTANT", "CONVOLUTION") and layer.get_output(0).dtype == trt.bfloat16:
                given = _halves(parsed, layer, given)
            result = run(layer, given)
            outputs = list(result) if isinstance(result, tuple) else [result]
            for index, value in enumerate(outputs):
                tensor = layer.get_output(index)
                outputs[index] = values[tensor.name] = np.asarray(value).astype(numpy_dtype(trt, tensor.dtype))
            if probe:
                probe(layer, outputs)
            for name in names:
                uses[name] -= 1
                if name and not uses[name] and name not in wanted:
                    del values[name]
    return {name: values[name] for name in wanted}


def _in_order(layers: list[Any], known: set[str]) -> list[Any]:
    """Layers after those they read; the parser adds a few later than their readers."""
    ordered, waiting = [], list(layers)
    while waiting:
        late = []
        for layer in waiting:
            sources = [layer.get_input(i) for i in range(layer.num_inputs)]
            if all(tensor is None or tensor.name in known for tensor in sources):
                ordered.append(layer)
                known.update(layer.get_output(i).name for i in range(layer.num_outputs))
            else:
                late.append(layer)
        if len(late) == len(waiting):
            raise InputError(f"expected a network without loops, found one at {late[0].name}")
        waiting = late
    return ordered


def _f(x: Array) -> Array:
    """Half precision is computed in float32; other dtypes as they are."""
    return x.astype(np.float32) if x.dtype.kind not in "iub" and x.dtype.itemsize == 2 else x


# ---- values and shapes -------------------------------------------------------------------------------------------


def _constant(layer: Any, given: list[Array]) -> Array:
    return (given[0] if given else _weights(layer.weights)).reshape(tuple(layer.shape))


def _weights(weights: Any) -> Array:
    """Constants that a layer holds itself."""
    return weights if isinstance(weights, np.ndarray) else np.empty(0, np.float32)


def _halves(parsed: Parsed, layer: Any, given: list[Array]) -> list[Array]:
    """The layer's bfloat16 constants, from the graph: TensorRT's bindings have no way to read them back."""
    node = next((node for node in parsed.model.graph.node if node.name == layer.name), None)
    names = [layer.name] if node is None else list(node.input)[1:]
    tensors = {tensor.name: tensor for tensor in parsed.model.graph.initializer}
    found = [numpy_helper.to_array(tensors[name], base_dir=str(parsed.path.parent)) for name in names]
    return given[:1] + found


def _shape(layer: Any, given: list[Array]) -> Array:
    return np.array(given[0].shape, np.int64)


def _shuffle(layer: Any, given: list[Array]) -> Array:
    value = given[0]
    first = list(layer.first_transpose)[: value.ndim]
    value = value.transpose(first) if value.ndim else value
    sizes = [int(size) for size in given[1]] if len(given) > 1 else _dims(layer.reshape_dims)
    if sizes is not None:
        if layer.zero_is_placeholder:
            sizes = [value.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
        value = value.reshape(sizes)
    second = list(layer.second_transpose)[: value.ndim]
    return value.transpose(second) if value.ndim else value


def _dims(dims: Any) -> list[int] | None:
    """Sizes that the layer holds itself; None where there are none."""
    return None if dims is None or len(dims) < 0 else [int(size) for size in dims]


def _squeeze(layer: Any, given: list[Array]) -> Array:
    return np.squeeze(given[0], tuple(int(axis) for axis in given[1].reshape(-1)) if len(given) > 1 else None)


def _unsqueeze(layer: Any, given: list[Array]) -> Array:
    return np.expand_dims(given[0], tuple(int(axis) for axis in given[1].reshape(-1)))


def _concatenation(layer: Any, given: list[Array]) -> Array:
    return np.concatenate(given, layer.axis)


def _slice(layer: Any, given: list[Array]) -> Array:
    def dims(index: int, static: Any, otherwise: Any = ()) -> list[int]:
        if len(given) > index and given[index].size:
            return [int(size) for size in given[index].reshape(-1)]
        return _dims(static) or list(otherwise)

    value = given[0]
    start, size, stride = dims(1, layer.start), dims(2, layer.shape), dims(3, layer.stride)
    axes = dims(5, layer.axes, range(value.ndim))
    mode = layer.mode.name
    for axis, first, count, step in zip(axes, start, size, stride, strict=True):
        index = first + step * np.arange(count)
        length = value.shape[axis]
        if mode == "STRICT_BOUNDS":
            assert not count or (index.min() >= 0 and index.max() < length), (layer.name, first, count, step, length)
            value = value.take(index, axis)
        elif mode == "FILL":
            filled = value.take(np.clip(index, 0, length - 1), axis)
            outside = np.expand_dims((index < 0) | (index >= length), tuple(range(1, value.ndim - axis)))
            fill = given[4].reshape(-1)[0] if len(given) > 4 and given[4].size else 0
            value = np.where(outside, np.asarray(fill, value.dtype), filled)
        elif mode == "WRAP":
            value = value.take(index % length, axis)
        elif mode == "CLAMP":
            value = value.take(np.clip(index, 0, length - 1), axis)
        else:
            raise InputError(f"expected a slice that the interpreter knows, found mode {mode} of {layer.name}")
    return value


def _gather(layer: Any, given: list[Array]) -> Array:
    data, index = given[0], given[1].astype(np.int64)
    mode = layer.mode.name
    if mode == "ELEMENT":
        return np.take_along_axis(data, index, layer.axis)
    batch = layer.num_elementwise_dims
    if mode == "DEFAULT":
        if not batch:
            return data.take(index, layer.axis)
        return np.stack([data[i].take(index[i], layer.axis - 1) for i in range(len(data))])
    if not batch:
        return data[tuple(np.moveaxis(index, -1, 0))]
    return np.stack([_nd(data[i], index[i], batch - 1) for i in range(len(data))])


def _nd(data: Array, index: Array, batch: int) -> Array:
    if batch:
        return np.stack([_nd(data[i], index[i], batch - 1) for i in range(len(data))])
    return data[tuple(np.moveaxis(index, -1, 0))]


def _scatter(layer: Any, given: list[Array]) -> Array:
    data, index, updates = given[0].copy(), given[1].astype(np.int64), given[2]
    if layer.mode.name == "ELEMENT":
        np.put_along_axis(data, index, updates, layer.axis)
    else:
        data[tuple(np.moveaxis(index, -1, 0))] = updates
    return data


def _select(layer: Any, given: list[Array]) -> Array:
    return np.where(given[0], given[1], given[2])


def _fill(layer: Any, given: list[Array]) -> Array:
    if layer.operation.name != "LINSPACE":
        raise InputError(f"expected no random numbers in the network, found {layer.name}")
    sizes = [int(size) for size in (given[0] if given and given[0].size else layer.shape)]
    start = given[1].reshape(-1)[0] if len(given) > 1 else layer.alpha
    steps = given[2].reshape(-1) if len(given) > 2 else np.atleast_1d(layer.beta)
    ranges = np.indices(sizes)
    return start + sum(step * grid for step, grid in zip(steps, ranges, strict=True))


def _one_hot(layer: Any, given: list[Array]) -> Array:
    index, (off, on), depth = given[0], given[1].reshape(-1), int(given[2])
    axis = layer.axis if layer.axis >= 0 else index.ndim + 1 + layer.axis
    places = np.arange(depth).reshape([-1 if i == axis else 1 for i in range(index.ndim + 1)])
    hot = np.expand_dims(index, axis) == places
    return np.where(hot, on, off)


def _same(layer: Any, given: list[Array]) -> Array:
    return given[0]


# ---- arithmetic --------------------------------------------------------------------------------------------------


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":  # towards zero
        return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))
    return np.asarray(a / b)


ELEMENTWISE: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": lambda a, b: a + b,
    "PROD": lambda a, b: a * b,
    "SUB": lambda a, b: a - b,
    "DIV": _divide,
    "FLOOR_DIV": lambda a, b: a // b,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "POW": lambda a, b: a**b,
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
    "EQUAL": np.equal,
    "GREATER": np.greater,
    "LESS": np.less,
}


def _elementwise(layer: Any, given: list[Array]) -> Array:
    return ELEMENTWISE[layer.op.name](_f(given[0]), _f(given[1]))


def _known(table: dict[str, Callable[[Array], Array]], layer: Any, name: str) -> Callable[[Array], Array]:
    if name not in table:
        raise InputError(f"expected a function that the interpreter knows, found {name.lower()} in {layer.name}")
    return table[name]


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


UNARY: dict[str, Callable[[Array], Array]] = {
    "EXP": np.exp,
    "LOG": np.log,
    "SQRT": np.sqrt,
    "RECIP": lambda x: 1 / x,
    "ABS": np.abs,
    "NEG": np.negative,
    "SIN": np.sin,
    "COS": np.cos,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "ROUND": np.round,
    "ERF": _erf,
    "NOT": np.logical_not,
    "SIGN": np.sign,
}


def _unary(layer: Any, given: list[Array]) -> Array:
    return _known(UNARY, layer, layer.op.name)(_f(given[0]))


ACTIVATION: dict[str, Callable[[Array], Array]] = {
    "RELU": lambda x: np.maximum(x, 0),
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "TANH": np.tanh,
    "GELU_ERF": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "GELU_TANH": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def _activation(layer: Any, given: list[Array]) -> Array:
    kind = layer.type.name
    if kind == "CLIP":
        return np.clip(_f(given[0]), layer.alpha, layer.beta)
    return _known(ACTIVATION, layer, kind)(_f(given[0]))


def _axes(mask: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(32) if mask >> axis & 1)


def _reduce(layer: Any, given: list[Array]) -> Array:
    runs: dict[str, Any] = {"SUM": np.sum, "PROD": np.prod, "MAX": np.max, "MIN": np.min, "AVG": np.mean}
    run = runs[layer.op.name]
    return np.asarray(run(_f(given[0]), axis=_axes(layer.axes), keepdims=layer.keep_dims))


def _softmax(layer: Any, given: list[Array]) -> Array:
    return _softmax_over(_f(given[0]), _axes(layer.axes)[0])


def _softmax_over(x: Array, axis: int) -> Array:
    mass = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(mass / mass.sum(axis=axis, keepdims=True))


def _matrix_multiply(layer: Any, given: list[Array]) -> Array:
    a, b = _f(given[0]), _f(given[1])
    if layer.op0.name == "TRANSPOSE":
        a = a.swapaxes(-1, -2)
    if layer.op1.name == "TRANSPOSE":
        b = b.swapaxes(-1, -2)
    return np.matmul(a, b)


def _cumulative(layer: Any, given: list[Array]) -> Array:
    value, axis = _f(given[0]), int(given[1])
    if layer.reverse:
        value = np.flip(value, axis)
    total = np.cumsum(value, axis)
    if layer.exclusive:
        total = total - value
    return np.flip(total, axis) if layer.reverse else total


def _topk(layer: Any, given: list[Array]) -> tuple[Array, Array]:
    axis = _axes(layer.axes)[0]
    k = int(given[1]) if len(given) > 1 else layer.k
    value = _f(given[0])
    order = np.argsort(-value if layer.op.name == "MAX" else value, axis=axis, kind="stable")
    best = order.take(np.arange(k), axis)
    return np.take_along_axis(given[0], best, axis), best


# ---- pictures ----------------------------------------------------------------------------------------------------


def _convolution(layer: Any, given: list[Array]) -> Array:
    x = _f(given[0])
    outputs, groups = layer.num_output_maps, layer.num_groups
    size, stride, dilation = (tuple(part) for part in (layer.kernel_size_nd, layer.stride_nd, layer.dilation_nd))
    kernel = _f(given[1] if len(given) > 1 and given[1].size else _weights(layer.kernel))
    kernel = kernel.reshape(outputs, x.shape[1] // groups, *size)
    bias = _f(given[2] if len(given) > 2 and given[2].size else _weights(layer.bias))
    if groups != 1 or any(step != 1 for step in dilation):
        raise InputError(f"expected a plain convolution, found groups or dilation in {layer.name}")
    if not layer.padding_mode.name.startswith("EXPLICIT"):
        raise InputError(f"expected explicit padding, found {layer.padding_mode.name.lower()} in {layer.name}")
    padding = [(0, 0), (0, 0), *zip(layer.pre_padding, layer.post_padding, strict=True)]
    space = tuple(range(2, x.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, padding), size, axis=space)
    windows = windows[(slice(None), slice(None), *(slice(None, None, step) for step in stride))]  # [B, C, H, W, kh, kw]
    inside = tuple(range(x.ndim, windows.ndim))
    result = np.moveaxis(np.tensordot(windows, kernel, axes=((1, *inside), (1, *space))), -1, 1)
    return result + bias.reshape(1, -1, *(1 for _ in space)) if bias.size else result


def _normalization(layer: Any, given: list[Array]) -> Array:
    x, scale, bias = (_f(value) for value in given[:3])
    groups, axes = layer.num_groups, _axes(layer.axes)
    if groups > 1:
        grouped = x.reshape(len(x), groups, x.shape[1] // groups, *x.shape[2:])
        over = tuple(range(2, grouped.ndim))
    else:
        grouped, over = x, axes
    mean = grouped.mean(axis=over, keepdims=True, dtype=np.float64)
    variance = grouped.var(axis=over, keepdims=True, dtype=np.float64)
    normal = ((grouped - mean) / np.sqrt(variance + layer.epsilon)).reshape(x.shape)
    return np.asarray(normal * scale + bias)


def _resize(layer: Any, given: list[Array]) -> Array:
    value = given[0]
    if layer.resize_mode.name != "NEAREST":
        raise InputError(f"expected nearest resizing, found {layer.resize_mode.name.lower()} in {layer.name}")
    scales = list(layer.scales) if layer.scales is not None else []
    static = _dims(layer.shape) or []
    if len(given) > 1 and given[1].size:
        sizes = [int(size) for size in given[1]]
    elif scales:
        sizes = [int(size * scale) for size, scale in zip(value.shape, scales, strict=True)]
    else:
        sizes = static
    if scales and any(size * scale % 1 for size, scale in zip(value.shape, scales, strict=True)):
        raise InputError(f"expected resizing to whole sizes, found scales {scales} in {layer.name}")
    how, rounding = layer.coordinate_transformation.name, layer.nearest_rounding.name
    rounds: dict[str, Callable[[Array], Array]] = {
        "FLOOR": np.floor,
        "CEIL": np.ceil,
        "HALF_DOWN": lambda x: np.ceil(x - 0.5),
        "HALF_UP": lambda x: np.floor(x + 0.5),
    }
    for axis, (old, new) in enumerate(zip(value.shape, sizes, strict=True)):
        if old == new:
            continue
        place = np.arange(new)
        at = {
            "ASYMMETRIC": place * old / new,
            "HALF_PIXEL": (place + 0.5) * old / new - 0.5,
            "ALIGN_CORNERS": place * (old - 1) / max(new - 1, 1),
        }[how]
        value = value.take(np.clip(rounds[rounding](at), 0, old - 1).astype(int), axis)
    return value


# ---- attention ---------------------------------------------------------------------------------------------------


def _rotary(layer: Any, given: list[Array]) -> Array:
    x, cos, sin = (_f(value) for value in given[:3])  # [B, N, S, H], [B, S, H / 2]
    if len(given) > 3 and given[3].size:
        cos, sin = cos[given[3]], sin[given[3]]
    cos, sin = cos[:, None], sin[:, None]
    width = layer.rotary_embedding_dim or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if layer.interleaved:
        low, high = turned[..., ::2], turned[..., 1::2]
        both = np.stack([low * cos - high * sin, high * cos + low * sin], -1).reshape(turned.shape)
    else:
        low, high = np.split(turned, 2, -1)
        both = np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
    return np.concatenate([both, rest], -1)


def _cache_update(layer: Any, given: list[Array]) -> Array:
    cache, update, index = given[0].copy(), given[1], given[2]
    for row, start in enumerate(index):
        if start < 0 or start + update.shape[2] > cache.shape[2]:
            raise InputError(
                f"expected writes inside the cache of {cache.shape[2]} slots, found {start} in {layer.name}"
            )
        cache[row, :, start : start + update.shape[2]] = update[row]
    return cache


def _attention(layer: Any, given: list[Array]) -> Array:
    """softmax(q k + mask) v; the scale was multiplied into q and k by layers of their own."""
    attention = layer.attention
    q, k, v = (_f(value) for value in given[:3])  # [B, N, S, H]
    repeat = q.shape[1] // k.shape[1]
    k, v = (np.repeat(value, repeat, 1) if repeat > 1 else value for value in (k, v))
    scores = q @ k.swapaxes(-1, -2)
    rows, columns = scores.shape[-2:]
    causal = attention.causal_kind.name
    if causal != "NONE":
        shift = columns - rows if causal == "LOWER_RIGHT" else 0
        scores = np.where(np.tri(rows, columns, shift, bool), scores, -np.inf)
    if attention.mask is not None:
        mask = given[3]
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + _f(mask)
    if attention.norm_op.name == "SOFTMAX":
        scores = _softmax_over(scores, -1)
    return np.asarray(scores @ v)


LAYERS: dict[str, tuple[str, Run]] = {  # layer type -> interface, function
    "CONSTANT": ("IConstantLayer", _constant),
    "SHAPE": ("IShapeLayer", _shape),
    "SHUFFLE": ("IShuffleLayer", _shuffle),
    "SQUEEZE": ("ISqueezeLayer", _squeeze),
    "UNSQUEEZE": ("IUnsqueezeLayer", _unsqueeze),
    "CONCATENATION": ("IConcatenationLayer", _concatenation),
    "SLICE": ("ISliceLayer", _slice),
    "GATHER": ("IGatherLayer", _gather),
    "SCATTER": ("IScatterLayer", _scatter),
    "SELECT": ("ISelectLayer", _select),
    "FILL": ("IFillLayer", _fill),
    "ONE_HOT": ("IOneHotLayer", _one_hot),
    "CAST": ("ICastLayer", _same),
    "IDENTITY": ("IIdentityLayer", _same),
    "ELEMENTWISE": ("IElementWiseLayer", _elementwise),
    "UNARY": ("IUnaryLayer", _unary),
    "ACTIVATION": ("IActivationLayer", _activation),
    "REDUCE": ("IReduceLayer", _reduce),
    "SOFTMAX": ("ISoftMaxLayer", _softmax),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", _matrix_multiply),
    "CUMULATIVE": ("ICumulativeLayer", _cumulative),
    "TOPK": ("ITopKLayer", _topk),
    "CONVOLUTION": ("IConvolutionLayer", _convolution),
    "NORMALIZATION": ("INormalizationLayer", _normalization),
    "RESIZE": ("IResizeLayer", _resize),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", _rotary),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", _cache_update),
    "ATTENTION_INPUT": ("IAttentionInputLayer", _attention),
    "ATTENTION_OUTPUT": ("IAttentionOutputLayer", _same),
}
