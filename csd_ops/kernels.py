"""The CUDA backend: what csd_ops/kernels.cu takes, how it is launched, and its compilation to PTX.

The same table serves every way to run the kernels: a launch by the runtime, the TensorRT plugin, and the tests' host
build. Compiling needs NVRTC (`cuda.bindings` and `nvidia-cuda-nvrtc`) and no driver and no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csd_ops.contract import CONTROLS, MEASURES, RESULTS, STATE
from csd_ops.errors import InputError, MachineError

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 512  # per block
LARGEST_VOCABULARY = 65536
ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # compute capabilities the tests compile for

Shape = tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """One entry of the source. Arguments in order: pointers of `inputs`, int32 `scalars`, pointers of `outputs`.

    Shapes and sizes are sums of the contract's symbols and numbers ("W + C"); the grid is (x, y).
    """

    name: str
    inputs: dict[str, tuple[str, Shape]]  # name -> (dtype, shape)
    scalars: Shape
    outputs: dict[str, tuple[str, Shape]]
    grid: tuple[str, str]

    def launch_grid(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Blocks in x, y, z."""
        x, y = (evaluate(size, sizes) for size in self.grid)
        return x, y, 1

    def scalar_values(self, sizes: Mapping[str, int]) -> list[int]:
        """The int32 arguments."""
        return [evaluate(size, sizes) for size in self.scalars]

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shape of every pointer argument."""
        return {
            name: tuple(evaluate(size, sizes) for size in shape)
            for name, (_, shape) in (self.inputs | self.outputs).items()
        }


def evaluate(size: str, sizes: Mapping[str, int]) -> int:
    """A sum of symbols and numbers as a number."""
    return sum(int(term) if term.isdigit() else sizes[term] for term in size.split(" + "))


def _named(*tables: Mapping[str, tuple[str, Shape]], names: str) -> dict[str, tuple[str, Shape]]:
    known = {name: entry for table in tables for name, entry in table.items()}
    return {name: known[name] for name in names.split()}


JUDGED: dict[str, tuple[str, Shape]] = {  # what csd::Verify hands to csd::Advance
    "q": ("float32", ("B", "W", "V")),
    "accept": ("bool", ("B", "W")),
    "final": ("int64", ("B", "W")),
    "redraft": ("int64", ("B", "W")),
}
CODES: dict[str, tuple[str, Shape]] = {"codes": ("float32", ("V", "E"))}

VERIFY = Kernel(
    "csd_verify",
    _named(
        STATE,
        CONTROLS,
        RESULTS,
        CODES,
        names="logits ids kind draft_probs uniforms gumbel guidance settings codes",
    ),
    ("B", "W", "V", "N", "G", "E"),
    JUDGED | _named(RESULTS, names="measures"),
    ("W", "B"),
)
ADVANCE = Kernel(
    "csd_advance",
    _named(STATE, names="ids length position history_probs history_ids")
    | JUDGED
    | _named(CONTROLS, names="uniforms grammar settings"),
    ("R", "B", "W", "V", "C", "T"),
    {f"next_{name}": entry for name, entry in STATE.items()} | _named(RESULTS, names="committed tokens"),
    ("W + C", "B"),
)
# I image tokens of a picture, P rows of noise (most passes a picture can take)
PICTURE: dict[str, tuple[str, Shape]] = {
    "picture_tokens": ("int64", ("B", "I")),
    "picture_kind": ("int64", ("B", "I")),
    "picture_draft": ("int64", ("B", "I")),
    "picture_pass": ("int64", ("B", "I")),
    "picture_measures": ("float32", ("B", "I", str(len(MEASURES)))),
}
NOISE: dict[str, tuple[str, Shape]] = {
    "noise": ("float32", ("B", "P", "W", "3")),
    "gumbels": ("float32", ("B", "I + W", "N")),
}
RECORD = Kernel(
    "csd_record",
    _named(STATE, RESULTS, names="ids kind position committed tokens measures") | NOISE,
    ("W", "V", "I", "P", "N"),
    {"passes": ("int64", ("B",))} | _named(CONTROLS, names="uniforms gumbel") | PICTURE,
    ("1", "B"),
)
KERNELS = (VERIFY, ADVANCE, RECORD)


def _checked(result: tuple[Any, ...], nvrtc: Any) -> Any:
    error, *values = result
    if int(error):
        raise MachineError(
            f"expected NVRTC to work, found {nvrtc.nvrtcGetErrorString(error)[1].decode()}; install `csd-toolkit[rtx]`"
        )
    return values[0] if len(values) == 1 else values


@functools.cache
def compile_kernels(capability: int, *, binary: bool = False) -> tuple[bytes, str]:
    """The kernels as PTX for a compute capability (90: 9.0), or as machine code; and the compiler's log.

    Raises:
        InputError: NVRTC does not know the capability.
        MachineError: NVRTC is not installed.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MachineError(f"expected NVRTC, found no {error.name}; install `csd-toolkit[rtx]`") from None

    try:
        known = _checked(nvrtc.nvrtcGetNumSupportedArchs(), nvrtc)
    except RuntimeError as error:  # the bindings are there, the library is not
        raise MachineError(f"expected the NVRTC library, found: {error}; install `csd-toolkit[rtx]`") from None
    supported = list(_checked(nvrtc.nvrtcGetSupportedArchs(), nvrtc))[:known]
    if capability not in supported:
        raise InputError(
            f"expected a compute capability of {', '.join(map(str, supported))}, found {capability}; choose one of them"
        )
    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], []), nvrtc)
    kind = "sm" if binary else "compute"
    options = [f"--gpu-architecture={kind}_{capability}".encode(), b"--std=c++17"]
    if binary:
        options.append(b"--ptxas-options=-v")
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program), nvrtc))
    _checked(nvrtc.nvrtcGetProgramLog(program, log), nvrtc)  # type: ignore[arg-type, unused-ignore]
    text = log.decode().rstrip("\0\n")
    if int(failed):
        raise RuntimeError(f"{SOURCE.name} does not compile for {kind}_{capability}:\n{text}")
    size, get = (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if binary else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    code = bytearray(_checked(size(program), nvrtc))
    _checked(get(program, code), nvrtc)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), text
