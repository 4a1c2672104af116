"""The tail with fixed settings equals the reference: what a TensorRT engine without plugins may run."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from csd_ops.contract import Coupling, Fresh, Settings
from csd_ops.rules import RULES
from csd_ops.specialise import specialised_tail
from tests.csd_ops.backends import compare
from tests.csd_ops.cases import Case, generate


def run(case: Case, model: onnx.ModelProto) -> dict[str, np.ndarray]:
    inputs = {value.name for value in model.graph.input}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    given = {name: array for name, array in case.inputs().items() if name in inputs}
    return dict(zip(names, session.run(names, given), strict=True))


@pytest.mark.parametrize("coupling", Coupling)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_coupling(rule: str, coupling: Coupling) -> None:
    fresh = list(Fresh)[(list(RULES).index(rule) + 2 * coupling) % len(Fresh)]
    for seed, (top_k, top_p) in enumerate([(0, 1.0), (5, 0.8)]):
        settings = Settings(top_k=top_k, top_p=top_p, coupling=coupling, fresh=fresh, **RULES[rule]().settings())
        case = generate(seed, settings, vocabulary=40, window=6, forced={2: 45, 7: 41})
        model = specialised_tail(40, 3, case.codes, settings)
        assert not {"If", "Loop"} & {node.op_type for node in model.graph.node}
        assert "settings" not in {value.name for value in model.graph.input}
        compare(lambda given, model=model: run(given, model), case)  # type: ignore[misc]
