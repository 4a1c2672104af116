"""Generated cases for verification and window logic, and the comparison every backend must pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from csd_ops import reference
from csd_ops.contract import Coupling, Form, Fresh, Kind, Settings, grammar_table


@dataclass(frozen=True)
class Case:
    """One window in the middle of a picture, as float32 and int64 arrays."""

    settings: Settings
    guidance: np.ndarray
    logits: np.ndarray
    state: reference.State
    uniforms: np.ndarray
    gumbel: np.ndarray
    grammar: np.ndarray
    codes: np.ndarray

    @property
    def drafts(self) -> np.ndarray:
        images = len(self.state.position)
        return np.concatenate([self.state.ids[:images, 1:], np.zeros((images, 1), np.int64)], axis=1)

    def inputs(self) -> dict[str, np.ndarray]:
        """As the graph's inputs."""
        state = {name: value for name, value in vars(self.state).items()}
        floats = ("draft_probs", "history_probs")
        return {
            **{name: value.astype(np.float32) if name in floats else value for name, value in state.items()},
            "logits": self.logits,
            "uniforms": self.uniforms,
            "gumbel": self.gumbel,
            "guidance": self.guidance,
            "settings": self.settings.vector(),
            "grammar": self.grammar,
        }

    def verify(self) -> reference.Verified:
        state = self.state
        return reference.verify(
            self.logits.astype(np.float64),
            self.drafts,
            state.kind,
            state.draft_probs.astype(np.float32).astype(np.float64),
            self.uniforms.astype(np.float64),
            self.gumbel.astype(np.float64),
            self.guidance.astype(np.float64),
            float32(self.settings),
            self.codes.astype(np.float64),
        )


def float32(settings: Settings) -> Settings:
    """The settings as the vector carries them."""
    names = list(vars(settings))
    return Settings(**dict(zip(names, settings.vector().astype(np.float64).tolist(), strict=True)))


def uniforms(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """In [2^-23, 1 - 2^-23], as the contract says."""
    return ((generator.integers(0, 2**22, shape) + 0.5) / 2**22).astype(np.float32)


def generate(
    seed: int,
    settings: Settings,
    *,
    images: int = 2,
    window: int = 5,
    vocabulary: int = 7,
    columns: int = 3,
    tokens: int = 12,
    guidance: float | None = 3.0,
    spread: float = 2.0,
    closeness: float = 0.5,
    forced: dict[int, int] | None = None,
) -> Case:
    """A random but consistent case: drafts drawn from their laws, which lie near the target laws."""
    generator = np.random.default_rng(seed)
    rows = 1 if guidance is None else 2
    logits = generator.normal(0, spread, (rows * images, window, vocabulary)).astype(np.float32)
    weights = np.array([1.0] if guidance is None else [guidance, 1 - guidance], np.float32)
    target = reference.target_law(logits.astype(float), weights.astype(float), settings)
    noise = generator.dirichlet(np.ones(vocabulary), (images, window))
    mix = generator.choice([0.0, closeness, 1.0], (images, window, 1))
    p = (1 - mix) * target + mix * noise
    position = generator.integers(0, tokens + 1, images)
    grammar = grammar_table(forced or {}, tokens, window)
    kind = np.zeros((images, window), np.int64)
    ids = generator.integers(0, vocabulary, (images, window))
    for image, slot in np.ndindex(images, window):
        rule = grammar[position[image] + slot]
        kind[image, slot] = generator.choice([Kind.FRESH, Kind.DRAFTED, Kind.DRAFTED])
        if rule >= 0:
            kind[image, slot] = Kind.FORCED
        elif rule == -2 or slot == window - 1:
            kind[image, slot] = Kind.ABSENT
        if kind[image, slot] < Kind.FRESH:
            p[image, slot] = 0
        elif generator.random() < 0.2:
            p[image, slot] = np.eye(vocabulary)[generator.integers(vocabulary)]
        if slot + 1 < window:
            mass = p[image, slot] if p[image, slot].sum() else np.ones(vocabulary)
            ids[image, slot + 1] = rule if rule >= 0 else generator.choice(vocabulary, p=mass / mass.sum())
    gumbel_shape = (images, window, vocabulary if settings.coupling == Coupling.GUMBEL else 1)
    state = reference.State(
        ids=np.tile(ids, (rows, 1)),
        length=np.tile(position, rows) + generator.integers(1, 9),
        position=position,
        kind=kind,
        draft_probs=p,
        history_probs=generator.dirichlet(np.ones(vocabulary), (images, columns)),
        history_ids=generator.integers(0, vocabulary, (images, columns)),
    )
    return Case(
        settings,
        weights,
        logits,
        state,
        uniforms(generator, (images, window, 3)),
        generator.gumbel(size=gumbel_shape).astype(np.float32),
        grammar,
        generator.normal(size=(vocabulary, 2)).astype(np.float32),
    )


def _cdf_agrees(mass: np.ndarray, uniform: np.ndarray, token: np.ndarray, tolerance: float) -> np.ndarray:
    """Whether `token` is where the running sum crosses uniform * total, up to rounding."""
    running = np.cumsum(mass, axis=-1) / mass.sum(axis=-1, keepdims=True)
    high = np.take_along_axis(running, token[..., None], -1)[..., 0]
    low = high - np.take_along_axis(mass / mass.sum(axis=-1, keepdims=True), token[..., None], -1)[..., 0]
    return (low - tolerance <= uniform) & (uniform <= high + tolerance)


def check(case: Case, got: dict[str, np.ndarray], tolerance: float = 2e-5) -> None:
    """Compare a backend's outputs with the reference: values within rounding, decisions equal away from ties."""
    expected = case.verify()
    settings = float32(case.settings)
    target = expected.q
    np.testing.assert_allclose(got["q"], target, atol=tolerance)
    scale = np.array([1, 1, 1, 1, 1e3, 1e3])  # surprises of unlikely tokens are large
    likely = np.exp(-expected.measures[..., 4:]) > 1e-4
    measured, wanted = got["measures"].astype(float).copy(), expected.measures.copy()
    same_final = got["final"] == expected.replacement
    measured[..., 4:][~likely] = wanted[..., 4:][~likely] = 0
    measured[..., 5][~same_final] = wanted[..., 5][~same_final] = 0
    np.testing.assert_allclose(measured / scale, wanted / scale, atol=10 * tolerance)
    kind, u = case.state.kind, case.uniforms.astype(float)
    real = kind >= Kind.FRESH
    q = np.maximum(target, settings.floor)
    p32 = case.state.draft_probs.astype(np.float32).astype(float)
    p = np.where(real[..., None], np.maximum(p32, settings.floor), 0.0)
    if settings.form != Form.JACOBI:
        margin = np.abs(u[..., 0] - expected.measures[..., 2])
        clear = (margin > 10 * tolerance) | ~real
        np.testing.assert_array_equal(got["accept"][clear], expected.accept[clear])
        assert clear.mean() > 0.9
    else:
        np.testing.assert_array_equal(got["accept"], (real & (got["redraft"] == case.drafts)) | (kind == Kind.FORCED))
    decided = kind != Kind.FORCED  # a forced slot's draws are never used
    differs = (got["final"] != expected.replacement) & decided
    if differs.any():
        relax = (kind == Kind.DRAFTED) | ((kind == Kind.FRESH) & (settings.relax_fresh > 0))
        b = reference.acceptance(p, q, np.arange(q.shape[1], dtype=float), relax, settings, case.codes.astype(float))
        mass = reference.residual(q, p, np.ones_like(q) if settings.form == Form.GROUP else b)
        mass = target if settings.form == Form.JACOBI else mass
        near = _cdf_agrees(mass, u[..., 1], got["final"], 10 * tolerance / np.maximum(mass.sum(-1), 1e-4))
        never = real & (np.maximum(q - p * b, 0).sum(-1) < tolerance)  # p = q up to rounding: never rejected
        assert (near | never)[differs].all() or settings.coupling == Coupling.GUMBEL
    same = (got["redraft"] == expected.redraft) | ~decided
    assert same.mean() >= (0.9 if same.size >= 10 else 0.5), "more redrafts differ than rounding explains"


def advance_reference(case: Case, got: dict[str, np.ndarray]) -> tuple[reference.State, np.ndarray, np.ndarray]:
    """The reference's window logic on the decisions a backend made."""
    verified = reference.Verified(
        got["q"].astype(float), got["accept"], got["final"], got["redraft"], got["measures"].astype(float)
    )
    state = replace(case.state, history_probs=case.state.history_probs.astype(np.float32).astype(float))
    return reference.advance(state, verified, case.uniforms.astype(float), case.grammar, float32(case.settings))


ALL_FRESH = list(Fresh)
