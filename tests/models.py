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


TINY_DECODER = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 0, "latent_channels": 32}


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
    published_decoder: bool = False,
) -> Path:
    """Write a checkpoint whose logits have about this standard deviation and depend on all tokens before.

    `published_decoder`: the image decoder has the sizes of Janus-Pro's (16 pixels a code) instead of tiny ones.
    """
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
            # transformers takes the token grid from here: image size / patch size
            image_size=(16 if published_decoder else 8) * side,
            patch_size=16 if published_decoder else 8,
            mlp_ratio=1.0,
            projection_dim=width,
            depth=1,
            num_image_tokens=side * side,
        ).to_dict(),
        vq_config=JanusVQVAEConfig(
            **({} if published_decoder else TINY_DECODER),
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


def write_tokenizer(
    folder: Path, words: list[str] = WORDS, specials: list[str] = SPECIAL, begin: str = "<bos>"
) -> None:
    """A word-level tokenizer; `begin` is put before every text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [word for word in specials if word in words]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8")


def _randomise(model: torch.nn.Module, spread: float) -> None:
    """Weights that keep the size of their input, biases 0, norms as they are: logits depend on all tokens before."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            elif "norm" not in name:
                parameter.zero_()
        model.get_input_embeddings().weight.normal_(0, 1)
        model.lm_head.weight.mul_(2.5 * spread)


LUMINA_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<racm3:break>", "<eoss>", "<image>", "<reserved08706>"]
LUMINA_SPECIAL += [f"<reserved0{number}>" for number in range(8799, 8807)]


def write_tiny_lumina(
    folder: Path,
    *,
    image_vocabulary: int = 32,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    key_value_heads: int | None = None,
    seed: int = 0,
    spread: float = 1.0,
    context: int = 192,
) -> Path:
    """A Chameleon checkpoint with the ids of Lumina-mGPT in small, and a VQGAN beside it."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    from export.families.lumina import Vqgan

    torch.manual_seed(seed)
    # Image ids stand early, as in the published vocabulary, and not in the order of their codes
    order = torch.randperm(image_vocabulary, generator=torch.Generator().manual_seed(1)).tolist()
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    images = [f"IMGIMG{str(code).translate(letters)}Z" for code in order]
    text = ["generate", "an", "image", "of", "apple", "cat", "red", "on"]
    words = [*LUMINA_SPECIAL[:4], *images, *LUMINA_SPECIAL[4:], *text]
    vocabulary = {word: index for index, word in enumerate(words)}
    config = ChameleonConfig(
        vocab_size=len(words) + 4,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or heads,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        vq_config={
            "embed_dim": 8,
            "num_embeddings": image_vocabulary,
            "latent_channels": 8,
            "resolution": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1, 2],
            "num_res_blocks": 1,
        },
        vocabulary_map=vocabulary,
    )
    model = ChameleonForConditionalGeneration(config).eval()
    _randomise(model, spread)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:  # not ones and zeros, or a lost norm would not show
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder, words, LUMINA_SPECIAL, begin="<s>")
    vqgan = Vqgan(config.vq_config)
    with torch.no_grad():
        vqgan.quantize.embedding.weight.normal_(0, 1)
    torch.save({"state_dict": vqgan.state_dict() | {"encoder.conv_in.bias": torch.zeros(3)}}, folder / "vqgan.ckpt")
    return folder


EMU3_SPECIAL = ["<|endoftext|>", "<|extra_203|>", "<|extra_204|>", "<unk>", "<image>", "<|image start|>"]
EMU3_SPECIAL += ["<|image token|>", "<|image end|>", "<|extra_200|>", "<|extra_201|>"]


def write_tiny_emu3(
    folder: Path,
    *,
    image_vocabulary: int = 32,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    key_value_heads: int | None = None,
    seed: int = 0,
    spread: float = 1.0,
    context: int = 192,
) -> Path:
    """An Emu3 checkpoint with the special tokens of Emu3-Gen."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    torch.manual_seed(seed)
    words = [
        *EMU3_SPECIAL,
        *[
            "0",
            "1",
            "2",
            "3",
            "4",
            "5",
            "6",
            "7",
            "8",
            "9",
            "*",
            ",",
            ".",
            "lowres",
            "bad",
            "apple",
            "cat",
            "red",
            "on",
        ],
    ]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {f"<|visual token {code:06d}|>": len(words) + code for code in range(image_vocabulary)}
    config = Emu3Config(
        text_config={
            "vocab_size": len(vocabulary),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads or heads,
            "max_position_embeddings": context,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vq_config={
            "codebook_size": image_vocabulary,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [3],
            "hidden_size": 32,
        },
        vocabulary_map=vocabulary,
    )
    model = Emu3ForConditionalGeneration(config).eval()
    _randomise(model, spread)
    with torch.no_grad():
        model.model.vqmodel.quantize.embedding.weight.normal_(0, 1)
    model.save_pretrained(folder)
    write_tokenizer(folder, list(vocabulary), EMU3_SPECIAL, begin="")
    return folder


def write_tiny(family: str, folder: Path, *, head_size: int) -> Path:
    """A tiny checkpoint of a family (its model_type) with a head size of the published models."""
    sizes = {"image_vocabulary": 32, "layers": 2, "width": 4 * head_size, "heads": 4}
    if family == "janus":
        return write_tiny_janus(folder, side=8, spread=2.0, **sizes)
    return {"chameleon": write_tiny_lumina, "emu3": write_tiny_emu3}[family](folder, **sizes)
