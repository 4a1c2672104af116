#!/usr/bin/env python
"""Train the demo domain's scorer: a tiny CLIP over the demo model's pictures and captions. Resumes after a kill."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import typer
from demo_training.codes import PATCH, fit_codes, tokenise
from demo_training.model import WORD_IDS
from demo_training.optimiser import MuonAdam
from demo_training.pictures import COLOUR_NAMES, FINAL_GRAIN, NAMES, PAIRS, SIZE, Renderer, pair
from demo_training.stages import load, run_stage, save
from rich import print as show
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional
from train_demo import PACKAGE, fetch
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerFast

from runtime import ImageModel
from runtime.evaluation.metrics import REFERENCE, Frechet, own_reference

SPECIAL = ["<pad>", "<bos>", "<unk>", "<eos>"]  # transformers pools text by an old rule where <eos> is 2: it is 3
WIDTH, HEADS, IMAGE_LAYERS, TEXT_LAYERS, PROJECTION = 96, 4, 4, 2, 64
SIGHT = 8  # pixels of an image patch
WORDS = 16  # longest caption
STEPS, BATCH = 1600, 64
BROKEN = 16  # pictures of a batch that return with patches permuted, as negatives of every caption
FORMS = (0.5, 0.25, 0.25)  # shares of the captions `cat on pink`, `cat`, `a cat`
HELD_OUT = 38  # of the 384 pairs of concept and colour
CODED, BLURRED = 0.25, 0.25  # shares of the pictures shown as their codes alone, and with blur and noise
SHARPEST = math.log(100.0)  # CLIP's own bound of the learned scale
TEST_SEED, REFERENCE_SEED = 20_000, 30_000  # training's generator has another one


class Stage(StrEnum):
    """What can be run alone; `test` needs only what is already written."""

    ALL = "all"
    TRAIN = "train"
    TEST = "test"


def main(
    work: Annotated[Path, typer.Option(help="Folder for data and resumable state.")] = Path("demo_work"),
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runtime/demo_scorer"),
    emoji: Annotated[Path | None, typer.Option(help=f"Unpacked {PACKAGE}; without it npm fetches it.")] = None,
    stage: Annotated[Stage, typer.Option(help="Run one stage alone.")] = Stage.ALL,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch and of the demo model.")] = 1,
) -> None:
    """Train and write the scorer, then measure it on pictures that training does not see."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    package = emoji or fetch(work)
    if stage in (Stage.ALL, Stage.TRAIN):
        train(package, work, output)
        write_reference(Renderer(package, FINAL_GRAIN), output)
        for file in output.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner alone
    if stage in (Stage.ALL, Stage.TEST):
        test(Renderer(package, FINAL_GRAIN), output, threads)


def train(package: Path, work: Path, output: Path) -> None:
    """Contrastive training; a picture that a caption also describes is no negative for it, a broken one always is."""
    renderers = [Renderer(package), Renderer(package, FINAL_GRAIN)]
    codes = load(work / "codes.pt")
    if codes is None:
        codes = fit_codes(renderers[0])
        save(work / "codes.pt", codes)
    tokenizer = new_tokenizer()
    torch.manual_seed(0)
    model = CLIPModel(configuration(len(tokenizer)))
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and ".layers." in name]
    others = [p for name, p in named if not (p.dim() == 2 and ".layers." in name)]
    optimiser = MuonAdam(matrices, others, muon_rate=0.01, adam_rate=1e-3, steps=STEPS, warm_up=100, decay=0.05)
    generator = torch.Generator().manual_seed(1)
    _, seen = split()

    def step() -> dict[str, float]:
        with torch.no_grad():
            model.logit_scale.clamp_(max=SHARPEST)
            numbers = seen[torch.randint(0, len(seen), (BATCH,), generator=generator)]
            names, colours = pair(numbers)
            renderer = renderers[optimiser.step_count % 2]
            pixels = degrade(renderer.draw(names, colours, generator).pixels, codes["centroids"], generator)
            share = 0.5 + 0.5 * float(torch.rand((), generator=generator))
            pixels = torch.cat([pixels, permute(pixels[:BROKEN], share, generator)])
            forms = torch.multinomial(torch.tensor(FORMS), BATCH, replacement=True, generator=generator)
            text = tokenizer(captions(numbers, forms), padding=True, return_tensors="pt")
            fits = (names[:, None] == names) & ((forms > 0) | (colours[:, None] == colours))  # [pictures, captions]
            fits.fill_diagonal_(False)
        scores, broken = model(**text, pixel_values=pixels).logits_per_image.split((BATCH, BROKEN))
        scores, own = scores.masked_fill(fits, -torch.inf), torch.arange(BATCH)
        loss = functional.cross_entropy(scores, own) + functional.cross_entropy(torch.cat([scores, broken]).T, own)
        (loss / 2).backward()
        return {"loss": float(loss.detach()) / 2, "top-1": float((scores.detach().argmax(1) == own).float().mean())}

    run_stage("scorer", work / "scorer.pt", STEPS, model, optimiser, generator, step)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    new_image_processor().save_pretrained(output)
    show(f"wrote {output}")


def configuration(vocabulary: int) -> CLIPConfig:
    """A tiny CLIP: 64 x 64 pixels in patches of 8, width 96, 4 layers for pictures and 2 for captions."""
    both = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_attention_heads": HEADS,
        "projection_dim": PROJECTION,
    }
    text = {"num_hidden_layers": TEXT_LAYERS, "vocab_size": vocabulary, "max_position_embeddings": WORDS}
    text |= {f"{name}_token_id": SPECIAL.index(f"<{name}>") for name in ("pad", "bos", "eos")}
    vision = {"num_hidden_layers": IMAGE_LAYERS, "image_size": SIZE, "patch_size": SIGHT}
    return CLIPConfig(text_config=both | text, vision_config=both | vision, projection_dim=PROJECTION)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """The demo model's words between `<bos>` and `<eos>`; every other word is `<unk>`."""
    words = [*SPECIAL, *(word for word in WORD_IDS if not word.startswith("<"))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    inner.add_tokens([AddedToken(name, normalized=True, single_word=True) for name in NAMES if " " in name])
    ends = [(word, SPECIAL.index(word)) for word in ("<bos>", "<eos>")]
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        unk_token="<unk>",
        eos_token="<eos>",
        model_max_length=WORDS,
    )


def new_image_processor() -> CLIPImageProcessorPil:
    """Pictures to 64 x 64 pixels in [-1, 1]."""
    size = {"height": SIZE, "width": SIZE}
    half = [0.5, 0.5, 0.5]
    return CLIPImageProcessorPil(size=size, do_center_crop=False, image_mean=half, image_std=half)


def split() -> tuple[Tensor, Tensor]:
    """Pair numbers that training never sees, and the others."""
    numbers = torch.randperm(PAIRS, generator=torch.Generator().manual_seed(10))
    return numbers[:HELD_OUT].sort().values, numbers[HELD_OUT:].sort().values


def captions(numbers: Tensor, forms: Tensor | int) -> list[str]:
    """The demo model's captions of pairs: form 0 `cat on pink`, 1 `cat`, 2 `a cat`; 3 `a cat on pink`, untrained."""
    texts = []
    for name, colour, form in zip(*pair(numbers), torch.as_tensor(forms).expand(len(numbers)), strict=True):
        article = "a " if form > 1 else ""
        place = f" on {COLOUR_NAMES[colour]}" if form in (0, 3) else ""
        texts.append(article + NAMES[name] + place)
    return texts


def degrade(pixels: Tensor, centroids: Tensor, generator: torch.Generator) -> Tensor:
    """Some pictures as their codes alone, some blurred and noisy, as a decoder shows them."""
    count = len(pixels)
    kind = torch.rand(count, generator=generator)
    coded, blurred = kind < CODED, kind > 1 - BLURRED
    flat = centroids[tokenise(pixels[coded], centroids)].transpose(1, 2)
    smooth = functional.avg_pool2d(functional.pad(pixels[blurred], (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    share, strength = torch.rand(2, len(smooth), 1, 1, 1, generator=generator)
    noise = torch.randn(smooth.shape, generator=generator) * strength * 0.08
    result = pixels.clone()
    result[coded] = functional.fold(flat, SIZE, PATCH, stride=PATCH)
    result[blurred] = (pixels[blurred].lerp(smooth, share) + noise).clamp(-1, 1)
    return result


class Scorer:
    """The written scorer: pixels [B, 3, 64, 64] in [-1, 1] and texts to vectors."""

    def __init__(self, folder: Path) -> None:
        self._model = CLIPModel.from_pretrained(folder).eval()
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """Projected, not normalised: [B, 64], what the Frechet distance is taken over."""
        parts = [self._model.get_image_features(piece).pooler_output for piece in pixels.split(BATCH)]
        return torch.cat(parts)

    @torch.no_grad()
    def text(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors [B, 64]."""
        inputs = self._tokenizer(list(texts), padding=True, return_tensors="pt")
        return functional.normalize(self._model.get_text_features(**inputs).pooler_output, dim=1)


def write_reference(renderer: Renderer, folder: Path) -> None:
    """Features of rendered pictures that nothing was trained on, every pair four times: what distances are taken to."""
    generator = torch.Generator().manual_seed(REFERENCE_SEED)
    numbers = torch.arange(PAIRS).repeat(4)
    pixels = [renderer.draw(*pair(part), generator).pixels for part in numbers.split(PAIRS)]
    save_file({"features": Scorer(folder).features(torch.cat(pixels)).contiguous()}, folder / REFERENCE)


def test(renderer: Renderer, folder: Path, threads: int) -> None:
    """Print the figures of the model card as Markdown."""
    scorer = Scorer(folder)
    never, seen = split()
    every = torch.arange(PAIRS)
    generator = torch.Generator().manual_seed(TEST_SEED)

    def rendered(numbers: Tensor) -> Tensor:
        return renderer.draw(*pair(numbers), generator).pixels

    made = ImageModel.open(threads=threads).generate(captions(every, 0), preset="sjd", seed=TEST_SEED, batch=8)
    drawn = torch.from_numpy(made.pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    sets = {
        "rendered, pairs of the training": (rendered(seen.repeat(4)), seen.repeat(4)),
        "rendered, pairs never trained": (rendered(never.repeat(16)), never.repeat(16)),
        "demo model, pairs of the training": (drawn[seen], seen),
        "demo model, pairs never trained": (drawn[never], never),
    }
    print("| pictures | n | concept of 48 | colour of 8 | pair of 384 | own caption | another's |\n|" + "---|" * 7)
    for title, (pixels, numbers) in sets.items():
        print(f"| {title} | {len(numbers)} | " + " | ".join(retrieval(scorer, pixels, numbers).values()) + " |")
    print("\n| wording | rendered | demo model |\n|" + "---|" * 3)
    whole = rendered(every)
    for form, wording in enumerate(("cat on pink", "cat", "a cat", "a cat on pink (never trained)")):
        shares = [f"{concept_share(scorer, pixels, every, form):.1%}" for pixels in (whole, drawn)]
        print(f"| {wording} | " + " | ".join(shares) + " |")
    distance = Frechet(own_reference(folder))
    print("\n| 384 pictures, every pair once | own caption | Frechet distance |\n|" + "---|" * 3)
    rows = {"rendered": whole, "demo model, `sjd`": drawn}
    for share in (0.05, 0.1, 0.25, 0.5):
        rows[f"rendered, {share:.0%} of the patches from other pictures"] = swap(whole, share, generator)
    for share in (0.25, 1.0):
        rows[f"rendered, {share:.0%} of the patches permuted"] = permute(whole, share, generator)
    text = scorer.text(captions(every, 0))
    for title, pixels in rows.items():
        features = scorer.features(pixels)
        own = (functional.normalize(features, dim=1) * text).sum(1).mean()
        print(f"| {title} | {own:.3f} | {distance(features.double().numpy()):.2f} |")


def retrieval(scorer: Scorer, pixels: Tensor, numbers: Tensor) -> dict[str, str]:
    """Top-1 shares, and mean cosine (standard deviation) with the own caption and with another picture's."""
    names, colours = pair(numbers)
    text = scorer.text(captions(torch.arange(PAIRS), 0))
    scores = functional.normalize(scorer.features(pixels), dim=1) @ text.T  # [pictures, 384]
    table = scores.view(-1, len(COLOUR_NAMES), len(NAMES))
    rows = torch.arange(len(numbers))
    others = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(TEST_SEED))]
    own, other = scores[rows, numbers], scores[rows, others][others != numbers]
    return {
        "concept": f"{(table[rows, colours].argmax(1) == names).float().mean():.1%}",
        "colour": f"{(table[rows, :, names].argmax(1) == colours).float().mean():.1%}",
        "pair": f"{(scores.argmax(1) == numbers).float().mean():.1%}",
        "own": f"{own.mean():.3f} ({own.std():.3f})",
        "other": f"{other.mean():.3f} ({other.std():.3f})",
    }


def concept_share(scorer: Scorer, pixels: Tensor, numbers: Tensor, form: int) -> float:
    """Share of pictures whose concept is the best of the 48 in one wording, on the picture's own colour."""
    names, colours = pair(numbers)
    text = scorer.text(captions(torch.arange(PAIRS), form)).view(len(COLOUR_NAMES), len(NAMES), -1)
    scores = torch.einsum("bd,bnd->bn", scorer.features(pixels), text[colours])
    return float((scores.argmax(1) == names).float().mean())


def swap(pixels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of every picture's 8 x 8 patches, at random places, from the same places of another picture."""
    side = SIZE // SIGHT
    chosen = torch.rand(len(pixels), side * side, generator=generator).argsort(1) < round(share * side * side)
    mask = chosen.view(-1, 1, side, side).repeat_interleave(SIGHT, 2).repeat_interleave(SIGHT, 3)
    return torch.where(mask, pixels.roll(5 * len(NAMES) + 7, 0), pixels)


def permute(pixels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of every picture's 8 x 8 patches, at random places, change places within the picture."""
    pieces = functional.unfold(pixels, SIGHT, stride=SIGHT)
    count, places = len(pixels), pieces.shape[2]
    moved = torch.rand(count, places, generator=generator).argsort(1)[:, : round(share * places)]
    order = torch.arange(places).repeat(count, 1).scatter(1, moved, moved.roll(1, 1))
    return functional.fold(pieces.gather(2, order[:, None].expand_as(pieces)), SIZE, SIGHT, stride=SIGHT)


if __name__ == "__main__":
    typer.run(main)
