"""`csd build --verify`: the parsed network, interpreted, against ONNX Runtime on the same graph.

Windows of several widths follow each other on ragged lengths, some rolled back; each side carries its own caches. That
is what a wrong mask, a wrong write index or a dropped input shows in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from csd_ops.contract import Kind, cache_names
from csd_ops.errors import InputError, MachineError
from csd_ops.kernels import evaluate
from engines.nvidia.graph import PRECISIONS, StepSizes
from engines.nvidia.interpreter import interpret
from engines.nvidia.network import Parsed

TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}  # of the largest value of an output
OF_LAWS = 10  # probabilities are exponentials: their errors may be so many times larger
SAME = {"fp32": 0.99, "fp16": 0.9, "bf16": 0.75}  # share of drawn tokens that must be equal: rounding turns a few
LEVELS = {"fp32": 1, "fp16": 3, "bf16": 40}  # the worst pixel may differ by so much of 255


class VerificationError(MachineError):
    """TensorRT's parser understood another graph."""


@dataclass
class Agreement:
    """How well two runs agree."""

    errors: dict[str, float] = field(default_factory=dict)  # output -> worst error, relative to the largest value
    same: dict[str, float] = field(default_factory=dict)  # integer output -> least share of equal values

    def add(self, name: str, found: np.ndarray, expected: np.ndarray) -> None:
        """Note one output of one pass."""
        if expected.dtype.kind in "iub":
            share = float((found == expected).mean()) if expected.size else 1.0
            self.same[name] = min(self.same.get(name, 1.0), share)
            return
        one, other = found.astype(np.float64), expected.astype(np.float64)
        error = float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-9))
        self.errors[name] = max(self.errors.get(name, 0.0), error if np.isfinite(error) else np.inf)

    def check(self, precision: str) -> None:
        """VerificationError when an output is further off than the precision explains."""
        for name, error in self.errors.items():
            tolerance = TOLERANCE[precision] * (OF_LAWS if name.endswith("probs") else 1)
            if not error <= tolerance:
                raise VerificationError(
                    f"expected {name} of the parsed network within {tolerance:.0e} of ONNX Runtime, found "
                    f"{error:.1e}; do not use this engine, export the bundle again"
                )
        for name, share in self.same.items():
            if share < SAME[precision]:
                raise VerificationError(
                    f"expected {name} of the parsed network to equal ONNX Runtime's, found {share:.0%} equal; "
                    "do not use this engine, export the bundle again"
                )


def reference_session(model: onnx.ModelProto, folder: Path) -> Any:
    """ONNX Runtime on the CPU, for a graph in memory whose weights lie in `folder`; bfloat16 is refused."""
    try:
        import onnxruntime
    except ImportError:
        raise MachineError("expected ONNX Runtime to verify with, found none; install `csd-toolkit[cpu]`") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def verify_step(
    parsed: Parsed, reference: Any, sizes: StepSizes, *, window: int, prompt: int, image_tokens: int, rows: int = 2
) -> Agreement:
    """Run a sequence of windows on both and compare every output.

    Args:
        parsed: the network, with the reference's inputs and outputs; caches may be of another float type.
        reference: an ONNX Runtime session.
        sizes: of the step.
        window: W.
        prompt: width of the first pass.
        image_tokens: tokens of a picture.
        rows: R.
    """
    generator = np.random.default_rng(0)
    graph = {value.name: value.type.tensor_type for value in parsed.model.graph.input}
    capacity = graph["key_0"].shape.dim[2].dim_value
    names = cache_names(sizes.layers)
    dtype = helper.tensor_dtype_to_np_dtype(graph["key_0"].elem_type)
    expected_dtype = next(i.type for i in reference.get_inputs() if i.name == "key_0")
    caches = {name: np.zeros((rows, sizes.key_value_heads, capacity, sizes.head_size), np.float32) for name in names}
    ours = {name: cache.astype(dtype) for name, cache in caches.items()}
    theirs = {
        name: cache.astype(np.float16 if expected_dtype == "tensor(float16)" else np.float32)
        for name, cache in caches.items()
    }
    agreement = Agreement()
    length = np.zeros(rows, np.int64)
    room = capacity - max(prompt, window)
    for number, width in enumerate((prompt, window, 1, window, max(window // 2, 1))):
        given = _inputs(graph, sizes, rows, width, image_tokens, generator)
        given["length"] = length
        found = interpret(parsed, {**given, **ours})
        outputs = [output.name for output in reference.get_outputs()]
        wanted = dict(zip(outputs, reference.run(outputs, {**given, **theirs}), strict=True))
        for name in outputs:
            if name.removeprefix("next_") in ours:
                ours[name.removeprefix("next_")] = found[name]
                theirs[name.removeprefix("next_")] = wanted[name]
            if name != "next_ids":  # drafts of positions no pass has seen follow the drawn tokens
                agreement.add(name, found[name], wanted[name])
        # ragged: every row keeps another share of what was fed; the fourth pass is rolled back further
        kept = generator.integers(1, width + 1, rows)
        length = np.clip(length + kept - (3 if number == 2 else 0), 1, room)
    return agreement


def verify_image_decoder(parsed: Parsed, reference: Any, precision: str) -> int:
    """The largest difference of a pixel, of 255; VerificationError when it is more than the precision explains."""
    shape = parsed.model.graph.input[0].type.tensor_type.shape.dim
    weights = {tensor.name: tensor.dims for tensor in parsed.model.graph.initializer}
    table = next(node for node in parsed.model.graph.node if node.op_type == "Gather" and node.input[0] in weights)
    codes = np.random.default_rng(0).integers(0, weights[table.input[0]][0], (1, shape[1].dim_value))
    name, result = parsed.model.graph.input[0].name, parsed.model.graph.output[0].name
    found = interpret(parsed, {name: codes})[result]
    (expected,) = reference.run([result], {name: codes})
    worst = int(np.abs(found.astype(int) - expected.astype(int)).max())
    if worst > LEVELS[precision]:
        raise VerificationError(
            f"expected pixels of the parsed image decoder within {LEVELS[precision]} of ONNX Runtime's, found {worst}; "
            "do not use this engine, export the bundle again"
        )
    return worst


def _inputs(
    graph: dict[str, Any], sizes: StepSizes, rows: int, width: int, image_tokens: int, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    """Random state and controls, as far as the graph asks for them."""
    batch = max(rows // 2, 1)
    given: dict[str, np.ndarray] = {"ids": generator.integers(0, sizes.image_vocabulary, (rows, width))}
    known = {"R": rows, "B": batch, "G": rows // batch, "W": width, "T": image_tokens + width, "N": 1}
    known |= {"V": sizes.image_vocabulary, "C": sizes.columns}
    for name, kind in graph.items():
        if name in given or name == "length" or name.startswith(("key_", "value_")):
            continue
        shape = [
            dim.dim_value if dim.HasField("dim_value") else evaluate(dim.dim_param, known) for dim in kind.shape.dim
        ]
        if name == "gumbel" and shape[-1] == 1:
            shape[-1] = sizes.image_vocabulary
        if name == "kind":
            given[name] = np.full(shape, Kind.DRAFTED, np.int64)
            given[name][:, -1] = Kind.ABSENT
        elif name in ("draft_probs", "history_probs"):
            given[name] = generator.dirichlet(np.ones(shape[-1]), shape[:-1]).astype(np.float32)
        elif name == "uniforms":
            given[name] = generator.uniform(0.01, 0.99, shape).astype(np.float32)
        elif name == "gumbel":
            given[name] = generator.gumbel(size=shape).astype(np.float32)
        elif name == "guidance":
            given[name] = np.array([1.0] if shape[0] == 1 else [2.0, -1.0], np.float32)
        elif name == "grammar":
            given[name] = np.full(shape, -1, np.int64)
        elif kind.elem_type == TensorProto.INT64:
            given[name] = np.zeros(shape, np.int64)
        else:
            raise InputError(f"expected an input of the step's contract, found {name}")
    if "draft_probs" in given:
        given["draft_probs"][:, -1] = 0
    return given


assert set(TOLERANCE) == set(SAME) == set(LEVELS) == set(PRECISIONS)
