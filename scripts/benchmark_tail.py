#!/usr/bin/env python
"""Cost of verification and window logic alone: ONNX function, NumPy and PyTorch, interleaved, best of many."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import onnxruntime
import torch
import typer
from rich.progress import track

from csd_ops.contract import Coupling, Fresh, Settings
from csd_ops.onnx_function import tail_model
from csd_ops.rules import Csd
from tests.csd_ops.cases import Case, generate


@functools.cache
def _laws(library: Any, columns: int, vocabulary: int) -> tuple[Any, Any, Any]:
    history = library.full((columns, vocabulary), 1 / vocabulary, dtype=library.float32)
    return history, history[:1] * 1, history[:1] * 0


def case_laws(library: Any, case: Case) -> tuple[Any, Any, Any]:
    """History, uniform and empty law rows as arrays of the library."""
    return _laws(library, case.state.history_ids.shape[1], case.logits.shape[-1])


def numpy_verify(case: Case) -> Callable[[], object]:
    """Affine rule, maximal coupling, float32, vectorised: what one would write without a graph."""
    settings, k = case.settings, int(case.settings.top_k)
    p, kind = case.state.draft_probs.astype(np.float32), case.state.kind
    x = case.drafts[..., None]

    def run() -> object:
        rows = case.logits.reshape(len(case.guidance), -1, *case.logits.shape[1:])
        z = case.guidance[0] * rows[0] + case.guidance[1] * rows[1]
        if k:
            z = np.where(z < np.partition(z, -k, axis=-1)[..., -k, None], -np.inf, z)
        q = np.exp(z - z.max(-1, keepdims=True))
        q /= q.sum(-1, keepdims=True)
        entropy = -(q * np.log(np.maximum(q, 1e-30))).sum(-1)
        variation = 0.5 * np.abs(p - q).sum(-1)
        bonus = settings.lambda_ * entropy * (variation < settings.delta) * (kind == 3)
        kept = np.minimum(p, q + p * bonus[..., None])
        running = np.cumsum(np.maximum(q - kept, 0), -1)
        replacement = (running <= case.uniforms[..., 1:2] * running[..., -1:]).sum(-1)
        p_x, q_x = (np.take_along_axis(law, x, -1)[..., 0] for law in (p, q))
        accept = case.uniforms[..., 0] < np.minimum(1, q_x / np.maximum(p_x, 1e-38) + bonus)
        redraft = np.where(case.uniforms[..., 0] * p_x < q_x, x[..., 0], replacement)
        window = advance(np, case, q, (accept & (kind > 0))[0], replacement[0], redraft[0])
        return window, variation - (p - kept).sum(-1)

    return run


def advance(library: Any, case: Case, q: Any, accept: Any, replacement: Any, redraft: Any) -> tuple[Any, ...]:
    """Window logic of one picture: first rejection, commit, and the rows of laws for the next pass."""
    window = case.logits.shape[1]
    columns, state = case.state.history_ids.shape[1], case.state
    leading = next((slot for slot in range(window - 1) if not accept[slot]), window - 1)
    tokens = [*state.ids[0, 1 : leading + 1].tolist(), int(replacement[leading]), *redraft[leading + 1 :].tolist()]
    count = leading + 1
    history, flat, empty = case_laws(library, case)
    laws = library.concatenate([history, q[0], flat, empty])
    rows = [columns + count + slot if count + slot < window else columns + window for slot in range(window)]
    return tokens, count, laws[rows], laws[count : count + columns] * 1  # a copy: the next pass reads it


def torch_verify(case: Case) -> Callable[[], object]:
    """The same in PyTorch eager."""
    settings, k = case.settings, int(case.settings.top_k)
    p, kind = torch.from_numpy(case.state.draft_probs.astype(np.float32)), torch.from_numpy(case.state.kind)
    logits, x = torch.from_numpy(case.logits), torch.from_numpy(case.drafts)[..., None]
    uniforms, weights = torch.from_numpy(case.uniforms), case.guidance.tolist()

    @torch.no_grad()
    def run() -> object:
        rows = logits.reshape(len(weights), -1, *logits.shape[1:])
        z = weights[0] * rows[0] + weights[1] * rows[1]
        if k:
            z = z.masked_fill(z < z.topk(k).values[..., -1:], float("-inf"))
        q = z.softmax(-1)
        entropy = -torch.xlogy(q, q).sum(-1)
        variation = 0.5 * (p - q).abs().sum(-1)
        bonus = settings.lambda_ * entropy * (variation < settings.delta) * (kind == 3)
        kept = torch.minimum(p, q + p * bonus[..., None])
        running = (q - kept).relu().cumsum(-1)
        replacement = torch.searchsorted(running, uniforms[..., 1:2] * running[..., -1:], right=True)
        p_x, q_x = p.gather(-1, x)[..., 0], q.gather(-1, x)[..., 0]
        accept = uniforms[..., 0] < (q_x / p_x.clamp_min(1e-38) + bonus).clamp_max(1)
        redraft = torch.where(uniforms[..., 0] * p_x < q_x, x[..., 0], replacement[..., 0])
        window = advance(torch, case, q, (accept & (kind > 0))[0], replacement[0, :, 0], redraft[0])
        return window, variation - (p - kept).sum(-1)

    return run


def onnx_tail(case: Case, threads: int) -> Callable[[], object]:
    """csd::Verify and csd::Advance with bound buffers."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    vocabulary, columns = case.logits.shape[-1], case.state.history_ids.shape[1]
    session = onnxruntime.InferenceSession(tail_model(vocabulary, columns, case.codes).SerializeToString(), options)
    binding = session.io_binding()
    inputs = {name: np.ascontiguousarray(value) for name, value in case.inputs().items()}
    for name, value in inputs.items():
        binding.bind_cpu_input(name, value)
    names = [output.name for output in session.get_outputs()]
    kept = []
    for name, value in zip(names, session.run(names, inputs), strict=True):
        if name not in ("q", "accept", "final", "redraft"):
            buffer = np.ascontiguousarray(value)
            kept.append(buffer)
            binding.bind_output(name, "cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
    alive = (inputs, kept)
    return lambda: (session.run_with_iobinding(binding), alive)[0]


def main(
    threads: Annotated[int, typer.Option(help="Threads on every side.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time for each combination.")] = 1.5,
) -> None:
    """Print a Markdown table of milliseconds."""
    torch.set_num_threads(threads)
    print(
        "| V | W | top-k | ONNX function, ms | NumPy, ms | PyTorch, ms | ONNX / NumPy |\n|---|---|---|---|---|---|---|"
    )
    combinations = [(v, w, k) for v in (1024, 8192, 16384) for w in (1, 16, 32, 64) for k in (0, 1000)]
    for vocabulary, window, top_k in track(combinations, transient=True):
        settings = Settings(
            top_k=min(top_k, vocabulary), coupling=Coupling.MAXIMAL, fresh=Fresh.UNIFORM, **Csd(0.5, 0.35).settings()
        )
        case = generate(0, settings, images=1, window=window, vocabulary=vocabulary, columns=24, tokens=576)
        case = replace(case, codes=np.zeros((vocabulary, 1), np.float32))
        contestants = {
            "onnx": onnx_tail(case, threads),
            "numpy": numpy_verify(case),
            "torch": torch_verify(case),
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times["torch"]) < 5:
            for name, run in contestants.items():
                began = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - began)
        onnx, numpy, pytorch = (float(np.median(times[name])) * 1e3 for name in ("onnx", "numpy", "torch"))
        shown = top_k if top_k else "off"
        print(f"| {vocabulary} | {window} | {shown} | {onnx:.3f} | {numpy:.3f} | {pytorch:.3f} | {onnx / numpy:.2f} |")


if __name__ == "__main__":
    typer.run(main)
