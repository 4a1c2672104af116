"""What every backend of verification and window logic must do, on generated cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from csd_ops.contract import Coupling, Fresh, Kind, Settings
from csd_ops.rules import Addition, Amplify, Cool, Csd, Entropy, Gsd, Jacobi, Rule, Sjd
from tests.csd_ops.cases import Case, advance_reference, check, generate

Backend = Callable[[Case], dict[str, np.ndarray]]  # all outputs of csd::Verify and csd::Advance

RULES = st.one_of(
    st.just(Sjd()),
    st.just(Jacobi()),
    st.builds(Amplify, st.floats(1, 5)),
    st.builds(Addition, st.floats(0, 1)),
    st.builds(Entropy, st.floats(0, 1)),
    # a threshold of 1 on a distance that rounds to 1 has no answer of its own in float32: |1 - 1e-10| is 1
    st.builds(Csd, st.floats(0, 2), st.floats(0, 0.99)),
    st.builds(Cool, st.floats(0.3, 2), st.floats(0, 1)),
    st.builds(Gsd, st.sampled_from([1, 3, 5, 25]), st.floats(0.01, 0.99), st.sampled_from([0.5, 2.0, math.inf])),
)


@st.composite
def cases(draw: Any) -> Case:
    """Every rule, coupling, fresh law, truncation, guidance and shape."""
    rule: Rule = draw(RULES)
    images, window, vocabulary = draw(st.sampled_from([(1, 1, 3), (2, 1, 7), (1, 2, 5), (3, 6, 33), (2, 17, 100)]))
    settings = Settings(
        temperature=draw(st.floats(0.3, 2)),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 99])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.3, 0.8])),
        coupling=draw(st.sampled_from(Coupling)),
        fresh=draw(st.sampled_from(Fresh)),
        relax_fresh=float(draw(st.booleans())),
        floor=draw(st.sampled_from([0.0, 0.0, 1e-10])),
        **rule.settings(),
    )
    return generate(
        draw(st.integers(0, 2**31)),
        settings,
        images=images,
        window=window,
        vocabulary=vocabulary,
        columns=draw(st.sampled_from([1, 3])),
        guidance=draw(st.sampled_from([None, 1.5, 5.0])),
        forced={2: vocabulary + 3, 7: vocabulary + 1},
    )


def compare(run: Backend, case: Case) -> dict[str, np.ndarray]:
    """Both functions against the reference; the window logic on the decisions that the backend made."""
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


def base_case(**changes: object) -> Case:
    """An ordinary window."""
    return generate(5, Settings(**changes))  # type: ignore[arg-type]


def with_state(case: Case, **changes: np.ndarray) -> Case:
    """The case with other parts of the state."""
    return replace(case, state=replace(case.state, **changes))


def set_middle(case: Case) -> Case:
    """All images at position 3, every slot but the last a model draft."""
    kind = np.full_like(case.state.kind, Kind.DRAFTED)
    kind[:, -1] = Kind.ABSENT
    p = case.state.draft_probs.copy()
    p[p.sum(-1) == 0] = 1.0 / p.shape[-1]
    p[:, -1] = 0
    return with_state(case, kind=kind, position=np.full_like(case.state.position, 3), draft_probs=p)


def q_of_the_draft_is_zero(run: Backend) -> None:
    case = set_middle(base_case(top_k=1))
    verified = case.verify()
    worst = np.argmin(verified.q, axis=-1)
    ids = np.tile(np.concatenate([worst[:, :1], worst[:, :-1]], axis=1), (2, 1))
    got = compare(run, with_state(case, ids=ids))
    assert not got["accept"].any() and (got["committed"] == 1).all()


def p_equals_q_accepts_everything(run: Backend) -> None:
    case = set_middle(base_case())
    p = case.verify().q.copy()
    p[:, -1] = 0
    got = compare(run, with_state(case, draft_probs=p))
    assert got["accept"][:, :-1].all() and not got["accept"][:, -1].any()
    assert (got["committed"] == case.logits.shape[1]).all(), "all accepted: the window and one sampled token"
    assert np.abs(got["measures"][..., 1]).max() < 1e-6


def one_hot_rows_and_empty_residual(run: Backend) -> None:
    case = set_middle(base_case(top_k=1))
    best = np.argmax(case.verify().q, axis=-1)
    p = np.eye(case.logits.shape[-1])[best]
    p[:, -1] = 0
    ids = np.tile(np.concatenate([best[:, :1], best[:, :-1]], axis=1), (2, 1))
    got = compare(run, with_state(case, draft_probs=p, ids=ids))
    assert got["accept"][:, :-1].all()
    np.testing.assert_array_equal(got["final"], best)  # relu(q - p) is empty: q itself


def none_accepted_commits_one_token(run: Backend) -> None:
    case = set_middle(base_case())
    high = case.uniforms.copy()
    high[..., 0] = 1 - 2**-23
    p = np.eye(case.logits.shape[-1])[case.drafts]
    p[:, -1] = 0
    got = compare(run, replace(with_state(case, draft_probs=p), uniforms=high))
    assert (got["committed"] == 1).all()


def window_of_one_samples_the_target_law(run: Backend) -> None:
    got = compare(run, generate(3, Settings(), window=1, tokens=12))
    assert not got["accept"].any()


def finished_image_stays_as_it_is(run: Backend) -> None:
    case = base_case()
    position = np.full_like(case.state.position, 12)
    kind = np.zeros_like(case.state.kind)
    got = compare(
        run, with_state(case, position=position, kind=kind, draft_probs=np.zeros_like(case.state.draft_probs))
    )
    assert (got["committed"] == 0).all()
    np.testing.assert_array_equal(got["next_length"], case.state.length)
    np.testing.assert_array_equal(got["next_ids"][:, 0], case.state.ids[:, 0])


EXTREMES: tuple[Callable[[Backend], None], ...] = (
    q_of_the_draft_is_zero,
    p_equals_q_accepts_everything,
    one_hot_rows_and_empty_residual,
    none_accepted_commits_one_token,
    window_of_one_samples_the_target_law,
    finished_image_stays_as_it_is,
)
