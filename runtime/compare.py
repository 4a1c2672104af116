"""`csd compare`: the same windows through two engines, by Polygraphy's runners and comparator.

Windows carry their caches with them, so every engine sees the same state: a prompt on empty caches, then windows on
ragged lengths, one of them rolled back. The interpreted network stands for TensorRT where there is no GPU.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from csd_ops.contract import cache_names
from csd_ops.errors import InputError, MachineError
from runtime.bundle import STEP, Bundle

if TYPE_CHECKING:
    from engines.nvidia.graph import StepSizes

ENGINES = ("auto", "network", "tensorrt", "rtx")
AGAINST = ("onnxruntime", "eager")
Feed = dict[str, np.ndarray]


@dataclass(frozen=True)
class Difference:
    """How far two engines are apart in one output, over all windows."""

    output: str
    absolute: float  # largest |a - b|: the absolute tolerance that would have been needed
    relative: float  # the same over the largest |b|
    tolerance: float  # allowed, of the largest value

    @property
    def passed(self) -> bool:
        """Whether it is within the tolerance."""
        return self.relative <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_engines`."""

    engine: str
    against: str
    windows: int
    outputs: list[Difference]
    layers: list[Difference]  # in the order of the graph; empty unless asked for

    @property
    def passed(self) -> bool:
        """Whether every output is within its tolerance."""
        return all(difference.passed for difference in self.outputs)


def compare_engines(
    bundle: Bundle,
    *,
    engine: str = "auto",
    against: str = "onnxruntime",
    checkpoint: Path | None = None,
    precision: str | None = None,
    window: int = 16,
    windows: int = 4,
    tolerance: float | None = None,
    layers: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare a bundle's step in one engine with another.

    Args:
        bundle: an opened bundle.
        engine: tensorrt or rtx: a plan of the bundle on the GPU; network: what TensorRT parsed, interpreted; auto: a
            plan if there is a GPU, else network.
        against: onnxruntime, on the CPU; or eager: transformers, from the checkpoint.
        checkpoint: the checkpoint folder, for eager.
        precision: of the network; None: the bundle's. A plan has its own.
        window: W of the windows.
        windows: how many.
        tolerance: allowed error of the largest value; None: what the precision explains.
        layers: also every tensor in between (network against onnxruntime).
        on_progress: called with (runs done, runs in all).

    Raises:
        InputError, MachineError: one sentence.
    """
    for name, value, known in (("engine", engine, ENGINES), ("against", against, AGAINST)):
        if value not in known:
            raise InputError(f"expected {name} of {', '.join(known)}, found {value!r}; choose one of them")
    if against == "eager" and checkpoint is None:
        raise InputError("expected the checkpoint to compare with, found none; pass --checkpoint DIR")
    if layers and (engine not in ("auto", "network") or against != "onnxruntime"):
        raise InputError("expected network against onnxruntime for layers, found another pair; leave --layers out")
    polygraphy = _polygraphy()
    from engines.nvidia.graph import StepSizes, Tail, load_graph, step_copy
    from engines.nvidia.verification import TOLERANCE, reference_session

    sizes = StepSizes.of(load_graph(bundle.path(STEP)))
    precision = precision or bundle.manifest.precision
    capacity = 64 * (-(-(4 * window + 32) // 64))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (folder / "reference").mkdir()
        base, base_path = step_copy(
            bundle.path(STEP),
            capacity=capacity,
            precision="fp32" if precision == "bf16" else precision,
            tail=Tail.KERNEL,
            folder=folder / "reference",
        )
        feeds = make_feeds(reference_session(base, base_path.parent), sizes, capacity, window, windows)
        chosen = "network" if layers else engine
        first = _first_runner(polygraphy, bundle, chosen, precision, capacity, folder, sizes, layers, feeds[0])
        if against == "eager":
            assert checkpoint is not None
            second = _eager_runner(polygraphy, checkpoint, sizes, feeds[0])
        else:
            second = _reference_runner(polygraphy, base, base_path.parent, layers, feeds[0])
        allowed = tolerance or TOLERANCE[first.precision]
        results = _run(polygraphy, [first, second], feeds, on_progress)
    outputs = {"logits", *(f"next_{name}" for name in cache_names(sizes.layers))}
    found = differences(results, allowed)
    return Comparison(
        engine=first.name,
        against=second.name,
        windows=len(feeds),
        outputs=[difference for difference in found if difference.output in outputs],
        layers=[difference for difference in found if difference.output not in outputs] if layers else [],
    )


def _polygraphy() -> Any:
    try:
        import polygraphy.comparator
        from polygraphy.backend.base import BaseRunner
        from polygraphy.logger import G_LOGGER
    except ImportError as error:
        raise MachineError(f"expected Polygraphy, found no {error.name}; install `csd-toolkit[rtx]`") from None
    G_LOGGER.module_severity = G_LOGGER.CRITICAL

    from polygraphy.common import TensorMetadata

    class Runner(BaseRunner):  # type: ignore[misc, unused-ignore]
        """A function of a feed as a Polygraphy runner."""

        def __init__(self, name: str, infer: Callable[[Feed], Feed], precision: str, feed: Feed) -> None:
            super().__init__(name)
            self.precision, self._infer = precision, infer
            self._metadata = TensorMetadata()
            for tensor, value in feed.items():
                self._metadata.add(tensor, value.dtype, value.shape)

        def activate_impl(self) -> None:
            pass

        def get_input_metadata_impl(self) -> Any:
            return self._metadata

        def infer_impl(self, feed_dict: Feed) -> Any:
            found = self._infer(feed_dict)
            self.inference_time = 0.0
            return OrderedDict(
                (name, np.array(value, value.dtype if value.dtype.kind in "iub" else np.float32, order="C"))
                for name, value in found.items()
            )

    @dataclass(frozen=True)
    class Tools:
        comparator: Any
        compare: Any
        runner: Any

    return Tools(polygraphy.comparator.Comparator, polygraphy.comparator.CompareFunc, Runner)


def make_feeds(reference: Any, sizes: StepSizes, capacity: int, window: int, windows: int) -> list[Feed]:
    """Windows with the state they start from; two rows of different lengths, the third window rolled back."""
    generator = np.random.default_rng(0)
    rows = 2
    dtype = np.float16 if "float16" in next(i.type for i in reference.get_inputs() if i.name == "key_0") else np.float32
    shape = (rows, sizes.key_value_heads, capacity, sizes.head_size)
    caches = {name: np.zeros(shape, dtype) for name in cache_names(sizes.layers)}
    names = [f"next_{name}" for name in caches]
    length = np.zeros(rows, np.int64)
    feeds = []
    for number in range(windows):
        ids = generator.integers(0, sizes.image_vocabulary, (rows, window))
        feed = {"ids": ids, "length": length, **caches}
        feeds.append(feed)
        caches = dict(zip(caches, reference.run(names, feed), strict=True))
        kept = generator.integers(1, window + 1, rows)
        length = np.clip(length + kept - (2 if number == 1 else 0), 1, capacity - window)
    return feeds


def _first_runner(
    tools: Any,
    bundle: Bundle,
    engine: str,
    precision: str,
    capacity: int,
    folder: Path,
    sizes: StepSizes,
    layers: bool,
    feed: Feed,
) -> Any:
    if engine in ("auto", "tensorrt", "rtx"):
        try:
            return _plan_runner(tools, bundle, engine, sizes, feed)
        except MachineError:
            if engine != "auto":
                raise
    from engines.nvidia.graph import Tail, step_copy
    from engines.nvidia.interpreter import interpret
    from engines.nvidia.network import check_network, parse
    from engines.nvidia.toolchain import find_toolchain

    toolchain = find_toolchain("auto")
    work = folder / "network"
    work.mkdir()
    model, path = step_copy(bundle.path(STEP), capacity=capacity, precision=precision, tail=Tail.KERNEL, folder=work)
    parsed = parse(toolchain, model, path)
    check_network(parsed, model)

    def infer(feed: Feed) -> Feed:
        seen: Feed = {}

        def probe(layer: Any, values: list[np.ndarray]) -> None:
            seen.update({layer.get_output(index).name: value for index, value in enumerate(values)})

        return seen | interpret(parsed, feed, probe if layers else None)

    name = f"{toolchain.kind.module} {toolchain.version} network, {precision}, interpreted"
    return tools.runner(name, infer, precision, feed)


def _plan_runner(tools: Any, bundle: Bundle, engine: str, sizes: StepSizes, feed: Feed) -> Any:
    """A plan of the bundle on the GPU, its window profile."""
    from engines.nvidia.device import CudaDevice
    from engines.nvidia.engine import WINDOW, TensorRtPlan
    from engines.nvidia.plan import cards, read_plan
    from engines.nvidia.toolchain import KINDS, find_toolchain

    device = CudaDevice()
    targets = KINDS if engine == "auto" else (engine,)
    card = next((card for card in cards(bundle.folder) if card.target in targets and card.tail == "kernel"), None)
    if card is None:
        raise MachineError(
            f"expected a plan with a kernel tail in {bundle.folder / 'engines'}, found none; run `csd build`"
        )
    plan = TensorRtPlan(find_toolchain(card.target), card, read_plan(bundle.folder, card), device)
    context = plan.context(WINDOW)

    def infer(feed: Feed) -> Feed:
        given = {}
        for name, binding in context.inputs.items():
            value = feed[name].astype(binding.dtype)
            given[name] = device.allocate(value.shape, binding.dtype)
            device.write(given[name], value)
        results = {f"next_{name}": array for name, array in given.items() if name.startswith(("key_", "value_"))}
        rows, window = feed["ids"].shape
        results["logits"] = device.allocate((rows, window, sizes.image_vocabulary), "float32")
        context.bind(given, results)()
        return {name: device.reader(array)().wait() for name, array in results.items()}

    return tools.runner(context.provider, infer, card.precision, feed)


def _reference_runner(tools: Any, model: Any, folder: Path, layers: bool, feed: Feed) -> Any:
    """ONNX Runtime on the CPU, with every tensor in between if asked."""
    import onnx

    from engines.nvidia.verification import reference_session

    if layers:
        inferred = onnx.shape_inference.infer_shapes(model).graph
        outputs = {value.name for value in model.graph.output}
        made = {name for node in model.graph.node for name in node.output}
        model.graph.output.extend(
            value for value in inferred.value_info if value.name in made and value.name not in outputs
        )
    session = reference_session(model, folder)
    names = [output.name for output in session.get_outputs()]

    import onnxruntime

    def infer(feed: Feed) -> Feed:
        return dict(zip(names, session.run(names, feed), strict=True))

    return tools.runner(f"ONNX Runtime {onnxruntime.__version__}, CPUExecutionProvider", infer, "", feed)


def _eager_runner(tools: Any, checkpoint: Path, sizes: StepSizes, feed: Feed) -> Any:
    """Transformers' own code on the same caches, row by row."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import torch
        import transformers
        from transformers.cache_utils import DynamicCache

        from export.families import find_family
        from export.parity import embed, in_float32
    except ImportError as error:
        raise MachineError(
            f"expected the packages of the export extra, found no {error.name}; install `csd-toolkit[export]`"
        ) from None
    loaded = find_family(checkpoint).load(checkpoint)

    @torch.no_grad()
    def infer(feed: Feed) -> Feed:
        ids, length = feed["ids"], feed["length"]
        window = ids.shape[1]
        updated = {f"next_{name}": feed[name].copy() for name in cache_names(sizes.layers)}
        logits = []
        for row, filled in enumerate(int(size) for size in length):
            cache = DynamicCache()
            for layer in range(sizes.layers):
                known = (feed[f"{part}_{layer}"][row : row + 1, :, :filled] for part in ("key", "value"))
                cache.update(*(torch.from_numpy(values.astype(np.float32)) for values in known), layer)
            with in_float32(loaded):
                hidden = loaded.language_model(
                    inputs_embeds=embed(loaded, ids[row])[None],
                    cache=cache,
                    position_ids=torch.arange(filled, filled + window)[None],
                    use_cache=True,
                ).last_hidden_state
                logits.append(loaded.head(hidden)[0].numpy())
            for layer in range(sizes.layers):
                made = cache.layers[layer]
                for part, values in (("key", made.keys), ("value", made.values)):
                    updated[f"next_{part}_{layer}"][row, :, filled : filled + window] = values[0, :, filled:].numpy()
        return {"logits": np.stack(logits), **updated}

    name = f"transformers {transformers.__version__} eager, torch {torch.__version__}, fp32"
    return tools.runner(name, infer, "fp32", feed)


def _run(tools: Any, runners: list[Any], feeds: list[Feed], on_progress: Callable[[int, int], None] | None) -> Any:
    """Run all feeds through all runners."""
    done = 0

    class Watched:
        """The feeds, once per runner."""

        def __iter__(self) -> Any:
            nonlocal done
            for feed in feeds:
                yield OrderedDict(feed)
                done += 1
                if on_progress:
                    on_progress(done, len(feeds) * len(runners))

    results = tools.comparator.run(runners, data_loader=Watched(), warm_up=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # relative errors of zeros
        measure = tools.compare.simple(atol=0.0, rtol=0.0, check_error_stat="max")
        return tools.comparator.compare_accuracy(results, compare_func=measure), results


def differences(compared: tuple[Any, Any], tolerance: float) -> list[Difference]:
    """The comparator's figures per output, worst over the windows."""
    (accuracy,), results = compared  # one comparison function
    (pair,) = accuracy.keys()
    reference = results[pair[1]]
    found: dict[str, Difference] = {}
    for iteration, outcome in enumerate(accuracy[pair]):
        for name, figures in outcome.items():
            scale = float(np.abs(np.asarray(reference[iteration][name], np.float64)).max())
            absolute = float(getattr(figures, "max_absdiff", np.inf))
            relative = absolute / max(scale, 1e-9) if absolute else 0.0
            before = found.get(name)
            if before is None or relative > before.relative:
                found[name] = Difference(name, absolute, relative, tolerance)
    return list(found.values())


def describe(comparison: Comparison, most: int = 15) -> list[Any]:
    """Tables: every output, and of the layers the first that is off and the worst."""
    from rich.table import Table

    def table(title: str, rows: list[Difference]) -> Any:
        made = Table(title=title, title_justify="left")
        for column in ("tensor", "absolute tolerance needed", "of the largest value", "allowed", ""):
            made.add_column(column)
        for row in rows:
            made.add_row(
                row.output,
                f"{row.absolute:.2e}",
                f"{row.relative:.2e}",
                f"{row.tolerance:.0e}",
                "within" if row.passed else "OFF",
            )
        return made

    title = f"{comparison.engine}\nagainst {comparison.against}, {comparison.windows} windows"
    tables = [table(title, comparison.outputs)]
    if comparison.layers:
        worst = sorted(comparison.layers, key=lambda row: -row.relative)[:most]
        shown = [row for row in comparison.layers if row in worst]
        first = next((row.output for row in comparison.layers if not row.passed), None)
        about = f"the first that is off is {first}" if first else "none is off"
        tables.append(table(f"{len(comparison.layers)} tensors in between, the {len(shown)} worst; {about}", shown))
    return tables
