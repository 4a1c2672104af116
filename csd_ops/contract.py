"""The contract of one decoding step: what every backend reads and writes, in one place.

Shapes: B images, G guidance rows per image (2 with guidance, else 1), R = G * B rows ordered [all conditional;
all unconditional], W window, V image vocabulary, C columns of the token grid, T = image tokens + largest window,
H key-value heads, S cache capacity, D head size, E size of a code vector.

A window is a list of *decision slots*. Slot k decides the image token at `position + k`. The ids fed are the last
committed token (slot 0, not in the cache yet) and the drafts of slots 0..W-2, so the draft of slot W-1 is never fed:
that slot is ABSENT (or FORCED) and always ends the window.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from enum import IntEnum

import numpy as np

OPSET = 24
DOMAIN = "csd"

NOTHING = -2  # in the grammar: past the end of the image
FREE = -1  # in the grammar: the model decides; any other value is the id that must stand there


class Kind(IntEnum):
    """What stands in a decision slot of the window."""

    ABSENT = 0  # no draft: the token is sampled from the target law (its draft law is all zero)
    FORCED = 1  # the grammar says what must stand here: always accepted, in no statistic
    FRESH = 2  # a draft no forward pass has seen: drawn from a law that was not computed for this position
    DRAFTED = 3  # a draft drawn from the target law that the last pass computed for this position


class Form(IntEnum):
    """How a rule turns the two laws into an acceptance probability."""

    AFFINE = 0  # b = min(1, scale * q/p + bonus)
    JACOBI = 1  # accept when the newly drawn token equals the draft
    GROUP = 2  # b = min(1, q(group) / p(group))


class Coupling(IntEnum):
    """How the drafts after the first rejection are drawn from the new law q, given the old draft x ~ p."""

    INDEPENDENT = 0  # a new sample of q (SJD, arXiv 2410.01699)
    MAXIMAL = 1  # keep x with probability min(1, q/p), else the residual (MC-SJD, arXiv 2510.24211)
    GUMBEL = 2  # argmax(log q + noise of the position) (GS-SJD, arXiv 2510.24211)


class Fresh(IntEnum):
    """The law p of a draft for a position that no pass has reached yet."""

    UNIFORM = 0  # uniform over the image vocabulary
    ONE_HOT = 1  # a random token, p = one-hot on it
    COPY_LEFT = 2  # the token before it, p = one-hot
    COPY_ABOVE = 3  # the token one row above, p = one-hot
    LAW_LEFT = 4  # a sample of the last law computed, p = that law
    LAW_ABOVE = 5  # a sample of the target law one row above, p = that law


@dataclass(frozen=True)
class Settings:
    """The numbers one pass runs with, as every backend receives them: `vector()` is the step's `settings` input.

    The field order is the layout of the vector. Defaults are exact speculative Jacobi decoding.
    """

    temperature: float = 1.0  # > 0
    top_k: float = 0.0  # 0: off; ties with the k-th logit are kept
    top_p: float = 1.0  # 1: off
    form: float = float(Form.AFFINE)
    coupling: float = float(Coupling.INDEPENDENT)
    fresh: float = float(Fresh.UNIFORM)
    relax_fresh: float = 0.0  # 1: the bonus also applies to FRESH drafts (as the CSD paper's code does)
    scale: float = 1.0  # k of Amplify
    decay: float = 0.0  # nu of COOL: the scale of slot i is scale * exp(-decay * i)
    epsilon: float = 0.0  # constant bonus
    lambda_: float = 0.0  # bonus per nat of entropy of q
    delta: float = 0.0  # the entropy bonus applies where TV(p, q) < delta
    floor: float = 0.0  # probabilities in rule and residual are clamped up to this (the CSD paper's code: 1e-10)
    group_size: float = 1.0  # tokens in a GSD group, the draft in the middle
    group_probability: float = 1.0  # GSD: |q(y) - q(x)| below this
    group_distance: float = float("inf")  # GSD: squared distance of the code vectors below this

    def vector(self) -> np.ndarray:
        """The `settings` input, float32 [16]."""
        return np.array(astuple(self), dtype=np.float32)

    @classmethod
    def index(cls, name: str) -> int:
        """Where `name` stands in the vector."""
        return [field.name for field in fields(cls)].index(name)


SETTINGS_SIZE = len(fields(Settings))

# Columns of the `measures` output, one row per decision slot. The middle three are 0 where no draft was verified.
MEASURES = (
    "entropy",  # H(q), nats
    "total_variation",  # TV(p, q)
    "acceptance",  # b(x) of the draft
    "distortion",  # TV(law of the committed token, q)
    "draft_surprise",  # -log q(draft), nats
    "replacement_surprise",  # -log q(replacement), nats
)

UNIFORMS = ("accept", "sample", "fresh")  # last axis of the `uniforms` input

# name -> (dtype, symbolic shape)
STATE: dict[str, tuple[str, tuple[str, ...]]] = {
    "ids": ("int64", ("R", "W")),  # image codes 0..V-1, then V + text id
    "length": ("int64", ("R",)),  # tokens in the cache = where this window is written
    "position": ("int64", ("B",)),  # image tokens decided
    "kind": ("int64", ("B", "W")),
    "draft_probs": ("float32", ("B", "W", "V")),  # p, the law each draft was drawn from; 0 where ABSENT
    "history_probs": ("float32", ("B", "C", "V")),  # laws of the C positions before `position`
    "history_ids": ("int64", ("B", "C")),  # tokens of the C positions before `position`
}
CONTROLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "uniforms": ("float32", ("B", "W", "3")),  # in [2^-23, 1 - 2^-23]
    "gumbel": ("float32", ("B", "W", "N")),  # N = V with Gumbel coupling, else 1
    "guidance": ("float32", ("G",)),  # weights of the guidance rows: (w, 1 - w), or (1,) without guidance
    "settings": ("float32", (str(SETTINGS_SIZE),)),
    "grammar": ("int64", ("T",)),  # FREE, NOTHING or the forced id of every position
}
RESULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "logits": ("float32", ("R", "W", "V")),
    "committed": ("int64", ("B",)),  # tokens decided by this pass
    "tokens": ("int64", ("B", "W")),  # the first `committed` of them hold
    "measures": ("float32", ("B", "W", str(len(MEASURES)))),
}
CACHE_SHAPE = ("R", "H", "S", "D")


def cache_names(layers: int) -> list[str]:
    """Names of the cache inputs; each output is `next_` + name and binds to the same buffer."""
    return [f"{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


CAPACITY_STEP = 64  # cache slots are allocated in multiples of this


def cache_capacity(prompt: int, image_tokens: int, window: int) -> int:
    """S: the prompt, the picture, and one window or prompt written beyond it, in steps of CAPACITY_STEP."""
    needed = prompt + image_tokens + max(window, prompt)
    return -(-needed // CAPACITY_STEP) * CAPACITY_STEP


def grammar_table(forced: dict[int, int], tokens: int, window: int) -> np.ndarray:
    """The `grammar` input, int64 [tokens + window]: FREE, the forced id, or NOTHING past the end."""
    table = np.full(tokens + window, NOTHING, dtype=np.int64)
    table[:tokens] = FREE
    for position, identifier in forced.items():
        table[position] = identifier
    return table
