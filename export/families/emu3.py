"""Emu3-Gen: Llama-like body, codes inside the text vocabulary, rows ended by a token, negative prompt, VQ decoder.

Prompt `<bos>{text}<|image start|>H*W<|image token|>`, H and W in codes; the picture is rows of codes each ended by
`<|extra_200|>`, then `<|extra_201|>`, `<|image end|>` and the end of text. The unconditional row is the negative prompt
in the same template (transformers' Emu3Processor and the model card's example).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from csd_ops.errors import InputError
from export.families.base import Loaded
from export.families.reading import (
    AGAIN,
    check_codes,
    check_settings,
    check_vocabulary,
    image_head,
    read_stock,
    read_tokenizer,
    split_table,
)
from export.families.sizes import Sizes
from export.families.tensors import Table
from runtime.bundle import Manifest, text_id

IMAGE_START, IMAGE_TOKEN, IMAGE_END = "<|image start|>", "<|image token|>", "<|image end|>"
END_OF_LINE, END_OF_FILE = "<|extra_200|>", "<|extra_201|>"
CODE_PIXELS = 8
SIZES = Sizes(
    code=CODE_PIXELS,
    step=CODE_PIXELS,
    room=96,  # the negative prompt takes half of it
    largest=720,
    usual=range(720, 0, -CODE_PIXELS),
    published=[(720, 720), (624, 832), (832, 624), (536, 952), (952, 536)],
)
MAX_WINDOW = 64
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
# Names written before transformers 4.52
TABLE: Table = (
    (r"text_model\.lm_head\.", "lm_head."),
    (r"text_model\.model\.", "model.text_model."),
    (r"vqmodel\.", "model.vqmodel."),
)
NOT_READ = ("model.vqmodel.encoder.", "model.vqmodel.quant_conv.")


class Emu3:
    """See the module."""

    name = "emu3"

    def load(self, checkpoint: Path, size: tuple[int, int] | None = None, decoder: Path | None = None) -> Loaded:
        """Read an Emu3-Gen checkpoint in transformers' layout."""
        if decoder is not None:
            raise InputError(f"expected no image decoder for {self.name}, found {decoder}; the checkpoint has its own")
        check_settings(checkpoint)
        model = read_stock(checkpoint, "Emu3ForConditionalGeneration", TABLE, NOT_READ)
        inner = model.model
        config, vq = model.config.text_config, model.config.vq_config
        tokenizer = read_tokenizer(checkpoint, (IMAGE_START, IMAGE_TOKEN, IMAGE_END, END_OF_LINE, END_OF_FILE))
        check_vocabulary(checkpoint, tokenizer, config.vocab_size)
        begin = tokenizer.id_to_token(config.bos_token_id)
        if begin is None:
            raise InputError(
                f"expected the id {config.bos_token_id} (bos_token_id) in {checkpoint / 'tokenizer.json'}, found none; "
                f"{AGAIN}"
            )
        text_ids = check_codes(checkpoint, inner.vocabulary_mapping.img2bpe, vq.codebook_size)
        start = min(text_ids)
        pixels = inner.vqmodel.spatial_scale_factor
        width, height = replace(SIZES, code=pixels, step=pixels).choose(size, config.max_position_embeddings)
        inner.vqmodel.encoder = inner.vqmodel.quant_conv = nn.Identity()  # not read
        rows, columns = height // pixels, width // pixels + 1
        with torch.no_grad():
            embedding = split_table(inner.text_model.embed_tokens.weight, start, text_ids)
            head = image_head(model.lm_head, text_ids)
        tokens = rows * columns + 3
        end = config.eos_token_id if isinstance(config.eos_token_id, int) else config.eos_token_id[0]
        last = [tokenizer.token_to_id(END_OF_FILE), tokenizer.token_to_id(IMAGE_END), end]
        forced = {row * columns + columns - 1: tokenizer.token_to_id(END_OF_LINE) for row in range(rows)}
        forced |= {rows * columns + index: identifier for index, identifier in enumerate(last)}
        manifest = Manifest(
            family=self.name,
            name="",
            precision="fp32",
            image_vocabulary=vq.codebook_size,
            text_vocabulary=config.vocab_size - vq.codebook_size,
            image_id_start=start,
            tokens=tokens,
            first=0,
            rows=rows,
            columns=columns,
            codes_per_row=columns - 1,
            width=width,
            height=height,
            layers=config.num_hidden_layers,
            key_value_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            context=config.max_position_embeddings,
            max_window=min(MAX_WINDOW, tokens),
            max_prompt=min(512, config.max_position_embeddings - tokens),
            prompt_prefix=begin,
            prompt_suffix=f"{IMAGE_START}{rows}*{columns - 1}{IMAGE_TOKEN}",
            unconditional="negative",
            negative_prompt=NEGATIVE,
            pad_id=0,
            kept_head=0,
            kept_tail=1,
            forced={
                str(position): text_id(identifier, start, vq.codebook_size)
                for position, identifier in sorted(forced.items())
            },
            recommended={"preset": "csd", "guidance": 3.0, "temperature": 1.0, "top_k": 2048, "top_p": 1.0},
        )
        return Loaded(
            model=model,
            language_model=inner.text_model,
            embedding=embedding,
            head=head,
            codes=inner.vqmodel.quantize.embedding.weight.detach().float().numpy(),
            image_decoder=ImageDecoder(inner.vqmodel.float(), rows, columns - 1),
            manifest=manifest,
        )


FAMILY = Emu3()


class ImageDecoder(nn.Module):
    """Codes int64 [B, rows * columns] -> pixels uint8 [B, height, width, 3].

    Emu3's decoder is one of videos: a picture is the first of four frames. Frames meet in the temporal layers alone, so
    the others are left out behind them.
    """

    def __init__(self, vqmodel: Any, rows: int, columns: int) -> None:
        super().__init__()
        vqmodel.config._attn_implementation = "eager"
        _unfold_norms(vqmodel.decoder)
        self.vqmodel, self.rows, self.columns = vqmodel, rows, columns

    def _first_frame(self, states: torch.Tensor) -> torch.Tensor:
        """[B, C, 1, rows, columns] through the temporal layers; frame 0 of what comes out, [B, C, rows, columns]."""
        decoder = self.vqmodel.decoder
        for layer in decoder.time_res_stack:
            states = layer(states)
        for layer in decoder.time_conv:
            states = layer(states)
            states = states * torch.sigmoid(states)
        return states[:, :, 0]

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        vqmodel, decoder = self.vqmodel, self.vqmodel.decoder
        grid = codes.reshape(codes.shape[0], 1, self.rows, self.columns)
        quantised = functional.embedding(grid, vqmodel.quantize.embedding.weight).permute(0, 4, 1, 2, 3)
        hidden = decoder.conv_in(self._first_frame(vqmodel.post_quant_conv(quantised)))
        guide = self._first_frame(quantised)
        hidden = decoder.up_block(decoder.middle_block(hidden, guide), guide)
        hidden = decoder.norm_out(hidden, guide)
        pixels = decoder.conv_out(hidden * torch.sigmoid(hidden))  # [B, 3, height, width] in about [-1, 1]
        levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().clamp(0, 255)
        return levels.permute(0, 2, 3, 1).to(torch.uint8)


class _Affine(nn.Module):
    """A batch norm that does not learn any more: x * scale + shift by channel."""

    def __init__(self, norm: nn.BatchNorm3d) -> None:
        super().__init__()
        assert norm.running_var is not None and norm.running_mean is not None
        scale = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
        self.register_buffer("scale", scale.reshape(-1, 1, 1, 1))
        self.register_buffer("shift", (norm.bias.detach() - norm.running_mean * scale).reshape(-1, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def _unfold_norms(module: nn.Module) -> None:
    """Replace batch norms by what they are in evaluation, in place: one less kind of layer for every engine."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm3d):
            setattr(module, name, _Affine(child))
        else:
            _unfold_norms(child)
