"""The image codes: k-means over 4 x 4 RGB patches, half of them background, and the vectors they start from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from demo_training.pictures import PAIRS, Renderer, pair

CODES = 1024
PATCH = 4
FIT = 40_000  # patches of each kind, object and background
ROUNDS = 25
VECTOR = 8  # size of a code vector, as Janus


def patches(pixels: Tensor) -> Tensor:
    """[B, 3, 64, 64] -> [B, 256, 48]."""
    return functional.unfold(pixels, PATCH, stride=PATCH).transpose(1, 2)


def tokenise(pixels: Tensor, centroids: Tensor) -> Tensor:
    """Nearest code of every patch: [B, 3, 64, 64] -> [B, 256]."""
    flat = patches(pixels)
    return torch.cdist(flat.reshape(-1, flat.shape[-1]), centroids).argmin(1).view(len(pixels), -1)


def fit_codes(renderer: Renderer) -> dict[str, Tensor]:
    """Lloyd's algorithm with restarts of small clusters: `centroids` [1024, 48] and unit `vectors` [1024, 8].

    Codes are ordered by brightness. A vector is seven principal coordinates of its centroid and a constant.
    """
    generator = torch.Generator().manual_seed(3)
    pieces, shares = [], []
    for _ in range(3):
        pictures = renderer.draw(*pair(torch.arange(PAIRS)), generator)
        pieces.append(patches(pictures.pixels).reshape(-1, PATCH * PATCH * 3))
        shares.append(pictures.object_share().flatten())
    everything, share = torch.cat(pieces), torch.cat(shares)
    kinds = [everything[share > 0.02], everything[share <= 0.02]]
    fit = torch.cat([kind[torch.randperm(len(kind), generator=generator)[:FIT]] for kind in kinds])
    centroids = fit[torch.randperm(len(fit), generator=generator)[:CODES]].clone()
    for turn in range(ROUNDS):
        distance, nearest = torch.cdist(fit, centroids).min(1)
        count = torch.bincount(nearest, minlength=CODES).float()
        total = torch.zeros_like(centroids).index_add_(0, nearest, fit)
        centroids = torch.where(count[:, None] > 0, total / count[:, None].clamp_min(1), centroids)
        small = (count < 8).nonzero().flatten()
        if turn < ROUNDS - 7 and len(small):
            centroids[small] = fit[torch.multinomial(distance.square(), len(small), generator=generator)]
    centroids = centroids[centroids.mean(1).argsort()]
    mean = fit.mean(0)
    _, _, axes = torch.linalg.svd(fit - mean, full_matrices=False)
    coordinates = (centroids - mean) @ axes[: VECTOR - 1].T
    coordinates = coordinates / coordinates.std(0) ** 0.7
    coordinates = coordinates / coordinates.std()
    vectors = functional.normalize(torch.cat([coordinates, torch.ones(CODES, 1)], 1), dim=1)
    return {"centroids": centroids, "vectors": vectors}
