"""The ONNX functions csd::Verify and csd::Advance equal the float64 reference on generated cases."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from csd_ops.contract import Settings
from csd_ops.onnx_function import tail_model
from csd_ops.rules import Csd
from tests.csd_ops.backends import EXTREMES, Backend, base_case, cases, compare, set_middle
from tests.csd_ops.cases import Case, check, generate


@functools.cache
def session(vocabulary: int, columns: int, codes: bytes) -> onnxruntime.InferenceSession:
    table = np.frombuffer(codes, np.float32).reshape(vocabulary, -1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = tail_model(vocabulary, columns, table).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(case: Case) -> dict[str, np.ndarray]:
    vocabulary, columns = case.logits.shape[-1], case.state.history_ids.shape[1]
    engine = session(vocabulary, columns, case.codes.tobytes())
    names = [output.name for output in engine.get_outputs()]
    return dict(zip(names, engine.run(names, case.inputs()), strict=True))


@hypothesis_settings(max_examples=400, deadline=None)
@given(case=cases())
def test_every_rule_coupling_and_fresh_law(case: Case) -> None:
    compare(run, case)


@pytest.mark.parametrize("extreme", EXTREMES, ids=lambda extreme: extreme.__name__)
def test_extremes(extreme: Callable[[Backend], None]) -> None:
    extreme(run)


@pytest.mark.parametrize("vocabulary", [1000, 1024])
def test_large_vocabulary(vocabulary: int) -> None:
    settings = Settings(top_k=50, **Csd().settings())
    compare(run, generate(1, settings, window=16, vocabulary=vocabulary, columns=16, tokens=64))


def test_comparison_notices_a_wrong_backend() -> None:
    case = set_middle(base_case())
    got = run(case)
    got["q"] = got["q"][..., ::-1]
    with pytest.raises(AssertionError):
        check(case, got)
    got = run(case)
    got["accept"] = ~got["accept"]
    with pytest.raises(AssertionError):
        check(case, got)
