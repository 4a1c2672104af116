"""Write a checkpoint with the sizes of Janus-Pro-1B and random weights: for measuring exports and steps at full size.

The configuration is that of the published model (24 layers of 2048, 16 heads, 102400 text ids, 16384 codes, vision
tower included); the weights are noise of a usual size in bfloat16, the tokenizer is the tests' word list with its
special tokens. It takes 4.2 GB of disk and about 5 GB of memory.

    .venv/bin/python -m scripts.write_full_size FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from tests.models import write_tokenizer


def write(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    layers: Annotated[int, typer.Option(help="Layers of the transformer.")] = 24,
) -> None:
    """Write a checkpoint of Janus-Pro-1B's sizes with random weights."""
    from transformers import (
        GenerationConfig,
        JanusConfig,
        JanusForConditionalGeneration,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
    )

    torch.manual_seed(0)
    config = JanusConfig(
        text_config=LlamaConfig(
            vocab_size=102400,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=16384,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ).to_dict(),
        vision_config=JanusVisionConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            image_size=384,
            patch_size=16,
            projection_dim=2048,
            num_image_tokens=576,
        ).to_dict(),
        vq_config=JanusVQVAEConfig(projection_dim=2048, image_token_embed_dim=2048).to_dict(),
        image_token_id=5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = JanusForConditionalGeneration(config)
    rotary = type(model.model.language_model.rotary_emb)(model.config.text_config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.model.language_model.rotary_emb = rotary
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)
        for buffer in model.buffers():
            if buffer.dtype == torch.bfloat16:
                buffer.zero_()
    model.generation_config = GenerationConfig(
        pad_token_id=0, bos_token_id=1, eos_token_id=2, guidance_scale=5.0, generation_kwargs={"boi_token_id": 3}
    )
    model.save_pretrained(folder)
    write_tokenizer(folder)


if __name__ == "__main__":
    typer.run(write)
