"""The step graph's body: transformers' own code traced into the opset-24 form that ONNX Runtime and TensorRT share.

ids and lengths in, logits and caches out:

    pos = length + 0..W-1        mask[R, 1, W, S] = slot <= pos          once, shared by all layers
    layer: RMSNormalization -> q, k, v -> RotaryEmbedding
           cache = TensorScatter(cache, k | v, length)                   in place when both are bound to one buffer
           Attention(q, cache_k, cache_v, mask)

Never `is_causal` and never `nonpad_kv_seqlen`: TensorRT's parser drops them without a word.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

from csd_ops.contract import OPSET, cache_names
from export.families.base import Loaded

ATTENTION = "csd_static"


@functools.cache
def _operators() -> dict[Any, Callable[..., Any]]:
    """Three operators that tracing keeps whole, and the ONNX node each becomes."""
    import onnxscript

    op = onnxscript.values.Opset("", OPSET)  # onnxscript 0.7 ships no module for opset 24

    @torch.library.custom_op("csd_export::tensor_scatter", mutates_args=())
    def tensor_scatter(cache: Tensor, update: Tensor, length: Tensor) -> Tensor:
        index = length[:, None] + torch.arange(update.shape[2], device=cache.device)
        return cache.scatter(2, index[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3]), update)

    @torch.library.custom_op("csd_export::attention", mutates_args=())
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)

    @torch.library.custom_op("csd_export::rotary", mutates_args=())
    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([low * c - high * s, high * c + low * s], -1)

    tensor_scatter.register_fake(lambda cache, update, length: torch.empty_like(cache))
    attention.register_fake(lambda q, k, v, mask, scale: torch.empty_like(q))
    rotary.register_fake(lambda x, cos, sin: torch.empty_like(x))

    def scatter_node(cache: Any, update: Any, length: Any) -> Any:
        return op.TensorScatter(cache, update, length, axis=-2, mode="linear")

    def attention_node(q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        return op.Attention(q, k, v, mask, scale=scale)[0]

    def rotary_node(x: Any, cos: Any, sin: Any) -> Any:
        return op.RotaryEmbedding(x, cos, sin)

    ours = torch.ops.csd_export
    return {
        ours.tensor_scatter.default: scatter_node,
        ours.attention.default: attention_node,
        ours.rotary.default: rotary_node,
    }


@functools.cache
def _cache_layer() -> type:
    """A cache layer whose update is TensorScatter; transformers calls `update` and the size queries."""
    from transformers.cache_utils import CacheLayerMixin

    class Slot(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
        is_compileable = True
        is_sliding = False

        def __init__(self, keys: Tensor, values: Tensor, length: Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.length, self.is_initialized = keys, values, length, True

        def lazy_initialization(self, *args: Any) -> None:
            pass

        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.keys = torch.ops.csd_export.tensor_scatter(self.keys, keys, self.length)
            self.values = torch.ops.csd_export.tensor_scatter(self.values, values, self.length)
            return self.keys, self.values

        def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
            return self.keys.shape[2], 0

        def get_seq_length(self) -> int:
            return 0

        def get_max_length(self) -> int:
            return int(self.keys.shape[2])

    return Slot


@contextlib.contextmanager
def patched(language_model: nn.Module) -> Iterator[None]:
    """Transformers' modelling code with attention, rotation and norms replaced while tracing, restored after.

    Tracing the stock code takes two to three times the nodes and none of TensorRT's fused layers. Each replacement
    goes when transformers' own exporter emits TensorScatter, Attention-24 and RotaryEmbedding for Llama bodies
    (not in 5.24).
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return torch.ops.csd_export.attention(q, k, v, mask, float(scaling)).transpose(1, 2).contiguous(), None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2  # both halves of transformers' tables are equal
        c, s = cos[..., :half], sin[..., :half]
        return torch.ops.csd_export.rotary(q, c, s), torch.ops.csd_export.rotary(k, c, s)

    def norm(self: Any, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)

    module: Any = sys.modules[type(language_model).__module__]
    config: Any = language_model.config
    norms = {type(part) for part in language_model.modules() if type(part).__name__.endswith("RMSNorm")}
    before = (
        module.apply_rotary_pos_emb,
        config._attn_implementation,
        {kind: kind.forward for kind in norms},
    )
    try:
        # Item assignment can be taken back, `register` cannot. A 4-D mask needs no mask function: it is passed through.
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = attention
        module.apply_rotary_pos_emb, config._attn_implementation = rotate, ATTENTION
        for kind in norms:
            kind.forward = norm  # type: ignore[method-assign, unused-ignore]
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION]
        module.apply_rotary_pos_emb, config._attn_implementation = before[0], before[1]
        for kind, forward in before[2].items():
            kind.forward = forward  # type: ignore[method-assign, unused-ignore]


class Step(nn.Module):
    """ids [R, W], length [R], caches -> logits float32 [R, W, V], caches."""

    def __init__(self, embedding: Tensor, language_model: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.language_model, self.head = language_model, head

    def forward(self, ids: Tensor, length: Tensor, caches: list[Tensor]) -> tuple[Tensor, ...]:
        from transformers.cache_utils import Cache

        positions = length[:, None] + torch.arange(ids.shape[1], device=ids.device)[None]
        slots = torch.arange(caches[0].shape[2], device=ids.device)
        mask = slots[None, None, None] <= positions[:, None, :, None]
        kind = _cache_layer()
        layers = [kind(caches[i], caches[i + 1], length) for i in range(0, len(caches), 2)]
        hidden = self.language_model(
            inputs_embeds=functional.embedding(ids, self.embedding),
            attention_mask=mask,
            cache=Cache(layers=layers),
            use_cache=True,
            position_ids=positions,
        ).last_hidden_state
        logits = self.head(hidden).float()
        return (logits, *(part for layer in layers for part in (layer.keys, layer.values)))


@dataclass(frozen=True)
class Weight:
    """One weight of the traced graph: which parameter of Step it is, and whether the graph has it transposed."""

    initializer: str
    parameter: str
    transposed: bool
    pack: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # to what is stored of a quantised weight,
    scales: str = ""  # and the initializer of its scales


@dataclass(frozen=True)
class Traced:
    """A graph whose weights are not written yet."""

    model: onnx.ModelProto
    weights: list[Weight]


def hollow(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same module with parameters of another dtype that nothing was written to: they take no memory.

    Buffers are the module's own: `Module.to` would also round the rotary frequencies. A frequency rounded to float16 is
    off by up to 2^-12 of itself, so the angle is off by 0.15 rad at position 600: the error grows with the position.
    """
    empty = {id(tensor): torch.empty(tensor.shape, dtype=dtype) for tensor in module.parameters()}
    shared = {id(tensor): tensor for tensor in module.buffers()}
    made = copy.deepcopy(module, {**{key: nn.Parameter(value, False) for key, value in empty.items()}, **shared})
    return made.eval()


def trace_step(loaded: Loaded, dtype: torch.dtype) -> Traced:
    """The body as an ONNX model, opset 24, dimensions R, W and S free and so named; weights stay where they are."""
    manifest = loaded.manifest
    rows, window, slots = 4, 5, 24  # sizes of 0, 1 or equal sizes would be taken for constants
    shape = (rows, manifest.key_value_heads, slots, manifest.head_size)
    names = cache_names(manifest.layers)
    caches = [torch.zeros(shape, dtype=dtype) for _ in names]
    dim = torch.export.Dim
    free = {0: dim("R", min=1), 2: dim("S", min=2)}
    arguments = (torch.zeros(rows, window, dtype=torch.int64), torch.full((rows,), 7), caches)
    table = torch.empty(sum(len(part) for part in loaded.embedding), loaded.embedding[0].shape[1], dtype=dtype)
    step = Step(table, hollow(loaded.language_model, dtype), hollow(loaded.head, dtype)).eval()
    with patched(step.language_model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            step,
            arguments,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            optimize=False,  # below, without the weights: folding would read them, and merge those that look alike
            dynamic_shapes={
                "ids": {0: free[0], 1: dim("W", min=1)},
                "length": {0: free[0]},
                "caches": [free for _ in names],
            },
            custom_translation_table=_operators(),
            input_names=["ids", "length", *names],
            output_names=["logits", *(f"next_{name}" for name in names)],
        )
    assert program is not None
    parameters = [name for name, _ in step.named_parameters()]
    model, weights = _optimise(program.model, parameters)
    del model.graph.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]  # stack traces of the exporting machine
    return Traced(model, weights)


def _optimise(program: Any, parameters: list[str]) -> tuple[onnx.ModelProto, list[Weight]]:
    """Fold constants with the weights set aside as inputs, then take weights as they are multiplied: transposed."""
    import onnx_ir
    import onnxscript.optimizer

    graph = program.graph
    aside = {name: graph.initializers[name] for name in parameters if name in graph.initializers}
    for name, value in aside.items():
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    onnxscript.optimizer.optimize_ir(program)
    model: onnx.ModelProto = onnx_ir.to_proto(program)
    kept = [value for value in model.graph.input if value.name not in aside]
    shapes = {value.name: value for value in model.graph.input if value.name in aside}
    del model.graph.input[:]
    model.graph.input.extend(kept)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    weights, dropped, renamed = [], set(), {}
    for name, value in shapes.items():
        users = readers.get(name, [])
        if not users:
            continue
        kind = value.type.tensor_type
        dims = [dim.dim_value for dim in kind.shape.dim]
        swapped = all(user.op_type == "Transpose" and list(user.attribute[0].ints) == [1, 0] for user in users)
        if swapped:
            dims.reverse()
            for user in users:
                dropped.add(user.name)
                renamed[user.output[0]] = name
        weights.append(Weight(name, name, swapped))
        model.graph.initializer.append(onnx.TensorProto(name=name, data_type=kind.elem_type, dims=dims))
    nodes = [node for node in model.graph.node if node.name not in dropped]
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    stale = {name for name in renamed} | set(shapes)
    values = [value for value in model.graph.value_info if value.name not in stale]
    copied = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
    del model.graph.value_info[:]
    model.graph.value_info.extend(copied)
    return model, weights


def write_step(
    traced: Traced, loaded: Loaded, path: Path, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the graph, and its weights one by one into one file beside it: what is in memory is one weight.

    `on_progress` is called with (weights written, weights in all), counted in values.
    """
    model = traced.model
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    sources = parameter_sources(loaded)
    dtypes = {onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.FLOAT16: torch.float16}
    dtypes[onnx.TensorProto.BFLOAT16] = torch.bfloat16
    sizes = [math.prod(initializers[weight.initializer].dims) for weight in traced.weights]
    total, done = sum(sizes), 0
    data = path.with_name(path.name + ".data")
    with data.open("wb") as file, torch.no_grad():
        for weight, size in zip(traced.weights, sizes, strict=True):
            tensor = initializers[weight.initializer]
            dtype = dtypes.get(tensor.data_type, torch.float32)
            if weight.pack is not None:
                (part,) = sources[weight.parameter]
                packed, scales = weight.pack(part.detach())
                _append(file, tensor, [packed])
                _append(file, initializers[weight.scales], [scales])
            else:
                parts = (part.detach().to(dtype) for part in sources[weight.parameter])
                _append(file, tensor, (part.T if weight.transposed else part for part in parts))
            done += size
            if on_progress:
                on_progress(done, total)
        for tensor in model.graph.initializer:  # the rest: small constants, and the code vectors of the tail
            if tensor.data_location != onnx.TensorProto.EXTERNAL and len(tensor.raw_data) > 1024:
                values = torch.frombuffer(bytearray(tensor.raw_data), dtype=torch.uint8)
                tensor.ClearField("raw_data")
                _append(file, tensor, [values])
    path.write_bytes(model.SerializeToString())


def _append(file: BinaryIO, tensor: onnx.TensorProto, parts: Iterable[Tensor]) -> None:
    """Write a tensor's values behind each other and refer to them; aligned, so that the file can be mapped."""
    file.write(b"\0" * (-file.tell() % 64))
    begin = file.tell()
    for part in parts:
        file.write(memoryview(part.contiguous().view(torch.uint8).numpy()))
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", Path(file.name).name), ("offset", begin), ("length", file.tell() - begin)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


def parameter_sources(loaded: Loaded) -> dict[str, list[Tensor]]:
    """Where every parameter of Step is read from: parts that follow each other."""
    body = {f"language_model.{name}": [tensor] for name, tensor in loaded.language_model.named_parameters()}
    head = {f"head.{name}": [tensor] for name, tensor in loaded.head.named_parameters()}
    return {"embedding": loaded.embedding, **body, **head}


def save_graph(model: onnx.ModelProto, path: Path) -> None:
    """Write a small graph with its weights in one external file beside it."""
    onnx.save_model(
        model,
        str(path),
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=path.name + ".data",
        size_threshold=1024,
    )
    for written in (path, path.with_name(path.name + ".data")):
        written.chmod(0o644)  # onnx writes external data for its owner alone
