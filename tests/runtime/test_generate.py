"""Decoding with the demo model: equal to transformers where it must be, exact where it claims to be, repeatable."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from csd_ops.contract import Kind
from runtime import ImageModel, InputError, presets
from runtime.acceptance_map import draw_map

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "export" / "demo"
PROMPTS = [
    "grapes on white",
    "sun on blue",
    "lion on pink",
    "crown on green",
    "bus on yellow",
    "rose on gray",
    "gift on purple",
    "moon on orange",
    "ghost on blue",
    "cactus on white",
]


@pytest.mark.parametrize(("preset", "batch"), [("ar", 10), ("sjd", 1), ("sjd-maximal", 4)])
def test_greedy_equals_transformers(demo: ImageModel, preset: str, batch: int) -> None:
    """Temperature 0, token for token, against `generate(generation_mode="image")`."""
    import torch
    from transformers import AutoTokenizer, JanusForConditionalGeneration

    torch.set_num_threads(1)
    model = JanusForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    inputs = tokenizer([prompt + "<begin_of_image>" for prompt in PROMPTS], return_tensors="pt")
    with torch.no_grad():
        expected = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            generation_mode="image",
            do_sample=False,
            guidance_scale=2.0,
        ).numpy()
    got = demo.generate(PROMPTS, preset=preset, temperature=0, guidance=2.0, batch=batch)
    np.testing.assert_array_equal(np.stack([entry.tokens for entry in got.decoded]), expected)


def test_same_seed_same_picture(demo: ImageModel) -> None:
    first, again = (demo.generate("cat on pink", seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.pixels, again.pixels)
    assert first.forward_passes == again.forward_passes
    other = demo.generate("cat on pink", seed=4)
    assert (first.decoded[0].tokens != other.decoded[0].tokens).any()


@pytest.mark.parametrize("changes", [{"lambda_": 0.0}, {"delta": 0.0}])
def test_csd_at_zero_is_sjd(demo: ImageModel, changes: dict[str, float]) -> None:
    exact = demo.generate("dog on blue", preset="sjd", seed=2)
    relaxed = demo.generate("dog on blue", preset="csd-paper", seed=2, paper_exact=False, **changes)
    np.testing.assert_array_equal(exact.decoded[0].tokens, relaxed.decoded[0].tokens)
    assert exact.forward_passes == relaxed.forward_passes
    assert relaxed.distortion == pytest.approx(0, abs=1e-5)


def test_batches_advance_per_image(demo: ImageModel) -> None:
    """A batch gives the pictures that single runs give, and each counts its own passes."""
    alone = [demo.generate(prompt, preset="sjd", seed=i) for i, prompt in enumerate(PROMPTS[:5])]
    together = demo.generate(PROMPTS[:5], preset="sjd", batch=2)
    passes = [entry.passes for entry in together.decoded]
    same = [np.array_equal(a.decoded[0].tokens, b.tokens) for a, b in zip(alone, together.decoded, strict=True)]
    assert sum(same) >= 4, "rounding may turn one decision"
    for run, entry, equal in zip(alone, together.decoded, same, strict=True):
        assert not equal or run.forward_passes == entry.passes
    assert len(set(passes)) > 1
    assert together.engine_calls < sum(passes) * 0.75


def test_engine_calls_equal_forward_passes(demo: ImageModel) -> None:
    for preset in ("ar", "csd"):
        made = demo.generate("star on gray", preset=preset)
        assert made.engine_calls == made.forward_passes
    assert demo.generate("star on gray", preset="ar").forward_passes == 257  # the prompt, then one per token


@pytest.mark.parametrize("name", list(presets()))
def test_every_preset_draws(demo: ImageModel, name: str) -> None:
    made = demo.generate("fish on purple", preset=name, window=1 if name == "ar" else 8)
    decoded = made.decoded[0]
    assert decoded.tokens.min() >= 0 and decoded.tokens.max() < demo.bundle.manifest.image_vocabulary
    assert made.pixels.shape == (1, 64, 64, 3) and made.pixels.std() > 5
    assert decoded.pass_of[0] == 1 and decoded.pass_of[-1] == decoded.passes - 1
    assert (np.diff(decoded.pass_of) >= 0).all()
    assert (decoded.measure("distortion") >= -1e-6).all()
    if made.preset.lossless:
        assert made.distortion < 1e-4
    relaxed = decoded.measure("distortion") > 1e-4
    if name == "csd":
        assert (decoded.measure("distortion")[relaxed] < made.preset.rule.delta).all()
        assert not (relaxed & (decoded.kind == Kind.FRESH)).any()


def test_excess_surprise_tells_exact_from_relaxed(demo: ImageModel) -> None:
    """Mean of -log q(x) - H(q) over the picture's own tokens: 0 within its error if exact, positive if relaxed."""

    def excess(preset: str, **changes: float) -> tuple[float, float]:
        made = demo.generate(PROMPTS, preset=preset, batch=5, count=2, seed=50, **changes)
        values = np.array([entry.excess.mean() for entry in made.decoded])
        return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))

    for preset in ("ar", "sjd", "sjd-maximal", "sjd-gumbel"):
        mean, error = excess(preset)
        assert abs(mean) < 4 * error
    mean, error = excess("csd-paper", delta=0.8)
    assert mean > 4 * error


def test_passes_fall_with_delta(demo: ImageModel) -> None:
    passes = [
        demo.generate(PROMPTS, preset="csd-paper", delta=delta, batch=5).forward_passes
        for delta in (0.0, 0.35, 0.65, 1.0)
    ]
    assert all(more > less for more, less in itertools.pairwise(passes)), passes


def test_unknown_words_and_characters_draw(demo: ImageModel) -> None:
    made = demo.generate("Äpfel 🍎 猫 apple", preset="csd")
    assert made.pixels.shape == (1, 64, 64, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ""}, "empty"),
        ({"prompts": "  \n "}, "empty"),
        ({"prompts": "apple " * 600}, "at most"),
        ({"prompts": "apple <pad>"}, "special token"),
        ({"preset": "fast"}, "preset of ar"),
        ({"window": 0}, "window from 1"),
        ({"window": 1000}, "window from 1"),
        ({"preset": "csd", "delta": 1.5}, "delta of csd"),
        ({"preset": "csd", "lambda_": -1}, "lambda of csd"),
        ({"preset": "sjd", "delta": 0.5}, "setting of sjd"),
        ({"preset": "amplify", "k": 0.5}, "k of amplify"),
        ({"preset": "sjd", "coupling": "tight"}, "coupling of"),
        ({"guidance": -1}, "guidance"),
        ({"guidance": float("nan")}, "guidance"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top-p"),
        ({"seed": -1}, "seed"),
        ({"count": 0}, "count"),
        ({"batch": 0}, "batch"),
    ],
)
def test_bad_input_is_one_sentence(demo: ImageModel, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match="expected") as caught:
        demo.generate(**{"prompts": "apple", **arguments})  # type: ignore[arg-type]
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_map_shows_what_was_decided(demo: ImageModel) -> None:
    made = demo.generate("heart on yellow")
    decoded = made.decoded[0]
    assert decoded.accepted.max() <= made.preset.window
    assert (
        decoded.accepted[decoded.pass_of == 1].tolist() == [(decoded.pass_of == 1).sum()] * (decoded.pass_of == 1).sum()
    )
    sheet = draw_map(made.pixels[0], decoded, demo.bundle.manifest)
    assert sheet.width > 4 * 300 and np.asarray(sheet).std() > 20
