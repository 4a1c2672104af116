"""ONNX Runtime: the engine that works everywhere. NumPy buffers on the CPU, device arrays on CUDA, bound in place."""

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
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

# How idle threads of an operator wait for the next one, as ONNX Runtime's session entries. Sleeping costs a wake-up per
# operator; spinning keeps a core. Brief: 20 us, about as long as the operators that one thread runs alone, and only
# inside a call.
WAITS: dict[str, dict[str, str]] = {
    "passive": {"session.intra_op.allow_spinning": "0"},
    "brief": {
        "session.intra_op.allow_spinning": "1",
        "session.intra_op.spin_duration_us": "20",
        "session.force_spinning_stop": "1",
    },
    "active": {"session.intra_op.allow_spinning": "1"},
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
    """A graph opened with ONNX Runtime.

    Args:
        graph: an .onnx file, external weights beside it; or a serialised graph.
        weights: folder of a serialised graph's external weights.
        threads: threads of one operator; None: all cores that this process may use.
        wait: of WAITS: passive (sleep), brief, or active (spin): faster alone on a machine, slower on shared cores.
        profile: write what every operator took to a file beginning so, when `end_profile` is called.
        stream: run on CUDA, on this stream, and return from a call before it is done; None: on the CPU.
    """

    def __init__(
        self,
        graph: str | os.PathLike[str] | bytes,
        *,
        weights: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        wait: str = "brief",
        profile: str | os.PathLike[str] | None = None,
        stream: int | None = None,
    ) -> None:
        onnxruntime = _onnxruntime()
        if wait not in WAITS:
            raise InputError(f"expected wait of {', '.join(WAITS)}, found {wait!r}; choose one of them")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        for entry, value in WAITS[wait].items():
            options.add_session_config_entry(entry, value)
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, os.fspath(profile)
        options.log_severity_level = 3
        if weights is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.fspath(weights))
        providers: list[Any] = [CPU]
        if stream is not None:
            if CUDA not in onnxruntime.get_available_providers():
                raise MachineError(
                    f"expected ONNX Runtime with {CUDA}, found {', '.join(onnxruntime.get_available_providers())}; "
                    "install `csd-toolkit[gpu]` instead of `[cpu]`"
                )
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            providers = [(CUDA, {"user_compute_stream": str(stream), "has_user_compute_stream": "1"})]
        try:
            self._session = onnxruntime.InferenceSession(
                graph if isinstance(graph, bytes) else os.fspath(graph), sess_options=options, providers=providers
            )
        except Exception as error:  # ONNX Runtime raises a family of its own without a common public base
            first = str(error).splitlines()[0]
            where = f"of {len(graph)} bytes" if isinstance(graph, bytes) else f"at {os.fspath(graph)}"
            raise InputError(f"expected a graph that ONNX Runtime opens {where}, found: {first}") from None
        self._run_options = None
        if stream is not None:
            self._run_options = onnxruntime.RunOptions()
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._memory = "cpu" if stream is None else "cuda"
        self.provider: str = self._session.get_providers()[0]
        self.threads: int = options.intra_op_num_threads
        self.version: str = onnxruntime.__version__
        self.inputs = {value.name: _binding(value) for value in self._session.get_inputs()}
        self.outputs = {value.name: _binding(value) for value in self._session.get_outputs()}

    def end_profile(self) -> str:
        """Close the profile and return its file: JSON of trace events."""
        return str(self._session.end_profiling())

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Callable[[], None]:
        """Check and bind buffers; an input and an output may be the same one (the caches are).

        All inputs must be given; outputs not given are not computed into a buffer. The returned call allocates
        nothing here and keeps the buffers alive.
        """
        missing = self.inputs.keys() - inputs.keys()
        if missing:
            raise InputError(f"expected buffers for all inputs, found none for {sorted(missing)}")
        sizes: dict[str, int] = {}
        check_buffers(self.inputs, inputs, sizes)
        check_buffers(self.outputs, outputs, sizes)
        binding = self._session.io_binding()
        for bind, buffers in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, array in buffers.items():
                address = array.ctypes.data if isinstance(array, np.ndarray) else array.address
                bind(name, self._memory, 0, array.dtype.type, array.shape, address)
        run, run_options = self._session.run_with_iobinding, self._run_options
        alive = (inputs, outputs)

        def call(_alive: object = alive) -> None:
            run(binding, run_options)

        return call


def _binding(value: Any) -> Binding:
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return Binding(value.name, np.dtype(_DTYPES[value.type]), shape)
