"""A checkpoint by its id on the hub, in the cache that every tool of the hub shares."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

from csd_ops.errors import InputError

IDENTIFIER = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SETTINGS = ["*.json", "vqgan.safetensors", "*vqgan.ckpt"]
SAFETENSORS, PICKLED = "*.safetensors", "*.bin"


def fetch(checkpoint: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a checkpoint: a folder as it is, a hub id such as ORG/NAME after downloading what is missing.

    Weights are taken from safetensors, and from .bin files where there are none. HF_HUB_OFFLINE and the hub's other
    variables hold: offline, the cache alone is read.

    Raises:
        InputError: the hub has no such repository or revision, may not give it, or cannot be reached and the cache does
            not have it; or a revision of a folder was asked for.
    """
    path = Path(checkpoint)
    if path.exists() or not IDENTIFIER.fullmatch(os.fspath(checkpoint)):
        if revision is not None:
            raise InputError(f"expected a hub id with the revision {revision}, found the folder {path}; leave it out")
        return path
    name = os.fspath(checkpoint)
    folder = _download(name, revision, [*SETTINGS, SAFETENSORS])
    if not any(folder.glob(SAFETENSORS)):
        folder = _download(name, revision, [*SETTINGS, PICKLED])
    return folder


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    asked = f"{name} at {revision}" if revision else name
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        problem = f"expected to read {asked} on the hub, found it gated; accept its terms there, then `hf auth login`"
    except RevisionNotFoundError:
        problem = f"expected a branch, tag or commit {revision} of {name} on the hub, found none; check the revision"
    except (RepositoryNotFoundError, HFValidationError):
        problem = (
            f"expected a checkpoint folder or a repository {asked} on the hub, found neither (or one that this account "
            "may not read); check the name, or log in with `hf auth login`"
        )
    except (OSError, HfHubHTTPError) as error:  # not in the cache and no connection, or the connection broke
        first = textwrap.shorten(str(error), 120, placeholder=" ...")
        problem = (
            f"expected {asked} from the hub or in its cache {constants.HF_HUB_CACHE}, found neither ({first}); connect "
            f"and repeat, fetch it elsewhere with `hf download {name}`, or name a folder"
        )
    raise InputError(problem)
