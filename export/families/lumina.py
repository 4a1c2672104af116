r"""Lumina-mGPT: Chameleon body with q/k norms, codes inside the text vocabulary, forced grid, VQGAN image decoder.

Prompt `Generate an image of WxH according to the following prompt:\n{text}<reserved08706><racm3:break>`; the picture is
height token, width token, rows of codes each ended by a newline token, end of image, end of turn. The unconditional
row begins at the image's start token, with positions from 0 (the guidance context of the original processor).

transformers' Chameleon blanks the logits of image ids, so its body and head are called apart; it has no image decoder,
so Meta's `vqgan.ckpt` is read into one built here from its encoder's own blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from csd_ops.errors import InputError
from export.families.base import Loaded
from export.families.reading import (
    check_codes,
    check_settings,
    check_vocabulary,
    image_head,
    read_stock,
    read_tokenizer,
    split_table,
)
from export.families.sizes import Sizes
from export.families.tensors import Stored, assign, read_file
from runtime.bundle import Manifest, text_id

START, END, TURN, NEWLINE = "<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>"
FIRST_SIZE = 8800  # <reserved0(8800 + n)> says n * 32 pixels
CODE_PIXELS, STEP_PIXELS = 16, 32
PUBLISHED = (768, 512, 1024)
SIZES = Sizes(
    code=CODE_PIXELS,
    step=STEP_PIXELS,
    room=64,
    largest=max(PUBLISHED),
    usual=(*PUBLISHED, *range(512 - STEP_PIXELS, 0, -STEP_PIXELS)),
    published=[(side, side) for side in PUBLISHED],
)
MAX_WINDOW = 64
DECODERS = ("vqgan.safetensors", "vqgan.ckpt", "tokenizer/vqgan.ckpt")


class Lumina:
    """See the module."""

    name = "lumina"

    def load(self, checkpoint: Path, size: tuple[int, int] | None = None, decoder: Path | None = None) -> Loaded:
        """Read a Chameleon checkpoint in transformers' layout, and the VQGAN beside it or at `decoder`."""
        check_settings(checkpoint)
        model = read_stock(checkpoint, "ChameleonForConditionalGeneration", not_read=("model.vqmodel.",))
        config, body = model.config, model.model
        tokenizer = read_tokenizer(checkpoint, (START, END, TURN, NEWLINE))
        check_vocabulary(checkpoint, tokenizer, config.vocab_size)
        vocabulary = config.vq_config.num_embeddings
        text_ids = check_codes(checkpoint, body.vocabulary_mapping.img2bpe, vocabulary)
        start = min(text_ids)
        context = config.max_position_embeddings
        width, height = SIZES.choose(size, context)
        sizes = [f"<reserved0{FIRST_SIZE + side // STEP_PIXELS}>" for side in (height, width)]
        read_tokenizer(checkpoint, tuple(sizes))
        rows, columns = height // CODE_PIXELS, width // CODE_PIXELS + 1
        image_decoder = ImageDecoder(read_vqgan(checkpoint, decoder, config.vq_config), rows, columns - 1)
        with torch.no_grad():
            embedding = split_table(body.embed_tokens.weight, start, text_ids)
            head = image_head(model.lm_head, text_ids)
        body.vqmodel = nn.Identity()  # the encoder of pictures is not needed
        tokens = 2 + rows * columns + 2
        manifest = Manifest(
            family=self.name,
            name="",
            precision="fp32",
            image_vocabulary=vocabulary,
            text_vocabulary=config.vocab_size - vocabulary,
            image_id_start=start,
            tokens=tokens,
            first=2,
            rows=rows,
            columns=columns,
            codes_per_row=columns - 1,
            width=width,
            height=height,
            layers=config.num_hidden_layers,
            key_value_heads=config.num_key_value_heads,
            head_size=config.hidden_size // config.num_attention_heads,
            context=context,
            max_window=min(MAX_WINDOW, tokens),
            max_prompt=min(512, context - tokens),
            prompt_prefix=f"Generate an image of {width}x{height} according to the following prompt:\n",
            prompt_suffix=f"{TURN}{START}",
            unconditional="drop",
            negative_prompt="",
            pad_id=0,
            kept_head=0,
            kept_tail=1,
            forced=_grammar(tokenizer, start, vocabulary, rows, columns, sizes),
            recommended={"preset": "csd", "guidance": 3.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0},
        )
        return Loaded(
            model=model,
            language_model=body,
            embedding=embedding,
            head=head,
            codes=image_decoder.vqgan.quantize.embedding.weight.detach().numpy(),
            image_decoder=image_decoder,
            manifest=manifest,
        )


FAMILY = Lumina()


def _grammar(tokenizer: Any, start: int, vocabulary: int, rows: int, columns: int, sizes: list[str]) -> dict[str, int]:
    """The forced ids by position: height, width, newlines, end of image, end of turn."""

    def identifier(name: str) -> int:
        return text_id(int(tokenizer.token_to_id(name)), start, vocabulary)

    forced = dict(enumerate(sizes)) | {2 + row * columns + columns - 1: NEWLINE for row in range(rows)}
    forced |= {2 + rows * columns: END, 3 + rows * columns: TURN}
    return {str(position): identifier(name) for position, name in sorted(forced.items())}


# ---- the image decoder -------------------------------------------------------------------------------------------


@dataclass
class _Blocks:
    """What transformers' encoder blocks read of a configuration."""

    dropout: float = 0.0


class Vqgan(nn.Module):
    """Decoder half of Meta's VQGAN; names of parts as in its checkpoint, so that the key table is empty."""

    def __init__(self, config: Any) -> None:
        from transformers.models.chameleon.modeling_chameleon import (
            ChameleonVQVAEEncoderAttnBlock as Attention,
        )
        from transformers.models.chameleon.modeling_chameleon import (
            ChameleonVQVAEEncoderResnetBlock as Resnet,
        )

        super().__init__()
        widths = [config.base_channels * factor for factor in config.channel_multiplier]

        def resnet(before: int, after: int) -> nn.Module:
            block: nn.Module = Resnet(config=_Blocks(), in_channels=before, out_channels=after)  # type: ignore[arg-type, unused-ignore]
            return block

        self.quantize = nn.Module()
        self.quantize.embedding = nn.Embedding(config.num_embeddings, config.embed_dim)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)
        decoder = self.decoder = nn.Module()
        width = widths[-1]
        decoder.conv_in = nn.Conv2d(config.latent_channels, width, 3, padding=1)
        decoder.mid = nn.Module()
        decoder.mid.block_1, decoder.mid.attn_1 = resnet(width, width), Attention(width)
        decoder.mid.block_2 = resnet(width, width)
        decoder.up = nn.ModuleList([nn.Module() for _ in widths])
        for level in reversed(range(len(widths))):
            up = decoder.up[level]
            up.block = nn.ModuleList()
            for _ in range(config.num_res_blocks + 1):
                up.block.append(resnet(width, widths[level]))
                width = widths[level]
            if level:
                up.upsample = nn.Module()
                up.upsample.conv = nn.Conv2d(width, width, 3, padding=1)
        decoder.norm_out = nn.GroupNorm(32, width, eps=1e-6)
        decoder.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        """Codes int64 [B, rows, columns] to pixels [B, 3, height, width] in about [-1, 1]."""
        decoder: Any = self.decoder
        hidden = self.post_quant_conv(functional.embedding(grid, self.quantize.embedding.weight).permute(0, 3, 1, 2))
        hidden = decoder.conv_in(hidden)
        hidden = decoder.mid.block_2(decoder.mid.attn_1(decoder.mid.block_1(hidden)))
        for level in reversed(range(len(decoder.up))):
            for block in decoder.up[level].block:
                hidden = block(hidden)
            if level:
                hidden = functional.interpolate(hidden, scale_factor=2.0, mode="nearest")
                hidden = decoder.up[level].upsample.conv(hidden)
        hidden = decoder.norm_out(hidden)
        pixels: torch.Tensor = decoder.conv_out(hidden * torch.sigmoid(hidden))
        return pixels


class ImageDecoder(nn.Module):
    """Codes int64 [B, rows * columns] -> pixels uint8 [B, height, width, 3]."""

    def __init__(self, vqgan: Vqgan, rows: int, columns: int) -> None:
        super().__init__()
        self.vqgan, self.rows, self.columns = vqgan, rows, columns

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        pixels = self.vqgan(codes.reshape(codes.shape[0], self.rows, self.columns))
        levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().clamp(0, 255)
        return levels.permute(0, 2, 3, 1).to(torch.uint8)


def read_vqgan(checkpoint: Path, path: Path | None, config: Any) -> Vqgan:
    """The VQGAN's decoder from safetensors or a .ckpt (tensors only); InputError names what is missing or odd."""
    found = [checkpoint / name for name in DECODERS] if path is None else [path]
    path = next((candidate for candidate in found if candidate.is_file()), None)
    if path is None:
        raise InputError(
            f"expected Meta's VQGAN at {' or '.join(map(str, found))}, found none; copy vqgan.ckpt of Chameleon or "
            "Anole there, or name it with --image-decoder"
        )
    stored = {name: Stored(tensor, path) for name, tensor in read_file(path).items()}
    with torch.device("meta"):
        vqgan = Vqgan(config)
    # the encoder is left in the file
    assign(vqgan, {name: stored[name] for name in vqgan.state_dict() if name in stored}, path)
    return vqgan.float().eval()
