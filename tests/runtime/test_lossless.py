"""Lossless presets draw from the model's own law: chi-square against enumeration; broken variants must fail."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from csd_ops import reference
from csd_ops.contract import Coupling, Fresh, Settings
from csd_ops.rules import Addition, Amplify, Cool, Csd, Entropy, Gsd, Jacobi, Rule, Sjd
from runtime import ImageModel
from runtime.decoder import Decoder, Request, Setup, Start
from runtime.host_loop import HostLoop

SAMPLES = 100_000
BATCH = 2_000
GUIDANCE = 2.0
WINDOW = 3
PROMPT = "red apple"
REJECT = 1e-4  # significance: chance of a false alarm per test


@pytest.fixture(scope="module")
def prompt_rows(toy: ImageModel) -> tuple[np.ndarray, ...]:
    return toy._encoder.encode(PROMPT)


def exact_law(checkpoint: Path, rows: tuple[np.ndarray, ...], settings: Settings, guidance: float | None) -> np.ndarray:
    """Probability of each of the V^N pictures under the checkpoint in PyTorch, float64 after the logits."""
    from transformers import JanusForConditionalGeneration

    model = JanusForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    inner, vocabulary = model.model, model.model.generation_embeddings.num_embeddings
    tokens = inner.vqmodel.config.num_patches**2
    pictures = torch.tensor(list(itertools.product(range(vocabulary), repeat=tokens)))
    logits = []
    with torch.no_grad():
        for row in rows if guidance is not None else rows[:1]:
            text = torch.from_numpy(row - vocabulary).expand(len(pictures), -1)
            embedded = torch.cat(
                [
                    inner.language_model.embed_tokens(text),
                    model.prepare_embeddings_for_image_generation(pictures[:, :-1]),
                ],
                dim=1,
            )
            hidden = inner.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
            logits.append(inner.generation_head(hidden[:, len(row) - 1 :]).double().numpy())
    weights = np.array([1.0] if guidance is None else [guidance, 1 - guidance])
    q = reference.target_law(np.concatenate(logits), weights, settings)
    return np.take_along_axis(q, pictures.numpy()[..., None], -1)[..., 0].prod(axis=1)


def draw(
    model: ImageModel,
    rows: tuple[np.ndarray, ...],
    settings: Settings,
    guidance: float | None = GUIDANCE,
    samples: int = SAMPLES,
    spoil: type[HostLoop] = HostLoop,
    window: int = WINDOW,
) -> np.ndarray:
    """How often each picture was drawn."""
    manifest = model.bundle.manifest
    used = rows if guidance is not None else rows[:1]
    setup = Setup(manifest, settings, window, guidance, BATCH, len(rows[0]))
    decoder = Decoder(setup, spoil(model.backend.step, setup))
    decoded = decoder.decode([Request(used, seed) for seed in range(samples)])
    powers = manifest.image_vocabulary ** np.arange(manifest.image_tokens)[::-1]
    index = [int(entry.tokens @ powers) for entry in decoded]
    return np.bincount(index, minlength=manifest.image_vocabulary**manifest.image_tokens)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square, pictures expected fewer than ten times pooled."""
    expected = law * counts.sum()
    small = expected < 10
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    if wanted[-1] < 10:
        observed, wanted = (
            np.append(observed[:-2], observed[-2:].sum()),
            np.append(wanted[:-2], wanted[-2:].sum()),
        )
    return float(chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1))


LOSSLESS = [
    ("ar", Sjd(), Coupling.INDEPENDENT, Fresh.UNIFORM, {}, GUIDANCE, 1),
    *((f"sjd {c.name} {f.name}", Sjd(), c, f, {}, GUIDANCE, WINDOW) for c, f in zip(
        [*Coupling, *Coupling],
        [Fresh.UNIFORM, Fresh.LAW_ABOVE, Fresh.ONE_HOT, Fresh.COPY_ABOVE, Fresh.LAW_LEFT, Fresh.COPY_LEFT],
        strict=True)),
    ("jacobi", Jacobi(), Coupling.INDEPENDENT, Fresh.UNIFORM, {}, GUIDANCE, WINDOW),
    ("jacobi gumbel", Jacobi(), Coupling.GUMBEL, Fresh.UNIFORM, {}, GUIDANCE, WINDOW),
    ("amplify 1", Amplify(1), Coupling.MAXIMAL, Fresh.LAW_ABOVE, {}, GUIDANCE, WINDOW),
    ("addition 0, entropy 0", Addition(0), Coupling.INDEPENDENT, Fresh.LAW_LEFT, {}, GUIDANCE, WINDOW),
    ("entropy 0", Entropy(0), Coupling.GUMBEL, Fresh.ONE_HOT, {}, GUIDANCE, 4),
    ("csd delta 0", Csd(0.5, 0), Coupling.MAXIMAL, Fresh.UNIFORM, {}, GUIDANCE, 4),
    ("gsd of one", Gsd(1, 1.0), Coupling.INDEPENDENT, Fresh.UNIFORM, {}, GUIDANCE, WINDOW),
    ("cool below 1", Cool(0.8, 0.2), Coupling.MAXIMAL, Fresh.UNIFORM, {}, GUIDANCE, WINDOW),
    ("sjd top-k", Sjd(), Coupling.MAXIMAL, Fresh.LAW_ABOVE, {"top_k": 2}, GUIDANCE, WINDOW),
    ("sjd top-p", Sjd(), Coupling.INDEPENDENT, Fresh.UNIFORM, {"top_p": 0.9}, GUIDANCE, WINDOW),
    ("sjd without guidance", Sjd(), Coupling.MAXIMAL, Fresh.UNIFORM, {"temperature": 1.3}, None, WINDOW),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "coupling", "fresh", "truncation", "guidance", "window"),
    [c[1:] for c in LOSSLESS],
    ids=[c[0] for c in LOSSLESS],
)
def test_lossless(
    toy: ImageModel,
    toy_checkpoint: Path,
    prompt_rows: tuple[np.ndarray, ...],
    rule: Rule,
    coupling: Coupling,
    fresh: Fresh,
    truncation: dict[str, float],
    guidance: float | None,
    window: int,
) -> None:
    settings = Settings(coupling=coupling, fresh=fresh, **truncation, **rule.settings())
    law = exact_law(toy_checkpoint, prompt_rows, settings, guidance)
    assert abs(law.sum() - 1) < 1e-9
    counts = draw(toy, prompt_rows, settings, guidance, window=window)
    assert (counts[law == 0] == 0).all(), "a picture outside the truncated law was drawn"
    assert p_value(counts, law) > REJECT


class KeepsRejected(HostLoop):
    """The rejected draft's keys and values stay in the cache: the resampled token is never fed."""

    def step(self) -> None:
        super().step()
        for image, count in enumerate(self.results["committed"]):
            if self.state["position"][image] == self.setup.manifest.image_tokens or count == self.setup.window:
                continue  # finished, or nothing was rejected
            for group in range(self.setup.groups):
                row = group * self.setup.batch + image
                self.state["ids"][row, :-1] = self.state["ids"][row, 1:]
                self.state["length"][row] += 1
            kinds = self.state["kind"][image]
            kinds[:-1] = kinds[1:]


class KeepsOldLaw(HostLoop):
    """After coupling, p stays what it was instead of becoming q."""

    def step(self) -> None:
        laws = self.state["draft_probs"].copy()
        super().step()
        for image, count in enumerate(self.results["committed"]):
            for new in range(self.setup.window):
                if self.state["kind"][image, new] == 3 and laws[image, count + new].sum() > 0:
                    self.state["draft_probs"][image, new] = laws[image, count + new]


class ShiftedCache(HostLoop):
    """Lengths are off by one."""

    def begin(self, image: int, start: Start) -> None:
        super().begin(image, replace(start, length=start.length + 1))


@pytest.mark.parametrize("spoil", [KeepsRejected, KeepsOldLaw, ShiftedCache])
def test_broken_variants_fail(
    toy: ImageModel, toy_checkpoint: Path, prompt_rows: tuple[np.ndarray, ...], spoil: type[HostLoop]
) -> None:
    settings = Settings(coupling=Coupling.MAXIMAL)
    law = exact_law(toy_checkpoint, prompt_rows, settings, GUIDANCE)
    counts = draw(toy, prompt_rows, settings, spoil=spoil, window=4)
    assert p_value(counts, law) < 1e-9


@pytest.mark.parametrize("rule", [Csd(0.5, 1.0), Addition(0.2), Amplify(2)])
def test_relaxed_rules_are_not_lossless(
    toy: ImageModel, toy_checkpoint: Path, prompt_rows: tuple[np.ndarray, ...], rule: Rule
) -> None:
    settings = Settings(**rule.settings())
    law = exact_law(toy_checkpoint, prompt_rows, settings, GUIDANCE)
    assert p_value(draw(toy, prompt_rows, settings, samples=20_000), law) < 1e-9
