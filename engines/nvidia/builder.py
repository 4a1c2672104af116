"""Builds a plan from a bundle's graph: parse, check, two profiles, build, card."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from csd_ops.contract import Coupling, Settings, cache_capacity
from csd_ops.errors import InputError, MachineError
from csd_ops.kernels import ARCHITECTURES, compile_kernels, evaluate
from engines.machine import free_memory
from engines.nvidia.graph import PRECISIONS, StepSizes, Tail, decoder_copy, load_graph, step_copy
from engines.nvidia.network import Parsed, check_contract, check_network, layer_dtypes, let_decompose, parse
from engines.nvidia.plan import IMAGE_DECODER, PORTABLE, STEP, Card, write_card
from engines.nvidia.toolchain import Toolchain
from engines.nvidia.verification import reference_session, verify_image_decoder, verify_step

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
BUILD_FACTOR = 4  # a build takes up to this many times the weights in host memory
# What a build did, for a progress bar: phase, steps done, steps in all
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """What to build. Sizes as in the decoder: tokens, ids, pictures."""

    precision: str
    window: int
    prompt: int  # longest prompt, ids
    image_tokens: int
    batch: int = 1
    groups: int = 2  # guidance rows per picture
    tail: Tail | None = None  # None: plugin where there are plugins, else kernel
    preset: str = ""
    settings: Settings | None = None  # of the preset, for a function tail
    tf32: bool = False
    compute_capabilities: tuple[str, ...] = ()  # TensorRT-RTX: "8.9", ...; none: portable

    @property
    def capacity(self) -> int:
        """S, cache slots of a row."""
        return cache_capacity(self.prompt, self.image_tokens, self.window)

    @property
    def rows(self) -> int:
        """Rows of a full batch."""
        return self.batch * self.groups


def build_step(
    toolchain: Toolchain,
    graph: Path,
    request: Request,
    folder: Path,
    *,
    bundle: str,
    verify: bool = False,
    on_progress: Progress | None = None,
) -> Card:
    """Build the step's plan into `folder`, with its card and the kernels' PTX.

    Args:
        toolchain: the builder.
        graph: the bundle's step.onnx.
        request: what to build.
        folder: the bundle's engines folder.
        bundle: what identifies the bundle.
        verify: interpret the parsed network and compare it with ONNX Runtime before it is built.
        on_progress: see Progress.

    Raises:
        InputError: a graph or a request that cannot be built as asked.
        MachineError: too little memory or disk, or TensorRT's own failure.
    """
    tail = request.tail or (Tail.PLUGIN if toolchain.kind.plugins else Tail.KERNEL)
    if tail == Tail.PLUGIN and not toolchain.kind.plugins:
        raise InputError(f"expected a tail of kernel or function: {toolchain.kind.module} has no plugins; choose one")
    if tail == Tail.FUNCTION and request.settings is None:
        raise InputError("expected the preset that a function tail is made for, found none; pass --preset")
    sizes = StepSizes.of(load_graph(graph))
    _check_memory(graph, sizes.precision, request.precision, folder)
    with _work(folder) as work:
        model, base = step_copy(
            graph,
            capacity=request.capacity,
            precision=request.precision,
            tail=tail,
            folder=work,
            settings=request.settings,
        )
        if tail == Tail.PLUGIN:
            from csd_ops.plugin import register
            from engines.nvidia.device import describe_gpu

            major, minor = describe_gpu().compute_capability
            register(toolchain.trt, compile_kernels(10 * major + minor)[0])
        parsed = parse(toolchain, model, base)
        check_network(parsed, model)
        verified = _verify_step(parsed, graph, sizes, request, tail, work) if verify else {}
        profiles = [_step_shapes(model, sizes, request, width) for width in ((1, 16), (request.window,))]
        plan, attention, seconds = _build(parsed, request, profiles, on_progress)
        card = _card(toolchain, parsed, request, STEP, plan, attention, seconds, bundle, tail)
        memory = device_memory(sizes, request, len(plan))
        kernels = write_kernels(folder, card)
        fixed = settings_of(request.settings) if tail == Tail.FUNCTION and request.settings else {}
        card = replace(card, device_memory=memory, kernels=kernels, verified=verified, settings=fixed)
        _write(folder, card, plan)
    return card


def build_image_decoder(
    toolchain: Toolchain,
    graph: Path,
    request: Request,
    folder: Path,
    *,
    bundle: str,
    verify: bool = False,
    on_progress: Progress | None = None,
) -> Card:
    """Build the image decoder's plan into `folder`, with its card."""
    _check_memory(graph, "fp32", request.precision, folder)
    with _work(folder) as work:
        model, base = decoder_copy(graph, precision=request.precision, folder=work)
        parsed = parse(toolchain, model, base)
        check_contract(parsed, model)
        verified = {}
        if verify:
            reference = reference_session(load_graph(graph), graph.parent)
            verified = {"pixels": float(verify_image_decoder(parsed, reference, request.precision))}
        codes = model.graph.input[0]
        tokens = codes.type.tensor_type.shape.dim[1].dim_value
        one, most = (1, tokens), (request.batch, tokens)
        plan, attention, seconds = _build(parsed, request, [{codes.name: (one, one, most)}], on_progress)
        card = _card(toolchain, parsed, request, IMAGE_DECODER, plan, attention, seconds, bundle, None)
        card = replace(card, device_memory=3 * len(plan), verified=verified)
        _write(folder, card, plan)
    return card


def _verify_step(
    parsed: Parsed, graph: Path, sizes: StepSizes, request: Request, tail: Tail, work: Path
) -> dict[str, float]:
    if tail == Tail.PLUGIN:
        raise InputError("expected a tail that can be interpreted, found plugin; verify with --tail kernel")
    model, base = parsed.model, parsed.path
    if request.precision == "bf16":  # ONNX Runtime's CPU has no bfloat16 products
        (work / "reference").mkdir()
        options: dict[str, Any] = {"capacity": request.capacity, "tail": tail, "settings": request.settings}
        model, base = step_copy(graph, precision="fp32", folder=work / "reference", **options)
    agreement = verify_step(
        parsed,
        reference_session(model, base.parent),
        sizes,
        window=request.window,
        prompt=min(request.prompt, 16),
        image_tokens=request.image_tokens,
        rows=request.rows,
    )
    agreement.check(request.precision)
    return {name: float(f"{error:.2g}") for name, error in agreement.errors.items()}


# ---- before ------------------------------------------------------------------------------------------------------


def _check_memory(graph: Path, stored: str, precision: str, folder: Path) -> None:
    """Refuse a build that the machine cannot hold, with the figures."""
    data = graph.with_name(graph.name + ".data")
    weights = (data.stat().st_size if data.is_file() else graph.stat().st_size) * BYTES[precision] // BYTES[stored]
    needed, free = BUILD_FACTOR * weights, free_memory()
    if free is not None and needed > free:
        raise MachineError(
            f"expected about {needed / 1e9:.1f} GB of free memory to build an engine of {weights / 1e9:.1f} GB, found "
            f"{free / 1e9:.1f} GB; free some, or build on a larger machine"
        )
    folder.mkdir(parents=True, exist_ok=True)
    disk = os.statvfs(folder)
    space = disk.f_bavail * disk.f_frsize
    if 2 * weights > space:  # the plan, and the weights in another precision while it is built
        raise MachineError(
            f"expected {2 * weights / 1e9:.1f} GB of free disk at {folder}, found {space / 1e9:.1f} GB; free some"
        )


def device_memory(sizes: StepSizes, request: Request, plan: int) -> int:
    """Estimate of the device memory a decoding takes: plan, caches, state of two turns, noise, activations."""
    vocabulary, window, batch = sizes.image_vocabulary, request.window, request.batch
    cache = 2 * sizes.layers * request.rows * sizes.key_value_heads * request.capacity * sizes.head_size
    laws = batch * vocabulary * (3 * window + 2 * sizes.columns)
    logits = request.rows * vocabulary * max(window, request.prompt)
    noise = 3 * batch * window * request.image_tokens
    return plan + cache * BYTES[request.precision] + 4 * (laws + 2 * logits + noise) + plan // 4


class _work:  # noqa: N801 - used as a function
    """A temporary folder beside the plan, for weights in another precision; gone when the block ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".work-*"):  # of a killed build
            _remove(left)
        self._made = tempfile.TemporaryDirectory(prefix=".work-", dir=folder, ignore_cleanup_errors=True)

    def __enter__(self) -> Path:
        return Path(self._made.__enter__())

    def __exit__(self, *error: Any) -> None:
        self._made.__exit__(*error)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


# ---- the build ---------------------------------------------------------------------------------------------------

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def _step_shapes(model: onnx.ModelProto, sizes: StepSizes, request: Request, widths: tuple[int, ...]) -> Shapes:
    """Least, usual and most shape of every input: the prompt's profile has widths from 1, the window's has one."""
    most_wide = request.window if len(widths) == 1 else max(request.prompt, 2)
    least, usual = widths[0], min(widths[-1], most_wide)
    gumbel = request.settings is not None and request.settings.coupling == Coupling.GUMBEL
    noise = (sizes.image_vocabulary if gumbel else 1, sizes.image_vocabulary if gumbel or not request.settings else 1)
    known = {"C": sizes.columns, "V": sizes.image_vocabulary}
    chosen = []
    for rows, width, one_or_all in (
        (request.batch, least, noise[0]),
        (request.rows, usual, noise[0]),
        (request.rows, most_wide, noise[1]),
    ):
        batch = request.batch
        groups = rows // batch
        places = request.image_tokens + width
        chosen.append(known | {"R": rows, "B": batch, "G": groups, "W": width, "N": one_or_all, "T": places})
    return {
        value.name: tuple(  # type: ignore[misc]
            tuple(
                dim.dim_value if dim.HasField("dim_value") else evaluate(dim.dim_param, given)
                for dim in value.type.tensor_type.shape.dim
            )
            for given in chosen
        )
        for value in model.graph.input
    }


def _build(
    parsed: Parsed, request: Request, profiles: list[Shapes], on_progress: Progress | None
) -> tuple[bytes, str, float]:
    """The plan, how attention runs, and the seconds it took.

    float32 attention has no fused kernel: it is decomposed at once. In half precision the build is first tried with
    fused kernels alone, so that "fused" in the card is proven by the build.
    """
    began = time.perf_counter()
    attentions = bool(parsed.attentions())
    if attentions and request.precision == "fp32":
        let_decompose(parsed)
        plan = _serialise(parsed, request, profiles, on_progress)
        kind = "decomposed"
    else:
        plan = _serialise(parsed, request, profiles, on_progress)
        kind = "fused" if attentions else "none"
        if plan is None and attentions and any("decomposable" in line for line in parsed.toolchain.logger.errors):
            let_decompose(parsed)
            plan = _serialise(parsed, request, profiles, on_progress)
            kind = "decomposed"
    if plan is None:
        told = parsed.toolchain.logger.errors
        first = " ".join(told[-1].split()) if told else "no reason given"
        raise MachineError(f"expected {parsed.toolchain.kind.module} to build the engine, found: {first[:500]}")
    return plan, kind, time.perf_counter() - began


def _serialise(parsed: Parsed, request: Request, profiles: list[Shapes], on_progress: Progress | None) -> bytes | None:
    trt, builder = parsed.toolchain.trt, parsed.builder
    parsed.toolchain.logger.errors.clear()
    config = builder.create_builder_config()
    if not request.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in shapes.items():
            profile.set_shape(name, least, usual, most)
        config.add_optimization_profile(profile)
    if request.compute_capabilities:
        _set_capabilities(trt, config, request.compute_capabilities)
    monitor = None
    if on_progress:
        monitor = _monitor(trt, on_progress)
        config.progress_monitor = monitor
    cache = None
    if not parsed.toolchain.kind.builds_without_gpu:  # TensorRT-RTX tunes when the plan is first run
        cache = _timing_cache_path(parsed)
        stored = cache.read_bytes() if cache.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(stored), False)
    plan = builder.build_serialized_network(parsed.network, config)
    if plan is None:
        return None
    if cache:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f".{cache.name}.{os.getpid()}.tmp")
        temporary.write_bytes(bytes(config.get_timing_cache().serialize()))
        temporary.replace(cache)
    return bytes(plan)


def _timing_cache_path(parsed: Parsed) -> Path:
    """Tuning results are of a TensorRT version and a GPU; every bundle of this user shares them."""
    from engines.nvidia.device import describe_gpu

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    gpu = describe_gpu()
    name = f"{parsed.toolchain.kind.name}-{parsed.toolchain.version}-{gpu.name.replace(' ', '_')}.timing"
    return home / "csd-toolkit" / name


def _set_capabilities(trt: Any, config: Any, wanted: tuple[str, ...]) -> None:
    names = {name.removeprefix("SM"): member for name, member in trt.ComputeCapability.__members__.items()}
    config.num_compute_capabilities = len(wanted)
    for index, capability in enumerate(wanted):
        member = names.get(capability.replace(".", ""))
        if member is None:
            known = ", ".join(f"{name[:-1]}.{name[-1]}" for name in names if name.isdigit())
            raise InputError(f"expected a compute capability of {known}, found {capability}; choose one of them")
        config.set_compute_capability(member, index)


def _monitor(trt: Any, on_progress: Progress) -> Any:
    """TensorRT's own progress, phase by phase; an exception in the callback cancels the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self._steps[phase] = steps
            on_progress(phase, 0, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            try:
                on_progress(phase, step + 1, self._steps.get(phase, step + 1))
            except KeyboardInterrupt:
                return False
            return True

        def phase_finish(self, phase: str) -> None:
            steps = self._steps.pop(phase, 1)
            on_progress(phase, steps, steps)

    return Monitor()


# ---- after -------------------------------------------------------------------------------------------------------


def _card(
    toolchain: Toolchain,
    parsed: Parsed,
    request: Request,
    what: str,
    plan: bytes,
    attention: str,
    seconds: float,
    bundle: str,
    tail: Tail | None,
) -> Card:
    if toolchain.kind.builds_without_gpu:
        capability = ", ".join(request.compute_capabilities) or PORTABLE
    else:
        from engines.nvidia.device import describe_gpu

        capability = "{}.{}".format(*describe_gpu().compute_capability)
    return Card(
        what=what,
        target=toolchain.kind.name,
        version=toolchain.version,
        compute_capability=capability,
        precision=request.precision,
        window=request.window,
        prompt=request.prompt,
        capacity=request.capacity,
        batch=request.batch,
        rows=request.rows,
        tail=tail.value if tail else "",
        preset=request.preset if tail == Tail.FUNCTION else "",
        bundle=bundle,
        plan_size=len(plan),
        plan_sha256=hashlib.sha256(plan).hexdigest(),
        device_memory=0,
        attention=attention,
        tf32=request.tf32,
        seconds=round(seconds, 2),
        layer_dtypes=layer_dtypes(parsed),
        versions={"onnx": onnx.__version__, toolchain.kind.module: toolchain.version},
    )


def settings_of(settings: Settings) -> dict[str, float]:
    """As JSON carries them: infinity as a large number."""
    return {name: min(float(value), 3e38) for name, value in vars(settings).items()}


def kernels_name(capability: str) -> str:
    """File name of the kernels' PTX for a compute capability such as "9.0"."""
    return f"kernels-sm{capability.replace('.', '')}.ptx"


def write_kernels(folder: Path, card: Card) -> dict[str, str]:
    """Compile the kernels for every GPU the plan is for, so that the runtime needs no compiler."""
    if card.compute_capability == PORTABLE:
        capabilities = [f"{number // 10}.{number % 10}" for number in ARCHITECTURES]
    else:
        capabilities = card.compute_capability.split(", ")
    written = {}
    for capability in capabilities:
        code, _ = compile_kernels(int(capability.replace(".", "")))
        path = folder / kernels_name(capability)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(code)
        temporary.replace(path)
        written[capability] = hashlib.sha256(code).hexdigest()
    return written


def _write(folder: Path, card: Card, plan: bytes) -> None:
    path = folder / f"{card.name}.plan"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(plan)
        temporary.replace(path)
        write_card(folder, card)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MachineError(f"expected to write {path}, found: {error.strerror}; free some space") from None


assert set(BYTES) == set(PRECISIONS)
