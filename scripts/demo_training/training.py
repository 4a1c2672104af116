"""The three trained parts: image decoder, image encoder, language model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import JanusForConditionalGeneration

from demo_training.codes import tokenise
from demo_training.model import PAD, caption, logits, new_model, normalise_codebook
from demo_training.optimiser import MuonAdam
from demo_training.pictures import COLOUR_NAMES, NAMES, PAIRS, Renderer, pair
from demo_training.stages import load, run_stage

DECODER_STEPS, DECODER_BATCH = 1800, 8
ENCODER_STEPS, ENCODER_BATCH = 300, 8
LANGUAGE_STEPS, LANGUAGE_BATCH = 3600, 16
GRAIN_STEPS = 500  # of the last stage: the same training over stronger grain, at a third of the rates
SHORT_FORMS = 0.1  # share of batches whose captions do not name the colour
DROPPED = 0.1  # share of captions replaced by padding, for guidance
OBJECT_WEIGHT = 2.0  # loss weight of what the object covers


def random_pairs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Concepts and colours, [count] each."""
    return pair(torch.randint(0, PAIRS, (count,), generator=generator))


def signal_to_noise(error: float) -> float:
    """Peak signal to noise ratio in dB of a mean squared error over [-1, 1]."""
    return 10 * math.log10(4 / error)


def train_decoder(renderer: Renderer, codes: dict[str, Tensor], work: Path) -> dict[str, Any]:
    """Codes to pixels: L1, a little L2 and gradient L1, objects counting twice; code vectors are trained along."""
    model = new_model(codes["vectors"])
    vq = model.model.vqmodel
    parts = torch.nn.ModuleDict({"decoder": vq.decoder, "post": vq.post_quant_conv, "codes": vq.quantize})
    named = list(parts.named_parameters())
    muon = [p for name, p in named if p.dim() == 4 and "conv_out" not in name and not name.startswith("post")]
    chosen = {id(p) for p in muon}
    others = [p for _, p in named if id(p) not in chosen]
    optimiser = MuonAdam(muon, others, muon_rate=0.03, adam_rate=3e-3, steps=DECODER_STEPS, warm_up=20, decay=0.0)
    generator = torch.Generator().manual_seed(11)

    def step() -> dict[str, float]:
        with torch.no_grad():
            normalise_codebook(model)
            pictures = renderer.draw(*random_pairs(DECODER_BATCH, generator), generator)
            tokens = tokenise(pictures.pixels, codes["centroids"])
        weight = 1 + pictures.coverage
        with torch.autocast("cpu", torch.bfloat16):
            drawn = vq.decode(tokens)
        error = drawn.float() - pictures.pixels
        across = (error[..., 1:] - error[..., :-1]).abs() * weight[..., 1:]
        down = (error[:, :, 1:] - error[:, :, :-1]).abs() * weight[:, :, 1:]
        loss = (error.abs() * weight).mean() + 0.5 * (error.square() * weight).mean()
        (loss + 0.4 * (across.mean() + down.mean())).backward()
        return {"loss": float(loss.detach()), "dB": signal_to_noise(float(error.detach().square().mean()))}

    @torch.no_grad()
    def check() -> dict[str, Any]:
        normalise_codebook(model)
        numbers = torch.arange(48)
        pictures = renderer.draw(numbers, numbers % 8, torch.Generator().manual_seed(7))
        drawn = vq.decode(tokenise(pictures.pixels, codes["centroids"]))
        return {"dB": signal_to_noise(float((drawn - pictures.pixels).square().mean()))}

    return run_stage("decoder", work / "decoder.pt", DECODER_STEPS, parts, optimiser, generator, step, check)


def train_encoder(renderer: Renderer, codes: dict[str, Tensor], work: Path) -> dict[str, Any]:
    """Pixels to the same codes, so that the stock class encodes too; generation does not use it."""
    model = new_model(codes["vectors"])
    vq = model.model.vqmodel
    trained = load(work / "decoder.pt")
    assert trained is not None, "the decoder comes first"
    vectors = functional.normalize(trained["model"]["codes.embedding.weight"], dim=1)
    parts = torch.nn.ModuleDict({"encoder": vq.encoder, "quant": vq.quant_conv})
    optimiser = MuonAdam(
        [],
        list(parts.parameters()),
        muon_rate=0.0,
        adam_rate=3e-3,
        steps=ENCODER_STEPS,
        warm_up=30,
        decay=0.0,
    )
    generator = torch.Generator().manual_seed(21)

    def step() -> dict[str, float]:
        with torch.no_grad():
            pictures = renderer.draw(*random_pairs(ENCODER_BATCH, generator), generator)
            tokens = tokenise(pictures.pixels, codes["centroids"]).flatten()
        with torch.autocast("cpu", torch.bfloat16):
            found = vq.quant_conv(vq.encoder(pictures.pixels))
        unit = functional.normalize(found.float().permute(0, 2, 3, 1).reshape(-1, vectors.shape[1]), dim=1)
        sharpness = 25 + 75 * optimiser.step_count / ENCODER_STEPS
        loss = functional.cross_entropy(sharpness * unit @ vectors.T, tokens)
        (loss + 5 * (unit - vectors[tokens]).square().sum(1).mean()).backward()
        agreement = ((unit.detach() @ vectors.T).argmax(1) == tokens).float().mean()
        return {"loss": float(loss.detach()), "agreement": float(agreement)}

    return run_stage("encoder", work / "encoder.pt", ENCODER_STEPS, parts, optimiser, generator, step)


def language_parts(model: JanusForConditionalGeneration) -> torch.nn.ModuleDict:
    """What the language model stage trains."""
    inner = model.model
    return torch.nn.ModuleDict(
        {
            "language": inner.language_model,
            "embeddings": inner.generation_embeddings,
            "aligner": inner.generation_aligner,
            "head": inner.generation_head,
        }
    )


def train_language_model(
    renderer: Renderer, codes: dict[str, Tensor], work: Path, *, final: bool = False
) -> dict[str, Any]:
    """Next code given caption and codes before, cross-entropy with object tokens counting twice.

    The `final` stage goes on from the first one over the renderer's stronger grain.
    """
    model = new_model(codes["vectors"])
    parts = language_parts(model)
    steps, rate = (GRAIN_STEPS, 0.3) if final else (LANGUAGE_STEPS, 1.0)
    if final:
        first = load(work / "language.pt")
        assert first is not None, "the language model comes first"
        parts.load_state_dict(first["model"])
    muon = [p for p in model.model.language_model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in muon}
    others = [p for p in parts.parameters() if id(p) not in chosen]
    optimiser = MuonAdam(muon, others, muon_rate=0.02 * rate, adam_rate=3e-3 * rate, steps=steps, warm_up=60, decay=0.1)
    generator = torch.Generator().manual_seed(6 if final else 5)

    def step() -> dict[str, float]:
        with torch.no_grad():
            names, colours = random_pairs(LANGUAGE_BATCH, generator)
            pictures = renderer.draw(names, colours, generator)
            image = tokenise(pictures.pixels, codes["centroids"])
            weight = 1 + (OBJECT_WEIGHT - 1) * (pictures.object_share() > 0.05).float()
            short = float(torch.rand((), generator=generator))
            form = 0 if short > SHORT_FORMS else 1 if short < SHORT_FORMS / 2 else 2
            text = captions(names, colours, form)
            text[torch.rand(len(text), generator=generator) < DROPPED, 1:-1] = PAD
        with torch.autocast("cpu", torch.bfloat16):
            scores = logits(model, text, image)
        losses = functional.cross_entropy(scores.float().flatten(0, 1), image.flatten(), reduction="none")
        loss = (losses * weight.flatten()).sum() / weight.sum()
        loss.backward()
        return {"loss": float(loss.detach()), "nats": float(losses.detach().mean())}

    return run_stage(
        "final grain" if final else "language model",
        work / ("grain.pt" if final else "language.pt"),
        steps,
        parts,
        optimiser,
        generator,
        step,
        lambda: validate(model, renderer, codes),
    )


def captions(names: Tensor, colours: Tensor, form: int) -> Tensor:
    """Prompt ids [B, L] of one form."""
    pairs = zip(names.tolist(), colours.tolist(), strict=True)
    return torch.tensor([caption(NAMES[name], COLOUR_NAMES[colour], form) for name, colour in pairs])


@torch.no_grad()
def validate(model: JanusForConditionalGeneration, renderer: Renderer, codes: dict[str, Tensor]) -> dict[str, Any]:
    """Nats per token and entropy by region on 96 renderings that training does not see."""
    numbers = torch.arange(96)
    names, colours = numbers % 48, numbers * 5 % 8
    pictures = renderer.draw(names, colours, torch.Generator().manual_seed(999))
    image, share = tokenise(pictures.pixels, codes["centroids"]), pictures.object_share()
    text = captions(names, colours, 0)
    scores = torch.cat([logits(model, text[i : i + 32], image[i : i + 32]).float() for i in range(0, 96, 32)])
    laws = scores.log_softmax(-1)
    loss = -laws.gather(2, image[..., None])[..., 0]
    entropy = -(laws.exp() * laws).sum(-1)
    regions = {"background": share == 0, "edge": (share > 0) & (share < 0.98), "inside": share >= 0.98}
    notes = {"nats": float(loss.mean()), "entropy": float(entropy.mean())}
    for name, region in regions.items():
        notes[f"{name} nats"] = float(loss[region].mean())
        notes[f"{name} entropy"] = float(entropy[region].mean())
        notes[f"{name} share"] = float(region.float().mean())
    return notes


def assemble(codes: dict[str, Tensor], work: Path) -> JanusForConditionalGeneration:
    """The whole model from the stages' work files."""
    model = new_model(codes["vectors"])
    vq = model.model.vqmodel
    vq_parts = torch.nn.ModuleDict({"decoder": vq.decoder, "post": vq.post_quant_conv, "codes": vq.quantize})
    encoder_parts = torch.nn.ModuleDict({"encoder": vq.encoder, "quant": vq.quant_conv})
    language = language_parts(model)
    for name, parts in (
        ("decoder", vq_parts),
        ("encoder", encoder_parts),
        ("language", language),
        ("grain", language),
    ):
        state = load(work / f"{name}.pt")
        if state is not None:
            parts.load_state_dict(state["model"])
    normalise_codebook(model)
    return model
