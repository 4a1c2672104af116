"""A plan made runnable: TensorRT or TensorRT-RTX on a device's stream, one context per profile, weights once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from csd_ops.errors import InputError, MachineError
from engines.nvidia.device import CudaDevice, DeviceArray
from engines.nvidia.plan import Card
from engines.nvidia.toolchain import Toolchain
from engines.protocol import Binding, check_buffers

PROMPT, WINDOW = 0, 1  # the profiles of a step's plan


def numpy_dtype(trt: Any, dtype: Any) -> np.dtype:
    """bfloat16 too, which NumPy itself does not know."""
    if dtype == trt.bfloat16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(trt.nptype(dtype))


class TensorRtPlan:
    """A deserialised plan: weights on the device once, shared by its contexts.

    Raises:
        MachineError: TensorRT cannot load it here.
    """

    def __init__(self, toolchain: Toolchain, card: Card, plan: bytes, device: CudaDevice) -> None:
        trt = toolchain.trt
        self.toolchain, self.card, self.device = toolchain, card, device
        self._runtime = trt.Runtime(toolchain.logger)
        toolchain.logger.errors.clear()
        self.engine = self._runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            told = toolchain.logger.errors
            first = " ".join(told[-1].split()) if told else "no reason given"
            raise MachineError(
                f"expected {toolchain.kind.module} {toolchain.version} to load {card.name}.plan on {device.name}, "
                f"found: {first}; build the engine on this machine with `csd build`"
            )

    def context(self, profile: int) -> TensorRtEngine:
        """An engine of one profile."""
        return TensorRtEngine(self, profile)


class TensorRtEngine:
    """See engines.protocol.Engine; buffers are DeviceArrays and a call queues on the device's stream."""

    def __init__(self, plan: TensorRtPlan, profile: int) -> None:
        trt, engine = plan.toolchain.trt, plan.engine
        self._plan = plan
        self._context = engine.create_execution_context()
        stream = plan.device.handle
        if self._context is None or not self._context.set_optimization_profile_async(profile, stream):
            raise MachineError(
                f"expected {plan.card.device_memory / 1e9:.2f} GB of GPU memory for {plan.card.name}, found too "
                "little; choose a smaller batch or window"
            )
        card = plan.card
        self.provider = (
            f"{plan.toolchain.kind.module} {plan.toolchain.version}, {card.precision}, attention {card.attention}, "
            f"{card.tail or 'no'} tail, {plan.device.name}"
        )
        self._bound: object = None
        self.inputs: dict[str, Binding] = {}
        self.outputs: dict[str, Binding] = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            shape = tuple(
                size if size >= 0 else f"{name}.{axis}" for axis, size in enumerate(engine.get_tensor_shape(name))
            )
            binding = Binding(name, numpy_dtype(trt, engine.get_tensor_dtype(name)), shape)
            given = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (self.inputs if given else self.outputs)[name] = binding

    def bind(self, inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]) -> Callable[[], None]:
        """Check and set shapes and addresses once. A cache and its update must be one buffer."""
        for declared, given, what in ((self.inputs, inputs, "input"), (self.outputs, outputs, "output")):
            missing = declared.keys() - given.keys()
            if missing:
                raise InputError(f"expected a buffer for every {what}, found none for {sorted(missing)}")
        sizes: dict[str, int] = {}
        check_buffers(self.inputs, {name: inputs[name] for name in self.inputs}, sizes)
        check_buffers(self.outputs, {name: outputs[name] for name in self.outputs}, sizes)
        check_in_place(inputs, outputs)
        context = self._context
        for name in self.inputs:
            if not context.set_input_shape(name, inputs[name].shape):
                raise InputError(
                    f"expected {name} of a shape that {self._plan.card.name} was built for, found {inputs[name].shape}"
                )
        unresolved = context.infer_shapes()
        if unresolved:
            raise InputError(f"expected shapes for all inputs, found none for {unresolved}")
        known = self.inputs | self.outputs
        buffers = {name: array for name, array in {**inputs, **outputs}.items() if name in known}
        shapes = {name: inputs[name].shape for name in self.inputs}
        execute, stream = context.execute_async_v3, self._plan.device.handle

        def call() -> None:
            if self._bound is not buffers:  # a context holds one set of addresses; a captured graph has its own
                for name, shape in shapes.items():
                    context.set_input_shape(name, shape)
                for name, array in buffers.items():
                    context.set_tensor_address(name, array.address)
                self._bound = buffers
            execute(stream)

        return call


def check_in_place(inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]) -> None:
    """Every cache is read and written at one address."""
    for name, array in inputs.items():
        if name.startswith(("key_", "value_")) and outputs[f"next_{name}"].address != array.address:
            raise InputError(f"expected {name} and next_{name} at one address, found two")
