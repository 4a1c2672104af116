"""Trials: every contestant on every prompt in turn, one picture at a time, prompt in, pixels out."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from csd_ops.contract import CONTROLS, RESULTS, STATE, Kind
from csd_ops.errors import MachineError
from engines.machine import processor
from engines.onnx_runtime import OnnxRuntimeEngine
from engines.protocol import Engine
from runtime.backends import CpuBackend
from runtime.bench.floor import Floor, Work, floor, step_work
from runtime.bench.roofs import Roofs, measure_roofs
from runtime.bundle import STEP
from runtime.decoder import Setup
from runtime.host_loop import buffers
from runtime.model import ImageModel
from runtime.presets import Preset

PARTS = ("transformer", "verify", "host", "image decode")
REPEATS = 30  # of the tail alone, for its share of a step


@dataclass
class Trial:
    """One picture of one contestant."""

    contestant: str
    number: int  # of the round; the prompt and the seed go with it
    seconds: float
    forward_passes: int
    tokens: int
    parts: dict[str, float]  # seconds, of PARTS; only what could be told apart
    histogram: list[int]  # forward passes by the tokens they decided, from 0; empty for eager


@dataclass
class Report:
    """What `bench` found; `as_json` is the file's content."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    roofs: Roofs
    work: Work
    floors: dict[str, Floor]  # by contestant
    memory: dict[str, float]  # MB at the peak, by side
    trials: list[Trial] = field(default_factory=list)

    @property
    def contestants(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(sorted((t.contestant for t in self.trials), key=lambda n: "eager" not in n)))

    def of(self, contestant: str) -> list[Trial]:
        """Its trials."""
        return [trial for trial in self.trials if trial.contestant == contestant]

    def median(self, contestant: str) -> float:
        """Median seconds per picture."""
        return float(np.median([trial.seconds for trial in self.of(contestant)]))

    def passes(self, contestant: str) -> float:
        """Mean forward passes per picture."""
        return float(np.mean([trial.forward_passes for trial in self.of(contestant)]))

    def part(self, contestant: str, part: str) -> float:
        """Median milliseconds per forward pass of a part; NaN where it cannot be told."""
        shares = [t.parts[part] / t.forward_passes for t in self.of(contestant) if part in t.parts]
        return float(np.median(shares)) * 1e3 if shares else float("nan")

    def step(self, contestant: str) -> float:
        """Median seconds of one step, transformer and verification."""
        return (self.part(contestant, "transformer") + self.part(contestant, "verify")) / 1e3

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        summary = {}
        for name in self.contestants:
            seconds = [trial.seconds for trial in self.of(name)]
            own: dict[str, Any] = {
                "seconds": {f"p{level}": float(np.percentile(seconds, level)) for level in (50, 95, 99)},
                "forward_passes": self.passes(name),
                "milliseconds_per_pass": {part: self.part(name, part) for part in PARTS},
                "tokens_per_pass_histogram": np.sum(
                    [np.pad(t.histogram, (0, 128 - len(t.histogram))) for t in self.of(name)], axis=0
                ).tolist(),
            }
            if name in self.floors:
                own["floor"] = asdict(self.floors[name]) | {"reached": self.step(name) / self.floors[name].seconds}
                own |= self.rates(name)
            summary[name] = {key: none_for_nan(value) for key, value in own.items()}
        return {
            "machine": self.machine,
            "settings": self.settings,
            "roofs": asdict(self.roofs),
            "work": asdict(self.work),
            "peak_memory_mb": self.memory,
            "summary": summary,
            "trials": [asdict(trial) for trial in self.trials],
        }

    def rates(self, contestant: str) -> dict[str, float]:
        """Bytes and operations per second that its steps reached."""
        at, seconds = self.settings["at"][contestant], self.step(contestant)
        return {
            "bytes_per_second": self.work.bytes(at["rows"], at["length"]) / seconds,
            "operations_per_second": self.work.operations(at["rows"], at["window"], at["length"]) / seconds,
        }


def none_for_nan(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: none_for_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and value != value else value


class Stopwatch:
    """An engine whose bound calls add up what they take."""

    def __init__(self, engine: Engine) -> None:
        self.inputs, self.outputs, self.provider = engine.inputs, engine.outputs, engine.provider
        self.engine, self.seconds = engine, 0.0

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Callable[[], None]:
        """See Engine."""
        call = self.engine.bind(inputs, outputs)

        def timed() -> None:
            began = time.perf_counter()
            call()
            self.seconds += time.perf_counter() - began

        return timed


def bench(
    model: ImageModel,
    prompts: Sequence[str],
    presets: Mapping[str, Preset],
    *,
    checkpoint: Path | None = None,
    baselines: Sequence[str] = (),
    baseline_threads: int | None = None,
    count: int = 8,
    guidance: float | None = None,
    seed: int = 0,
    memory: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
    on_round: Callable[[Report], None] | None = None,
) -> Report:
    """Measure presets and baselines, interleaved, in an order that rotates; the first round is warm-up.

    Args:
        model: an opened bundle.
        prompts: texts, taken in turn.
        presets: by the name they have in the report.
        checkpoint: what the bundle was exported from, for the baselines.
        baselines: of runtime.bench.eager.BASELINES.
        baseline_threads: PyTorch's; None: as many as the model's.
        count: pictures per contestant.
        guidance: weight; None: the bundle's.
        seed: of round 0; the next ones count up.
        memory: also draw one picture per side in a process of its own and note its peak memory.
        on_progress: called with (pictures drawn, pictures in all).
        on_round: called with the report after every round.

    Raises:
        InputError, MachineError: one sentence.
    """
    recommended = model.bundle.manifest.recommended
    guidance = float(recommended.get("guidance", 1.0) if guidance is None else guidance)
    eager = None
    if baselines:
        from runtime.bench.eager import Eager

        assert checkpoint is not None
        eager = Eager(checkpoint, model, baseline_threads or model.backend.threads)
    report = _start(model, presets, guidance, prompts[0])
    report.settings |= {"guidance": guidance, "seed": seed, "threads": model.backend.threads, "wait": model.wait}
    if memory:
        report.memory = {"csd": _peak(_OURS, str(model.bundle.folder), prompts[0], str(model.backend.threads))}
        if eager:
            report.memory["eager"] = _peak(_EAGER, str(checkpoint), json.dumps(eager.ids(prompts[0]).tolist()))
    backend, watch, tails = model.backend, None, {}
    if isinstance(backend, CpuBackend):
        tails = {name: tail_seconds(model, preset, guidance) for name, preset in presets.items()}
        watch = Stopwatch(backend.step)
        backend.step = watch
    names = [*baselines, *presets]
    done, total = 0, (count + 1) * len(names)
    for number in range(-1, count):
        prompt, turn = prompts[number % len(prompts)], number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if name in presets:
                trial = _draw(model, watch, presets[name], prompt, guidance, seed + number + 1)
                if watch:
                    verify = tails[name] * trial.forward_passes
                    trial.parts |= {"verify": verify, "transformer": trial.parts["transformer"] - verify}
            else:
                assert eager is not None
                trial = _draw_eager(eager, model, name, prompt, guidance, seed + number + 1)
            trial.contestant, trial.number = name, number
            done += 1
            if on_progress:
                on_progress(done, total)
            if number >= 0:
                report.trials.append(trial)
        if on_round and number >= 0:
            on_round(report)
    if watch and isinstance(backend, CpuBackend):
        backend.step = watch.engine
    return report


def _draw(model: ImageModel, watch: Stopwatch | None, preset: Preset, prompt: str, guidance: float, seed: int) -> Trial:
    before = watch.seconds if watch else 0.0
    made = model.generate(prompt, preset=preset, guidance=guidance, seed=seed)
    decoded = made.decoded[0]
    parts = {"image decode": made.decode_seconds}
    if watch:
        parts["transformer"] = watch.seconds - before
        parts["host"] = made.seconds - made.decode_seconds - parts["transformer"]
    histogram = np.bincount(np.bincount(decoded.pass_of, minlength=decoded.passes)[1:], minlength=2)
    return Trial("", 0, made.seconds, decoded.passes, len(decoded.tokens), parts, histogram.tolist())


def _draw_eager(eager: Any, model: ImageModel, name: str, prompt: str, guidance: float, seed: int) -> Trial:
    before = dict(eager.spent)
    began = time.perf_counter()
    eager.draw(name, prompt, guidance, seed)
    seconds = time.perf_counter() - began
    parts = {part: eager.spent[part] - before[part] for part in before}
    parts["host"] = seconds - sum(parts.values())
    tokens = model.bundle.manifest.image_tokens
    return Trial(name, 0, seconds, tokens, tokens, parts, [])


def _start(model: ImageModel, presets: Mapping[str, Preset], guidance: float, prompt: str) -> Report:
    """The report without trials: machine, roofs, floors."""
    manifest = model.bundle.manifest
    work = step_work(model.bundle)
    rows = 1 if guidance == 1 else 2
    length = model.prompt_length(prompt) + manifest.image_tokens / 2  # what the caches hold on average
    threads = model.backend.threads or 1
    roofs = measure_roofs(threads, int(work.bytes(rows, length)))
    at = {name: {"rows": rows, "window": preset.window, "length": length} for name, preset in presets.items()}
    floors = {}
    if isinstance(model.backend, CpuBackend):
        floors = {name: floor(work, roofs, rows, preset.window, length) for name, preset in presets.items()}
    settings = {"bundle": model.bundle.folder.name, "precision": manifest.precision, "at": at}
    return Report(describe_machine(model), settings, roofs, work, floors, {})


def describe_machine(model: ImageModel) -> dict[str, Any]:
    """Processor, cores and versions."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("csd-toolkit", "numpy", "onnxruntime", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    name, cores = processor()
    return {
        "processor": name,
        "cores": cores,
        "system": platform.platform(),
        "python": platform.python_version(),
        "provider": model.backend.provider,
        "versions": versions,
    }


def tail_seconds(model: ImageModel, preset: Preset, guidance: float) -> float:
    """Median seconds of verification and window logic alone, at this preset's window and settings, on random laws."""
    from csd_ops.onnx_function import tail_model
    from runtime.backends import read_codes

    manifest = model.bundle.manifest
    settings = preset.settings(top_k=int(manifest.recommended.get("top_k", 0)))
    setup = Setup(manifest, settings, preset.window, None if guidance == 1 else guidance, 1, 1)
    graph = tail_model(manifest.image_vocabulary, manifest.columns, read_codes(model.bundle)).SerializeToString()
    engine = OnnxRuntimeEngine(graph, threads=model.backend.threads, wait=model.wait)
    sizes, generator = setup.sizes, np.random.default_rng(0)
    fed = buffers({name: entry for name, entry in (STATE | CONTROLS).items() if name in engine.inputs}, sizes)
    fed |= buffers({"logits": RESULTS["logits"]}, sizes)
    fed["logits"][:] = generator.normal(0, 3, fed["logits"].shape)
    fed["draft_probs"][:] = generator.dirichlet(np.ones(sizes["V"]), fed["draft_probs"].shape[:2])
    fed["kind"][:] = Kind.DRAFTED
    fed["uniforms"][:] = generator.uniform(0.01, 0.99, fed["uniforms"].shape)
    fed["settings"][:], fed["guidance"][:] = settings.vector(), setup.weights
    fed["grammar"][:] = setup.grammar
    made = buffers({name: RESULTS[name] for name in ("committed", "tokens", "measures")}, sizes)
    made |= {f"next_{name}": array for name, array in buffers(STATE, sizes).items()}
    call = engine.bind(fed, {name: array for name, array in made.items() if name in engine.outputs})
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def trace(model: ImageModel, preset: Preset, prompt: str, path: Path, *, guidance: float, seed: int = 0) -> int:
    """Draw one picture with ONNX Runtime's profiler and write its events with ours, for Perfetto; returns their number.

    Profiling costs time per operator: durations are for where, not for how long.

    Raises:
        MachineError: the model does not run on the CPU.
    """
    from tempfile import TemporaryDirectory

    from runtime.bundle import write_text

    if not isinstance(model.backend, CpuBackend):
        raise MachineError("expected the CPU for --trace, found a GPU; use Nsight Systems there")
    kept = model.backend.step
    with TemporaryDirectory() as folder:
        model.backend.step = engine = OnnxRuntimeEngine(
            model.bundle.path(STEP), threads=model.backend.threads, wait=model.wait, profile=f"{folder}/step"
        )
        try:
            decoded = model.generate(prompt, preset=preset, guidance=guidance, seed=seed).decoded[0]
        finally:
            model.backend.step = kept
        events = json.loads(Path(engine.end_profile()).read_text("utf-8"))
    runs = [event for event in events if event["name"] == "model_run"]
    counts = np.bincount(decoded.pass_of, minlength=decoded.passes)
    first = len(runs) - (decoded.passes - 1)  # before it, the prompt's
    for number, run in enumerate(runs):
        label = f"pass {number - first + 1}: {counts[number - first + 1]} tokens" if number >= first else "prompt"
        events.append({**run, "name": label, "cat": "pass", "tid": 0})
    write_text(path, json.dumps(events))
    return len(events)


_PEAK = "from pathlib import Path; print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
_OURS = (
    "import sys; from runtime import ImageModel; "
    "ImageModel.open(sys.argv[1], threads=int(sys.argv[3]) or None, verify=False).generate(sys.argv[2]); " + _PEAK
)
_EAGER = (
    "import json, sys, torch; from transformers import JanusForConditionalGeneration as Model; "
    "model = Model.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True).eval(); "
    "ids = torch.tensor(json.loads(sys.argv[2])); torch.set_grad_enabled(False); "
    "model.decode_image_tokens(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), "
    "generation_mode='image', do_sample=True)); " + _PEAK
)


def _peak(code: str, *arguments: str) -> float:
    """Peak resident memory in MB of a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise MachineError(f"expected the peak memory of a process of its own, found: {done.stderr.strip()[-200:]}")
    return int(done.stdout) / 1024
