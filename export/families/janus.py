r"""Janus and Janus-Pro: Llama body, codes through an aligner, a two-layer image head, VQ image decoder.

Prompt `<|User|>: {text}\n\n<|Assistant|>:<begin_of_image>`; the unconditional row pads all but the first and last id
(arXiv 2501.17811 and transformers' JanusForConditionalGeneration). No token is forced: the grid has no line ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from csd_ops.errors import InputError
from export.families.base import Loaded
from export.families.reading import check_settings, check_vocabulary, read_stock, read_tokenizer
from runtime.bundle import Manifest

BEGIN_OF_IMAGE = "<begin_of_image>"
USER = "<|User|>"
MAX_WINDOW = 64
NOT_READ = ("model.vision_model.", "model.aligner.", "lm_head.", "model.vqmodel.encoder.", "model.vqmodel.quant_conv.")


class Janus:
    """See the module."""

    name = "janus"

    def load(self, checkpoint: Path, size: tuple[int, int] | None = None, decoder: Path | None = None) -> Loaded:
        """Read a Janus checkpoint in transformers' layout."""
        check_settings(checkpoint)
        model = read_stock(checkpoint, "JanusForConditionalGeneration", not_read=NOT_READ)
        return load_model(checkpoint, model, size, decoder)


FAMILY = Janus()


def load_model(checkpoint: Path, model: Any, size: tuple[int, int] | None, decoder: Path | None) -> Loaded:
    """What the exporter needs of a stock model whose weights were read."""
    if decoder is not None:
        raise InputError(f"expected no image decoder for {Janus.name}, found {decoder}; the checkpoint has its own")
    inner = model.model
    config, vq = model.config.text_config, model.config.vq_config
    with torch.no_grad():
        codes = torch.arange(inner.generation_embeddings.num_embeddings)
        inner.generation_embeddings.float(), inner.generation_aligner.float(), inner.vqmodel.float()
        images = model.prepare_embeddings_for_image_generation(codes[None])[0]
        embedding = [images, inner.language_model.embed_tokens.weight.detach()]
        vectors = functional.normalize(inner.vqmodel.quantize.embedding.weight, dim=-1)
    side = vq.num_patches
    tokens = model.config.vision_config.num_image_tokens
    _check_grid(checkpoint, side * side, tokens, config.max_position_embeddings)
    scale = 2 ** (len(vq.channel_multiplier) - 1)
    if size not in (None, (side * scale, side * scale)):
        raise InputError(
            f"expected the size {side * scale}x{side * scale}, the only one {Janus.name} draws, found "
            f"{size[0]}x{size[1]}; leave --size out"
        )
    manifest = Manifest(
        family=Janus.name,
        name="",
        precision="fp32",
        image_vocabulary=len(codes),
        text_vocabulary=inner.language_model.embed_tokens.num_embeddings,
        image_id_start=-1,
        tokens=side * side,
        first=0,
        rows=side,
        columns=side,
        codes_per_row=side,
        width=side * scale,
        height=side * scale,
        layers=config.num_hidden_layers,
        key_value_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        context=config.max_position_embeddings,
        max_window=min(MAX_WINDOW, side * side),
        max_prompt=min(512, config.max_position_embeddings - side * side),
        recommended=_recommended(model),
        **_prompt(checkpoint, inner.language_model.embed_tokens.num_embeddings, model.generation_config),
    )
    return Loaded(
        model=model,
        language_model=inner.language_model,
        embedding=embedding,
        head=inner.generation_head,
        codes=vectors.detach().numpy(),
        image_decoder=ImageDecoder(inner.vqmodel, side),
        manifest=manifest,
    )


class ImageDecoder(nn.Module):
    """Codes int64 [B, N] -> pixels uint8 [B, height, width, 3]; the code lookup is one table."""

    def __init__(self, vqmodel: Any, side: int) -> None:
        super().__init__()
        with torch.no_grad():
            vectors = functional.normalize(vqmodel.quantize.embedding.weight, dim=-1)
        self.register_buffer("table", vectors.detach().clone())
        self.post, self.decoder, self.side = vqmodel.post_quant_conv, vqmodel.decoder, side

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        vectors = functional.embedding(codes, self.table)  # [B, N, E]
        grid = vectors.transpose(1, 2).reshape(codes.shape[0], -1, self.side, self.side)
        pixels = self.decoder(self.post(grid))  # [B, 3, height, width] in about [-1, 1]
        levels = ((pixels + 1) * 127.5).round().clamp(0, 255)
        return levels.permute(0, 2, 3, 1).to(torch.uint8)


def _check_grid(checkpoint: Path, grid: int, tokens: int, context: int) -> None:
    path = checkpoint / "config.json"
    if grid != tokens:
        raise InputError(
            f"expected num_image_tokens of {grid} (image_size / patch_size, squared) in {path}, found {tokens}; "
            "download the checkpoint again"
        )
    if context <= grid + 2:
        raise InputError(
            f"expected max_position_embeddings over {grid + 2} in {path} (a picture and a prompt), found {context}; "
            "download the checkpoint again"
        )


def _recommended(model: Any) -> dict[str, Any]:
    guidance = getattr(model.generation_config, "guidance_scale", None)
    return {"preset": "csd", "guidance": float(guidance or 5.0), "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def _prompt(checkpoint: Path, text_vocabulary: int, settings: Any) -> dict[str, Any]:
    """The prompt template and guidance pair, from the checkpoint's tokenizer."""
    path = checkpoint / "tokenizer.json"
    tokenizer = read_tokenizer(checkpoint, (BEGIN_OF_IMAGE,))
    pad = next(
        (name for name in ("<｜▁pad▁｜>", "<pad>", "<|pad|>") if tokenizer.token_to_id(name) is not None),
        None,
    )
    if pad is None:
        raise InputError(
            f"expected the special token a padding token in {path}, found none; this tokenizer is of another model"
        )
    check_vocabulary(checkpoint, tokenizer, text_vocabulary)
    chat = tokenizer.token_to_id(USER) is not None
    prefix, suffix = (f"{USER}: ", f"\n\n<|Assistant|>:{BEGIN_OF_IMAGE}") if chat else ("", BEGIN_OF_IMAGE)
    ids = tokenizer.encode(f"{prefix}a{suffix}").ids
    expected = {
        "bos_token_id": (settings.bos_token_id, ids[0]),
        "boi_token_id": ((getattr(settings, "generation_kwargs", None) or {}).get("boi_token_id"), ids[-1]),
        "pad_token_id": (settings.pad_token_id, tokenizer.token_to_id(pad)),
    }
    for name, (wanted, found) in expected.items():
        if wanted is not None and wanted != found:  # the unconditional row keeps first and last id and pads the others
            raise InputError(
                f"expected {name} {wanted} of generation_config.json from {path}, found {found}; "
                "download the tokenizer again"
            )
    return {
        "prompt_prefix": prefix,
        "prompt_suffix": suffix,
        "unconditional": "pad",
        "negative_prompt": "",
        "pad_id": tokenizer.token_to_id(pad),
        "kept_head": 1,
        "kept_tail": 1,
    }
