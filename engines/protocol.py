"""What the runtime asks of an engine: names, dtypes and shapes of the bindings, and a bound call. Nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from csd_ops.errors import InputError


@dataclass(frozen=True)
class Binding:
    """One input or output: dtype and shape; a str in the shape is a size that the caller chooses."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str, ...]


class Engine(Protocol):
    """A graph made runnable."""

    inputs: dict[str, Binding]
    outputs: dict[str, Binding]
    provider: str  # what really runs it

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Callable[[], None]:
        """Check the buffers (NumPy or device arrays) and return a call that reads and writes them in place.

        On a device the call queues the work and returns at once.
        """
        ...


def check_buffers(declared: Mapping[str, Binding], buffers: Mapping[str, Any], sizes: dict[str, int]) -> None:
    """Refuse buffers whose dtype, shape or layout differ from the contract; fills `sizes` with the chosen ones."""
    for name, array in buffers.items():
        if name not in declared:
            raise InputError(f"expected one of {sorted(declared)} to bind, found {name!r}")
        binding = declared[name]
        if array.dtype != binding.dtype:
            raise InputError(f"expected {binding.dtype} for {name}, found {array.dtype}")
        if isinstance(array, np.ndarray) and not (array.flags.c_contiguous and array.flags.aligned):
            raise InputError(f"expected a contiguous buffer for {name}, found strides {array.strides}")
        if len(array.shape) != len(binding.shape):
            raise InputError(f"expected shape {binding.shape} for {name}, found {array.shape}")
        for size, wanted in zip(array.shape, binding.shape, strict=True):
            expected = wanted if isinstance(wanted, int) else sizes.setdefault(wanted, size)
            if size != expected:
                raise InputError(
                    f"expected shape {binding.shape} ({wanted} = {expected}) for {name}, found {array.shape}"
                )
