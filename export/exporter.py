"""The stages of an export: load, trace, append the tail, write, compare, move into place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from csd_ops.errors import InputError, MachineError
from engines.machine import free_memory, multiplies_bytes, processor
from runtime.bundle import IMAGE_DECODER, STEP, TOKENIZER, Bundle, open_bundle, write_manifest, writing_bundle

if TYPE_CHECKING:
    from export.parity import Parity

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4", "w8a8")
MEMORY = 1_300_000_000  # bytes of PyTorch and its exporter, before any weight
STAGES = ("load", "trace step", "write step", "image decoder", "compare", "check bundle")


def export_checkpoint(
    checkpoint: str | PathLike[str],
    output: str | PathLike[str],
    *,
    precision: str = "fp32",
    size: tuple[int, int] | None = None,
    image_decoder: str | PathLike[str] | None = None,
    force: bool = False,
    revision: str | None = None,
    on_stage: Callable[[str, int, int], None] | None = None,
    on_write: Callable[[int, int], None] | None = None,
) -> tuple[Bundle, Parity]:
    """Export a checkpoint to a bundle, compared with PyTorch before it is moved into place.

    Args:
        checkpoint: folder with safetensors (preferred) or .bin weights, or an id on the hub such as ORG/NAME.
        output: bundle folder; an existing bundle stays until the new one has passed.
        precision: fp32, fp16 or bf16, of weights, activations and cache; int8 or int4, of weights alone; w8a8, of
            weights and what they are multiplied with. Norms and softmax are computed, and everything after the head
            is, in float32.
        size: width and height of the pictures in pixels; None: the family's usual size.
        image_decoder: file of an image decoder that the checkpoint lacks (Lumina-mGPT: Meta's vqgan.ckpt).
        force: keep a bundle whose logits are further off than its precision explains.
        revision: branch, tag or commit of a hub id; None: its main branch.
        on_stage: called with (stage, number from 0, stages) before each stage.
        on_write: called with (weights written, weights in all), counted in values, during `write step`.

    Raises:
        InputError: the checkpoint is not one that can be exported, or the output is taken.
        MachineError: a package of the export extra is missing, or the bundle cannot be written.
        ParityError: the graphs do not compute what the checkpoint computes; nothing is written.
    """
    if precision not in PRECISIONS:
        raise InputError(f"expected precision of {', '.join(PRECISIONS)}, found {precision!r}; choose one of them")

    if precision == "w8a8" and not multiplies_bytes():
        raise MachineError(
            f"expected a processor with VNNI to compare w8a8 with PyTorch, found {processor()[0]}, whose products of "
            "bytes overflow; export on another machine, or with --precision int8"
        )

    def stage(name: str) -> None:
        if on_stage:
            on_stage(name, STAGES.index(name), len(STAGES))

    from export.families import find_family
    from export.hub import fetch

    name = Path(checkpoint).resolve().name
    with _machine_errors(output):
        checkpoint = fetch(checkpoint, revision)
    with _machine_errors(output), writing_bundle(output) as folder:
        family = find_family(checkpoint)
        check_room(checkpoint, folder, precision)
        import torch

        from csd_ops.onnx_function import attach_tail
        from export.image_decoder import trace_image_decoder
        from export.parity import compare
        from export.quantise import QUANTISED, quantise
        from export.step import save_graph, trace_step, write_step

        stage("load")
        loaded = family.load(checkpoint, size, Path(image_decoder) if image_decoder else None)
        manifest = replace(loaded.manifest, name=name, precision=precision, versions=versions())
        loaded = replace(loaded, manifest=manifest)
        stage("trace step")
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
        traced = trace_step(loaded, dtypes.get(precision, torch.float32))
        if precision in QUANTISED:
            traced = quantise(traced, precision)
        attach_tail(traced.model, columns=manifest.columns, codes=loaded.codes)
        stage("write step")
        write_step(traced, loaded, folder / STEP, on_write)
        del traced
        stage("image decoder")
        save_graph(trace_image_decoder(loaded), folder / IMAGE_DECODER)
        shutil.copyfile(checkpoint / TOKENIZER, folder / TOKENIZER)
        stage("compare")
        parity = compare(loaded, folder, precision)
        parity.check(precision, force=force)
        stage("check bundle")
        write_manifest(folder, manifest)
        open_bundle(folder)
    return open_bundle(output, verify=False), parity


def check_room(checkpoint: Path, folder: Path, precision: str) -> None:
    """Refuse an export that memory or disk cannot hold, with the figures, before anything is read.

    Weights stay mapped from the checkpoint, whose pages the system takes back when it needs them; what an export holds
    itself is PyTorch, one weight at a time, and one piece of the graph while it is compared: 2.8 GB at the sizes of
    Janus-Pro-1B.
    """
    files = list(checkpoint.glob("*.safetensors")) or list(checkpoint.glob("*.bin"))
    size = sum(path.stat().st_size for path in files)
    needed, free = MEMORY + 3 * size // 8, free_memory()
    if free is not None and needed > free:
        raise MachineError(
            f"expected about {needed / 1e9:.1f} GB of free memory to export {size / 1e9:.1f} GB, found "
            f"{free / 1e9:.1f} GB; free some, or export on a larger machine"
        )
    bundle = size * (2 if precision == "fp32" else 1)  # at most: checkpoints are in half precision, or smaller
    space = shutil.disk_usage(folder).free
    if bundle > space:
        raise MachineError(
            f"expected up to {bundle / 1e9:.1f} GB of free disk at {folder.parent}, found {space / 1e9:.1f} GB; "
            "free some, or name another output"
        )


@contextmanager
def _machine_errors(output: str | PathLike[str]) -> Iterator[None]:
    """Tell a missing package or a full disk in one sentence."""
    try:
        yield
    except ImportError as error:
        found = f"no {error.name}" if error.name else " ".join(str(error).split())
        raise MachineError(
            f"expected the packages of the export extra, found {found}; install `csd-toolkit[export]`"
        ) from None
    except OSError as error:
        raise MachineError(
            f"expected to read the checkpoint and write {output}, found: {' '.join(str(error).split())}; "
            "check permissions and free space, or name another output"
        ) from None


def versions() -> dict[str, str]:
    """What made the bundle."""
    from importlib.metadata import version

    from runtime import __version__

    packages = ("torch", "transformers", "onnx", "onnxscript")
    return {"csd-toolkit": __version__} | {name: version(name) for name in packages}
