"""The ONNX backend: verification and window logic as ONNX functions, appended to a traced transformer.

`csd::Verify` is row-wise (one row per decision slot) and is the node a TensorRT build replaces by the plugin of the
same name; `csd::Advance` is integer logic and row copies. Their meaning is defined by csd_ops.reference. Choices that
cost time (top-k, top-p, groups, couplings, fresh laws) are If branches on the settings: what is off is not computed.

The bodies below are onnxscript: Python syntax, translated to nodes, never run as Python.
"""
# mypy: ignore-errors
# ruff: noqa: N802 - functions are named as the operators they become; unpacking names every setting

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx
import onnxscript
from onnx import TensorProto, helper, numpy_helper

from csd_ops.contract import CONTROLS, DOMAIN, OPSET, RESULTS, STATE
from csd_ops.kernels import ADVANCE, VERIFY

op = onnxscript.values.Opset("", OPSET)  # onnxscript 0.7 ships no module for opset 24
csd = onnxscript.values.Opset(DOMAIN, 1)

GROUP = 4  # tokens per group of the two-level top-k
BLOCK = 128  # tokens per block of the two-level sampling
NEVER = -1e30  # score of a token outside the truncation: finite, so that 0 * score is 0


@functools.cache
def functions() -> tuple[onnx.FunctionProto, ...]:
    """The functions of the `csd` domain, in the order of use."""

    @onnxscript.script(csd, default_opset=op)
    def Sample(mass, uniform, otherwise):
        """Index at which the running sum of mass [B, W, V] first exceeds uniform [B, W] * total; `otherwise` if empty.

        In two levels, blocks of BLOCK tokens and then one block: CumSum over V is the slowest node there is.
        """
        last = op.Constant(value_ints=[-1])
        vocabulary = op.Shape(mass, start=-1)
        missing = op.Mod(op.Neg(vocabulary), op.Constant(value_ints=[BLOCK]))
        padded = op.Pad(mass, op.Concat(op.Constant(value_ints=[0]), missing, axis=0), 0.0, last)
        shape = op.Concat(op.Shape(mass, end=2), last, op.Constant(value_ints=[BLOCK]), axis=0)
        blocks = op.Reshape(padded, shape)  # [B, W, V / BLOCK, BLOCK]
        sums = op.ReduceSum(blocks, last, keepdims=0)
        running = op.CumSum(sums, op.Constant(value_int=-1))
        total = op.ReduceMax(running, last, keepdims=1)
        threshold = op.Unsqueeze(uniform, last) * total  # [B, W, 1]
        before = op.Cast(running <= threshold, to=TensorProto.INT64)
        block = op.ReduceSum(before, last, keepdims=1)  # [B, W, 1]
        block = op.Min(block, op.Shape(sums, start=-1) - 1)
        behind = op.GatherElements(running - sums, block, axis=-1)
        inside = op.GatherND(blocks, block, batch_dims=2)  # [B, W, BLOCK]
        below = op.Cast(op.CumSum(inside, op.Constant(value_int=-1)) + behind <= threshold, to=TensorProto.INT64)
        place = op.Squeeze(block, last) * BLOCK + op.ReduceSum(below, last, keepdims=0)
        return op.Where(op.Squeeze(total, last) > 0.0, op.Min(place, vocabulary - 1), otherwise)

    @onnxscript.script(csd, default_opset=op)
    def Target(logits, guidance, settings):
        """Guidance, temperature, top-k, top-p, softmax: [R, W, V] -> q [B, W, V] and H(q) [B, W] in nats."""
        temperature = op.Gather(settings, op.Constant(value_int=0))
        top_k = op.Gather(settings, op.Constant(value_int=1))
        top_p = op.Gather(settings, op.Constant(value_int=2))
        last = op.Constant(value_ints=[-1])
        shape = op.Concat(op.Shape(guidance), last, op.Shape(logits, start=1), axis=0)
        rows = op.Reshape(logits, shape)  # [G, B, W, V]
        weights = guidance / temperature
        conditional = op.Gather(weights, op.Constant(value_int=0))
        unconditional = op.ReduceSum(weights, keepdims=0) - conditional  # 0 without guidance
        scores = op.Gather(rows, op.Constant(value_int=0)) * conditional
        scores = scores + op.Gather(rows, op.Constant(value_int=-1)) * unconditional
        if op.Or(top_k > 0.0, top_p < 1.0):
            vocabulary = op.Shape(logits, start=-1)
            never = op.Constant(value_float=NEVER)
            if top_k > 0.0:
                wanted = op.Min(op.Reshape(op.Cast(top_k, to=TensorProto.INT64), last), vocabulary)
                if wanted * 8 < vocabulary:
                    # The k-th largest lies in the k groups of GROUP tokens with the largest maxima: two smaller TopKs
                    missing = op.Mod(op.Neg(vocabulary), op.Constant(value_ints=[GROUP]))
                    padded = op.Pad(scores, op.Concat(op.Constant(value_ints=[0]), missing, axis=0), never, last)
                    split = op.Concat(op.Shape(scores, end=2), last, op.Constant(value_ints=[GROUP]), axis=0)
                    groups = op.Reshape(padded, split)  # [B, W, V / GROUP, GROUP]
                    _maxima, chosen = op.TopK(op.ReduceMax(groups, last, keepdims=0), wanted, axis=-1, sorted=0)
                    near = op.GatherND(groups, op.Unsqueeze(chosen, last), batch_dims=2)  # [B, W, k, GROUP]
                    flat = op.Reshape(near, op.Concat(op.Shape(scores, end=2), last, axis=0))
                    best, _best_ids = op.TopK(flat, wanted, axis=-1, sorted=0)
                    threshold = op.ReduceMin(best, last, keepdims=1)
                else:  # as the largest of the V - k + 1 smallest: a selection, where TopK(k) may keep a heap
                    worst, _worst_ids = op.TopK(scores, vocabulary - wanted + 1, axis=-1, largest=0, sorted=0)
                    threshold = op.ReduceMax(worst, last, keepdims=1)
                kept = op.Where(scores < threshold, never, scores)
            else:
                kept = op.Identity(scores)
            if top_p < 1.0:
                full = op.Softmax(kept, axis=-1)
                ranked, _ranked_ids = op.TopK(full, vocabulary, axis=-1, sorted=1)
                before = op.CumSum(ranked, op.Constant(value_int=-1), exclusive=1)
                inside = op.Where(before < top_p, ranked, op.Constant(value_float=2.0))
                least = op.ReduceMin(inside, last, keepdims=1)
                z = op.Where(full < least, never, kept)
            else:
                z = op.Identity(kept)
        else:
            z = op.Identity(scores)
        q = op.Softmax(z, axis=-1)
        # H = log sum e^z - sum q z, with log sum e^z = z - log q at the best token
        normaliser = op.ReduceMax(z, last, keepdims=0) - op.Log(op.ReduceMax(q, last, keepdims=0))
        entropy = op.Relu(normaliser - op.ReduceSum(q * z, last, keepdims=0))
        return q, entropy

    @onnxscript.script(csd, default_opset=op)
    def GroupKept(p, q, codes, settings):
        """b(x) p(x) for every x, b the ratio of group masses: a loop over the ranks around x."""
        last = op.Constant(value_ints=[-1])
        vocabulary = op.Shape(q, start=-1)
        size = op.Cast(op.Gather(settings, op.Constant(value_int=13)), to=TensorProto.INT64)
        closest = op.Gather(settings, op.Constant(value_int=14))
        nearest = op.Gather(settings, op.Constant(value_int=15))
        reach = (size - 1) / 2
        ranked_q, order = op.TopK(q, vocabulary, axis=-1, sorted=1)
        ranked_p = op.GatherElements(p, order, axis=-1)
        ranked_codes = op.Gather(codes, order)
        ranks = op.Range(0, op.Squeeze(vocabulary), 1)
        mass_q = op.Identity(ranked_q)
        mass_p = op.Identity(ranked_p)
        for i in range(size):
            offset = i - reach
            moved = ranks + offset
            there = op.And(op.And(moved >= 0, moved < vocabulary), offset != 0)
            index = op.Max(op.Min(moved, vocabulary - 1), 0)
            near_q = op.Gather(ranked_q, index, axis=-1)
            near_p = op.Gather(ranked_p, index, axis=-1)
            step = op.Gather(ranked_codes, index, axis=-2) - ranked_codes
            distance = op.ReduceSum(step * step, last, keepdims=0)
            member = op.And(op.And(op.Abs(near_q - ranked_q) < closest, distance < nearest), there)
            weight = op.Cast(member, to=TensorProto.FLOAT)
            mass_q = mass_q + near_q * weight
            mass_p = mass_p + near_p * weight
        b = op.Where(mass_p > 0.0, op.Min(mass_q / mass_p, 1.0), op.Constant(value_float=0.0))
        return op.ScatterElements(q, order, b * ranked_p, axis=-1)

    @onnxscript.script(csd, default_opset=op)
    def Drafts(ids, images_first):
        """The drafts of the decision slots, [B, W]: the ids fed after slot 0, and 0 for the last slot.

        `images_first` is any tensor whose first axis is B.
        """
        images = op.Shape(images_first, end=1)
        one = op.Constant(value_ints=[1])
        fed = op.Slice(ids, op.Constant(value_ints=[0]), images, op.Constant(value_ints=[0]))
        after = op.Slice(fed, one, op.Constant(value_ints=[2**31 - 1]), one)
        return op.Concat(after, op.Expand(op.Constant(value_int=0), op.Concat(images, one, axis=0)), axis=1)

    @onnxscript.script(csd, default_opset=op)
    def Verify(logits, ids, kind, draft_probs, uniforms, gumbel, guidance, settings, codes):
        """Judge every draft: csd_ops.reference.verify."""
        last = op.Constant(value_ints=[-1])
        form = op.Gather(settings, op.Constant(value_int=3))
        coupling = op.Gather(settings, op.Constant(value_int=4))
        relax_fresh = op.Gather(settings, op.Constant(value_int=6))
        scale = op.Gather(settings, op.Constant(value_int=7))
        decay = op.Gather(settings, op.Constant(value_int=8))
        epsilon = op.Gather(settings, op.Constant(value_int=9))
        lambda_ = op.Gather(settings, op.Constant(value_int=10))
        delta = op.Gather(settings, op.Constant(value_int=11))
        floor = op.Gather(settings, op.Constant(value_int=12))

        drafts = csd.Drafts(ids, kind)
        target, entropy = csd.Target(logits, guidance, settings)  # [B, W, V], [B, W]
        real_bool = kind >= 2
        x = op.Where(real_bool, drafts, 0)
        x_index = op.Unsqueeze(x, last)
        u_accept, u_sample, _u_fresh = op.Split(uniforms, axis=-1, num_outputs=3)
        u_accept = op.Squeeze(u_accept, last)
        u_sample = op.Squeeze(u_sample, last)

        if op.Or(op.ReduceMax(kind, keepdims=0) >= 2, coupling == 2.0):
            real = op.Cast(real_bool, to=TensorProto.FLOAT)  # [B, W]
            if floor > 0.0:
                q = op.Max(target, floor)
                p = op.Max(draft_probs, floor) * op.Unsqueeze(real, last)
            else:
                q = op.Identity(target)
                p = op.Identity(draft_probs)

            variation = op.ReduceSum(op.Abs(p - q), last, keepdims=0) * 0.5
            q_x = op.Squeeze(op.GatherElements(q, x_index, axis=-1), last)
            p_x = op.Squeeze(op.GatherElements(p, x_index, axis=-1), last)
            # b(x) p(x) for every x; for the affine form min(p, scale q + bonus p), without a division
            slots = op.Cast(op.Range(0, op.Squeeze(op.Shape(kind, start=1, end=2)), 1), to=TensorProto.FLOAT)
            scales = op.Expand(scale * op.Exp(op.Neg(decay) * slots), op.Shape(kind))  # [B, W]
            relaxable = op.Cast(op.Or(kind == 3, op.And(kind == 2, relax_fresh > 0.0)), to=TensorProto.FLOAT)
            near = op.Cast(variation < delta, to=TensorProto.FLOAT)
            bonus = relaxable * (epsilon + lambda_ * entropy * near)
            if form == 2.0:
                kept = csd.GroupKept(p, q, codes, settings)
                mass = op.Relu(q - p)
                kept_x = op.Squeeze(op.GatherElements(kept, x_index, axis=-1), last)
                chance = kept_x / op.Max(p_x, 1e-38)
                rejected = op.ReduceSum(p - kept, last, keepdims=1)
                total = op.Max(op.ReduceSum(mass, last, keepdims=1), 1e-30)
                output = kept + mass * (rejected / total)
                distortion = op.ReduceSum(op.Abs(output - q), last, keepdims=0) * 0.5
            else:
                kept = op.Min(p, q * op.Unsqueeze(scales, last) + p * op.Unsqueeze(bonus, last))
                mass = op.Relu(q - kept)
                chance = op.Min(scales * q_x / op.Max(p_x, 1e-38) + bonus, 1.0)
                rejected = op.ReduceSum(p - kept, last, keepdims=0)
                distortion = op.Relu(variation - rejected)  # Theorem 3.2
            replacement = csd.Sample(mass, u_sample, x)

            if coupling == 1.0:
                kept_draft = op.And(real_bool, u_accept * p_x < q_x)
                if op.And(form == 0.0, op.ReduceMin(scales, keepdims=0) < 1.0):
                    other = csd.Sample(op.Relu(q - p), u_sample, x)  # below scale 1 the rule's residual is another
                else:
                    other = op.Identity(replacement)
                redraft = op.Where(kept_draft, x, other)
            else:
                if coupling == 2.0:
                    redraft = op.ArgMax(op.Log(op.Max(target, 1e-38)) + gumbel, axis=-1, keepdims=0)
                else:
                    redraft = csd.Sample(target, u_sample, x)

            if form == 1.0:
                final = op.Identity(redraft)
                accepted = redraft == x
                shown_chance = op.Identity(q_x)
                shown_distortion = variation * 0.0
            else:
                final = op.Identity(replacement)
                accepted = u_accept < chance
                shown_chance = op.Identity(chance)
                shown_distortion = op.Identity(distortion)
            accept = op.Or(op.And(real_bool, accepted), kind == 1)
            middle = op.Concat(
                op.Unsqueeze(variation * real, last),
                op.Unsqueeze(shown_chance * real, last),
                op.Unsqueeze(shown_distortion * real, last),
                axis=-1,
            )
        else:  # no drafts at all, as in one token per pass: sample q
            final = csd.Sample(target, u_sample, x)
            redraft = op.Identity(final)
            accept = kind == 1
            middle = op.Expand(op.Constant(value_float=0.0), op.Shape(uniforms))
        target_x = op.GatherElements(target, x_index, axis=-1)
        target_final = op.GatherElements(target, op.Unsqueeze(final, last), axis=-1)
        surprises = op.Neg(op.Log(op.Max(op.Concat(target_x, target_final, axis=-1), 1e-30)))
        measures = op.Concat(op.Unsqueeze(entropy, last), middle, surprises, axis=-1)
        return target, accept, final, redraft, measures

    @onnxscript.script(csd, default_opset=op)
    def Advance(
        ids,
        length,
        position,
        history_probs,
        history_ids,
        q,
        accept,
        final,
        redraft,
        uniforms,
        grammar,
        settings,
    ):
        """First rejection, commit, shift and refill: csd_ops.reference.advance."""
        scheme = op.Gather(settings, op.Constant(value_int=5))
        one = op.Constant(value_ints=[1])
        zero = op.Constant(value_ints=[0])
        images = op.Shape(position)  # [1]
        window = op.Shape(ids, start=1)  # [1]
        columns = op.Shape(history_ids, start=1)  # [1]
        vocabulary = op.Shape(q, start=2)  # [1]
        slots = op.Range(0, op.Squeeze(window), 1)  # [W]
        start = op.Unsqueeze(position, one)  # [B, 1]
        drafts = csd.Drafts(ids, position)

        stops = op.Cast(op.And(accept, slots < window - 1), to=TensorProto.INT32)
        leading = op.ArgMin(stops, axis=1, keepdims=1)  # the first slot not accepted; the last never is
        forced = op.Gather(grammar, start + slots)  # [B, W]
        drawn = op.Where(slots < leading, drafts, op.Where(slots == leading, final, redraft))
        tokens = op.Where(forced >= 0, forced, drawn)
        decided = op.And(op.Not(forced == -2), slots <= leading)
        count = op.ReduceSum(op.Cast(decided, to=TensorProto.INT64), one, keepdims=1)  # [B, 1]
        committed = op.Squeeze(count, one)

        fed = op.Slice(ids, zero, images, zero)
        before = op.Slice(fed, zero, one, one)
        newest = op.GatherElements(op.Concat(before, tokens, axis=1), count, axis=1)  # [B, 1]

        # Rows of known laws: C of history, W of this window, then one uniform and one empty
        row = op.Concat(images, one, vocabulary, axis=0)
        flat = op.Expand(op.Reciprocal(op.Cast(vocabulary, to=TensorProto.FLOAT)), row)
        laws = op.Concat(history_probs, q, flat, op.Expand(op.Constant(value_float=0.0), row), axis=1)
        names = op.Concat(history_ids, tokens, axis=1)
        known = columns + window
        old = count + slots  # this position's slot in the pass just made
        above = op.Min(old, known - 1)
        place = start + old
        rule = op.Gather(grammar, op.Min(place, op.Shape(grammar) - 1))
        free = op.And(rule == -1, slots < window - 1)
        drafted = op.And(free, old < window)
        fresh = op.And(free, old >= window)
        has_above = place >= columns

        _u_accept, _u_sample, u_fresh = op.Split(uniforms, axis=-1, num_outputs=3)
        u = op.Squeeze(u_fresh, op.Constant(value_ints=[-1]))
        anywhere = op.Min(op.Cast(u * op.Cast(vocabulary, to=TensorProto.FLOAT), to=TensorProto.INT64), vocabulary - 1)
        source = op.Where(op.And(scheme == 5.0, has_above), above, op.Where(scheme == 4.0, known - 1, known))
        empty = known + 1
        index = op.Where(drafted, columns + old, op.Where(fresh, source, empty))
        rows = op.GatherND(laws, op.Unsqueeze(index, op.Constant(value_ints=[2])), batch_dims=1)
        if scheme >= 4.0:
            sampled = csd.Sample(rows, u, anywhere)
            random = op.Where(source < known, sampled, anywhere)
        else:
            copy = op.Where(scheme == 2.0, op.Expand(known - 1, op.Shape(above)), above)
            copied = op.GatherElements(names, copy, axis=1)
            usable = op.Or(scheme == 2.0, op.And(scheme == 3.0, has_above))
            random = op.Where(op.And(usable, copied < vocabulary), copied, anywhere)
        moved = op.GatherElements(tokens, op.Min(old, window - 1), axis=1)
        draft = op.Where(rule >= 0, rule, op.Where(drafted, moved, op.Where(fresh, random, 0)))
        if op.And(scheme >= 1.0, scheme < 4.0):
            certain = op.OneHot(random, vocabulary, op.Constant(value_floats=[0.0, 1.0]), axis=-1)
            next_draft_probs = op.Where(op.Unsqueeze(fresh, op.Constant(value_ints=[2])), certain, rows)
        else:
            next_draft_probs = op.Identity(rows)
        kept = op.Unsqueeze(count + op.Range(0, op.Squeeze(columns), 1), op.Constant(value_ints=[2]))
        next_history_probs = op.GatherND(laws, kept, batch_dims=1)
        next_history_ids = op.GatherND(names, kept, batch_dims=1)
        next_kind = op.Where(rule >= 0, 1, op.Where(drafted, 3, op.Where(fresh, 2, 0)))
        row_ids = op.Concat(newest, op.Slice(draft, zero, window - 1, one), axis=1)
        copies = op.Shape(ids, end=1) / images  # [1]: guidance rows per image
        next_ids = op.Tile(row_ids, op.Concat(copies, one, axis=0))
        next_length = length + op.Tile(committed, copies)
        next_position = position + committed
        return (
            next_ids,
            next_length,
            next_position,
            next_kind,
            next_draft_probs,
            next_history_probs,
            next_history_ids,
            committed,
            tokens,
        )

    scripts = (Sample, Target, GroupKept, Drafts, Verify, Advance)
    return tuple(function.to_function_proto() for function in scripts)


TYPES = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}


def _value(name: str, dtype: str, shape: Sequence[str], sizes: dict[str, int]) -> onnx.ValueInfoProto:
    dims = [int(dim) if dim.isdigit() else sizes.get(dim, dim) for dim in shape]
    return helper.make_tensor_value_info(name, TYPES[dtype], dims)


def attach_tail(model: onnx.ModelProto, *, columns: int, codes: np.ndarray) -> None:
    """Append verification and window logic to a traced transformer, in place.

    Args:
        model: has inputs `ids` [R, W], `length` [R] and the caches, outputs `logits` float32 [R, W, V] and the caches.
        columns: C, columns of the token grid.
        codes: [V, E], the vectors of the image codes, for the distance filter of GSD.
    """
    graph = model.graph
    sizes = {"V": codes.shape[0], "C": columns}
    present = {value.name for value in graph.input}
    for name, (dtype, shape) in (STATE | CONTROLS).items():
        if name not in present:
            graph.input.append(_value(name, dtype, shape, sizes))
    graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(codes, np.float32), "codes"))
    node = functools.partial(helper.make_node, domain=DOMAIN)
    graph.node.extend(
        [
            node("Verify", list(VERIFY.inputs), list(VERIFY.outputs), name="verify"),
            node("Advance", list(ADVANCE.inputs), list(ADVANCE.outputs), name="advance"),
        ]
    )
    for name, (dtype, shape) in STATE.items():
        graph.output.append(_value(f"next_{name}", dtype, shape, sizes))
    for name, (dtype, shape) in RESULTS.items():
        if name != "logits":
            graph.output.append(_value(name, dtype, shape, sizes))
    model.functions.extend(functions())
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def tail_model(vocabulary: int, columns: int, codes: np.ndarray | None = None) -> onnx.ModelProto:
    """The tail alone: `logits` is an input. For tests and measurements."""
    codes = np.zeros((vocabulary, 1), np.float32) if codes is None else codes
    logits = _value("logits", *RESULTS["logits"], {"V": vocabulary})
    graph = helper.make_graph([], "tail", [logits], [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)
    attach_tail(model, columns=columns, codes=codes)
    sizes = {"V": vocabulary}
    model.graph.output.append(_value("q", "float32", ("B", "W", "V"), sizes))
    model.graph.output.append(helper.make_tensor_value_info("accept", TensorProto.BOOL, ["B", "W"]))
    model.graph.output.extend(_value(name, "int64", ("B", "W"), sizes) for name in ("final", "redraft"))
    return model
