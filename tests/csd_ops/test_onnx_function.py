"""The ONNX functions csd::Verify and csd::Advance equal the float64 reference on generated cases."""

from __future__ import annotations

import functools
import math

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from csd_ops.contract import Coupling, Fresh, Kind, Settings
from csd_ops.onnx_function import tail_model
from csd_ops.rules import Addition, Amplify, Cool, Csd, Entropy, Gsd, Jacobi, Rule, Sjd
from tests.csd_ops.cases import Case, advance_reference, check, generate


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


def compare(case: Case) -> dict[str, np.ndarray]:
    got = run(case)
    check(case, got)
    state, committed, tokens = advance_reference(case, got)
    np.testing.assert_array_equal(got["committed"], committed)
    np.testing.assert_array_equal(got["tokens"], tokens)
    for name, value in vars(state).items():
        if name == "ids":
            same = got["next_ids"] == value
            assert same.mean() > (0.99 if case.settings.fresh < Fresh.LAW_LEFT else 0.8)
        else:
            np.testing.assert_allclose(got[f"next_{name}"], value, atol=1e-6, err_msg=name)
    return got


RULES = st.one_of(
    st.just(Sjd()),
    st.just(Jacobi()),
    st.builds(Amplify, st.floats(1, 5)),
    st.builds(Addition, st.floats(0, 1)),
    st.builds(Entropy, st.floats(0, 1)),
    st.builds(Csd, st.floats(0, 2), st.floats(0, 1)),
    st.builds(Cool, st.floats(0.3, 2), st.floats(0, 1)),
    st.builds(Gsd, st.sampled_from([1, 3, 5, 25]), st.floats(0.01, 1), st.sampled_from([0.5, 2.0, math.inf])),
)


@hypothesis_settings(max_examples=400, deadline=None)
@given(
    rule=RULES,
    coupling=st.sampled_from(Coupling),
    fresh=st.sampled_from(Fresh),
    relax_fresh=st.booleans(),
    floor=st.sampled_from([0.0, 0.0, 1e-10]),
    temperature=st.floats(0.3, 2),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.8]),
    guidance=st.sampled_from([None, 1.5, 5.0]),
    shape=st.sampled_from([(1, 1, 3), (2, 1, 7), (1, 2, 5), (3, 6, 33), (2, 17, 100)]),
    columns=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**31),
)
def test_every_rule_coupling_and_fresh_law(
    rule: Rule,
    coupling: Coupling,
    fresh: Fresh,
    relax_fresh: bool,
    floor: float,
    temperature: float,
    top_k: int,
    top_p: float,
    guidance: float | None,
    shape: tuple[int, int, int],
    columns: int,
    seed: int,
) -> None:
    images, window, vocabulary = shape
    settings = Settings(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        coupling=coupling,
        fresh=fresh,
        relax_fresh=float(relax_fresh),
        floor=floor,
        **rule.settings(),
    )
    compare(
        generate(
            seed,
            settings,
            images=images,
            window=window,
            vocabulary=vocabulary,
            columns=columns,
            guidance=guidance,
            forced={2: vocabulary + 3, 7: vocabulary + 1},
        )
    )


def base_case(**changes: object) -> Case:
    return generate(5, Settings(**changes))  # type: ignore[arg-type]


def with_state(case: Case, **changes: np.ndarray) -> Case:
    from dataclasses import replace

    return replace(case, state=replace(case.state, **changes))


def set_middle(case: Case) -> Case:
    """All images at position 3, every slot but the last a model draft."""
    kind = np.full_like(case.state.kind, Kind.DRAFTED)
    kind[:, -1] = Kind.ABSENT
    p = case.state.draft_probs.copy()
    p[p.sum(-1) == 0] = 1.0 / p.shape[-1]
    p[:, -1] = 0
    return with_state(case, kind=kind, position=np.full_like(case.state.position, 3), draft_probs=p)


def test_q_of_the_draft_is_zero() -> None:
    case = set_middle(base_case(top_k=1))
    verified = case.verify()
    worst = np.argmin(verified.q, axis=-1)
    ids = np.tile(np.concatenate([worst[:, :1], worst[:, :-1]], axis=1), (2, 1))
    got = compare(with_state(case, ids=ids))
    assert not got["accept"].any() and (got["committed"] == 1).all()


def test_p_equals_q_accepts_everything() -> None:
    case = set_middle(base_case())
    p = case.verify().q.copy()
    p[:, -1] = 0
    got = compare(with_state(case, draft_probs=p))
    assert got["accept"][:, :-1].all() and not got["accept"][:, -1].any()
    assert (got["committed"] == case.logits.shape[1]).all(), "all accepted: the window and one sampled token"
    assert np.abs(got["measures"][..., 1]).max() < 1e-6


def test_one_hot_rows_and_empty_residual() -> None:
    case = set_middle(base_case(top_k=1))
    best = np.argmax(case.verify().q, axis=-1)
    p = np.eye(case.logits.shape[-1])[best]
    p[:, -1] = 0
    ids = np.tile(np.concatenate([best[:, :1], best[:, :-1]], axis=1), (2, 1))
    got = compare(with_state(case, draft_probs=p, ids=ids))
    assert got["accept"][:, :-1].all()
    np.testing.assert_array_equal(got["final"], best)  # relu(q - p) is empty: q itself


def test_none_accepted_commits_one_token() -> None:
    case = set_middle(base_case())
    high = case.uniforms.copy()
    high[..., 0] = 1 - 2**-23
    p = np.eye(case.logits.shape[-1])[case.drafts]
    p[:, -1] = 0
    from dataclasses import replace

    got = compare(replace(with_state(case, draft_probs=p), uniforms=high))
    assert (got["committed"] == 1).all()


def test_window_of_one_samples_the_target_law() -> None:
    got = compare(generate(3, Settings(), window=1, tokens=12))
    assert not got["accept"].any()


def test_finished_image_stays_as_it_is() -> None:
    case = base_case()
    position = np.full_like(case.state.position, 12)
    kind = np.zeros_like(case.state.kind)
    got = compare(with_state(case, position=position, kind=kind, draft_probs=np.zeros_like(case.state.draft_probs)))
    assert (got["committed"] == 0).all()
    np.testing.assert_array_equal(got["next_length"], case.state.length)
    np.testing.assert_array_equal(got["next_ids"][:, 0], case.state.ids[:, 0])


@pytest.mark.parametrize("vocabulary", [1000, 1024])
def test_large_vocabulary(vocabulary: int) -> None:
    compare(
        generate(1, Settings(top_k=50, **Csd().settings()), window=16, vocabulary=vocabulary, columns=16, tokens=64)
    )


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
