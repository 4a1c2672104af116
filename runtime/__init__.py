"""Bundle in, pictures out: a lean runtime that decodes autoregressive image models speculatively, without torch."""

from csd_ops.errors import CsdError, InputError, MachineError
from runtime.bundle import Bundle, Manifest, open_bundle
from runtime.decoder import Decoded
from runtime.model import Generation, ImageModel
from runtime.presets import Preset, presets

__version__ = "0.1.0"

__all__ = [
    "Bundle",
    "CsdError",
    "Decoded",
    "Generation",
    "ImageModel",
    "InputError",
    "MachineError",
    "Manifest",
    "Preset",
    "open_bundle",
    "presets",
]
