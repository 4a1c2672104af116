"""csd_ops/kernels.cu compiled for the host, and launched block by block on NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from csd_ops.kernels import SOURCE, Kernel

SHIM = Path(__file__).with_name("host_shim.h")
COMPILER = shutil.which("g++") or shutil.which("clang++")


@functools.cache
def library(*options: str) -> ctypes.CDLL:
    """The kernels as a shared library."""
    assert COMPILER, "needs a C++ compiler"
    folder = Path(tempfile.mkdtemp(prefix="csd_kernels_"))
    target = folder / "kernels.so"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-x", "c++", *options]
    subprocess.run([COMPILER, *flags, "-include", SHIM, SOURCE, "-o", target], check=True)
    loaded = ctypes.CDLL(os.fspath(target))
    shutil.rmtree(folder)
    return loaded


def launch(kernel: Kernel, arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> None:
    """Run every block in turn, outputs in place. Dtypes and shapes are checked against the kernel's contract."""
    for name, (dtype, _) in (kernel.inputs | kernel.outputs).items():
        assert arrays[name].dtype == dtype and arrays[name].flags.c_contiguous, name
    for name, shape in kernel.shapes(sizes).items():
        assert arrays[name].shape == shape, (name, arrays[name].shape, shape)
    built = library(*os.environ.get("CSD_HOST_FLAGS", "").split())
    entry = getattr(built, kernel.name)
    arguments = [
        *(ctypes.c_void_p(arrays[name].ctypes.data) for name in kernel.inputs),
        *(ctypes.c_int(value) for value in kernel.scalar_values(sizes)),
        *(ctypes.c_void_p(arrays[name].ctypes.data) for name in kernel.outputs),
    ]
    across, down, _ = kernel.launch_grid(sizes)
    for y in range(down):
        for x in range(across):
            built.host_block(x, y)
            entry(*arguments)


def outputs(kernel: Kernel, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Buffers for the outputs, filled with what no kernel writes."""
    shapes = kernel.shapes(sizes)
    made = {}
    for name, (dtype, _) in kernel.outputs.items():
        made[name] = np.full(shapes[name], 1 if dtype == "bool" else -77, dtype)
    return made
