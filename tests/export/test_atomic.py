"""An export leaves the whole bundle, the previous one or nothing; transformers is as it was afterwards."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from csd_ops.errors import CsdError
from export import export_checkpoint
from export.families import find_family
from runtime.bundle import MANIFEST, TOKENIZER, open_bundle
from tests.models import WORDS, write_tokenizer


@pytest.mark.parametrize("at", ["trace step", "image decoder", "check bundle"])
def test_interrupted_export_keeps_the_previous_bundle(
    toy_checkpoint: Path, toy_bundle: Path, tmp_path: Path, at: str
) -> None:
    folder = Path(shutil.copytree(toy_bundle, tmp_path / "bundle"))
    before = (folder / MANIFEST).read_bytes()

    def on_stage(name: str, number: int, count: int) -> None:
        if name == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(toy_checkpoint, folder, on_stage=on_stage)
    assert (folder / MANIFEST).read_bytes() == before and open_bundle(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


OUTPUTS = {
    "a file": lambda folder: folder / "file",
    "below a file": lambda folder: folder / "file" / "bundle",
    "a folder of other files": lambda folder: folder,
    "where nobody may write": lambda folder: Path("/proc/nothing/bundle"),
}


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_outputs_that_cannot_be_written_are_refused(toy_checkpoint: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CsdError) as caught:
        export_checkpoint(toy_checkpoint, OUTPUTS[name](tmp_path))
    message = str(caught.value)
    assert message.startswith("expected") and "found" in message and ";" in message and "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_modelling_code_is_restored(toy_checkpoint: Path) -> None:
    from transformers.models.llama import modeling_llama

    from export.step import patched

    model = find_family(toy_checkpoint).load(toy_checkpoint).language_model
    before = (
        modeling_llama.apply_rotary_pos_emb,
        modeling_llama.LlamaRMSNorm.forward,
        model.config._attn_implementation,
    )
    with pytest.raises(ZeroDivisionError), patched(model):
        assert modeling_llama.apply_rotary_pos_emb is not before[0]
        raise ZeroDivisionError
    after = (
        modeling_llama.apply_rotary_pos_emb,
        modeling_llama.LlamaRMSNorm.forward,
        model.config._attn_implementation,
    )
    assert after == before


def test_importing_the_exporter_does_not_import_torch() -> None:
    code = "import sys, export; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_prompts_begin_and_end_with_their_special_tokens(toy_bundle: Path) -> None:
    from tokenizers import Tokenizer

    manifest = open_bundle(toy_bundle).manifest
    tokenizer = Tokenizer.from_file(str(toy_bundle / TOKENIZER))
    ids = tokenizer.encode(f"{manifest.prompt_prefix}red apple{manifest.prompt_suffix}").ids
    words = [tokenizer.id_to_token(identifier) for identifier in ids]
    assert words == ["<bos>", "red", "apple", "<begin_of_image>"]
    assert (manifest.kept_head, manifest.kept_tail) == (1, 1)
    assert tokenizer.id_to_token(manifest.pad_id) == "<pad>"


def test_chat_tokenizers_get_the_chat_prompt(toy_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(toy_checkpoint, tmp_path / "checkpoint"))
    write_tokenizer(checkpoint, [*WORDS, "<|User|>"])
    manifest = find_family(checkpoint).load(checkpoint).manifest
    assert manifest.prompt_prefix == "<|User|>: "
    assert manifest.prompt_suffix == "\n\n<|Assistant|>:<begin_of_image>"
