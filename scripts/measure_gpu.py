"""Time the kernels and the step on this machine's GPU, and print a table: what `scripts/gpu` runs after the tests.

The kernels are measured alone and as a share of the step they follow. Medians over replays of a captured sequence, so
that no launch from the host is in the figures.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from csd_ops.contract import Coupling, Settings
from csd_ops.errors import CsdError
from csd_ops.kernels import ADVANCE, VERIFY
from csd_ops.rules import Csd
from engines.nvidia.device import CudaDevice
from runtime import ImageModel
from runtime.build import build_engines
from runtime.bundle import open_bundle
from runtime.model import DEMO

REPLAYS, ROUNDS = 50, 9


def timed(device: CudaDevice, call: object) -> float:
    """Milliseconds of one call: the median over rounds of many replays."""
    replay = device.capture(call)  # type: ignore[arg-type]
    rounds = []
    for _ in range(ROUNDS):
        device.finish()
        began = time.perf_counter()
        for _ in range(REPLAYS):
            replay()
        device.finish()
        rounds.append((time.perf_counter() - began) / REPLAYS * 1e3)
    return float(np.median(rounds))


def kernel_times(device: CudaDevice, vocabulary: int, window: int, top_k: int) -> dict[str, float]:
    """Milliseconds of csd_verify and csd_advance on random laws, one picture with guidance."""
    sizes = {"B": 1, "W": window, "V": vocabulary, "R": 2, "G": 2, "N": 1, "E": 8, "C": 24, "T": 576 + window}
    generator = np.random.default_rng(0)
    arrays = {}
    for kernel in (VERIFY, ADVANCE):
        shapes = kernel.shapes(sizes)
        for name, (dtype, _) in (kernel.inputs | kernel.outputs).items():
            arrays.setdefault(name, device.allocate(shapes[name], dtype))
    settings = Settings(top_k=top_k, coupling=Coupling.MAXIMAL, **Csd().settings())
    device.write(arrays["logits"], generator.normal(0, 3, (2, window, vocabulary)))
    device.write(arrays["draft_probs"], generator.dirichlet(np.ones(vocabulary), (1, window)))
    device.write(arrays["kind"], np.full((1, window), 3))
    device.write(arrays["uniforms"], generator.uniform(0.01, 0.99, (1, window, 3)))
    device.write(arrays["guidance"], np.array([5.0, -4.0]))
    device.write(arrays["settings"], settings.vector())
    device.write(arrays["grammar"], np.full(sizes["T"], -1))
    return {kernel.name: timed(device, device.launcher(kernel, arrays, sizes)) for kernel in (VERIFY, ADVANCE)}


def main() -> None:
    console = Console()
    try:
        device = CudaDevice()
    except CsdError as error:
        sys.exit(f"measure_gpu: {error}")
    table = Table(title=f"kernels on {device.name}, CSD rule, maximal coupling, ms per launch", title_justify="left")
    for column in ("V", "W", "top-k", "csd_verify", "csd_advance"):
        table.add_column(column)
    for vocabulary in (1024, 8192, 16384, 32768):
        for window in (1, 16, 32, 64):
            for top_k in (0, 2000):
                times = kernel_times(device, vocabulary, window, top_k)
                table.add_row(str(vocabulary), str(window), str(top_k), *(f"{value:.4f}" for value in times.values()))
    console.print(table)
    with TemporaryDirectory() as folder:
        bundle_folder = Path(folder) / "demo"
        shutil.copytree(DEMO, bundle_folder)
        steps = Table(title="demo model, s per picture, default rule at W = 16", title_justify="left")
        for column in ("engine", "s per picture", "forward passes", "ms per pass"):
            steps.add_column(column)
        for target in ("tensorrt", "rtx", "cuda", "cpu"):
            try:
                if target in ("tensorrt", "rtx"):
                    build_engines(open_bundle(bundle_folder), target=target, window=16)
                model = ImageModel.open(bundle_folder, engine=target)
                model.generate("cat on pink", preset="csd", window=16)
                made = [model.generate("cat on pink", preset="csd", window=16, seed=seed) for seed in range(5)]
            except CsdError as error:
                steps.add_row(target, str(error), "", "")
                continue
            seconds = float(np.median([one.seconds for one in made]))
            passes = float(np.mean([one.forward_passes for one in made]))
            steps.add_row(made[0].provider, f"{seconds:.4f}", f"{passes:.1f}", f"{seconds / passes * 1e3:.3f}")
        console.print(steps)


if __name__ == "__main__":
    main()
