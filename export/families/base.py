"""The skeleton every family fills in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from runtime.bundle import Manifest


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory in the precision it is stored in, as the exporter needs it.

    Attributes:
        model: the whole model, for comparisons.
        language_model: the transformer body, called with inputs_embeds, attention_mask, position_ids, cache.
        embedding: parts of the table [V + text vocabulary, width]: image codes first.
        head: hidden states [..., width] -> image logits [..., V].
        codes: code vectors [V, E], unit length.
        image_decoder: codes [B, N] -> pixels [B, height, width, 3] as uint8.
        manifest: all but name, precision and versions, which the exporter sets.
    """

    model: Any
    language_model: nn.Module
    embedding: list[torch.Tensor]
    head: nn.Module
    codes: np.ndarray
    image_decoder: nn.Module
    manifest: Manifest


class Family(Protocol):
    """One model family."""

    name: str

    def load(self, checkpoint: Path, size: tuple[int, int] | None = None, decoder: Path | None = None) -> Loaded:
        """Read a checkpoint in its own precision; InputError names what is missing, unexpected or torn.

        `size` is the picture's width and height in pixels, None the family's usual one; `decoder` is the file of an
        image decoder that the checkpoint does not have itself.
        """
        ...
