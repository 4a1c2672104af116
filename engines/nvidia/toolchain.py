"""Which of NVIDIA's two builders is here: `tensorrt` (data-centre GPUs, plugins) or `tensorrt_rtx` (RTX, no plugins).

Both have the same Python interface; what differs is data, in the table below.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from csd_ops.errors import InputError, MachineError


@dataclass(frozen=True)
class Kind:
    """One builder: its module, how to install it, and what it can do."""

    name: str
    module: str
    install: str
    plugins: bool
    oldest: tuple[int, int]  # version that has KVCacheUpdate, IAttention and strongly typed networks alone
    builds_without_gpu: bool


KINDS = {
    "tensorrt": Kind("tensorrt", "tensorrt", "csd-toolkit[tensorrt]", True, (11, 0), False),
    "rtx": Kind("rtx", "tensorrt_rtx", "csd-toolkit[rtx]", False, (1, 4), True),
}


@dataclass(frozen=True)
class Toolchain:
    """A builder that was found. `trt` is the module."""

    kind: Kind
    trt: Any
    logger: Any

    @property
    def version(self) -> str:
        """The module's version."""
        return str(self.trt.__version__)


def find_toolchain(target: str = "auto") -> Toolchain:
    """The builder of that name; `auto`: TensorRT if it is installed, else TensorRT-RTX.

    Raises:
        InputError: an unknown name.
        MachineError: it is not installed, or too old.
    """
    if target != "auto" and target not in KINDS:
        raise InputError(f"expected target auto, {', '.join(KINDS)}, found {target!r}; choose one of them")
    found = [kind for name, kind in KINDS.items() if target in ("auto", name)]
    reasons = []
    for kind in found:
        try:
            trt = importlib.import_module(kind.module)
        except ImportError as error:
            reasons.append(f"{kind.module} ({error})")
            continue
        version = tuple(int(part) for part in str(trt.__version__).split(".")[:2])
        if version < kind.oldest:
            oldest = ".".join(map(str, kind.oldest))
            raise MachineError(
                f"expected {kind.module} {oldest} or newer, found {trt.__version__}; install `{kind.install}`"
            )
        return Toolchain(kind, trt, _logger(trt))
    install = " or ".join(f"`{kind.install}`" for kind in found)
    raise MachineError(
        f"expected {' or '.join(kind.module for kind in found)}, found no {'; '.join(reasons)}; install {install}"
    )


def _logger(trt: Any) -> Any:
    """A logger that keeps warnings and errors instead of printing them; the builder shows the errors it raises."""

    class Logger(trt.ILogger):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.warnings: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message)

    return Logger()
