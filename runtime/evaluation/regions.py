"""Where drafts are accepted: against the picture's local variation and against the entropy of the target's law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from runtime.bundle import Manifest
from runtime.evaluation.generate import Results
from runtime.evaluation.statistics import Interval, mean_interval, paired_mean

BINS = 10
GREY = np.array([0.299, 0.587, 0.114])
KINDS = {"variation": "local standard deviation, levels of 255", "entropy": "entropy of q, nats"}


@dataclass(frozen=True)
class Curve:
    """Share of tokens accepted as drafted by tenths of something, and their rank correlation within a picture.

    Attributes:
        centres: means of the tenths [BINS].
        shares: accepted in each, with intervals over pictures.
        correlation: Spearman's, mean over pictures.
        p: of a correlation of 0, two-sided, over pictures.
    """

    centres: list[float]
    shares: list[Interval]
    correlation: Interval
    p: float


def local_variation(pixels: np.ndarray, manifest: Manifest) -> np.ndarray:
    """Standard deviation of grey levels under each code and half a code around it, [rows, codes_per_row]."""
    grey = pixels @ GREY
    down, across = grey.shape[0] / manifest.rows, grey.shape[1] / manifest.codes_per_row
    found = np.zeros((manifest.rows, manifest.codes_per_row))
    for row in range(manifest.rows):
        for column in range(manifest.codes_per_row):
            top, left = max(0, round((row - 0.5) * down)), max(0, round((column - 0.5) * across))
            part = grey[top : round((row + 1.5) * down), left : round((column + 1.5) * across)]
            found[row, column] = part.std()
    return found


def curves(results: Results, preset: str, manifest: Manifest) -> Mapping[str, Curve]:
    """Both curves of a preset; tokens that the grammar forces do not count."""
    pictures = []
    for pixels, details in zip(results.pictures(preset), results.details(preset), strict=True):
        free = manifest.grid(details["free"]).ravel()
        values = {
            "variation": local_variation(pixels, manifest).ravel()[free],
            "entropy": manifest.grid(details["entropy"]).ravel()[free],
        }
        pictures.append((values, manifest.grid(details["accepted"]).ravel()[free].astype(float)))
    return {kind: _curve([(values[kind], accepted) for values, accepted in pictures]) for kind in KINDS}


def _curve(pictures: list[tuple[np.ndarray, np.ndarray]]) -> Curve:
    everything = np.concatenate([values for values, _ in pictures])
    edges = np.quantile(everything, np.linspace(0, 1, BINS + 1)[1:-1])
    places = [np.searchsorted(edges, values, side="right") for values, _ in pictures]
    place = np.concatenate(places)
    centres, shares = [], []
    for number in range(BINS):
        if not (place == number).any():
            continue
        own = [
            accepted[at == number].mean() for (_, accepted), at in zip(pictures, places, strict=True) if number in at
        ]
        centres.append(float(everything[place == number].mean()))
        shares.append(mean_interval(np.array(own)))
    found = [
        float(stats.spearmanr(values, accepted).statistic)
        for values, accepted in pictures
        if np.ptp(values) > 0 and np.ptp(accepted) > 0
    ]
    ranks = np.array(found or [0.0])
    correlation, p = paired_mean(ranks, np.zeros_like(ranks))
    return Curve(centres, shares, correlation, p)
