"""The acceptance map: the picture beside what each forward pass decided where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.bundle import Manifest
from runtime.decoder import Decoded

if TYPE_CHECKING:
    from PIL.Image import Image

# Viridis at nine points, RGB
_COLOURS = np.array(
    [
        (68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141),
        (39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37),
    ],
    dtype=float,
)  # fmt: skip
_PANEL = 320
_MARGIN = 14
_CAPTION = 46


def colour(values: np.ndarray, high: float) -> np.ndarray:
    """Values from 0 to `high` as RGB uint8, last axis added."""
    place = np.clip(values / max(high, 1e-12), 0, 1) * (len(_COLOURS) - 1)
    low = np.minimum(place.astype(int), len(_COLOURS) - 2)
    share = (place - low)[..., None]
    return np.rint(_COLOURS[low] * (1 - share) + _COLOURS[low + 1] * share).astype(np.uint8)


def draw_map(pixels: np.ndarray, decoded: Decoded, manifest: Manifest) -> Image:
    """Four panels: picture, tokens decided per forward pass, entropy of q in nats, distortion of the rule."""
    from PIL import Image

    accepted = manifest.grid(decoded.accepted).astype(float)
    seen = manifest.grid(decoded.measure("entropy"))
    distortion = manifest.grid(decoded.measure("distortion"))
    worst = max(float(distortion.max()), 1e-3)
    maps: list[tuple[str, str, np.ndarray, float]] = [
        ("tokens per pass", f"mean {len(decoded.tokens) / decoded.passes:.2f}", accepted, float(accepted.max())),
        ("entropy of q, nats", f"mean {decoded.mean('entropy'):.2f}", seen, float(seen.max())),
        ("distortion, TV", f"mean {decoded.mean('distortion'):.4f}, sum {distortion.sum():.2f}", distortion, worst),
    ]
    width = (len(maps) + 1) * (_PANEL + _MARGIN) + _MARGIN
    sheet = Image.new("RGB", (width, _PANEL + _CAPTION + 2 * _MARGIN), "white")
    picture = Image.fromarray(pixels).resize((_PANEL, _PANEL), Image.Resampling.LANCZOS)
    sheet.paste(picture, (_MARGIN, _MARGIN + _CAPTION))
    _caption(sheet, _MARGIN, "picture", f"{decoded.passes} forward passes", None)
    for index, (title, note, values, high) in enumerate(maps, start=1):
        left = _MARGIN + index * (_PANEL + _MARGIN)
        panel = Image.fromarray(colour(values, high)).resize((_PANEL, _PANEL), Image.Resampling.NEAREST)
        sheet.paste(panel, (left, _MARGIN + _CAPTION))
        _caption(sheet, left, title, note, high)
    return sheet


def _caption(sheet: Image, left: int, title: str, note: str, high: float | None) -> None:
    from PIL import Image, ImageDraw, ImageFont

    draw = ImageDraw.Draw(sheet)
    draw.text((left, _MARGIN - 4), title, fill="black", font=ImageFont.load_default(17))
    draw.text((left, _MARGIN + 19), note, fill=(90, 90, 90), font=ImageFont.load_default(13))
    if high is None:
        return
    scale = Image.fromarray(colour(np.linspace(0, 1, 90)[None].repeat(10, 0), 1.0))
    sheet.paste(scale, (left + _PANEL - 120, _MARGIN))
    label = f"{high:.0f}" if high >= 10 else f"{high:.2g}"
    font = ImageFont.load_default(11)
    draw.text((left + _PANEL - 130, _MARGIN - 2), "0", fill="black", font=font)
    draw.text((left + _PANEL - 27, _MARGIN - 2), label, fill="black", font=font)
