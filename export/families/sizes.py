"""Sizes of pictures whose rows of codes end with a token: what the grammar allows and the context holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from csd_ops.errors import InputError

MOST_RATIO = 4


@dataclass(frozen=True)
class Sizes:
    """What a family can draw, in pixels.

    Attributes:
        code: of a side of one code.
        step: sides are multiples of it.
        room: ids left for prompts beside the picture.
        largest: side of the square with the largest area.
        usual: sides of squares, the first that the context holds is drawn unless another size is asked for.
        published: widths and heights that the family was trained with.
    """

    code: int
    step: int
    room: int
    largest: int
    usual: Iterable[int]
    published: Iterable[tuple[int, int]]

    def choose(self, size: tuple[int, int] | None, context: int) -> tuple[int, int]:
        """Width and height: what was asked for, or the usual one. InputError lists what can be drawn."""

        def fits(width: int, height: int) -> bool:
            return (height // self.code) * (width // self.code + 1) + self.room <= context

        if size is None:
            side = next((side for side in self.usual if fits(side, side)), self.step)
            size = (side, side)
        steps = all(side > 0 and side % self.step == 0 for side in size)
        area = size[0] * size[1] <= self.largest**2
        if steps and area and max(size) <= MOST_RATIO * min(size) and fits(*size):
            return size
        listed = ", ".join(f"{width}x{height}" for width, height in self.published if fits(width, height))
        raise InputError(
            f"expected a size of {listed or 'fewer tokens than the context'}, or another in steps of {self.step} "
            f"pixels, at most {MOST_RATIO} to 1, {self.largest}x{self.largest} in all and within {context} tokens, "
            f"found {size[0]}x{size[1]}; choose one of them"
        )
