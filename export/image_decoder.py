"""The image decoder graph: codes int64 [B, N] to pixels uint8 [B, height, width, 3], float32 inside."""

from __future__ import annotations

import warnings

import onnx
import torch

from csd_ops.contract import OPSET
from export.families.base import Loaded


def trace_image_decoder(loaded: Loaded) -> onnx.ModelProto:
    """The family's image decoder as an ONNX model, B free."""
    codes = torch.zeros(2, loaded.manifest.codes, dtype=torch.int64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            loaded.image_decoder.eval(),
            (codes,),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            dynamic_shapes={"codes": {0: torch.export.Dim("B", min=1)}},
            input_names=["codes"],
            output_names=["pixels"],
        )
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]
    return model
