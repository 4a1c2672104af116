"""Checkpoint in, bundle out. Needs the `export` extra: torch, transformers, onnx, onnxscript."""

from export.exporter import export_checkpoint

__all__ = ["export_checkpoint"]
