"""The model: transformers' own Janus classes at a tiny size, its tokenizer, and its start values."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
)

from demo_training.codes import CODES, VECTOR
from demo_training.pictures import COLOUR_NAMES, NAMES, SIZE

WIDTH, LAYERS, HEADS, HIDDEN = 256, 4, 4, 704
ROPE_THETA = 1000.0
GRID = 16
SPECIAL = ["<pad>", "<bos>", "<eos>", "<begin_of_image>", "<end_of_image>", "<image_placeholder>", "<unk>"]
PAD, BOS, EOS, BEGIN_OF_IMAGE, _END, IMAGE, UNKNOWN = range(len(SPECIAL))
WORDS = [*SPECIAL, "on", *COLOUR_NAMES, *(name for name in NAMES if name not in COLOUR_NAMES)]
WORD_IDS = {word: identifier for identifier, word in enumerate(WORDS)}
TEXT_IDS = -(-len(WORDS) // 8) * 8


def caption(name: str, colour: str, form: int) -> list[int]:
    """Prompt ids: form 0 `<name> on <colour>`, form 1 `<name>`, form 2 an unknown word and `<name>`."""
    words = {0: [name, "on", colour], 1: [name], 2: ["<unk>", name]}[form]
    return [BOS, *(WORD_IDS[word] for word in words), BEGIN_OF_IMAGE]


def configuration() -> JanusConfig:
    """A tiny Janus: 4 Llama layers of width 256, 1024 codes, 16 x 16 tokens, 64 x 64 pixels."""
    return JanusConfig(
        text_config=LlamaConfig(
            vocab_size=TEXT_IDS,
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        ).to_dict(),
        vision_config=JanusVisionConfig(  # image understanding is not trained: the smallest that loads
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            image_size=SIZE,
            patch_size=4,
            mlp_ratio=1.0,
            projection_dim=WIDTH,
            depth=1,
            num_image_tokens=GRID * GRID,
        ).to_dict(),
        vq_config=JanusVQVAEConfig(
            base_channels=64,
            channel_multiplier=[1, 1, 2],
            num_res_blocks=0,
            latent_channels=64,
            embed_dim=VECTOR,
            num_embeddings=CODES,
            num_patches=GRID,
            projection_dim=WIDTH,
            image_token_embed_dim=WIDTH,
            num_hidden_layers=2,
        ).to_dict(),
        image_token_id=IMAGE,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


@torch.no_grad()
def new_model(vectors: Tensor) -> JanusForConditionalGeneration:
    """The model at its start: embeddings from the k-means vectors, variance-preserving convolutions."""
    torch.manual_seed(0)
    model = JanusForConditionalGeneration(configuration())
    inner = model.model
    for name, parameter in inner.vqmodel.named_parameters():
        if parameter.dim() == 4:
            parameter.normal_(0, parameter[0].numel() ** -0.5)
            if name.endswith(("conv2.weight", "proj_out.weight")):
                parameter.mul_(0.2)  # residual branches start small
    inner.vqmodel.quantize.embedding.weight.copy_(vectors)
    inner.generation_embeddings.weight.copy_(vectors * VECTOR**0.5)
    torch.nn.init.normal_(inner.generation_aligner.fc1.weight, 0, VECTOR**-0.5)
    torch.nn.init.uniform_(inner.generation_aligner.fc1.bias, -1, 1)
    torch.nn.init.normal_(inner.generation_aligner.hidden_layers[0].weight, 0, WIDTH**-0.5)
    inner.language_model.embed_tokens.weight.normal_(0, 0.5)
    inner.language_model.embed_tokens.weight[PAD] = 0
    torch.nn.init.normal_(inner.generation_head.proj_out.weight, 0, WIDTH**-0.5)
    inner.generation_head.vision_head.weight.mul_(0.5)
    for layer in inner.language_model.layers:
        layer.self_attn.o_proj.weight.mul_((2 * LAYERS) ** -0.5)
        layer.mlp.down_proj.weight.mul_((2 * LAYERS) ** -0.5)
    return model


def logits(model: JanusForConditionalGeneration, text: Tensor, image: Tensor) -> Tensor:
    """Teacher forcing: text ids [B, L], image codes [B, 256] -> logits [B, 256, V]."""
    inner = model.model
    embedded = torch.cat(
        [
            inner.language_model.embed_tokens(text).float(),
            model.prepare_embeddings_for_image_generation(image[:, :-1]).float(),
        ],
        1,
    )
    hidden = inner.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    return inner.generation_head(hidden[:, text.shape[1] - 1 :])


@torch.no_grad()
def normalise_codebook(model: JanusForConditionalGeneration) -> None:
    """Code vectors back to unit length."""
    weight = model.model.vqmodel.quantize.embedding.weight
    weight.copy_(functional.normalize(weight, dim=1))


def save_checkpoint(model: JanusForConditionalGeneration, folder: Path, guidance: float) -> None:
    """fp16 safetensors, configurations and tokenizer in transformers' layout."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        guidance_scale=guidance,
        generation_kwargs={"boi_token_id": BEGIN_OF_IMAGE},
    )
    model.half().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(WORD_IDS, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, normalized=True, single_word=True) for name in NAMES if " " in name])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    extra = {
        "boi_token": "<begin_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_placeholder>",
    }
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 512,
        **extra,
        "extra_special_tokens": extra,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
