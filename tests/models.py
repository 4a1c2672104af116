"""Tiny random Janus checkpoints in transformers' layout: small enough to enumerate, or with true head sizes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
)

SPECIAL = ["<pad>", "<bos>", "<eos>", "<begin_of_image>", "<end_of_image>", "<image_placeholder>", "<unk>"]
WORDS = [*SPECIAL, "on", "apple", "cat", "red", "blue"]


def write_tiny_janus(
    folder: Path,
    *,
    image_vocabulary: int = 4,
    side: int = 2,
    layers: int = 1,
    width: int = 16,
    heads: int = 2,
    key_value_heads: int | None = None,
    seed: int = 0,
    spread: float = 0.7,
) -> Path:
    """Write a checkpoint whose logits have about this standard deviation and depend on all tokens before."""
    torch.manual_seed(seed)
    config = JanusConfig(
        text_config=LlamaConfig(
            vocab_size=16,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads or heads,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ).to_dict(),
        vision_config=JanusVisionConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            image_size=8 * side,  # transformers takes the token grid from here: image size / patch size
            patch_size=8,
            mlp_ratio=1.0,
            projection_dim=width,
            depth=1,
            num_image_tokens=side * side,
        ).to_dict(),
        vq_config=JanusVQVAEConfig(
            base_channels=32,
            channel_multiplier=[1, 1],
            num_res_blocks=0,
            latent_channels=32,
            embed_dim=8,
            num_embeddings=image_vocabulary,
            num_patches=side,
            projection_dim=width,
            image_token_embed_dim=width,
            num_hidden_layers=2,
        ).to_dict(),
        image_token_id=5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = JanusForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            elif "norm" not in name:
                parameter.zero_()
        model.model.generation_embeddings.weight.normal_(0, 1)
        model.model.language_model.embed_tokens.weight.normal_(0, 1)
        model.model.generation_head.vision_head.weight.mul_(2.5 * spread)
    model.generation_config = GenerationConfig(
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        do_sample=True,
        top_k=0,
        guidance_scale=2.0,
        generation_kwargs={"boi_token_id": 3},
    )
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    """A word-level tokenizer with the special tokens of the demo model."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [word for word in SPECIAL if word in words]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8")


def write_tiny(family: str, folder: Path, *, head_size: int) -> Path:
    """A tiny checkpoint of a family with a head size of the published models."""
    writers = {"janus": write_tiny_janus}
    return writers[family](folder, image_vocabulary=32, side=8, layers=2, width=4 * head_size, heads=4, spread=2.0)
