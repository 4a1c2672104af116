"""Who draws: this process, several, or actors of Ray. All of them draw the same pictures.

A picture depends on its preset, prompt, seed and the threads of a worker alone, and is decoded by itself. What comes
back comes in any order; one process writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csd_ops.contract import Kind
from csd_ops.errors import InputError, MachineError
from runtime.contestants import contestant
from runtime.model import ImageModel

DETAILS = ("entropy", "distortion")


@dataclass(frozen=True)
class Orders:
    """What every worker must know."""

    bundle: Path
    engine: str
    threads: int
    prompts: tuple[str, ...]
    seed: int
    guidance: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None


@dataclass(frozen=True)
class Drawn:
    """One picture: preset and number, pixels uint8 [height, width, 3], one line of results, arrays by token [N]."""

    preset: str
    number: int
    pixels: np.ndarray
    line: dict[str, Any]
    details: dict[str, np.ndarray]


class Worker:
    """A model that draws what it is told; the first picture of a process is drawn twice, for the time of the second."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.model = ImageModel.open(orders.bundle, engine=orders.engine, threads=orders.threads)
        self._warm = False

    def draw(self, preset: str, number: int) -> Drawn:
        """Picture `number` by a preset."""
        orders = self.orders
        prompt = orders.prompts[number]
        if not self._warm:
            self._warm = True
            self.draw(preset, number)
        made = self.model.generate(
            prompt,
            preset=contestant(self.model, preset),
            seed=orders.seed + number,
            guidance=orders.guidance,
            temperature=orders.temperature,
            top_k=orders.top_k,
            top_p=orders.top_p,
        )
        (decoded,) = made.decoded
        line = {
            "preset": preset,
            "number": number,
            "prompt": prompt,
            "seed": decoded.seed,
            "seconds": round(made.seconds, 5),
            "forward_passes": decoded.passes,
            "tokens": len(decoded.tokens),
            "distortion": decoded.mean("distortion"),
            "excess": float(decoded.excess.mean()),
        }
        verified = (decoded.kind >= Kind.FRESH) & (decoded.draft == decoded.tokens)
        details = {
            "tokens": decoded.tokens.astype(np.int32),
            "pass_of": decoded.pass_of.astype(np.int32),
            "accepted": verified,
            "free": decoded.free,
            **{name: decoded.measure(name).astype(np.float32) for name in DETAILS},
        }
        return Drawn(preset, number, made.pixels[0], line, details)


Jobs = Sequence[tuple[str, int]]


def draw_here(orders: Orders, jobs: Jobs) -> Iterator[Drawn]:
    """In this process."""
    worker = Worker(orders)
    for job in jobs:
        yield worker.draw(*job)


_worker: Worker | None = None  # of a process of draw_in_processes


def _open(orders: Orders) -> None:
    global _worker
    _worker = Worker(orders)


def _draw(job: tuple[str, int]) -> Drawn:
    assert _worker is not None
    return _worker.draw(*job)


def draw_in_processes(orders: Orders, jobs: Jobs, count: int) -> Iterator[Drawn]:
    """In so many processes of this machine.

    Raises:
        MachineError: a process ended, most often for want of memory.
    """
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(count, get_context("spawn"), _open, (orders,))
    waiting = iter(jobs)
    running: set[Future[Drawn]] = set()
    try:
        while True:
            while len(running) < 2 * count and (job := next(waiting, None)) is not None:
                running.add(pool.submit(_draw, job))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise MachineError(
            f"expected {count} processes to draw, found one that ended; run again with fewer --workers, what is drawn "
            "is kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def draw_on_ray(orders: Orders, jobs: Jobs, count: int | None, address: str | None) -> Iterator[Drawn]:
    """On a Ray cluster (None: a local one): so many actors, or as many as it has room for.

    An actor takes the cores of its threads, and a GPU unless the engine is `cpu`. The bundle's path must be good on
    every machine.

    Raises:
        MachineError: no Ray, or no such cluster.
    """
    try:
        import ray
        from ray.util import ActorPool
    except ImportError:
        raise MachineError("expected Ray, found none; install `csd-toolkit[ray]`") from None
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = " ".join(str(error).split())[:160]
        raise MachineError(f"expected a Ray cluster at {address}, found: {first}; start it or leave it out") from None
    try:
        here = ray.cluster_resources()
        gpus = 0 if orders.engine == "cpu" else min(1, int(here.get("GPU", 0)))
        room = int(here.get("GPU", 0)) if gpus else int(here.get("CPU", 1)) // orders.threads
        actors = max(1, min(count or room, len(jobs)))
        remote = ray.remote(num_cpus=orders.threads, num_gpus=gpus)(Worker)
        pool = ActorPool([remote.remote(orders) for _ in range(actors)])
        yield from pool.map_unordered(lambda actor, job: actor.draw.remote(*job), list(jobs))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, InputError) else None
        raise cause or MachineError(
            f"expected a Ray actor to draw, found: {' '.join(str(error).split())[-160:]}; what is drawn is kept"
        ) from None
    except ray.exceptions.RayError as error:
        raise MachineError(
            f"expected a Ray actor to draw, found: {' '.join(str(error).split())[:160]}; what is drawn is kept"
        ) from None
    finally:
        ray.shutdown()
