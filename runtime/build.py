"""`csd build`: a bundle's engines, built into the bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from csd_ops.errors import InputError, MachineError
from runtime.bundle import IMAGE_DECODER, STEP, WEIGHTS, Bundle
from runtime.presets import find_preset

if TYPE_CHECKING:
    from engines.nvidia.plan import Card

PROMPT = 64  # ids that a plan takes unless asked for more; the bundle's longest prompt if that is shorter


def bundle_identity(bundle: Bundle) -> str:
    """What ties a plan to its bundle: the digest of the graphs' and weights' digests."""
    names = [name for name in sorted(bundle.files) if name.startswith((STEP, WEIGHTS, IMAGE_DECODER))]
    return hashlib.sha256("".join(bundle.files[name]["sha256"] for name in names).encode()).hexdigest()


def _require_onnx() -> None:
    """Said before the modules that need it are imported."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise MachineError("expected onnx to build engines, found none; install `csd-toolkit[rtx]`") from None


def default_precision(bundle: Bundle) -> str:
    """The bundle's if that is half precision, else fp16."""
    stored = bundle.manifest.precision
    return stored if stored in ("fp16", "bf16") else "fp16"


def build_engines(
    bundle: Bundle,
    *,
    target: str = "auto",
    precision: str | None = None,
    window: int | None = None,
    batch: int = 1,
    prompt: int | None = None,
    guidance: bool = True,
    tail: str | None = None,
    preset: str | None = None,
    tf32: bool = False,
    compute_capabilities: Sequence[str] = (),
    verify: bool = False,
    on_progress: Callable[[str, str, int, int], None] | None = None,
) -> list[Card]:
    """Build the plans of the step and of the image decoder into `engines/` of the bundle.

    Args:
        bundle: an opened bundle.
        target: "tensorrt", "rtx" or "auto".
        precision: fp32, fp16 or bf16; None: the bundle's if that is half precision, else fp16.
        window: W; None: the preset's.
        batch: most pictures decoded together.
        prompt: longest prompt in ids; None: 64, or the model's longest if that is less.
        guidance: off for pictures without guidance only: half the rows.
        tail: "plugin", "kernel" or "function"; None: plugin where the target has plugins, else kernel.
        preset: gives the window, and the settings of a function tail; None: the bundle's recommended one.
        tf32: let TensorRT round float32 products to TF32.
        compute_capabilities: GPUs to build for, TensorRT-RTX only; none: one plan for all of them.
        verify: interpret what the parser made of the graphs and compare it with ONNX Runtime.
        on_progress: called with (plan, phase, steps done, steps in all).

    Raises:
        InputError, MachineError: one sentence for what cannot be built as asked.
    """
    _require_onnx()
    from engines.nvidia.builder import Request, build_image_decoder, build_step
    from engines.nvidia.graph import PRECISIONS, Tail
    from engines.nvidia.plan import FOLDER
    from engines.nvidia.plan import IMAGE_DECODER as DECODER
    from engines.nvidia.plan import STEP as STEP_PLAN
    from engines.nvidia.toolchain import find_toolchain

    manifest = bundle.manifest
    if manifest.precision in ("int8", "int4", "w8a8"):
        raise InputError(
            f"expected a bundle in fp32, fp16 or bf16 for TensorRT, found {manifest.precision}, which is for the CPU; "
            "export the checkpoint again"
        )
    precision = precision or default_precision(bundle)
    if precision not in PRECISIONS:
        raise InputError(f"expected precision of {', '.join(PRECISIONS)}, found {precision!r}; choose one of them")
    if tail is not None and tail not in set(Tail):
        raise InputError(f"expected tail of {', '.join(Tail)}, found {tail!r}; choose one of them")
    recommended = manifest.recommended
    chosen = find_preset(preset or str(recommended.get("preset", "csd")), manifest.family)
    window = window or chosen.window
    longest = min(prompt or PROMPT, manifest.max_prompt)
    for name, value, most in (("window", window, manifest.max_window), ("prompt", prompt or 1, manifest.max_prompt)):
        if not 1 <= value <= most:
            raise InputError(f"expected {name} from 1 to {most}, found {value}; choose one inside")
    if batch < 1:
        raise InputError(f"expected batch of at least 1, found {batch}; choose a larger one")
    toolchain = find_toolchain(target)
    settings = chosen.settings(
        temperature=float(recommended.get("temperature", 1.0)),
        top_k=int(recommended.get("top_k", 0)),
        top_p=float(recommended.get("top_p", 1.0)),
    )
    request = Request(
        precision=precision,
        window=window,
        prompt=longest,
        image_tokens=manifest.image_tokens,
        batch=batch,
        groups=2 if guidance else 1,
        tail=Tail(tail) if tail else None,
        preset=chosen.name,
        settings=settings if tail == Tail.FUNCTION else None,
        tf32=tf32,
        compute_capabilities=tuple(compute_capabilities),
    )

    def progress(plan: str) -> Any:
        return (lambda *phase: on_progress(plan, *phase)) if on_progress else None

    options: dict[str, Any] = {"bundle": bundle_identity(bundle), "verify": verify}
    folder = bundle.folder / FOLDER
    step = build_step(toolchain, bundle.path(STEP), request, folder, on_progress=progress(STEP_PLAN), **options)
    decoder = build_image_decoder(
        toolchain, bundle.path(IMAGE_DECODER), request, folder, on_progress=progress(DECODER), **options
    )
    return [step, decoder]


def needed_memory(bundle: Bundle, precision: str | None = None) -> str:
    """What a build takes, said before it starts."""
    _require_onnx()
    from engines.machine import free_memory
    from engines.nvidia.builder import BUILD_FACTOR, BYTES

    manifest = bundle.manifest
    chosen = precision or default_precision(bundle)
    stored = int(bundle.files.get(WEIGHTS, {"size": 0})["size"])
    weights = stored * BYTES.get(chosen, 4) // BYTES.get(manifest.precision, 4)
    free = free_memory()
    found = f", {free / 1e9:.1f} GB are free" if free is not None else ""
    return (
        f"building {manifest.name} in {chosen}: {weights / 1e9:.3f} GB of weights, about "
        f"{BUILD_FACTOR * weights / 1e9:.2f} GB of memory{found}"
    )


def describe(card: Card) -> Any:
    """The card as a table: what was really built and what it is valid for."""
    from rich.table import Table

    floats = ("float", "half", "bf16")
    shares = {kind: sum(counts.get(kind, 0) for counts in card.layer_dtypes.values()) for kind in floats}
    total = max(sum(shares.values()), 1)
    products = card.layer_dtypes.get("matrix_multiply", {}) | card.layer_dtypes.get("convolution", {})
    table = Table(title=f"{card.name}.plan", show_header=False, title_justify="left")
    rows = {
        "valid for": f"{card.target} {card.version}, "
        + (f"compute capability {card.compute_capability}" if card.compute_capability != "portable" else "RTX GPUs"),
        "size": f"{card.plan_size / 1e6:.1f} MB in {card.seconds:.1f} s; running takes about "
        f"{card.device_memory / 1e6:.0f} MB of GPU memory",
        "float layers": ", ".join(f"{kind} {count / total:.0%}" for kind, count in shares.items() if count),
        "products": ", ".join(f"{count} in {kind}" for kind, count in products.items()),
        "TF32": "allowed" if card.tf32 else "off",
    }
    if card.what == "step":
        tail = f"{card.tail}, settings of {card.preset} fixed" if card.preset else card.tail
        rows |= {
            "attention": card.attention,
            "tail": tail,
            "profiles": f"prompts up to {card.prompt} ids, windows of {card.window}, pictures at once: "
            f"{card.batch}, capacity {card.capacity}",
        }
    if card.verified:
        worst = max(card.verified.items(), key=lambda entry: entry[1])
        unit = "levels of 255" if card.what != "step" else "of the largest value"
        rows["verified"] = f"worst {worst[0]}, {worst[1]:g} {unit}, against ONNX Runtime"
    for name, value in rows.items():
        table.add_row(name, value)
    return table
