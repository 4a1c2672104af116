"""The acceptance rules, one small object each: parameters, their ranges, and the settings they stand for.

Notation of the CSD paper (arXiv 2606.27829): p is the law the draft x was drawn from, q the target's law at the same
position, both after guidance, temperature and truncation; H(q) is in nats; TV(p, q) = 1/2 sum |p - q|. A draft is
accepted when u < b(x), u uniform in [0, 1). All rules but `Gsd` and `Jacobi` are the affine form

    b(x) = min(1, k_i * q(x) / p(x) + epsilon + lambda * H(q) * [TV(p, q) < delta])        k_i = k * exp(-nu * i)

so they share one graph and are chosen by numbers at run time. To add an affine rule, add a class here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from csd_ops.contract import Form
from csd_ops.errors import InputError


@dataclass(frozen=True)
class Rule:
    """Base of all rules. Parameters are checked on construction; InputError names the one out of range."""

    name: ClassVar[str]
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}
    lossless: ClassVar[bool] = False
    source: ClassVar[str]

    def __post_init__(self) -> None:
        for parameter in fields(self):
            low, high = self.ranges[parameter.name]
            value = getattr(self, parameter.name)
            if not low <= value <= high:  # NaN fails too
                label = parameter.name.rstrip("_")
                raise InputError(
                    f"expected {label} of {self.name} from {low:g} to {high:g}, found {value:g}; choose one inside"
                )

    def settings(self) -> dict[str, float]:
        """The fields of `Settings` that this rule sets."""
        return {}


@dataclass(frozen=True)
class Sjd(Rule):
    """b = min(1, q/p): exact speculative sampling, the output law is q."""

    name = "sjd"
    lossless = True
    source = "Speculative Jacobi Decoding, arXiv 2410.01699"


@dataclass(frozen=True)
class Jacobi(Rule):
    """Accept while the draft equals the newly drawn token: b = [y = x], y drawn from q by the coupling."""

    name = "jacobi"
    lossless = True
    source = "Jacobi decoding, baseline of arXiv 2410.01699"

    def settings(self) -> dict[str, float]:
        return {"form": Form.JACOBI}


@dataclass(frozen=True)
class Amplify(Rule):
    """b = min(1, k q/p)."""

    k: float = 1.3
    name = "amplify"
    ranges = {"k": (1.0, math.inf)}  # noqa: RUF012 - a class constant of a frozen dataclass
    source = "lenience of Leviathan et al. 2023; baseline of arXiv 2606.27829"

    def settings(self) -> dict[str, float]:
        return {"scale": self.k}


@dataclass(frozen=True)
class Addition(Rule):
    """b = min(1, q/p + epsilon)."""

    epsilon: float = 0.1
    name = "addition"
    ranges = {"epsilon": (0.0, 1.0)}  # noqa: RUF012
    source = "Yin et al. 2024; baseline of arXiv 2606.27829"

    def settings(self) -> dict[str, float]:
        return {"epsilon": self.epsilon}


@dataclass(frozen=True)
class Entropy(Rule):
    """b = min(1, q/p + lambda H(q)): CSD without its total-variation filter."""

    lambda_: float = 0.02
    name = "entropy"
    ranges = {"lambda_": (0.0, math.inf)}  # noqa: RUF012
    source = "arXiv 2606.27829, table 4"

    def settings(self) -> dict[str, float]:
        return {"lambda_": self.lambda_, "delta": 2.0}  # TV is at most 1: the filter passes everything


@dataclass(frozen=True)
class Csd(Rule):
    """b = min(1, q/p + lambda H(q) [TV(p, q) < delta]): content-aware speculative decoding."""

    lambda_: float = 0.5
    delta: float = 0.65
    name = "csd"
    ranges = {"lambda_": (0.0, math.inf), "delta": (0.0, 1.0)}  # noqa: RUF012
    source = "arXiv 2606.27829, section 3"

    def settings(self) -> dict[str, float]:
        return {"lambda_": self.lambda_, "delta": self.delta}


@dataclass(frozen=True)
class Cool(Rule):
    """b = min(1, omega_i q/p), omega_i = scale * exp(-decay * i): relaxed early in the window, strict late."""

    scale: float = 1.3
    decay: float = 0.7
    name = "cool"
    ranges = {"scale": (0.0, math.inf), "decay": (0.0, math.inf)}  # noqa: RUF012
    source = "COOL-SD, arXiv 2601.09212 (scale = delta exp(-mu), decay = nu)"

    def settings(self) -> dict[str, float]:
        return {"scale": self.scale, "decay": self.decay}


@dataclass(frozen=True)
class Gsd(Rule):
    """b = min(1, q(C) / p(C)): C holds the tokens ranked around x by q that pass two filters.

    `size` tokens, x in the middle, clipped at the ends of the ranking; kept if |q(y) - q(x)| < probability and the
    squared distance of the code vectors is < distance. The residual is norm(relu(q - p)) on tokens, as published.
    """

    size: int = 25
    probability: float = 0.15
    distance: float = math.inf
    name = "gsd"
    ranges = {"size": (1, 1001), "probability": (0.0, 1.0), "distance": (0.0, math.inf)}  # noqa: RUF012
    source = "Grouped Speculative Decoding, arXiv 2508.07747, algorithm 3"

    def settings(self) -> dict[str, float]:
        return {
            "form": Form.GROUP,
            "group_size": self.size,
            "group_probability": self.probability,
            "group_distance": self.distance,
        }


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Sjd, Jacobi, Amplify, Addition, Entropy, Csd, Cool, Gsd)}
