"""Scores of pictures: CLIP score, Frechet and kernel distances of features, diversity. Needs torch, all but the last.

A folder of a CLIP model (or its hub id) scores how well a picture fits its prompt: 100 times the cosine of its and the
prompt's vector, at least 0 (Hessel et al. 2021, as torchmetrics). Distances compare features of the pictures with those
of a reference set: with the features of Inception V3, from the usual weights, they are FID (Heusel et al. 2017) and KID
(Binkowski et al. 2018). The demo scorer is a tiny CLIP of the demo model's own domain: its figures are its own, and no
CLIP score and no FID.
"""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from csd_ops.errors import InputError, MachineError

DEMO_SCORER = Path(__file__).parents[1] / "demo_scorer"
REFERENCE = "reference.safetensors"  # features of a scorer's own reference pictures
BATCH = 32
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SMALL = 32  # pixels of a side, for diversity


@dataclass(frozen=True)
class Scorer:
    """A CLIP model and how its pictures and words are prepared."""

    model: Any
    processor: Any
    name: str

    @classmethod
    def open(cls, source: str) -> Scorer:
        """From a folder or a hub id; safetensors alone, no code of the checkpoint runs.

        Raises:
            InputError: no such model.
            MachineError: no torch or transformers.
        """
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            from transformers import CLIPModel, CLIPProcessor
        except ImportError as error:
            raise MachineError(
                f"expected torch and transformers to score with, found no {error.name}; install `csd-toolkit[eval]`"
            ) from None
        try:
            model = CLIPModel.from_pretrained(source, use_safetensors=True).eval()
            processor = CLIPProcessor.from_pretrained(source)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = " ".join(str(error).split())[:160]
            raise InputError(
                f"expected a CLIP model with safetensors at {source}, found: {first}; pass its folder or hub id with "
                "--clip"
            ) from None
        return cls(model, processor, "demo score" if Path(source).resolve() == DEMO_SCORER else "CLIP score")

    def features(self, pictures: Iterable[np.ndarray]) -> np.ndarray:
        """Projected vectors of pictures uint8 [height, width, 3], float64 [n, E]."""
        import torch

        parts = []
        with torch.no_grad():
            for batch in _batches(pictures):
                inputs = self.processor(images=batch, return_tensors="pt")
                parts.append(_vectors(self.model.get_image_features(**inputs)))
        return np.concatenate(parts)

    def text(self, texts: Sequence[str]) -> np.ndarray:
        """Projected vectors of prompts, cut to the model's length, float64 [n, E]."""
        import torch

        most = self.model.config.text_config.max_position_embeddings
        parts = []
        with torch.no_grad():
            for batch in _batches(texts):
                inputs = self.processor(text=batch, return_tensors="pt", padding=True, truncation=True, max_length=most)
                parts.append(_vectors(self.model.get_text_features(**inputs)))
        return np.concatenate(parts)


def _vectors(found: Any) -> np.ndarray:
    """Transformers 5 returns the whole output, of which the pooled vector is meant."""
    vectors = found if hasattr(found, "numpy") else found.pooler_output
    return np.asarray(vectors.double().numpy())


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def scores(pictures: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """100 max(cos, 0) of each picture's vector [n, E] and its prompt's [n, E]."""
    cosines = (pictures * texts).sum(1) / np.linalg.norm(pictures, axis=1) / np.linalg.norm(texts, axis=1)
    return np.maximum(100 * cosines, 0)


@dataclass(frozen=True)
class Inception:
    """Inception V3 as FID wants it: 2048 features of its last pooling."""

    network: Any
    name: str = "FID"

    @classmethod
    def open(cls, weights: Path) -> Inception:
        """From the file of the usual weights (pt_inception-2015-12-05-6726825d.pth).

        Raises:
            InputError: no such file, or another.
            MachineError: no torchmetrics or torch-fidelity.
        """
        if not weights.is_file():
            raise InputError(
                f"expected Inception's weights (pt_inception-2015-12-05-6726825d.pth) at {weights}, found none; "
                "download them and pass the file with --inception"
            )
        try:
            import torch
            from torchmetrics.image.fid import NoTrainInceptionV3

            tensors = torch.load(weights, map_location="cpu", weights_only=True)
            with TemporaryDirectory() as folder:  # torch-fidelity unpickles whatever is in a file: give it one of ours
                torch.save(tensors, f"{folder}/weights.pth")
                network = NoTrainInceptionV3("inception-v3-compat", ["2048"], f"{folder}/weights.pth")
        except ImportError as error:
            raise MachineError(
                f"expected torch-fidelity for FID, found no {error.name or 'working one'}; install `csd-toolkit[fid]`"
            ) from None
        except Exception as error:  # whatever unpickling and loading weights raise
            odd = isinstance(error, UnpicklingError)
            first = "something else than tensors" if odd else textwrap.shorten(str(error), 160)
            raise InputError(f"expected Inception's weights at {weights}, found: {first}; download it again") from None
        return cls(network.eval())

    def features(self, pictures: Iterable[np.ndarray]) -> np.ndarray:
        """Features of pictures uint8 [height, width, 3], float64 [n, 2048]."""
        import torch

        parts = []
        with torch.no_grad():
            for picture in pictures:  # one by one: reference pictures have sizes of their own
                pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None]
                parts.append(np.asarray(self.network(pixels).double().numpy()))
        return np.concatenate(parts)


def reference_features(network: Scorer | Inception, folder: Path) -> np.ndarray:
    """Features of all pictures of a folder.

    Raises:
        InputError: no such folder, no pictures in it, or one that cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if len(files) < 2:
        raise InputError(
            f"expected a folder of reference pictures at {folder}, found {len(files)}; pass one with --reference"
        )

    def read() -> Iterator[np.ndarray]:
        for path in files:
            try:
                yield np.asarray(Image.open(path).convert("RGB"))
            except (OSError, UnidentifiedImageError) as error:
                raise InputError(f"expected a picture at {path}, found: {error}; remove or replace it") from None

    return network.features(read())


def own_reference(folder: Path) -> np.ndarray:
    """Features that a scorer's folder brings of its own reference pictures."""
    from safetensors.numpy import load_file

    return load_file(folder / REFERENCE)["features"].astype(np.float64)


@dataclass(frozen=True)
class Frechet:
    """Frechet distance of features [n, E] to those of a reference set, each as a normal law."""

    reference: np.ndarray
    _mean: np.ndarray = field(init=False)
    _root: np.ndarray = field(init=False)  # of the covariance

    def __post_init__(self) -> None:
        object.__setattr__(self, "_mean", self.reference.mean(0))
        values, vectors = np.linalg.eigh(np.cov(self.reference.T))
        object.__setattr__(self, "_root", vectors * np.sqrt(values.clip(0)) @ vectors.T)

    def __call__(self, features: np.ndarray) -> float:
        """|m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)); the last root's trace from the symmetric R C R, R = C'^(1/2)."""
        covariance = np.cov(features.T)
        inner = self._root @ covariance @ self._root
        roots = np.sqrt(np.linalg.eigvalsh((inner + inner.T) / 2).clip(0)).sum()
        apart = ((features.mean(0) - self._mean) ** 2).sum()
        return float(apart + np.trace(covariance) + (self._root**2).sum() - 2 * roots)


def kernel_distance(features: np.ndarray, reference: np.ndarray, subsets: int = 50) -> tuple[float, float]:
    """KID of torchmetrics: mean and standard deviation over random subsets.

    Raises:
        MachineError: no torchmetrics.
    """
    try:
        import torch
        from torchmetrics.image.kid import KernelInceptionDistance
    except ImportError as error:
        raise MachineError(
            f"expected torchmetrics for the kernel distance, found no {error.name}; install `csd-toolkit[eval]`"
        ) from None

    size = min(len(features), len(reference), 1000)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metric = KernelInceptionDistance(feature=_given(features.shape[1]), subsets=subsets, subset_size=size)
        metric.update(torch.from_numpy(reference), real=True)
        metric.update(torch.from_numpy(features), real=False)
        mean, deviation = metric.compute()
    return float(mean), float(deviation)


def _given(width: int) -> Any:
    """A network whose features are what it is given, for torchmetrics."""
    from torch import nn

    network = nn.Identity()
    network.num_features = width  # type: ignore[assignment, unused-ignore]
    return network


def thumbnails(pictures: Iterable[np.ndarray]) -> np.ndarray:
    """Pictures as small ones [n, SMALL * SMALL * 3] in [0, 1]."""
    from PIL import Image

    box = Image.Resampling.BOX
    small = [np.asarray(Image.fromarray(picture).resize((SMALL, SMALL), box)).ravel() for picture in pictures]
    return np.stack(small) / 255.0


def diversity(small: np.ndarray) -> float:
    """Root mean square difference of two different pictures of a set, per value of their thumbnails."""
    return float(np.sqrt(2 * small.var(0, ddof=1).mean()))
