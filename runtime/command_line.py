"""The command `csd`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from csd_ops.errors import CsdError, InputError, MachineError

if TYPE_CHECKING:
    from runtime.model import Generation

app = typer.Typer(
    name="csd",
    help="Decode autoregressive image models with content-aware speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=True, highlight=False)
PICTURE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def main() -> None:
    """Run the command; an error of the user or the machine is one sentence and exit code 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that half-written files are cleared up
    try:
        app()
    except CsdError as error:
        console.print(f"csd: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("csd: interrupted")
        sys.exit(130)


BundleOption = Annotated[
    Path | None,
    typer.Option("--bundle", "-b", help="Bundle folder; without it the demo model.", show_default=False),
]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads; without it all cores.", min=1)]
WaitOption = Annotated[
    str,
    typer.Option(help="Threads between operators: passive (sleep; for crowded machines), brief, active (spin)."),
]


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="What to draw; several prompts draw several pictures.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG file; several pictures are numbered.")] = Path(
        "picture.png"
    ),
    bundle: BundleOption = None,
    preset: Annotated[str | None, typer.Option(help="Decoding preset; `csd presets` lists them.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first picture; the next ones count up.")] = 0,
    count: Annotated[int, typer.Option(help="Pictures per prompt.")] = 1,
    batch: Annotated[int, typer.Option(help="Pictures decoded together, each at its own pace.")] = 1,
    window: Annotated[int | None, typer.Option(help="Tokens fed per forward pass.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance weight; 1 is without.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass; 1 is off.")] = None,
    delta: Annotated[float | None, typer.Option(help="CSD: relax where TV(p, q) is below this.")] = None,
    lambda_: Annotated[float | None, typer.Option("--lambda", help="CSD: bonus per nat of entropy.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another number of the preset: k=2, coupling=gumbel, ..."),
    ] = None,
    map_: Annotated[
        Path | None,
        typer.Option("--map", help="Also draw where tokens were accepted, entropy and distortion."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the closing figures as one JSON object.")] = False,
    engine: Annotated[
        str, typer.Option(help="cpu, tensorrt, rtx, cuda, or auto: a plan that fits this GPU, else cpu.")
    ] = "auto",
    threads: ThreadsOption = None,
    wait: WaitOption = "brief",
) -> None:
    """Draw pictures from prompts."""
    from runtime.model import ImageModel
    from runtime.presets import parse_settings

    number = len(prompts) * count
    files = _numbered(output, number)
    maps = _numbered(map_, number) if map_ else []
    for path in (*files, *maps):
        check_picture(path)
    model = ImageModel.open(bundle, engine=engine, threads=threads, wait=wait)
    with progress_bar("drawing", quiet=json_) as on_progress:
        result = model.generate(
            prompts,
            preset=preset,
            seed=seed,
            count=count,
            batch=batch,
            guidance=guidance,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            on_progress=on_progress,
            window=window,
            delta=delta,
            lambda_=lambda_,
            **parse_settings(setting or []),
        )
    _save(model, result, files, maps)
    summary = result.summary() | {"files": [str(path) for path in (*files, *maps)]}
    if json_:
        print(json.dumps(summary))
    else:
        console.print(closing_line(result), soft_wrap=True)
        console.print("wrote " + ", ".join(summary["files"]), soft_wrap=True, markup=False)


def closing_line(result: Generation) -> str:
    """One sentence that says what ran and what it cost."""
    exact = "lossless" if result.preset.lossless else f"distortion {result.distortion:.4f} per token"
    pictures = f"{len(result.decoded)} pictures, " if len(result.decoded) > 1 else ""
    return (
        f"{pictures}{result.tokens} tokens in {result.forward_passes} forward passes "
        f"({result.tokens_per_pass:.2f} tokens per pass), {result.seconds:.2f} s, {exact}; "
        f"{result.preset.name}, window {result.preset.window}"
        f"{' (tuned)' if result.preset.tuned else ''}, {result.provider}"
        + (f", {result.threads} threads" if result.threads else "")
    )


def check_picture(path: Path) -> None:
    """Refuse a picture file that could not be written before any work is done."""
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise InputError(f"expected a name ending in {', '.join(PICTURE_FORMATS)}, found {path.name}; change it")
    if path.is_dir():
        raise InputError(f"expected a file name, found the folder {path}; name a file in it")
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a file whose folder is missing or cannot be written in."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"expected the folder {folder} for {path.name}, found none; make it or name another")
    if not os.access(folder, os.W_OK):
        raise MachineError(f"expected to write in {folder}, found no permission; name another output")


def _numbered(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    digits = len(str(count))
    return [path.with_name(f"{path.stem}-{number:0{digits}d}{path.suffix}") for number in range(1, count + 1)]


def _save(model: Any, result: Generation, files: list[Path], maps: list[Path]) -> None:
    from runtime.acceptance_map import draw_map

    manifest = model.bundle.manifest
    for image, path in zip(result.images, files, strict=True):
        save_image(image, path)
    for pixels, decoded, path in zip(result.pixels, result.decoded, maps, strict=False):
        save_image(draw_map(pixels, decoded, manifest), path)


def save_image(image: Any, path: Path) -> None:
    """Write a picture in the format of its suffix, whole or not at all."""
    from runtime.bundle import write_bytes

    data = BytesIO()
    image.save(data, format=PICTURE_FORMATS[path.suffix.lower()])
    write_bytes(path, data.getvalue())


@contextmanager
def progress_bar(
    label: str, *, unit: str = "tokens", quiet: bool = False
) -> Iterator[Callable[[int, int], None] | None]:
    """A bar with time left; nothing when nobody watches or the output is for a program."""
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command()
def inspect(
    bundle: Annotated[Path | None, typer.Argument(help="Bundle folder; without it the demo model.")] = None,
) -> None:
    """Print what is in a bundle, after checking it."""
    from runtime.bundle import open_bundle
    from runtime.model import DEMO

    opened = open_bundle(bundle or DEMO)
    manifest = opened.manifest
    table = Table(title=f"{manifest.name} ({opened.folder})", show_header=False, title_justify="left")
    cache = 2 * manifest.layers * manifest.key_value_heads * manifest.head_size
    item = 2 if manifest.precision == "fp16" else 4
    rows = {
        "family": manifest.family,
        "precision": manifest.precision,
        "picture": f"{manifest.width} x {manifest.height} pixels, {manifest.rows} x {manifest.codes_per_row} codes, "
        f"{manifest.tokens} tokens",
        "vocabulary": f"{manifest.image_vocabulary} image codes, {manifest.text_vocabulary} text ids",
        "transformer": f"{manifest.layers} layers, {manifest.key_value_heads} key-value heads of {manifest.head_size}",
        "context": f"{manifest.context} positions, prompts up to {manifest.max_prompt}",
        "window": f"up to {manifest.max_window}",
        "cache": f"{cache * item / 1e3:.1f} kB per position and row",
        "prompt": f"{manifest.prompt_prefix}…{manifest.prompt_suffix}",
        "recommended": ", ".join(f"{name} {value}" for name, value in manifest.recommended.items()),
        "forced tokens": str(len(manifest.forced)),
        "made by": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "files": "\n".join(
            f"{name}  {entry['size'] / 1e6:.2f} MB  {entry['sha256'][:12]}" for name, entry in opened.files.items()
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table, markup=False)


@app.command("presets")
def list_presets(bundle: BundleOption = None) -> None:
    """List the decoding presets and their numbers."""
    from dataclasses import asdict

    from runtime.bundle import open_bundle
    from runtime.model import DEMO
    from runtime.presets import presets

    family = open_bundle(bundle or DEMO, verify=False).manifest.family
    table = Table(title=f"presets for {family}", title_justify="left")
    for column in ("preset", "rule", "window", "coupling", "fresh drafts", "law"):
        table.add_column(column, no_wrap=column != "rule")
    for preset in presets(family).values():
        numbers = ", ".join(f"{name.rstrip('_')} {value:g}" for name, value in asdict(preset.rule).items())
        exact = " as published" if preset.paper_exact else ""
        table.add_row(
            preset.name,
            f"{preset.rule.name} {numbers}".strip() + exact,
            str(preset.window),
            preset.coupling.name.lower(),
            preset.fresh.name.lower().replace("_", "-"),
            "exact" if preset.lossless else "relaxed",
        )
    Console(highlight=False).print(table)


@app.command("export")
def export_command(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder, or an id on the hub: ORG/NAME.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Bundle folder to write.")],
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16 (GPU), int8, int4 or w8a8 (CPU).")] = "fp32",
    size: Annotated[str | None, typer.Option(help="Pictures' WIDTHxHEIGHT; without it the family's usual.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Keep it though its logits are too far off.")] = False,
    image_decoder: Annotated[
        Path | None, typer.Option(help="Image decoder's file, where the checkpoint has none (Lumina-mGPT: vqgan.ckpt).")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Export a checkpoint to a bundle and compare it with PyTorch."""
    from export.command import run

    run(checkpoint, output, precision, parse_size(size), image_decoder, force, revision, console)


def parse_size(text: str | None) -> tuple[int, int] | None:
    """WIDTHxHEIGHT as numbers."""
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise InputError(f"expected a size such as 768x768, found {text!r}; write width, x, height in pixels")
    return int(width), int(height)


@app.command("build")
def build_command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder; the engines go into it.")],
    target: Annotated[str, typer.Option(help="tensorrt, rtx or auto: what is installed.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="fp32, fp16 or bf16; without it half precision.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens per forward pass; without it the preset's.")] = None,
    batch: Annotated[int, typer.Option(help="Most pictures decoded together.")] = 1,
    prompt: Annotated[int | None, typer.Option(help="Longest prompt, ids; without it 64.")] = None,
    guidance: Annotated[bool, typer.Option(help="Off: for pictures without guidance only.")] = True,
    tail: Annotated[
        str | None, typer.Option(help="plugin, kernel or function; without it plugin, or kernel on RTX.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Gives the window, and a function tail's settings.")] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="Let float32 products be rounded to TF32.")] = False,
    compute_capability: Annotated[
        list[str] | None, typer.Option(help="RTX: a GPU to build for, such as 8.9; without it one plan for all.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Interpret what the parser made of the graphs and compare it.")
    ] = False,
) -> None:
    """Build TensorRT engines from a bundle, into it. TensorRT-RTX builds without a GPU."""
    from runtime.build import build_engines, describe, needed_memory
    from runtime.bundle import open_bundle

    opened = open_bundle(bundle)
    console.print(needed_memory(opened, precision), soft_wrap=True, markup=False)
    with phases("build") as on_progress:
        cards = build_engines(
            opened,
            target=target,
            precision=precision,
            window=window,
            batch=batch,
            prompt=prompt,
            guidance=guidance,
            tail=tail,
            preset=preset,
            tf32=tf32,
            compute_capabilities=compute_capability or (),
            verify=verify,
            on_progress=on_progress,
        )
    for card in cards:
        Console(highlight=False).print(describe(card), markup=False)


@app.command("compare")
def compare_command(
    bundle: Annotated[Path | None, typer.Argument(help="Bundle folder; without it the demo model.")] = None,
    engine: Annotated[
        str, typer.Option(help="tensorrt, rtx, network (what TensorRT parsed, interpreted), or auto.")
    ] = "auto",
    against: Annotated[str, typer.Option(help="onnxruntime or eager.")] = "onnxruntime",
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder, for eager.")] = None,
    precision: Annotated[str | None, typer.Option(help="Of the network; without it the bundle's.")] = None,
    window: Annotated[int, typer.Option(help="Tokens per window.", min=1)] = 16,
    windows: Annotated[int, typer.Option(help="How many windows.", min=1)] = 4,
    tolerance: Annotated[
        float | None, typer.Option(help="Allowed error of the largest value; without it as the precision explains.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also every tensor in between.")] = False,
) -> None:
    """Feed the same windows to two engines and compare; exit code 1 where they differ."""
    from runtime.bundle import open_bundle
    from runtime.compare import compare_engines, describe
    from runtime.model import DEMO

    with progress_bar("compare", unit="runs") as on_progress:
        comparison = compare_engines(
            open_bundle(bundle or DEMO),
            engine=engine,
            against=against,
            checkpoint=checkpoint,
            precision=precision,
            window=window,
            windows=windows,
            tolerance=tolerance,
            layers=layers,
            on_progress=on_progress,
        )
    for table in describe(comparison):
        Console(highlight=False).print(table, markup=False)
    if not comparison.passed:
        sys.exit(1)


@contextmanager
def phases(label: str) -> Iterator[Callable[[str, str, int, int], None] | None]:
    """Bars of a build: what is built and its phase, with the time it took so far."""
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(label, total=None)

        def show(plan: str, phase: str, done: int, total: int) -> None:
            bars.update(task, description=f"{plan.replace('_', ' ')}: {phase.lower()}", completed=done, total=total)

        yield show


@app.command("sweep")
def sweep_command(
    bundle: Annotated[Path | None, typer.Argument(help="Bundle folder; without it the demo model.")] = None,
    prompts: Annotated[Path, typer.Option("--prompts", "-p", help="Text file, one prompt per line.")] = Path(
        "prompts.txt"
    ),
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the results; resumes there.")] = Path(
        "sweep"
    ),
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", "-v", help="A preset and its numbers: 'csd delta=0.35,0.65 window=16,32'."),
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance weight; without it the bundle's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature; without it the bundle's.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Top-k; without it the bundle's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; the next ones count up.")] = 0,
    threads: ThreadsOption = None,
) -> None:
    """Compare rules, settings and windows over a prompt list: lines, table and plot."""
    from runtime import sweep as sweeping
    from runtime.bundle import write_text
    from runtime.model import ImageModel
    from runtime.prompt import read_prompts

    if seed < 0:
        raise InputError(f"expected seed of at least 0, found {seed}; choose a larger one")
    texts = read_prompts(prompts)
    model = ImageModel.open(bundle, threads=threads)
    variants = sweeping.expand(variant or sweeping.STANDARD, model)
    with progress_bar("sweep", unit="pictures") as on_progress:
        results = sweeping.sweep(
            model,
            texts,
            variants,
            output,
            guidance=guidance,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            on_progress=on_progress,
        )
    rows = sweeping.summarise(results)
    table = sweeping.markdown(rows)
    write_text(output / sweeping.TABLE, table)
    print(table)
    sweeping.plot(rows, output / sweeping.PLOT)
    console.print(f"wrote {', '.join(str(output / name) for name in sweeping.FILES)}", soft_wrap=True)


@app.command("bench")
def bench_command(
    bundle: Annotated[Path | None, typer.Argument(help="Bundle folder; without it the demo model.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Checkpoint folder the bundle was exported from: measures transformers too.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", "-p", help="Text file, one prompt per line.")] = None,
    presets: Annotated[
        str, typer.Option(help="Comma-separated; `csd:16` is csd with a window of 16, `default` what generate takes.")
    ] = "ar,sjd,csd:16,default",
    baselines: Annotated[
        str, typer.Option(help="With --baseline: eager (static cache), eager-dynamic, eager-compiled.")
    ] = "eager,eager-dynamic",
    count: Annotated[int, typer.Option(help="Pictures per contestant, after one of warm-up.", min=1)] = 8,
    guidance: Annotated[float | None, typer.Option(help="Guidance weight; without it the bundle's.")] = None,
    engine: Annotated[str, typer.Option(help="As for generate.")] = "auto",
    threads: ThreadsOption = None,
    wait: WaitOption = "brief",
    baseline_threads: Annotated[int | None, typer.Option(help="Other threads for the baseline.", min=1)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for bench.json and bench.png.")] = Path(
        "bench"
    ),
    trace: Annotated[
        Path | None, typer.Option(help="Also write one picture's events of every operator, for ui.perfetto.dev.")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, in processes of their own.")] = True,
) -> None:
    """Measure seconds per picture and their parts, interleaved with transformers eager, against the machine's floor."""
    from runtime.bench import measure, report
    from runtime.bench.eager import BASELINES, check_checkpoint
    from runtime.bundle import write_text
    from runtime.contestants import contestant, split_presets
    from runtime.model import ImageModel
    from runtime.prompt import read_prompts

    names = baselines.split(",") if baseline else []
    for name in names:
        if name not in BASELINES:
            known = ", ".join(BASELINES)
            raise InputError(f"expected baselines of {known}, found {name!r}; choose among them")
    if baseline:
        check_checkpoint(baseline)
    if trace:
        check_folder(trace)
    texts = read_prompts(prompts) if prompts else list(BENCH_PROMPTS)
    model = ImageModel.open(bundle, engine=engine, threads=threads, wait=wait)
    chosen = {name: contestant(model, name) for name in split_presets(presets)}
    make_folder(output)

    def save(found: measure.Report) -> None:
        write_text(output / "bench.json", json.dumps(found.as_json(), indent=1) + "\n")

    with progress_bar("bench", unit="pictures") as on_progress:
        found = measure.bench(
            model,
            texts,
            chosen,
            checkpoint=baseline,
            baselines=names,
            baseline_threads=baseline_threads,
            count=count,
            guidance=guidance,
            memory=memory,
            on_progress=on_progress,
            on_round=save,
        )
    print(report.markdown(found))
    for line in report.notes(found):
        print(line)
    report.plot(found, output / "bench.png")
    written = [output / "bench.json", output / "bench.png"]
    if trace:
        first = next(iter(chosen.values()))
        last = chosen.get("default", first)
        measure.trace(model, last, texts[0], trace, guidance=found.settings["guidance"])
        written.append(trace)
    console.print(f"wrote {', '.join(map(str, written))}", soft_wrap=True, markup=False)


@app.command("eval")
def eval_command(
    bundle: Annotated[Path | None, typer.Argument(help="Bundle folder; without it the demo model.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", "-p", help="COCO captions (.json), GenEval (.jsonl), or a line each.")
    ] = None,
    presets: Annotated[
        str,
        typer.Option(help="Comma-separated; `csd:16`: csd with a window of 16, `csd(delta=0.35)`: with other numbers."),
    ] = "ar,sjd,addition,gsd,csd-paper,csd",
    count: Annotated[int | None, typer.Option(help="Pictures per preset; without it one per prompt.", min=1)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of results, resumed if it is there.")] = Path(
        "eval"
    ),
    clip: Annotated[
        str | None, typer.Option(help="CLIP folder or hub id for CLIP scores; without it the demo model has its own.")
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(help="File of Inception V3's usual weights, for FID and KID.")
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="Folder of reference pictures, for FID and KID.")] = None,
    seed: Annotated[int, typer.Option(help="Picture i of a preset uses this plus i.")] = 0,
    guidance: Annotated[float | None, typer.Option(help="Guidance weight; without it the bundle's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Without it the bundle's; 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Without it the bundle's; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Without it the bundle's; 1 is off.")] = None,
    engine: Annotated[str, typer.Option(help="As for generate.")] = "auto",
    workers: Annotated[
        int | None, typer.Option(help="Processes, or Ray actors; without it as many as there are cores.", min=1)
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each; another number may turn a decision.", min=1)] = 1,
    ray: Annotated[str | None, typer.Option(help="Draw on a Ray cluster: its address, or `local`.")] = None,
) -> None:
    """Compare presets as the CSD paper does: same prompts and seeds, latency, steps, scores, tests, a report."""
    from functools import partial

    from engines.machine import processor
    from runtime.contestants import contestant, split_presets
    from runtime.evaluation import generate as drawing
    from runtime.evaluation import prompts as captions
    from runtime.evaluation.workers import Orders, draw_here, draw_in_processes, draw_on_ray
    from runtime.model import DEMO, ImageModel

    try:
        import jinja2  # noqa: F401 - before hours of drawing, not after

        from runtime.evaluation import metrics, report
    except ImportError as error:
        raise MachineError(
            f"expected the packages of the eval extra, found no {error.name}; install `csd-toolkit[eval]`"
        ) from None
    if prompts is None:
        raise InputError("expected prompts, found none; name COCO captions, GenEval's lines or a text with --prompts")
    chosen = split_presets(presets)
    texts = captions.read(prompts, count, seed)
    model = ImageModel.open(bundle, engine=engine, threads=threads)
    for name in chosen:
        contestant(model, name)
    for prompt in texts:
        model.prompt_length(prompt.text)  # one that does not fit is told before anything is drawn
    orders = Orders(
        model.bundle.folder.resolve(),
        engine,
        threads,
        tuple(prompt.text for prompt in texts),
        seed,
        guidance,
        temperature,
        top_k,
        top_p,
    )
    number = workers or max(1, processor()[1] // threads)
    draw = partial(draw_in_processes, count=number) if number > 1 else draw_here
    if ray is not None:
        draw = partial(draw_on_ray, count=workers, address=None if ray == "local" else ray)
    with progress_bar("eval", unit="pictures") as on_progress:
        results = drawing.generate(orders, texts, chosen, output, draw, on_progress)
    if clip is None and model.bundle.folder.resolve() == DEMO.resolve():
        clip = str(metrics.DEMO_SCORER)
    with progress_bar("score", unit="metrics") as on_progress:
        found = report.evaluate(results, model, report.Sources(clip, inception, reference), on_progress)
    written = report.write(found, results, model)
    print(report.markdown(found))
    for line in (*found.notes, *report.sentences(found)):
        print(line)
    console.print(f"wrote {', '.join(map(str, written))}", soft_wrap=True, markup=False)
    if found.problems:
        raise InputError(f"expected every metric, found {len(found.problems)} without: {' | '.join(found.problems)}")


BENCH_PROMPTS = ("red apple", "cat on pink", "a house", "sunflower on blue")


@app.command("tune")
def tune_command(
    bundle: Annotated[Path | None, typer.Argument(help="Bundle folder; without it the demo model.")] = None,
    preset: Annotated[str | None, typer.Option(help="Preset to choose the window of; without it the bundle's.")] = None,
    windows: Annotated[str | None, typer.Option(help="Comma-separated windows to try.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", "-p", help="Text file, one prompt per line.")] = None,
    count: Annotated[int, typer.Option(help="Pictures per window.", min=1)] = 5,
    threads: ThreadsOption = None,
    wait: WaitOption = "brief",
    reset: Annotated[bool, typer.Option("--reset", help="Forget the stored window instead.")] = False,
) -> None:
    """Find the fastest window on this machine and let `generate` use it from now on."""
    from runtime import tuning
    from runtime.model import ImageModel
    from runtime.prompt import read_prompts

    numbers = [int(text) if text.strip().isdigit() else 0 for text in windows.split(",")] if windows else None
    if numbers is not None and min(numbers) < 1:
        raise InputError(f"expected windows such as 8,16,32, found {windows!r}; write numbers from 1")
    model = ImageModel.open(bundle, engine="cpu", threads=threads, wait=wait)
    chosen = model.preset(preset)
    holds = (model.bundle, chosen.name, model.backend.provider, model.backend.threads)
    if reset:
        path = tuning.keep(*holds, None)
        console.print(f"{chosen.name} has its own window of {chosen.window} again, in {path}", soft_wrap=True)
        return
    texts = read_prompts(prompts) if prompts else list(BENCH_PROMPTS)
    with progress_bar("tune", unit="pictures") as on_progress:
        rows = tuning.tune(
            model, texts, preset=chosen.name, windows=numbers or tuning.WINDOWS, count=count, on_progress=on_progress
        )
    table = Table(title=f"{chosen.name} on {model.bundle.folder.name}, medians", title_justify="left")
    for column in ("window", "s per picture", "ms per pass", "tokens per pass", "pays from", ""):
        table.add_column(column, justify="right" if column else "left")
    best = tuning.fastest(rows)
    for row in rows:
        pays = "pays" if row.tokens_per_pass > row.break_even else "does not pay"
        table.add_row(
            str(row.window),
            f"{row.seconds:.3f}",
            f"{row.milliseconds:.2f}",
            f"{row.tokens_per_pass:.2f}",
            f"{row.break_even:.2f}",
            "fastest" if row is best else pays if row.window > 1 else "",
        )
    Console(highlight=False).print(table)
    path = tuning.keep(*holds, rows)
    console.print(f"window {best.window} from now on for {chosen.name}, in {path}", soft_wrap=True, markup=False)


def make_folder(path: Path) -> None:
    """A folder for results; MachineError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"expected to write in {path}, found: {error.strerror}; name another output") from None


if __name__ == "__main__":
    main()
