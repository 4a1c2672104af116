"""The TensorRT backend: csd::Verify and csd::Advance as quickly deployable plugins, implemented ahead of time.

The kernels' PTX goes into the engine; at run time there is no Python, no compiler and no library of ours. TensorRT
hands a kernel its tensors, int32 expressions of their shapes, and its outputs, in this order, that of csd_ops.kernels.
All numbers of a rule are tensors, so one engine serves every preset.
"""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

from csd_ops.contract import DOMAIN
from csd_ops.errors import MachineError
from csd_ops.kernels import ADVANCE, THREADS, VERIFY, Kernel

PLUGINS = {f"{DOMAIN}::Verify": VERIFY, f"{DOMAIN}::Advance": ADVANCE}


def register(trt: Any, code: bytes) -> None:
    """Register both plugins with TensorRT; the parser finds them by the nodes' domain and type.

    Args:
        trt: the module `tensorrt`.
        code: the kernels' PTX or machine code for the GPU that the engine is for.

    Raises:
        MachineError: this TensorRT has no quickly deployable plugins with an ahead-of-time implementation.
    """
    plugins = _plugin_module(trt)
    known = importlib.import_module(f"{plugins.__name__}._lib").QDP_REGISTRY
    for name, kernel in PLUGINS.items():
        if name not in known:
            plugins.register(name)(_describe(trt, plugins, kernel))
        # the code of another GPU replaces the one before
        plugins.aot_impl(name)(_implement(plugins, kernel, code))


def _plugin_module(trt: Any) -> Any:
    names = ["tensorrt.plugin", "tensorrt_bindings.plugin"] if "rtx" not in trt.__name__ else []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "aot_impl"):
            return module
    raise MachineError(
        f"expected a TensorRT with ahead-of-time Python plugins, found {trt.__name__} {trt.__version__}; "
        "install TensorRT 11, or build with --tail kernel"
    )


def _signature(function: Any, names: list[str], annotation: Any, extra: list[str], returned: Any) -> Any:
    """Give a function the parameters that TensorRT reads from its signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    tensors = [inspect.Parameter(name, kind, annotation=annotation) for name in names]
    others = [inspect.Parameter(name, kind) for name in extra]
    function.__signature__ = inspect.Signature(tensors + others, return_annotation=returned)
    return function


def _sizes(kernel: Kernel, tensors: tuple[Any, ...]) -> dict[str, Any]:
    """Every symbol of the contract as an expression of the inputs' shapes."""
    sizes: dict[str, Any] = {}
    for (_, shape), tensor in zip(kernel.inputs.values(), tensors, strict=True):
        for axis, size in enumerate(shape):
            if not size.isdigit() and " " not in size:
                sizes.setdefault(size, tensor.shape_expr[axis])
    return sizes


def _expression(size: str, sizes: dict[str, Any]) -> Any:
    """A sum of symbols and numbers as an expression, or a number."""
    if size.isdigit():
        return int(size)
    first, *rest = size.split(" + ")
    total = sizes[first]
    for term in rest:
        total = total + (int(term) if term.isdigit() else sizes[term])
    return total


def _describe(trt: Any, plugins: Any, kernel: Kernel) -> Any:
    """Shapes and dtypes of the outputs."""
    dtypes = {"float32": trt.float32, "int64": trt.int64, "bool": trt.bool}

    def describe(*tensors: Any) -> tuple[Any, ...]:
        sizes = _sizes(kernel, tensors)
        return tuple(
            plugins.from_shape_expr(tuple(_expression(size, sizes) for size in shape), dtypes[dtype])
            for dtype, shape in kernel.outputs.values()
        )

    returned = types.GenericAlias(tuple, (plugins.TensorDesc,) * len(kernel.outputs))
    return _signature(describe, list(kernel.inputs), plugins.TensorDesc, [], returned)


def _implement(plugins: Any, kernel: Kernel, code: bytes) -> Any:
    """Entry, code, launch and scalar arguments."""

    def implement(*arguments: Any) -> tuple[str, bytes, Any, Any]:
        sizes = _sizes(kernel, arguments[: len(kernel.inputs)])
        launch = plugins.KernelLaunchParams()
        launch.grid_x, launch.grid_y = (_expression(size, sizes) for size in kernel.grid)
        launch.block_x = THREADS
        scalars = plugins.SymIntExprs(len(kernel.scalars))
        for index, size in enumerate(kernel.scalars):
            scalars[index] = plugins.SymInt32(_expression(size, sizes))
        return kernel.name, code, launch, scalars

    returned = types.GenericAlias(tuple, (str, bytes, plugins.KernelLaunchParams, plugins.SymIntExprs))
    return _signature(implement, list(kernel.inputs), plugins.TensorDesc, ["outputs", "tactic"], returned)
