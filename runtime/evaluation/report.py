"""Table, plots, contact sheet and HTML of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from csd_ops.errors import CsdError, MachineError
from runtime.bench.report import pyplot
from runtime.bundle import write_bytes, write_text
from runtime.contestants import contestant
from runtime.evaluation import metrics, regions
from runtime.evaluation.generate import Results, folder_name
from runtime.evaluation.statistics import Interval, holm, mean_interval, paired_mean, paired_set, set_interval
from runtime.model import ImageModel

BASE = "ar"
SIGNIFICANT = 0.05
WIDE = 512  # features from which a distance's intervals take too long
SUMMARY, TABLE, HTML = "summary.json", "table.md", "report.html"
FRONT, REGIONS, SHEET = "front.png", "regions.png", "sheet.png"
SHEET_ROWS, SHEET_SIDE = 16, 128


@dataclass
class Row:
    """One preset: figures of its pictures, differences to `ar`, and their p values (Holm's, over the presets)."""

    preset: str
    window: int
    lossless: bool
    seconds: Interval
    passes: Interval
    distortion: Interval
    excess: Interval
    metrics: dict[str, Interval] = field(default_factory=dict)
    differences: dict[str, Interval] = field(default_factory=dict)
    p: dict[str, float] = field(default_factory=dict)


@dataclass
class Report:
    """All rows, and what could not be measured and why."""

    rows: list[Row]
    pictures: int
    problems: list[str]
    notes: list[str]
    curves: Mapping[str, Mapping[str, regions.Curve]]

    def base(self) -> Row:
        """The row others are compared with."""
        return next((row for row in self.rows if row.preset == BASE), self.rows[0])


@dataclass(frozen=True)
class Sources:
    """What to score with; None leaves a metric out without a word, a path that does not hold it is a problem."""

    clip: str | None = None
    inception: Path | None = None
    reference: Path | None = None


def evaluate(
    results: Results,
    model: ImageModel,
    sources: Sources,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Score every preset; a metric that cannot be had is noted among the problems, and the others are made."""
    rows = []
    for name in results.presets:
        preset = contestant(model, name)
        keys = ("seconds", "forward_passes", "distortion", "excess")
        seconds, passes, distortion, excess = (mean_interval(results.values(name, key)) for key in keys)
        rows.append(Row(name, preset.window, preset.lossless, seconds, passes, distortion, excess))
    report = Report(rows, len(results.lines[results.presets[0]]), [], [], {})
    wanted: list[Callable[[], None]] = [
        lambda: _add_diversity(report, results),
        lambda: _add_clip(report, results, sources),
        lambda: _add_inception(report, results, sources),
        lambda: _add_regions(report, results, model),
    ]
    for done, add in enumerate(wanted):
        if on_progress:
            on_progress(done, len(wanted))
        try:
            add()
        except CsdError as error:
            report.problems.append(str(error))
    _adjust(report)
    return report


def _add_diversity(report: Report, results: Results) -> None:
    small = {row.preset: metrics.thumbnails(results.pictures(row.preset)) for row in report.rows}
    _add_set(report, "diversity", small, metrics.diversity, True)


def _add_clip(report: Report, results: Results, sources: Sources) -> None:
    if sources.clip is None:
        report.notes.append("No CLIP score: pass a CLIP folder or hub id with --clip.")
        return
    scorer = metrics.Scorer.open(sources.clip)
    demo = scorer.name == "demo score"
    features = {row.preset: scorer.features(results.pictures(row.preset)) for row in report.rows}
    values = {}
    for row in report.rows:
        texts = scorer.text([line["prompt"] for line in results.lines[row.preset]])
        values[row.preset] = metrics.scores(features[row.preset], texts)
        row.metrics[scorer.name] = mean_interval(values[row.preset])
    base = report.base().preset
    for row in report.rows:
        if row.preset != base:
            row.differences[scorer.name], row.p[scorer.name] = paired_mean(values[row.preset], values[base])
    if demo:
        reference = metrics.own_reference(metrics.DEMO_SCORER)
        _add_distances(report, "demo distance", "demo kernel distance", features, reference)
        report.notes.append(
            "Demo score and demo distance are of the demo model's own tiny scorer: they are no CLIP score and no FID, "
            "and cannot be compared with published ones."
        )


def _add_inception(report: Report, results: Results, sources: Sources) -> None:
    if sources.inception is None:
        return
    inception = metrics.Inception.open(sources.inception)
    if sources.reference is None:
        raise metrics.InputError("expected reference pictures for FID, found none; pass their folder with --reference")
    reference = metrics.reference_features(inception, sources.reference)
    features = {row.preset: inception.features(results.pictures(row.preset)) for row in report.rows}
    _add_distances(report, "FID", "KID", features, reference)


def _add_distances(
    report: Report, name: str, kernel: str, features: Mapping[str, np.ndarray], reference: np.ndarray
) -> None:
    _add_set(report, name, features, metrics.Frechet(reference), reference.shape[1] <= WIDE)
    for row in report.rows:
        mean, deviation = metrics.kernel_distance(features[row.preset], reference)
        row.metrics[kernel] = Interval(mean, mean - 2 * deviation, mean + 2 * deviation)


def _add_set(
    report: Report,
    name: str,
    sets: Mapping[str, np.ndarray],
    statistic: Callable[[np.ndarray], float],
    resampled: bool,
) -> None:
    """A figure of whole sets. Intervals and tests only where a figure is quick."""
    base, none = report.base().preset, float("nan")
    for row in report.rows:
        own = sets[row.preset]
        row.metrics[name] = set_interval(own, statistic) if resampled else Interval(statistic(own), none, none)
        if row.preset != base and resampled:
            difference, row.p[name] = paired_set(own, sets[base], statistic)
            row.differences[name] = Interval(difference, none, none)


def _add_regions(report: Report, results: Results, model: ImageModel) -> None:
    drafting = [row.preset for row in report.rows if row.window > 1]
    report.curves = {name: regions.curves(results, name, model.bundle.manifest) for name in drafting}


def _adjust(report: Report) -> None:
    for name in {name for row in report.rows for name in row.p}:
        own = [row for row in report.rows if name in row.p]
        for row, value in zip(own, holm([row.p[name] for row in own]), strict=True):
            row.p[name] = value


# ---- what is written ---------------------------------------------------------------------------------------------


def columns(report: Report) -> list[str]:
    """Names of the metrics that at least one row has, in the order they were made."""
    return list(dict.fromkeys(name for row in report.rows for name in row.metrics))


def table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Head and cells, in the layout of the CSD paper's Tables 1 and 2."""
    names = columns(report)
    base = report.base()
    tested = [name for name in names if any(name in row.p for row in report.rows)]
    head = ["method", "W", "latency s", f"x latency (to {base.preset})", "steps", "x steps", "distortion"]
    head += names + [f"{name}: difference, p" for name in tested]
    cells = []
    for row in report.rows:
        line = [
            row.preset,
            str(row.window),
            f"{row.seconds:.3f}",
            f"{base.seconds.value / row.seconds.value:.2f}",
            f"{row.passes:.1f}",
            f"{base.passes.value / row.passes.value:.2f}",
            "0 (exact)" if row.lossless else f"{row.distortion.value:.4f}",
        ]
        line += [format(row.metrics[name], _digits(name)) if name in row.metrics else "-" for name in names]
        for name in tested:
            if name not in row.p:
                line.append("-")
                continue
            told = "told apart" if row.p[name] < SIGNIFICANT else "not told apart"
            line.append(f"{row.differences[name].value:+{_digits(name)}}, {row.p[name]:.3f}: {told}")
        cells.append(line)
    return head, cells


def _digits(name: str) -> str:
    return ".4f" if "kernel" in name or name in ("KID", "diversity") else ".2f"


def markdown(report: Report) -> str:
    """The table, for a terminal or a README."""
    head, cells = table(report)
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def as_json(report: Report) -> dict[str, Any]:
    """Everything in the table, and the curves."""
    return {
        "pictures": report.pictures,
        "rows": [
            {
                "preset": row.preset,
                "window": row.window,
                "lossless": row.lossless,
                **{name: _plain(getattr(row, name)) for name in ("seconds", "passes", "distortion", "excess")},
                "metrics": {name: _plain(value) for name, value in row.metrics.items()},
                "differences": {name: _plain(value) for name, value in row.differences.items()},
                "p": row.p,
            }
            for row in report.rows
        ],
        "regions": {
            preset: {
                kind: {
                    "centres": curve.centres,
                    "shares": [_plain(share) for share in curve.shares],
                    "correlation": _plain(curve.correlation),
                    "p": curve.p,
                }
                for kind, curve in own.items()
            }
            for preset, own in report.curves.items()
        },
        "problems": report.problems,
        "notes": report.notes,
    }


def _plain(interval: Interval) -> list[float | None]:
    return [None if np.isnan(value) else value for value in (interval.value, interval.low, interval.high)]


def write(report: Report, results: Results, model: ImageModel) -> list[Path]:
    """All files into the results' folder; the paths of those to look at."""
    folder = results.folder
    write_text(folder / SUMMARY, json.dumps(as_json(report), indent=1) + "\n")
    write_text(folder / TABLE, markdown(report))
    _front(report, folder / FRONT)
    if report.curves:
        _regions(report, folder / REGIONS)
    _sheet(results, folder / SHEET)
    write_text(folder / HTML, _html(report, results, model))
    return [folder / TABLE, folder / HTML]


def _save(figure: Any, path: Path) -> None:
    data = BytesIO()
    figure.savefig(data, format="png", dpi=110)
    pyplot().close(figure)
    write_bytes(path, data.getvalue())


def _front(report: Report, path: Path) -> None:
    """Every metric against forward passes, with intervals."""
    names = ["distortion", *columns(report)]
    figure, axes = pyplot().subplots(1, len(names), figsize=(4.4 * len(names), 4), layout="constrained", squeeze=False)
    for place, name in zip(axes[0], names, strict=True):
        for index, row in enumerate(report.rows):
            found = row.distortion if name == "distortion" else row.metrics.get(name)
            if found is None:
                continue
            value = 0.0 if name == "distortion" and row.lossless else found.value
            bars = None if np.isnan(found.low) else [[max(0.0, value - found.low)], [max(0.0, found.high - value)]]
            colour, marker = f"C{index % 10}", "osD^vP*X"[index % 8]
            place.errorbar(
                [row.passes.value], [value], yerr=bars, fmt=marker, color=colour, capsize=2, label=row.preset
            )
        place.set(xscale="log", xlabel="forward passes per picture", title=name)
        ticks = [10, 20, 30, 40, 60, 80, 100, 150, 250, 500, 1000, 2500]
        low, high = min(r.passes.value for r in report.rows) * 0.85, max(r.passes.value for r in report.rows) * 1.15
        place.set_xlim(low, high)
        place.set_xticks([tick for tick in ticks if low <= tick <= high])
        place.xaxis.set_major_formatter("{x:.0f}")
        place.xaxis.minorticks_off()
        place.grid(alpha=0.3)
    axes[0, -1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def _regions(report: Report, path: Path) -> None:
    """Share of accepted drafts by tenths."""
    figure, axes = pyplot().subplots(1, len(regions.KINDS), figsize=(11, 4), layout="constrained")
    for place, (kind, title) in zip(axes, regions.KINDS.items(), strict=True):
        for preset, own in report.curves.items():
            curve = own[kind]
            place.plot(curve.centres, [share.value for share in curve.shares], "o-", markersize=3, label=preset)
        place.set(xlabel=title, ylabel="share of tokens accepted as drafted", ylim=(0, 1))
        place.grid(alpha=0.3)
    axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def _sheet(results: Results, path: Path) -> None:
    """The first prompts, one row each, all presets side by side."""
    from PIL import Image, ImageDraw

    rows = min(SHEET_ROWS, len(results.lines[results.presets[0]]))
    head, margin, words = 18, 4, 170
    width = words + len(results.presets) * (SHEET_SIDE + margin)
    sheet = Image.new("RGB", (width, head + rows * (SHEET_SIDE + margin)), "white")
    pen = ImageDraw.Draw(sheet)
    for column, preset in enumerate(results.presets):
        left = words + column * (SHEET_SIDE + margin)
        pen.text((left, 3), preset, fill="black")
        for row, pixels in enumerate(islice(results.pictures(preset), rows)):
            small = Image.fromarray(pixels).resize((SHEET_SIDE, SHEET_SIDE), Image.Resampling.LANCZOS)
            sheet.paste(small, (left, head + row * (SHEET_SIDE + margin)))
    for row in range(rows):
        top = head + row * (SHEET_SIDE + margin)
        for number, part in enumerate(_wrapped(results.lines[results.presets[0]][row]["prompt"], 26)):
            pen.text((4, top + 4 + 12 * number), part, fill="black")
    data = BytesIO()
    sheet.save(data, "png")
    write_bytes(path, data.getvalue())


def _wrapped(text: str, width: int) -> Iterator[str]:
    import textwrap

    yield from textwrap.wrap(text, width)[: SHEET_SIDE // 12 - 1]


def sentences(report: Report) -> list[str]:
    """What the regions say, in words."""
    lines = []
    for preset, own in report.curves.items():
        parts = [
            f"{kind} {curve.correlation:+.3f} (p {curve.p:.4f}), from {curve.shares[0].value:.0%} in the lowest tenth "
            f"to {curve.shares[-1].value:.0%} in the highest"
            for kind, curve in own.items()
        ]
        lines.append(f"{preset}: rank correlation of acceptance with local " + "; with ".join(parts))
    return lines


def _html(report: Report, results: Results, model: ImageModel) -> str:
    try:
        from jinja2 import Environment
    except ImportError:
        raise MachineError("expected jinja2 for the report, found none; install `csd-toolkit[eval]`") from None
    template = (Path(__file__).parent / HTML).read_text("utf-8")
    head, cells = table(report)
    manifest = model.bundle.manifest
    return (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            title=f"{manifest.name}, {manifest.precision}: {report.pictures} pictures per preset",
            provider=model.backend.provider,
            base=report.base().preset,
            head=head,
            cells=cells,
            sentences=sentences(report),
            notes=report.notes,
            problems=report.problems,
            front=FRONT,
            regions=REGIONS if report.curves else None,
            sheet=SHEET,
            folders=[folder_name(preset) for preset in results.presets],
        )
    )
