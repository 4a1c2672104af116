"""ONNX Runtime: the engine that works everywhere. CPU here; buffers are NumPy arrays bound in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from csd_ops.errors import InputError, MachineError
from engines.protocol import Binding, check_buffers

_DTYPES = {
    "tensor(int64)": np.int64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MachineError(
            "expected ONNX Runtime, found none; install `csd-toolkit[cpu]` (or `[gpu]` on a machine with CUDA)"
        ) from None
    return onnxruntime


class OnnxRuntimeEngine:
    """A graph file opened with ONNX Runtime.

    Args:
        path: an .onnx file; external weights lie beside it.
        threads: threads of one operator; None: all cores that this process may use.
        spinning: busy waiting between operators; faster alone on a machine, slower on shared cores.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None, spinning: bool = False) -> None:
        onnxruntime = _onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                os.fspath(path), sess_options=options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime raises a family of its own without a common public base
            first = str(error).splitlines()[0]
            raise InputError(f"expected a graph that ONNX Runtime opens at {path}, found: {first}") from None
        self.provider: str = self._session.get_providers()[0]
        self.threads: int = options.intra_op_num_threads
        self.version: str = onnxruntime.__version__
        self.inputs = {value.name: _binding(value) for value in self._session.get_inputs()}
        self.outputs = {value.name: _binding(value) for value in self._session.get_outputs()}

    def bind(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """Check and bind NumPy buffers; an input and an output may be the same array (the caches are).

        All inputs must be given; outputs not given are not computed into a buffer. The returned call allocates
        nothing here and keeps the arrays alive.
        """
        missing = self.inputs.keys() - inputs.keys()
        if missing:
            raise InputError(f"expected buffers for all inputs, found none for {sorted(missing)}")
        sizes: dict[str, int] = {}
        check_buffers(self.inputs, inputs, sizes)
        check_buffers(self.outputs, outputs, sizes)
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        run = self._session.run_with_iobinding
        alive = (inputs, outputs)

        def call(_alive: object = alive) -> None:
            run(binding)

        return call


def _binding(value: Any) -> Binding:
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return Binding(value.name, np.dtype(_DTYPES[value.type]), shape)
