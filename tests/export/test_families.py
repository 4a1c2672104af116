"""Every family against stock code: prompts, guidance rows, windowed logits, greedy pictures, image decoders, grids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from csd_ops.errors import InputError
from csd_ops.rules import RULES
from engines.onnx_runtime import OnnxRuntimeEngine
from export import export_checkpoint
from export.families import KNOWN
from runtime import ImageModel
from runtime.bundle import STEP, Manifest
from tests.export.step_runner import StepRunner
from tests.models import write_tiny_emu3, write_tiny_janus, write_tiny_lumina

WINDOWS = (2, 7, 1, 5, 3, 8, 1, 4)


@dataclass
class Family:
    """A tiny model of a family: its bundle, and stock code for the same questions."""

    model: ImageModel
    stock: Any
    logits: Callable[[list[int]], np.ndarray]  # of a sequence of bundle ids, image codes only, [L, V]
    text_ids: dict[int, int]  # bundle id -> id of the checkpoint

    @property
    def manifest(self) -> Manifest:
        return self.model.bundle.manifest


def make_janus(folder: Path) -> Family:
    from transformers import JanusForConditionalGeneration

    checkpoint = write_tiny_janus(folder / "checkpoint", side=3, layers=2, key_value_heads=1)
    export_checkpoint(checkpoint, folder / "bundle")
    stock = JanusForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    codes = stock.config.vq_config.num_embeddings

    @torch.no_grad()
    def logits(ids: list[int]) -> np.ndarray:
        parts = [
            stock.prepare_embeddings_for_image_generation(torch.tensor([[i]]))
            if i < codes
            else stock.get_input_embeddings()(torch.tensor([[i - codes]]))
            for i in ids
        ]
        hidden = stock.model.language_model(inputs_embeds=torch.cat(parts, 1), use_cache=False).last_hidden_state
        return np.asarray(stock.model.generation_head(hidden)[0].numpy())

    return Family(ImageModel.open(folder / "bundle", threads=1), stock, logits, {})


def make_coded(folder: Path, checkpoint: Path, name: str, body: Callable[[Any], Any]) -> Family:
    """Families whose image codes are text ids: the checkpoint's own ids, and its whole head."""
    import transformers

    export_checkpoint(checkpoint, folder / "bundle")
    stock = getattr(transformers, name).from_pretrained(checkpoint, dtype=torch.float32).eval()
    model = ImageModel.open(folder / "bundle", threads=1)
    manifest = model.bundle.manifest
    images = stock.model.vocabulary_mapping.img2bpe
    text_ids = dict(images)
    for identifier in range(stock.get_input_embeddings().num_embeddings):
        if identifier not in images.values():
            text_ids[manifest.text_id(identifier)] = identifier
    rows = torch.tensor([images[code] for code in range(manifest.image_vocabulary)])

    @torch.no_grad()
    def logits(ids: list[int]) -> np.ndarray:
        given = torch.tensor([[text_ids[i] for i in ids]])
        hidden = body(stock)(input_ids=given, use_cache=False).last_hidden_state
        return np.asarray(stock.lm_head(hidden)[0][:, rows].numpy())

    return Family(model, stock, logits, text_ids)


def make_lumina(folder: Path) -> Family:
    checkpoint = write_tiny_lumina(folder / "checkpoint", key_value_heads=2)
    return make_coded(folder, checkpoint, "ChameleonForConditionalGeneration", lambda stock: stock.model)


def make_emu3(folder: Path) -> Family:
    checkpoint = write_tiny_emu3(folder / "checkpoint", key_value_heads=2)
    return make_coded(folder, checkpoint, "Emu3ForConditionalGeneration", lambda stock: stock.model.text_model)


MAKERS = {"janus": make_janus, "chameleon": make_lumina, "emu3": make_emu3}
assert MAKERS.keys() == KNOWN.keys()


@pytest.fixture(scope="module", params=sorted(MAKERS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    made: Family = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    return made


def test_a_prompt_that_does_not_fit(family: Family) -> None:
    most = family.manifest.max_prompt
    with pytest.raises(InputError, match=f"expected a prompt of at most {most} tokens, found .*; shorten it"):
        family.model.generate("red " * most)


@pytest.mark.parametrize("shift", [0, 1])
def test_windows_after_roll_backs_equal_the_full_forward(family: Family, shift: int) -> None:
    """Ragged rows, each rolled back by its own number; a length off by one (shift) must show."""
    manifest, rows = family.manifest, 3
    codes, generator = manifest.image_vocabulary, np.random.default_rng(rows)
    run = StepRunner(OnnxRuntimeEngine(family.model.bundle.path(STEP), threads=1), manifest, rows, 40)
    known: list[list[int]] = [[] for _ in range(rows)]
    worst = 0.0
    for window in WINDOWS:
        ids = generator.integers(0, codes + manifest.text_vocabulary, (rows, window))
        got = run(ids, np.array([max(0, len(row) - shift) for row in known]))
        for row in range(rows):
            known[row] += [int(identifier) for identifier in ids[row]]
            expected = family.logits(known[row])[-window:]
            worst = max(worst, float(np.abs(got[row] - expected).max() / np.abs(expected).max()))
            known[row] = known[row][: max(1, len(known[row]) - int(generator.integers(0, window + 3)))]
    assert worst < 1e-4 if not shift else worst > 1e-2


def greedy(family: Family, rows: tuple[np.ndarray, ...], guidance: float) -> list[int]:
    """Token by token with full forwards, the grammar's tokens forced: no cache, no window."""
    manifest = family.manifest
    tokens: list[int] = []
    for position in range(manifest.tokens):
        if str(position) in manifest.forced:
            tokens.append(manifest.forced[str(position)])
            continue
        conditional, unconditional = (family.logits([*map(int, row), *tokens])[-1] for row in rows)
        tokens.append(int(np.argmax(unconditional + guidance * (conditional - unconditional))))
    return tokens


@pytest.mark.parametrize("preset", ["ar", "sjd-maximal"])
def test_greedy_pictures_are_equal_token_for_token(family: Family, preset: str) -> None:
    """Two prompts of different lengths, with rows of different lengths, in one batch."""
    prompts = ["red cat", "apple"]
    made = family.model.generate(
        prompts, preset=preset, guidance=2.0, temperature=0, batch=2, **({} if preset == "ar" else {"window": 6})
    )
    for prompt, decoded in zip(prompts, made.decoded, strict=True):
        rows = family.model._encoder.encode(prompt)
        assert decoded.tokens.tolist() == greedy(family, rows, 2.0)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_the_grid_whole(family: Family, rule: str) -> None:
    manifest = family.manifest
    name = {"csd": "csd", "gsd": "gsd"}.get(rule, rule)
    made = family.model.generate(["red cat", "apple"], preset=name, window=5, count=1, batch=2, top_k=5)
    forced = {int(position): identifier for position, identifier in manifest.forced.items()}
    for decoded in made.decoded:
        for position, token in enumerate(decoded.tokens.tolist()):
            assert token == forced[position] if position in forced else 0 <= token < manifest.image_vocabulary
        assert len(decoded.tokens) == manifest.tokens
        assert (manifest.grid(decoded.tokens) < manifest.image_vocabulary).all()
        assert decoded.free.sum() == manifest.codes
    assert made.pixels.shape == (2, manifest.height, manifest.width, 3)


# ---- prompts, as each family's own processor makes them -----------------------------------------------------------


def own_ids(family: Family, row: np.ndarray) -> list[int]:
    """Bundle ids back to the checkpoint's."""
    if family.text_ids:
        return [family.text_ids[int(identifier)] for identifier in row]
    return [int(identifier) - family.manifest.image_vocabulary for identifier in row]


def test_prompt_of_lumina(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The published text and ids; the guidance context is the image's start token alone."""
    family = make_lumina(tmp_path_factory.mktemp("lumina"))
    conditional, unconditional = family.model._encoder.encode("red cat")
    tokenizer = family.model._encoder._tokenizer
    manifest = family.manifest
    text = f"Generate an image of {manifest.width}x{manifest.height} according to the following prompt:\nred cat"
    assert own_ids(family, conditional) == [
        *tokenizer.encode(text).ids,
        tokenizer.token_to_id("<reserved08706>"),
        tokenizer.token_to_id("<racm3:break>"),
    ]
    assert own_ids(family, unconditional) == [tokenizer.token_to_id("<racm3:break>")]
    forced = {int(position): family.text_ids[identifier] for position, identifier in manifest.forced.items()}
    names = {position: tokenizer.id_to_token(identifier) for position, identifier in forced.items()}
    assert (
        names[0] == f"<reserved0{8800 + manifest.height // 32}>"
        and names[1] == f"<reserved0{8800 + manifest.width // 32}>"
    )
    newlines = [position for position, name in names.items() if name == "<reserved08799>"]
    assert newlines == [2 + row * manifest.columns + manifest.columns - 1 for row in range(manifest.rows)]
    assert names[manifest.tokens - 2] == "<eoss>" and names[manifest.tokens - 1] == "<reserved08706>"


def test_lumina_at_768_has_2357_tokens() -> None:
    """Start (in the prompt), height, width, 48 rows of 48 codes and a newline, end, end of turn."""
    from export.families.lumina import SIZES, _grammar

    class Ids:
        def token_to_id(self, name: str) -> int:
            return {"<reserved08824>": 8828, "<reserved08799>": 8803, "<eoss>": 8196, "<reserved08706>": 8710}[name]

    assert SIZES.choose(None, 4096) == (768, 768)
    forced = _grammar(Ids(), 4, 8192, 48, 49, ["<reserved08824>"] * 2)
    assert forced["0"] == forced["1"] == 8828, "text ids behind the image codes keep their number"
    assert [int(position) for position, name in forced.items() if name == 8803] == [2 + 49 * r + 48 for r in range(48)]
    assert 1 + 2 + 48 * 49 + 2 == 2357 and max(map(int, forced)) == 2355


def test_prompt_of_emu3_is_that_of_its_processor(tmp_path_factory: pytest.TempPathFactory) -> None:
    from transformers import Emu3Processor, PreTrainedTokenizerFast
    from transformers.models.emu3.image_processing_emu3 import Emu3ImageProcessor

    family = make_emu3(tmp_path_factory.mktemp("emu3"))
    manifest = family.manifest
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(family.model.bundle.path("tokenizer.json")),
        bos_token="<|extra_203|>",
        extra_special_tokens={
            "image_token": "<image>",
            "boi_token": "<|image start|>",
            "eoi_token": "<|image end|>",
            "image_wrapper_token": "<|image token|>",
            "eof_token": "<|extra_201|>",
        },
    )
    processor = Emu3Processor(Emu3ImageProcessor(), tokenizer)
    area = manifest.width * manifest.height
    for text, row in zip(("red cat", manifest.negative_prompt), family.model._encoder.encode("red cat"), strict=True):
        wanted = processor(text=[text], return_for_image_generation=True, ratio="1:1", image_area=area)
        assert own_ids(family, row) == list(wanted["input_ids"][0])
        assert list(wanted["image_sizes"][0]) == [manifest.rows, manifest.codes_per_row]
    assert family.manifest.unconditional == "negative"


# ---- image decoders ----------------------------------------------------------------------------------------------


def decoded_pixels(family: Family) -> tuple[np.ndarray, np.ndarray]:
    """Random codes and the pixels the bundle makes of them."""
    manifest = family.manifest
    codes = np.random.default_rng(0).integers(0, manifest.image_vocabulary, (1, manifest.codes))
    tokens = np.zeros((1, manifest.tokens), np.int64)
    grid = manifest.grid(tokens)
    grid[:] = codes.reshape(1, manifest.rows, manifest.codes_per_row)  # a view into the tokens
    return codes, family.model.decode_image(tokens)


def assert_same_levels(expected: np.ndarray, found: np.ndarray) -> None:
    """Rounded pictures of values in [-1, 1] within 1e-4: a hundredth of a level turns one value in eighty."""
    off = np.abs(expected - found.astype(float))
    assert off.max() <= 1 and (off > 0).mean() <= 127.5 * 1e-4


def test_pixels_of_emu3_are_those_of_its_decoder(tmp_path_factory: pytest.TempPathFactory) -> None:
    family = make_emu3(tmp_path_factory.mktemp("emu3"))
    stock = family.stock.model.vqmodel
    with torch.no_grad():
        for name, buffer in stock.named_buffers():  # batch norms that do something
            if name.endswith("running_mean"):
                assert buffer.abs().sum() == 0
    codes, found = decoded_pixels(family)
    manifest = family.manifest
    with torch.no_grad():
        image = stock.decode(torch.from_numpy(codes.reshape(1, manifest.rows, manifest.codes_per_row)))[0]
    expected = ((image.clamp(-1, 1) + 1) * 127.5).round().permute(1, 2, 0).numpy()
    assert_same_levels(expected, found[0])


def plain_vqgan(tensors: dict[str, Any], grid: Any) -> Any:
    """Meta's decoder written out with functions, from the names in its checkpoint."""

    def conv(name: str, x: Any, padding: int = 1) -> Any:
        return functional.conv2d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], padding=padding)

    def norm(name: str, x: Any) -> Any:
        return functional.group_norm(x, 32, tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps=1e-6)

    def block(name: str, x: Any) -> Any:
        hidden = conv(f"{name}.conv1", functional.silu(norm(f"{name}.norm1", x)))
        hidden = conv(f"{name}.conv2", functional.silu(norm(f"{name}.norm2", hidden)))
        return hidden + (conv(f"{name}.nin_shortcut", x, 0) if f"{name}.nin_shortcut.weight" in tensors else x)

    def attention(name: str, x: Any) -> Any:
        hidden = norm(f"{name}.norm", x)
        q, k, v = (conv(f"{name}.{part}", hidden, 0).flatten(2) for part in "qkv")
        weights = torch.softmax(q.transpose(1, 2) @ k / q.shape[1] ** 0.5, -1)
        return x + conv(f"{name}.proj_out", (v @ weights.transpose(1, 2)).reshape(x.shape), 0)

    x = tensors["quantize.embedding.weight"][grid].permute(0, 3, 1, 2)
    x = conv("decoder.conv_in", conv("post_quant_conv", x, 0))
    x = block("decoder.mid.block_2", attention("decoder.mid.attn_1", block("decoder.mid.block_1", x)))
    levels = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("decoder.up."))
    for level in reversed(range(levels)):
        inside = {int(n.split(".")[4]) for n in tensors if n.startswith(f"decoder.up.{level}.block.")}
        for number in sorted(inside):
            x = block(f"decoder.up.{level}.block.{number}", x)
        if level:
            x = conv(f"decoder.up.{level}.upsample.conv", functional.interpolate(x, scale_factor=2.0))
    return conv("decoder.conv_out", functional.silu(norm("decoder.norm_out", x)))


def test_pixels_of_lumina_are_those_of_metas_decoder(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("lumina")
    family = make_lumina(folder)
    tensors = torch.load(folder / "checkpoint" / "vqgan.ckpt", weights_only=True)["state_dict"]
    codes, found = decoded_pixels(family)
    manifest = family.manifest
    with torch.no_grad():
        image = plain_vqgan(tensors, torch.from_numpy(codes.reshape(1, manifest.rows, manifest.codes_per_row)))[0]
    expected = ((image.clamp(-1, 1) + 1) * 127.5).round().permute(1, 2, 0).numpy()
    assert_same_levels(expected, found[0])
    assert expected.std() > 5, "a picture, not a plain colour"


# ---- sizes and refusals ------------------------------------------------------------------------------------------


def test_other_sizes_by_grammar(tmp_path: Path) -> None:
    for write, size, rows, columns in (
        (write_tiny_lumina, (96, 64), 4, 6),
        (write_tiny_emu3, (64, 48), 6, 8),
    ):
        checkpoint = write(tmp_path / write.__name__)
        bundle, _ = export_checkpoint(checkpoint, tmp_path / f"{write.__name__}_bundle", size=size)
        manifest = bundle.manifest
        assert (manifest.width, manifest.height) == size
        assert (manifest.rows, manifest.codes_per_row, manifest.columns) == (rows, columns, columns + 1)
        made = ImageModel.open(bundle.folder, threads=1).generate("red cat", preset="sjd", window=4)
        assert made.pixels.shape == (1, size[1], size[0], 3)


@pytest.mark.parametrize(
    ("write", "size", "words"),
    [
        (write_tiny_lumina, (100, 100), "another in steps of 32 pixels"),
        (write_tiny_lumina, (320, 32), "at most 4 to 1"),
        (write_tiny_lumina, (768, 768), "within 192 tokens, found 768x768"),
        (write_tiny_emu3, (50, 50), "another in steps of 8 pixels"),
        (write_tiny_emu3, (1024, 1024), "720x720 in all and within 192 tokens, found 1024x1024"),
        (write_tiny_janus, (64, 64), "the only one janus draws, found 64x64; leave --size out"),
    ],
)
def test_sizes_that_cannot_be_drawn(write: Any, size: tuple[int, int], words: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint")
    with pytest.raises(InputError) as refusal:
        export_checkpoint(checkpoint, tmp_path / "bundle", size=size)
    assert words in str(refusal.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_lumina_without_its_image_decoder(tmp_path: Path) -> None:
    checkpoint = write_tiny_lumina(tmp_path / "checkpoint")
    (checkpoint / "vqgan.ckpt").rename(tmp_path / "elsewhere.ckpt")
    with pytest.raises(InputError, match=r"expected Meta's VQGAN at .*, found none; copy vqgan.ckpt"):
        export_checkpoint(checkpoint, tmp_path / "bundle")
    export_checkpoint(checkpoint, tmp_path / "bundle", image_decoder=tmp_path / "elsewhere.ckpt")
    (tmp_path / "elsewhere.ckpt").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(InputError, match=r"expected a whole file of tensors at .*elsewhere\.ckpt"):
        export_checkpoint(checkpoint, tmp_path / "again", image_decoder=tmp_path / "elsewhere.ckpt")


def test_tokenizers_of_another_model(tmp_path: Path) -> None:
    import json

    for write, token in ((write_tiny_lumina, "<reserved08799>"), (write_tiny_emu3, "<|extra_200|>")):
        checkpoint = write(tmp_path / write.__name__)
        path = checkpoint / "tokenizer.json"
        document = json.loads(path.read_text("utf-8"))
        document["model"]["vocab"] = {name: i for name, i in document["model"]["vocab"].items() if name != token}
        document["added_tokens"] = [entry for entry in document["added_tokens"] if entry["content"] != token]
        path.write_text(json.dumps(document), "utf-8")
        with pytest.raises(InputError) as refusal:
            export_checkpoint(checkpoint, tmp_path / "bundle")
        assert f"expected the special token {token} in {path}, found none" in str(refusal.value)
