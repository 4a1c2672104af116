"""The step graph with its caches, for any window: what tests compare, not what decoding uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csd_ops.contract import CONTROLS, SETTINGS_SIZE, STATE, Settings, cache_names
from engines.onnx_runtime import OnnxRuntimeEngine
from runtime.bundle import Manifest


@dataclass
class StepRunner:
    """Feeds windows one after the other."""

    engine: OnnxRuntimeEngine
    manifest: Manifest
    rows: int
    capacity: int

    def __post_init__(self) -> None:
        manifest = self.manifest
        dtype = np.float16 if manifest.precision == "fp16" else np.float32
        shape = (self.rows, manifest.key_value_heads, self.capacity, manifest.head_size)
        self.caches = {name: np.zeros(shape, dtype) for name in cache_names(manifest.layers)}

    def __call__(self, ids: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Feed a window [R, W] at `length` [R]; logits [R, W, V]."""
        rows, window = ids.shape
        vocabulary = self.manifest.image_vocabulary
        sizes = {"R": rows, "B": rows, "G": 1, "W": window, "V": vocabulary, "C": self.manifest.columns}
        sizes |= {"T": window, "N": 1, str(SETTINGS_SIZE): SETTINGS_SIZE, "3": 3}
        inputs = {
            name: np.zeros([sizes[dim] for dim in shape], dtype) for name, (dtype, shape) in (STATE | CONTROLS).items()
        }
        inputs["ids"][:], inputs["length"][:], inputs["guidance"][:] = ids, length, 1.0
        inputs["settings"][:] = Settings().vector()
        logits = np.empty((rows, window, vocabulary), np.float32)
        outputs = {f"next_{name}": array for name, array in self.caches.items()} | {"logits": logits}
        self.engine.bind({**inputs, **self.caches}, outputs)()
        return logits
