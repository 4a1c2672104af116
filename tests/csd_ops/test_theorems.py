"""The theorems behind the rules, on random laws, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from csd_ops import reference
from csd_ops.contract import Coupling, Kind, Settings
from csd_ops.errors import InputError
from csd_ops.rules import RULES, Addition, Amplify, Cool, Csd, Entropy, Gsd, Jacobi, Rule, Sjd
from tests.csd_ops.cases import generate, uniforms

SLOT = np.zeros(1)
RELAX = np.ones((1, 1), bool)


def laws(generator: np.random.Generator, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """A pair of laws [1, 1, V], sharp or flat, sometimes with zeros."""
    concentration = generator.choice([0.1, 1.0, 10.0])
    p, q = generator.dirichlet(np.full(vocabulary, concentration), 2)
    if generator.random() < 0.3:
        q[generator.integers(vocabulary)] = 0
        q /= q.sum()
    return p[None, None], q[None, None]


def output_law(p: np.ndarray, q: np.ndarray, b: np.ndarray, residual: np.ndarray) -> np.ndarray:
    left = residual / residual.sum()
    return b * p + ((1 - b) * p).sum() * left


def test_no_resampling_law_beats_the_residual() -> None:
    """Theorem 3.1 of arXiv 2606.27829: minimise TV(b p + R r, q) over laws r by linear programming."""
    generator = np.random.default_rng(0)
    for _ in range(60):
        size = int(generator.integers(2, 9))
        p, q = (law[0, 0] for law in laws(generator, size))
        exact = np.minimum(1.0, np.divide(q, p, out=np.ones(size), where=p > 0))
        b = exact + (1 - exact) * generator.random(size) * (generator.random(size) < 0.7)
        rejected = ((1 - b) * p).sum()
        # variables r[size], t[size]: minimise sum t / 2, t >= |b p + R r - q|, sum r = 1, r >= 0
        identity = np.eye(size)
        upper = np.block([[rejected * identity, -identity], [-rejected * identity, -identity]])
        bound = np.concatenate([q - b * p, b * p - q])
        best = linprog(
            np.concatenate([np.zeros(size), np.full(size, 0.5)]),
            A_ub=upper,
            b_ub=bound,
            A_eq=np.concatenate([np.ones(size), np.zeros(size)])[None],
            b_eq=[1.0],
        )
        assert best.success
        residual = reference.residual(q, p, b)
        ours = reference.total_variation(output_law(p, q, b, residual), q)
        assert ours <= best.fun + 1e-9
        assert reference.total_variation(output_law(p, q, b, q), q) >= best.fun - 1e-9  # another law: no better


@pytest.mark.parametrize(
    "rule",
    [Sjd(), Amplify(1.3), Amplify(4), Addition(0.1), Addition(0.4), Entropy(0.02), Csd(0.5, 0.65), Csd(2, 1)],
)
def test_rejection_and_distortion_sum_to_the_total_variation(rule: Rule) -> None:
    """Theorem 3.2: P(reject) + TV(output, q) = TV(p, q), for every rule with b >= min(1, q/p)."""
    generator = np.random.default_rng(1)
    for _ in range(300):
        p, q = laws(generator, int(generator.integers(2, 40)))
        settings = Settings(**rule.settings())
        b = reference.acceptance(p, q, SLOT, RELAX, settings, np.zeros((p.shape[-1], 1)))
        output = output_law(p, q, b, reference.residual(q, p, b))
        rejected = ((1 - b) * p).sum()
        between = reference.total_variation(p, q)[0, 0]
        assert abs(rejected + reference.total_variation(output, q)[0, 0] - between) < 1e-12
        assert abs(output.sum() - 1) < 1e-12


def test_the_identity_fails_for_a_wrong_residual() -> None:
    generator = np.random.default_rng(1)
    p, q = laws(generator, 12)
    b = reference.acceptance(p, q, SLOT, RELAX, Settings(epsilon=0.2), np.zeros((12, 1)))
    wrong = output_law(p, q, b, q)
    rejected = ((1 - b) * p).sum()
    assert rejected + reference.total_variation(wrong, q) > reference.total_variation(p, q) + 1e-3


@pytest.mark.parametrize(
    "rule", [Sjd(), Cool(0.5, 0.0), Cool(1.0, 0.7), Amplify(1), Addition(0), Entropy(0), Csd(0.5, 0)]
)
def test_neutral_settings_reproduce_the_target_law(rule: Rule) -> None:
    generator = np.random.default_rng(2)
    for _ in range(100):
        p, q = laws(generator, 9)
        slot = np.array([float(generator.integers(0, 16))])
        b = reference.acceptance(p, q, slot, RELAX, Settings(**rule.settings()), np.zeros((9, 1)))
        np.testing.assert_allclose(output_law(p, q, b, reference.residual(q, p, b)), q, atol=1e-12)


@pytest.mark.parametrize("delta", [0.1, 0.35, 0.65])
def test_distortion_stays_below_delta(delta: float) -> None:
    """A relaxed position costs at most TV(p, q), and only positions with TV < delta are relaxed."""
    relaxed = 0
    for seed in range(40):
        case = generate(seed, Settings(**Csd(2.0, delta).settings()), images=4, window=9, vocabulary=20)
        measures = case.verify().measures
        assert (measures[..., 3] < delta).all()
        relaxed += int((measures[..., 3] > 1e-9).sum())
    assert relaxed > 50


@pytest.mark.parametrize("coupling", list(Coupling))
@pytest.mark.parametrize("rule", [Sjd(), Jacobi(), Csd(0.5, 0.65), Gsd(5, 0.3)])
def test_measured_distortion_and_redrafts_match_simulation(rule: Rule, coupling: Coupling) -> None:
    """One slot drawn many times: the output law's TV is the reported one, and redrafts follow q exactly."""
    draws, vocabulary = 20_000 if isinstance(rule, Gsd) else 200_000, 6  # GSD's reference is a loop
    generator = np.random.default_rng(3)
    p, q = (law[0, 0] for law in laws(generator, vocabulary))
    shape = (draws, 1)
    x = generator.choice(vocabulary, size=shape, p=p)
    gumbel = generator.gumbel(size=(*shape, vocabulary))
    if coupling == Coupling.GUMBEL:  # the draft was drawn with the noise of its position
        x = np.argmax(np.log(p) + gumbel, axis=-1)
    settings = Settings(coupling=coupling, **rule.settings())
    verified = reference.verify(
        np.broadcast_to(np.log(np.maximum(q, 1e-300)), (*shape, vocabulary)),
        x,
        np.full(shape, Kind.DRAFTED),
        np.broadcast_to(p, (*shape, vocabulary)),
        uniforms(generator, (*shape, 3)).astype(float),
        gumbel,
        np.ones(1),
        settings,
        np.zeros((vocabulary, 1)),
    )
    token = np.where(verified.accept, x, verified.replacement)[:, 0]
    noise = 1.5 * np.sqrt(vocabulary / draws)
    output = np.bincount(token, minlength=vocabulary) / draws
    assert abs(reference.total_variation(output, q) - verified.measures[:, 0, 3].mean()) < noise
    redrawn = np.bincount(verified.redraft[:, 0], minlength=vocabulary) / draws
    assert reference.total_variation(redrawn, q) < noise
    if coupling != Coupling.INDEPENDENT and not isinstance(rule, Jacobi):
        between = reference.total_variation(p, q)
        collision = (verified.redraft == x).mean()
        least = 1 - between if coupling == Coupling.MAXIMAL else (1 - between) / (1 + between)
        assert collision >= least - noise


def test_parameters_out_of_range_are_refused() -> None:
    for rule, value in (
        (Csd, {"delta": 1.2}),
        (Csd, {"lambda_": -1}),
        (Amplify, {"k": 0.5}),
        (Addition, {"epsilon": np.nan}),
    ):
        with pytest.raises(InputError, match="expected"):
            rule(**value)
    assert set(RULES) == {"sjd", "jacobi", "amplify", "addition", "entropy", "csd", "cool", "gsd"}
