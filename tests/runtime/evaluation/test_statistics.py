"""Intervals cover, tests tell what differs from what does not, distances are those of torchmetrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchmetrics.image.fid import FrechetInceptionDistance

from runtime.bundle import Manifest
from runtime.evaluation import metrics, regions, statistics
from runtime.model import ImageModel


def test_mean_intervals_cover_about_their_level() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        found = statistics.mean_interval(rng.normal(size=60))
        covered += found.low <= 0 <= found.high
    assert 178 <= covered <= 199


def test_pairs_are_told_apart_only_where_they_differ() -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(size=200)
    alike = [statistics.paired_mean(base + rng.normal(size=200) * 0.1, base)[1] for _ in range(20)]
    difference, p = statistics.paired_mean(base + rng.normal(size=200) * 0.1 + 0.05, base)
    assert p < 0.001 and difference.low < 0.05 < difference.high
    assert sum(value < 0.05 for value in alike) <= 4
    assert statistics.paired_mean(base, base)[1] == 1


def test_sets_are_told_apart_only_where_they_differ() -> None:
    rng = np.random.default_rng(3)
    distance = metrics.Frechet(rng.normal(size=(500, 6)))
    shared = rng.normal(size=(300, 6))
    one, other = (shared + 0.3 * rng.normal(size=shared.shape) for _ in range(2))
    assert statistics.paired_set(one, other, distance)[1] > 0.05
    assert statistics.paired_set(one + 0.3, other, distance)[1] < 0.01
    found = statistics.set_interval(one, distance)
    assert found.low < found.value < found.high


def test_holm() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


def test_frechet_distance_is_that_of_torchmetrics() -> None:
    rng = np.random.default_rng(4)
    reference, features = rng.normal(size=(200, 12)), rng.normal(0.2, 1.3, size=(150, 12))
    metric = FrechetInceptionDistance(feature=metrics._given(12)).set_dtype(torch.float64)
    metric.update(torch.from_numpy(reference), real=True)
    metric.update(torch.from_numpy(features), real=False)
    assert metrics.Frechet(reference)(features) == pytest.approx(float(metric.compute()), rel=1e-6)
    same, _ = metrics.kernel_distance(reference[:100], reference[100:])
    other, _ = metrics.kernel_distance(features, reference)
    assert abs(same) < 0.1 < other


def test_diversity_is_the_mean_squared_difference_of_pairs() -> None:
    small = np.random.default_rng(5).random((7, 30))
    pairs = [np.mean((small[i] - small[j]) ** 2) for i in range(7) for j in range(i)]
    assert metrics.diversity(small) == pytest.approx(np.mean(pairs) ** 0.5)


def test_regions_find_where_drafts_are_accepted(demo: ImageModel) -> None:
    manifest: Manifest = demo.bundle.manifest
    rng = np.random.default_rng(6)
    flat = np.full((64, 64, 3), 200.0)
    flat[:, 32:] += rng.normal(0, 40, (64, 32, 1))
    variation = regions.local_variation(flat, manifest)
    assert variation.shape == (16, 16) and variation[:, :7].max() < 1 < 20 < variation[:, 9:].min()
    places = variation.ravel()
    smooth = [(places, (rng.random(256) < np.where(places < 10, 0.9, 0.5)).astype(float)) for _ in range(12)]
    curve = regions._curve(smooth)
    assert curve.correlation.high < 0 and curve.p < 0.01
    assert curve.shares[0].value > 0.8 > 0.6 > curve.shares[-1].value
    chance = regions._curve([(places, (rng.random(256) < 0.7).astype(float)) for _ in range(12)])
    assert chance.p > 0.01
