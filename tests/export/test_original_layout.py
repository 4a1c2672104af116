"""DeepSeek's original layout gives the bundle that transformers' layout of the same weights gives, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from csd_ops.errors import InputError
from export import export_checkpoint
from tests.models import write_tiny_janus, write_tokenizer

# Stock names back to DeepSeek's, in the words of its modules: written apart from the table that is tested
BACK = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.generation_embeddings\.", "gen_embed."),
    (r"^model\.generation_aligner\.fc1\.", "gen_aligner.layers.0."),
    (r"^model\.generation_aligner\.hidden_layers\.0\.", "gen_aligner.layers.2."),
    (r"^model\.generation_head\.proj_out\.", "gen_head.output_mlp_projector."),
    (r"^model\.generation_head\.", "gen_head."),
    (r"^model\.vqmodel\.(de|en)coder\.mid\.block_1\.", r"gen_vision_model.\1coder.mid.0."),
    (r"^model\.vqmodel\.(de|en)coder\.mid\.attn_1\.", r"gen_vision_model.\1coder.mid.1."),
    (r"^model\.vqmodel\.(de|en)coder\.mid\.block_2\.", r"gen_vision_model.\1coder.mid.2."),
    (r"^model\.vqmodel\.(de|en)coder\.(up|down)\.(\d+)\.block\.", r"gen_vision_model.\1coder.conv_blocks.\3.res."),
    (r"^model\.vqmodel\.(de|en)coder\.(up|down)\.(\d+)\.", r"gen_vision_model.\1coder.conv_blocks.\3."),
    (r"^model\.vqmodel\.", "gen_vision_model."),
    (r"^model\.aligner\.", "aligner.layers.0."),
    (r"^model\.vision_model\.", "vision_model.vision_tower."),
)
SIDE, CODES, WIDTH = 4, 24, 32


def old_name(name: str) -> str:
    for pattern, target in BACK:
        if re.match(pattern, name):
            return re.sub(pattern, target, name)
    return name


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in transformers' layout with the image decoder's published sizes, and its bundle."""
    folder = tmp_path_factory.mktemp("stock")
    checkpoint = write_tiny_janus(
        folder / "checkpoint", image_vocabulary=CODES, side=SIDE, width=WIDTH, layers=2, published_decoder=True
    )
    export_checkpoint(checkpoint, folder / "bundle")
    return checkpoint, folder / "bundle"


def write_original(folder: Path, stock: Path, write: Callable[[dict[str, Any], Path], object]) -> Path:
    """The same weights under their old names, with the old configuration; no generation_config.json."""
    folder.mkdir()
    tensors = {old_name(name): value.clone() for name, value in load_file(stock / "model.safetensors").items()}
    tensors["gen_vision_model.quantize.codebook_used"] = torch.zeros(3)
    write(tensors, folder)
    config = {
        "model_type": "multi_modality",
        "language_config": {
            "vocab_size": 16,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "torch_dtype": "bfloat16",
        },
        "vision_config": {"params": {"image_size": 16 * SIDE, "model_name": "siglip_large_patch16_384"}},
        "aligner_config": {"params": {"depth": 2, "n_embed": WIDTH}},
        "gen_vision_config": {"params": {"image_token_size": CODES, "n_embed": 8}},
        "gen_aligner_config": {"params": {"depth": 2, "input_dim": 8, "n_embed": WIDTH}},
        "gen_head_config": {"params": {"image_token_embed": WIDTH, "image_token_size": CODES, "n_embed": WIDTH}},
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    write_tokenizer(folder)
    return folder


def one_bin(tensors: dict[str, Any], folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def one_safetensors(tensors: dict[str, Any], folder: Path) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"never opened: safetensors are preferred")


def two_shards(tensors: dict[str, Any], folder: Path) -> None:
    names = sorted(tensors)
    files = {name: f"pytorch_model-0000{1 + (number % 2)}-of-00002.bin" for number, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}), "utf-8")


@pytest.mark.parametrize("write", [one_bin, one_safetensors, two_shards])
def test_the_bundle_is_the_same(stock: tuple[Path, Path], tmp_path: Path, write: Any) -> None:
    checkpoint, bundle = stock
    original = write_original(tmp_path / "original", checkpoint, write)
    made, parity = export_checkpoint(original, tmp_path / "bundle")
    assert parity.logits < 1e-5
    for name in ("step.onnx.data", "image_decoder.onnx.data"):
        assert made.path(name).read_bytes() == (bundle / name).read_bytes(), name
    assert made.manifest.tokens == SIDE * SIDE and made.manifest.recommended["guidance"] == 5.0


GONE = "gen_head.vision_head.weight"
STOCK_GONE = "model.generation_head.vision_head.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(GONE), f"expected the tensor {STOCK_GONE} in .*, found none \\(missing\\)"),
        (
            lambda t: t.update({GONE: t[GONE][:3].clone()}),
            f"expected {STOCK_GONE} of shape .* in .*pytorch_model.bin, found mismatched \\[3, {WIDTH}\\]",
        ),
        (lambda t: t.update(stray=torch.zeros(1)), "in .*pytorch_model.bin, found unexpected stray"),
    ],
)
def test_odd_tensors_are_named_with_their_file(
    stock: tuple[Path, Path], tmp_path: Path, change: Any, words: str
) -> None:
    def write(tensors: dict[str, Any], folder: Path) -> None:
        change(tensors)
        one_bin(tensors, folder)

    original = write_original(tmp_path / "original", stock[0], write)
    with pytest.raises(InputError, match=words):
        export_checkpoint(original, tmp_path / "bundle")


def test_torn_files_are_refused(stock: tuple[Path, Path], tmp_path: Path) -> None:
    original = write_original(tmp_path / "original", stock[0], two_shards)
    shard = original / "pytorch_model-00001-of-00002.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"expected a whole file of tensors at .*00001-of-00002\.bin"):
        export_checkpoint(original, tmp_path / "bundle")
    shard.unlink()
    with pytest.raises(InputError, match=r"expected the shard .*00001-of-00002\.bin, named in .*, found none"):
        export_checkpoint(original, tmp_path / "bundle")


class Harmful:
    """Pickled code: unpickling it would write a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.target, "harm"))


def test_pickled_code_is_never_run(stock: tuple[Path, Path], tmp_path: Path) -> None:
    def write(tensors: dict[str, Any], folder: Path) -> None:
        torch.save(tensors | {"harm": Harmful(tmp_path / "harm")}, folder / "pytorch_model.bin")

    original = write_original(tmp_path / "original", stock[0], write)
    with pytest.raises(InputError, match="expected a whole file of tensors"):
        export_checkpoint(original, tmp_path / "bundle")
    assert not (tmp_path / "harm").exists()


def test_a_configuration_without_its_parts(stock: tuple[Path, Path], tmp_path: Path) -> None:
    original = write_original(tmp_path / "original", stock[0], one_bin)
    document = json.loads((original / "config.json").read_text("utf-8"))
    del document["gen_head_config"]
    (original / "config.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(InputError, match=r"expected the configuration of a Janus model .*, found: 'gen_head_config'"):
        export_checkpoint(original, tmp_path / "bundle")
