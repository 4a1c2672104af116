"""What this machine can do at best: a copy and a matrix product, measured in a process of its own.

A process of its own, because NumPy's BLAS reads its number of threads once, when it is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from csd_ops.errors import MachineError

LEAST, MOST = 1 << 22, 1 << 29  # bytes of the copied buffer


@dataclass(frozen=True)
class Roofs:
    """Rates of one machine with a number of threads."""

    copy: float  # bytes per second, read plus written, of a buffer as large as what a step reads
    product: float  # operations per second of a float32 matrix product, 1024 x 1024 x 1024
    integer_product: float  # the same of one of uint8 and int8, in ONNX Runtime
    threads: int


def measure_roofs(threads: int, working_set: int) -> Roofs:
    """Measure with so many threads.

    The copied buffer is as large as what a step reads: a model that fits a cache is compared with that cache.

    Raises:
        MachineError: the process failed.
    """
    size = min(max(working_set, LEAST), MOST)
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(threads))
    command = [sys.executable, "-m", "runtime.bench.roofs", str(threads), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise MachineError(f"expected this machine's copy and product rates, found: {done.stderr.strip()[-200:]}")
    copy, product, integer_product = json.loads(done.stdout)
    return Roofs(copy, product, integer_product, threads)


def _measure(threads: int, size: int) -> tuple[float, float, float]:
    import numpy as np

    source, target = np.ones((threads, size // threads // 8)), np.zeros((threads, size // threads // 8))
    copies = max(1, (1 << 26) // size)  # of a small buffer several, so that starting threads does not count

    def copy(row: int) -> None:
        for _ in range(copies):
            np.copyto(target[row], source[row])

    with ThreadPoolExecutor(threads) as pool:
        copying = _best(lambda: list(pool.map(copy, range(threads))))
    a, b = np.ones((2, 1024, 1024), np.float32)
    out = np.empty_like(a)
    multiplying = _best(lambda: np.matmul(a, b, out=out))
    integers = _integer_product(threads)
    return 2 * source.nbytes * copies / copying, 2 * 1024**3 / multiplying, 2 * 1024**3 / _best(integers)


def _integer_product(threads: int) -> Callable[[], object]:
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    from engines.onnx_runtime import OnnxRuntimeEngine

    side = 1024
    a, out = np.ones((side, side), np.uint8), np.zeros((side, side), np.float32)
    x = helper.make_tensor_value_info("a", TensorProto.UINT8, [side, side])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [side, side])
    constants = {"b": np.ones((side, side), np.int8), "one": np.float32(1)}
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    node = helper.make_node("MatMulIntegerToFloat", ["a", "b", "one", "one"], ["y"], domain="com.microsoft")
    graph = helper.make_graph([node], "product", [x], [y], held)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return OnnxRuntimeEngine(model.SerializeToString(), threads=threads).bind({"a": a}, {"y": out})


def _best(run: Callable[[], object], seconds: float = 0.7) -> float:
    """Least seconds of one call, over calls for so long; the first, which also touches the memory, does not count."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]), int(sys.argv[2]))))
