"""A built plan and its card: what the plan is valid for and what was really built, as JSON beside it.

A plan is tied to its builder's version, to the GPU (or to the family it was built for), to the bundle it came from and
to the sizes of its profiles. The card says all of it, so that a plan that does not fit is refused with a sentence
before TensorRT sees it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from csd_ops.errors import InputError

SCHEMA = 1
FOLDER = "engines"
STEP = "step"
IMAGE_DECODER = "image_decoder"
PORTABLE = "portable"


@dataclass(frozen=True)
class Card:
    """What stands in a plan's JSON file. Sizes are in tokens, slots, pictures or bytes."""

    what: str  # "step" or "image_decoder"
    target: str  # "rtx" or "tensorrt"
    version: str  # of the builder
    compute_capability: str  # "9.0" of the GPU it was built on; "portable" for TensorRT-RTX; "8.6, 8.9" if asked
    precision: str
    window: int  # W of the second profile
    prompt: int  # longest prompt of the first
    capacity: int  # S
    batch: int  # pictures; rows are batch to rows
    rows: int  # most rows: guidance rows times pictures
    tail: str  # "plugin", "kernel" or "function"; "" for the image decoder
    preset: str  # what a function tail was made for, else ""
    bundle: str  # SHA-256 of the bundle's graph and of its weights
    plan_size: int
    plan_sha256: str
    device_memory: int  # estimate of what running it takes: plan, caches, state, activations
    attention: str  # "fused", "decomposed" or "none"
    tf32: bool
    seconds: float  # that the build took
    settings: dict[str, float] = field(default_factory=dict)  # of the preset, fixed in a function tail
    verified: dict[str, float] = field(default_factory=dict)  # output -> error against ONNX Runtime, if verified
    layer_dtypes: dict[str, dict[str, int]] = field(default_factory=dict)  # of the parsed network
    kernels: dict[str, str] = field(default_factory=dict)  # compute capability -> SHA-256 of its PTX file
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The plan's file name without its ending: what it is valid for."""
        version = ".".join(self.version.split(".")[:3])
        gpu = self.compute_capability.replace(", ", "+").replace(".", "")
        parts = [self.what, self.target, version, gpu if gpu == PORTABLE else f"sm{gpu}", self.precision]
        if self.what == STEP:
            tail = f"{self.tail}-{self.preset}" if self.preset else self.tail
            parts += [f"w{self.window}", f"p{self.prompt}", f"b{self.batch}", tail]
        return "-".join(parts)


@dataclass(frozen=True)
class Wanted:
    """What a plan must fit: the machine, the bundle and the request."""

    target: str
    version: str
    compute_capability: tuple[int, int]
    free_memory: int  # bytes of device memory
    bundle: str
    window: int
    prompt: int
    rows: int
    precision: str | None = None
    settings: dict[str, float] = field(default_factory=dict)


def write_card(folder: Path, card: Card) -> Path:
    """Write the card beside its plan, last: a plan without a card does not exist."""
    path = folder / f"{card.name}.json"
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps({"schema": SCHEMA} | asdict(card), indent=1) + "\n", "utf-8")
    temporary.replace(path)
    return path


def read_card(path: Path) -> Card:
    """Read a card; InputError says what is wrong with it."""
    remedy = "build the engine again with `csd build`"
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"expected JSON in {path}, found {error}; {remedy}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise InputError(f"expected a plan's card of schema {SCHEMA} in {path}, found {found!r}; {remedy}")
    kinds: dict[str, Any] = {"str": str, "int": int, "bool": bool, "float": (int, float)}
    values: dict[str, Any] = {}
    for entry in fields(Card):
        value = document.get(entry.name)
        if not isinstance(value, kinds.get(str(entry.type), dict)):
            raise InputError(f"expected {entry.name} ({entry.type}) in {path}, found {value!r}; {remedy}")
        values[entry.name] = value
    card = Card(**values)
    if f"{card.name}.json" != path.name:
        raise InputError(f"expected the card of {path.stem} in {path}, found that of {card.name}; {remedy}")
    return card


def cards(bundle: Path, what: str = STEP) -> list[Card]:
    """All plans of a bundle."""
    folder = bundle / FOLDER
    return [read_card(path) for path in sorted(folder.glob(f"{what}-*.json"))]


def unfit(card: Card, wanted: Wanted) -> str | None:
    """Why the plan cannot serve: "expected ..., found ..."; None if it can."""
    major, minor = wanted.compute_capability
    gpu = f"{major}.{minor}"
    fits_gpu = gpu in card.compute_capability.split(", ") or (card.compute_capability == PORTABLE and major >= 8)
    checks = (
        (card.target == wanted.target, f"a plan for {wanted.target}", f"one for {card.target}"),
        (card.version == wanted.version, f"a plan of {card.target} {wanted.version}", f"one of {card.version}"),
        (fits_gpu, f"a plan for compute capability {gpu}", f"one for {card.compute_capability}"),
        (card.bundle == wanted.bundle, "a plan of this bundle", "one of another"),
        (
            wanted.precision in (None, card.precision),
            f"a plan of precision {wanted.precision}",
            f"one of {card.precision}",
        ),
        (card.window == wanted.window, f"a plan for a window of {wanted.window}", f"one for {card.window}"),
        (
            card.tail != "function" or card.settings == wanted.settings,
            "a plan that takes these settings",
            f"one with those of {card.preset} fixed",
        ),
        (card.prompt >= wanted.prompt, f"a plan for prompts of {wanted.prompt} ids", f"one for up to {card.prompt}"),
        (card.rows >= wanted.rows, f"a plan for {wanted.rows} rows", f"one for up to {card.rows}"),
        (
            card.device_memory <= wanted.free_memory,
            f"{card.device_memory / 1e9:.2f} GB of free GPU memory",
            f"{wanted.free_memory / 1e9:.2f} GB",
        ),
    )
    for holds, expected, found in checks:
        if not holds:
            return f"expected {expected}, found {found}"
    return None


def choose(bundle: Path, wanted: Wanted) -> Card:
    """The step plan that fits; InputError names the closest one's misfit and what to run."""
    found = cards(bundle)
    remedy = f"build one with `csd build {bundle} --target {wanted.target} --window {wanted.window}`"
    if not found:
        raise InputError(f"expected a plan in {bundle / FOLDER}, found none; {remedy}")
    reasons = [(unfit(card, wanted), card) for card in found]
    for reason, card in reasons:
        if reason is None:
            return card
    reason, card = reasons[-1]
    raise InputError(f"{reason} ({card.name}.plan); {remedy}")


def image_decoder(bundle: Path, wanted: Wanted) -> Card | None:
    """The image decoder's plan that fits this machine and bundle; None if there is none."""
    for card in cards(bundle, IMAGE_DECODER):
        if unfit(card, replace(wanted, window=card.window, prompt=card.prompt, rows=card.rows)) is None:
            return card
    return None


def read_plan(bundle: Path, card: Card) -> bytes:
    """The plan's bytes, whole; InputError when it is truncated or changed."""
    import hashlib

    path = bundle / FOLDER / f"{card.name}.plan"
    remedy = "build the engine again with `csd build`"
    if not path.is_file():
        raise InputError(f"expected {path}, found none; {remedy}")
    data = path.read_bytes()
    if len(data) != card.plan_size:
        raise InputError(f"expected {card.plan_size} bytes in {path}, found {len(data)}; {remedy}")
    if hashlib.sha256(data).hexdigest() != card.plan_sha256:
        raise InputError(f"expected the checksum of its card for {path}, found another; {remedy}")
    return data
