"""What can be told apart from chance: bootstrap intervals over pictures and paired permutation tests against `ar`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 4999
Statistic = Callable[[np.ndarray], float]  # of chosen pictures, rows of an array


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap interval at LEVEL; nan where none could be made."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        return f"{self.value:{spec}}" + ("" if np.isnan(self.low) else f" [{self.low:{spec}}, {self.high:{spec}}]")


def mean_interval(values: np.ndarray) -> Interval:
    """Mean of values [n]."""
    values = np.asarray(values, np.float64)
    if len(values) < 2 or np.ptp(values) == 0:
        return Interval(float(values.mean()), float("nan"), float("nan"))
    found = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", rng=0
    ).confidence_interval
    return Interval(float(values.mean()), float(found.low), float(found.high))


def set_interval(rows: np.ndarray, statistic: Statistic, resamples: int = 200) -> Interval:
    """A statistic of a whole set, such as a distance, over resampled pictures [n, ...].

    Resampling repeats pictures, which moves such a statistic as a whole: the interval is moved back by that.
    """
    rng = np.random.default_rng(0)
    drawn = np.array([statistic(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(resamples)])
    value = statistic(rows)
    low, high = np.quantile(drawn - drawn.mean() + value, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))


def paired_mean(values: np.ndarray, base: np.ndarray) -> tuple[Interval, float]:
    """Mean difference of pairs, and the two-sided p of a permutation test that swaps within pairs."""
    difference = np.asarray(values, np.float64) - base
    if not difference.any():
        return Interval(0.0, 0.0, 0.0), 1.0
    found = stats.permutation_test(
        (difference,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, vectorized=True, rng=0
    )
    return mean_interval(difference), float(found.pvalue)


def paired_set(rows: np.ndarray, base: np.ndarray, statistic: Statistic, resamples: int = 400) -> tuple[float, float]:
    """Difference of a statistic of two sets of pairs, and the p of the same test."""
    rng = np.random.default_rng(0)
    found = statistic(rows) - statistic(base)
    extreme = 1
    for _ in range(resamples):
        swap = rng.random(len(rows)) < 0.5
        mask = swap.reshape(-1, *[1] * (rows.ndim - 1))
        other = statistic(np.where(mask, base, rows)) - statistic(np.where(mask, rows, base))
        extreme += abs(other) >= abs(found) - 1e-12
    return found, extreme / (resamples + 1)


def holm(values: Sequence[float]) -> list[float]:
    """P values of one family of tests, adjusted so that one false alarm among all has the stated chance."""
    order = np.argsort(values)
    adjusted, largest = [0.0] * len(values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        adjusted[index] = largest
    return adjusted
