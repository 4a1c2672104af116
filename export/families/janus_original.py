"""Janus and Janus-Pro in DeepSeek's original layout (`multi_modality`): a table of names into transformers' class.

Only what draws pictures is read: body, generation embeddings, aligner and head, image decoder. The vision tower, its
aligner, the text head and the image encoder are left in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from export.families import read_config
from export.families.base import Loaded
from export.families.janus import NOT_READ, load_model
from export.families.reading import check_settings, fill, skeleton
from export.families.tensors import Table

TABLE: Table = (
    (r"vision_model\..*", None),
    (r"aligner\..*", None),
    (r"language_model\.lm_head\..*", None),
    (r"gen_vision_model\.(encoder|quant_conv)\..*", None),
    (r"gen_vision_model\.quantize\.codebook_used", None),
    (r"language_model\.model\.", "model.language_model."),
    (r"gen_embed\.", "model.generation_embeddings."),
    (r"gen_aligner\.layers\.0\.", "model.generation_aligner.fc1."),
    (r"gen_aligner\.layers\.2\.", "model.generation_aligner.hidden_layers.0."),
    (r"gen_head\.output_mlp_projector\.", "model.generation_head.proj_out."),
    (r"gen_head\.vision_head\.", "model.generation_head.vision_head."),
    (r"gen_vision_model\.decoder\.conv_blocks\.(\d+)\.res\.", r"model.vqmodel.decoder.up.\1.block."),
    (r"gen_vision_model\.decoder\.conv_blocks\.", "model.vqmodel.decoder.up."),
    (r"gen_vision_model\.decoder\.mid\.0\.", "model.vqmodel.decoder.mid.block_1."),
    (r"gen_vision_model\.decoder\.mid\.1\.", "model.vqmodel.decoder.mid.attn_1."),
    (r"gen_vision_model\.decoder\.mid\.2\.", "model.vqmodel.decoder.mid.block_2."),
    (r"gen_vision_model\.", "model.vqmodel."),
)
LANGUAGE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


class JanusOriginal:
    """See the module."""

    name = "janus"

    def load(self, checkpoint: Path, size: tuple[int, int] | None = None, decoder: Path | None = None) -> Loaded:
        """Read the original layout, sharded or not, safetensors or .bin."""
        check_settings(checkpoint)
        model = _skeleton(checkpoint)
        fill(model, checkpoint, TABLE, NOT_READ)
        return load_model(checkpoint, model, size, decoder)


FAMILY = JanusOriginal()


def _skeleton(checkpoint: Path) -> Any:
    """The stock class on the meta device, with the sizes of the original configuration."""
    from transformers import (
        GenerationConfig,
        JanusConfig,
        JanusForConditionalGeneration,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
    )

    document = read_config(checkpoint)

    def config() -> JanusConfig:
        language = document["language_config"]
        image = document["gen_vision_config"]["params"]
        head = document["gen_head_config"]["params"]
        pixels = document["vision_config"]["params"]["image_size"]
        text = LlamaConfig(**{name: language[name] for name in LANGUAGE if name in language})
        return JanusConfig(
            text_config=text.to_dict(),
            vision_config=JanusVisionConfig(image_size=pixels, num_image_tokens=(pixels // 16) ** 2).to_dict(),
            vq_config=JanusVQVAEConfig(
                embed_dim=image["n_embed"],
                num_embeddings=image["image_token_size"],
                num_patches=pixels // 16,
                projection_dim=document["gen_aligner_config"]["params"]["n_embed"],
                image_token_embed_dim=head["image_token_embed"],
                num_hidden_layers=document["gen_aligner_config"]["params"]["depth"],
            ).to_dict(),
        )

    model = skeleton(checkpoint, JanusForConditionalGeneration, config)
    model.generation_config = GenerationConfig()  # the layout has none: special ids are the tokenizer's
    return model
