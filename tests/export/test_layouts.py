"""Every published layout of a family's tensors is read to the same numbers; what is missing or torn is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from csd_ops.errors import InputError
from export import export_checkpoint
from export.families import KNOWN, find_family
from export.step import parameter_sources
from tests.models import write_tiny

Tensors = dict[str, torch.Tensor]


def one_bin(tensors: Tensors, folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def shards(tensors: Tensors, folder: Path) -> None:
    names = sorted(tensors)
    files = {name: f"model-0000{1 + number % 3}-of-00003.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name].contiguous() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), "utf-8")


def rewrite(checkpoint: Path, folder: Path, write: Callable[[Tensors, Path], None]) -> Path:
    """A copy whose weights are written in another way."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write(tensors, folder)
    return folder


@pytest.fixture(scope="module", params=sorted(KNOWN))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(request.param, tmp_path_factory.mktemp(request.param) / "checkpoint", head_size=64)


def numbers(checkpoint: Path) -> dict[str, Any]:
    """All that a bundle takes from a checkpoint's tensors."""
    loaded = find_family(checkpoint).load(checkpoint)
    decoder = {f"image_decoder.{name}": [tensor] for name, tensor in loaded.image_decoder.state_dict().items()}
    assert not [name for name, tensor in loaded.language_model.named_buffers() if tensor.is_meta]
    return parameter_sources(loaded) | decoder | {"codes": [torch.from_numpy(loaded.codes)]}


def stock_names(tensors: Tensors, folder: Path) -> None:
    """As transformers' own class names them, which is not how it writes all of them."""
    save_file(tensors, folder / "model.safetensors")
    kind = json.loads((folder / "config.json").read_text("utf-8"))["architectures"][0]
    stock = getattr(transformers, kind).from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    one_bin(stock | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, folder)


@pytest.mark.parametrize("write", [one_bin, shards, stock_names])
def test_numbers_are_the_same(checkpoint: Path, tmp_path: Path, write: Callable[[Tensors, Path], None]) -> None:
    expected, found = numbers(checkpoint), numbers(rewrite(checkpoint, tmp_path / "copy", write))
    assert expected.keys() == found.keys()
    for name, parts in expected.items():
        assert all(torch.equal(one, other) for one, other in zip(parts, found[name], strict=True)), name


def test_nothing_but_pictures_is_needed(checkpoint: Path, tmp_path: Path) -> None:
    """The vision tower, encoders and Janus's text head may be missing; what is drawn with may not."""
    kind = json.loads((checkpoint / "config.json").read_text("utf-8"))["model_type"]
    apart = ("vision_model.", "aligner.", "vqmodel.encoder.", "vqmodel.quant_conv.")
    gone = tuple(f"{model}{name}" for name in apart for model in ("model.", ""))
    gone += ("lm_head.",) if kind == "janus" else ()

    def without(names: tuple[str, ...]) -> Callable[[Tensors, Path], None]:
        return lambda tensors, folder: one_bin(
            {name: value for name, value in tensors.items() if not name.startswith(names)}, folder
        )

    assert numbers(rewrite(checkpoint, tmp_path / "picture", without(gone))).keys() == numbers(checkpoint).keys()
    needed = "model.generation_head." if kind == "janus" else "lm_head."
    with pytest.raises(InputError, match=rf"expected the tensor {needed}.* in .*, found none \(missing\); download"):
        numbers(rewrite(checkpoint, tmp_path / "words", without((needed, f"text_model.{needed}"))))


def test_a_partial_shard_is_named(checkpoint: Path, tmp_path: Path) -> None:
    copy = rewrite(checkpoint, tmp_path / "copy", shards)
    shard = copy / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"expected a whole file of tensors at .*00002-of-00003\.safetensors, found"):
        export_checkpoint(copy, tmp_path / "bundle")
    shard.unlink()
    with pytest.raises(InputError, match=r"expected the shard .*00002-of-00003\.safetensors, named in .*, found none"):
        export_checkpoint(copy, tmp_path / "bundle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_configuration_that_contradicts_its_tensors(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    document = json.loads((copy / "config.json").read_text("utf-8"))
    (document.get("text_config") or document)["intermediate_size"] += 8
    (copy / "config.json").write_text(json.dumps(document), "utf-8")
    words = r"expected model\..*mlp\..* of shape .* in .*model\.safetensors, found mismatched"
    with pytest.raises(InputError, match=words):
        export_checkpoint(copy, tmp_path / "bundle")
