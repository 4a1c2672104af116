"""The bundle: one folder that is one exported model, and all that the runtime needs.

`bundle.json` names every other file with its size and SHA-256. A bundle is checked when it is opened; a wrong one
is refused with the file, what was expected, what was found and what to run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from csd_ops.errors import InputError, MachineError

SCHEMA = 2
MANIFEST = "bundle.json"
STEP = "step.onnx"
WEIGHTS = "step.onnx.data"
IMAGE_DECODER = "image_decoder.onnx"
TOKENIZER = "tokenizer.json"


def text_id(identifier: int, image_id_start: int, image_vocabulary: int) -> int:
    """The id of a text id in a bundle's one id space: image codes first, then the text ids that are none."""
    if image_id_start < 0 or identifier < image_id_start:
        return image_vocabulary + identifier
    return identifier  # behind the image codes: their number is taken off, and V is added


@dataclass(frozen=True)
class Manifest:
    """What `bundle.json` says of the model. Sizes are in tokens, codes or pixels."""

    family: str  # e.g. "janus"
    name: str
    precision: str  # "fp32", "fp16" or "bf16": weights, activations and cache; all after the head is float32
    image_vocabulary: int  # V: ids 0..V-1 are image codes
    text_vocabulary: int  # ids V.. are the text ids; those of image codes, where the text has them too, are left out
    image_id_start: int  # text id of the first image code, where image codes have text ids; else -1
    tokens: int  # of one picture, forced ones included
    first: int  # position of the grid's first token
    rows: int  # of the token grid
    columns: int  # tokens of a row, its end of line included
    codes_per_row: int  # image codes of a row
    width: int  # picture, pixels
    height: int
    layers: int
    key_value_heads: int
    head_size: int
    context: int  # most positions the model knows
    max_window: int
    prompt_prefix: str  # put before the user's text, special tokens by name
    prompt_suffix: str  # put after it
    max_prompt: int  # most ids of a prompt, special tokens counted
    unconditional: str  # the row without the prompt: "pad" the text, "drop" it, or take the "negative" prompt
    negative_prompt: str
    pad_id: int  # text id that replaces the prompt, with "pad"
    kept_head: int  # ids at the start of the prompt that the unconditional row keeps
    kept_tail: int  # and at its end
    forced: dict[str, int] = field(default_factory=dict)  # image position -> id that must stand there
    recommended: dict[str, Any] = field(default_factory=dict)  # preset, guidance, temperature, top_k, top_p, ...
    versions: dict[str, str] = field(default_factory=dict)  # what made it

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture, forced ones included."""
        return self.tokens

    @property
    def codes(self) -> int:
        """Image codes of one picture."""
        return self.rows * self.codes_per_row

    def grid(self, values: np.ndarray) -> np.ndarray:
        """Values of every token [..., tokens] laid out as the picture, [..., rows, codes_per_row]."""
        inside = values[..., self.first : self.first + self.rows * self.columns]
        return inside.reshape(*values.shape[:-1], self.rows, self.columns)[..., : self.codes_per_row]

    def text_id(self, identifier: int) -> int:
        """The id of a text id in the bundle's one id space."""
        return text_id(identifier, self.image_id_start, self.image_vocabulary)


@dataclass(frozen=True)
class Bundle:
    """An opened and checked bundle."""

    folder: Path
    manifest: Manifest
    files: dict[str, dict[str, Any]]  # name -> {"size": bytes, "sha256": hex}

    def path(self, name: str) -> Path:
        """The path of one of its files."""
        return self.folder / name

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(int(entry["size"]) for entry in self.files.values())


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_bundle(folder: str | os.PathLike[str], *, verify: bool = True) -> Bundle:
    """Open a bundle and check its manifest, its files' sizes and, unless `verify` is off, their checksums.

    Raises InputError with one sentence for anything that is not as the manifest says.
    """
    folder = Path(folder)
    remedy = "make one with `csd export CHECKPOINT -o BUNDLE`"
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"expected a bundle folder, found nothing at {folder}; {remedy}")
    if not path.is_file():
        raise InputError(f"expected {MANIFEST} in {folder}, found none; {remedy}")
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"expected JSON in {path}, found {error}; export the bundle again") from None
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
        raise InputError(f"expected a bundle manifest in {path}, found no schema version; {remedy}")
    if document["schema"] != SCHEMA:
        newer = document["schema"] > SCHEMA
        do = "update csd-toolkit" if newer else "export the bundle again"
        raise InputError(f"expected bundle schema {SCHEMA} in {path}, found {document['schema']}; {do}")
    manifest = _manifest(document.get("model"), path)
    files = document.get("files")
    if not isinstance(files, dict) or not {STEP, IMAGE_DECODER, TOKENIZER} <= files.keys():
        raise InputError(f"expected the list of files in {path}, found an incomplete one; export the bundle again")
    for name, entry in files.items():
        _check_file(folder, name, entry, verify)
    return Bundle(folder, manifest, files)


def _manifest(model: object, path: Path) -> Manifest:
    if not isinstance(model, dict):
        raise InputError(f"expected a model description in {path}, found none; export the bundle again")
    kinds = {"str": str, "int": int, "dict[str, Any]": dict, "dict[str, int]": dict, "dict[str, str]": dict}
    known = {entry.name: kinds[str(entry.type)] for entry in fields(Manifest)}
    for name, kind in known.items():
        if not isinstance(model.get(name), kind) or isinstance(model.get(name), bool):
            raise InputError(
                f"expected {name} ({kind.__name__}) in {path}, found {model.get(name)!r}; export the bundle again"
            )
    manifest = Manifest(**{name: model[name] for name in known})
    sizes = (
        "image_vocabulary",
        "tokens",
        "rows",
        "columns",
        "codes_per_row",
        "width",
        "height",
        "layers",
        "key_value_heads",
        "head_size",
    )
    for name in (*sizes, "context", "max_window", "max_prompt"):
        if getattr(manifest, name) < 1:
            raise InputError(
                f"expected {name} of at least 1 in {path}, found {getattr(manifest, name)}; export the bundle again"
            )
    if manifest.first + manifest.rows * manifest.columns > manifest.tokens or manifest.codes_per_row > manifest.columns:
        raise InputError(
            f"expected a grid of {manifest.rows} x {manifest.columns} within {manifest.tokens} tokens in {path}, found "
            f"it to begin at {manifest.first}; export the bundle again"
        )
    if manifest.unconditional not in ("pad", "drop", "negative"):
        raise InputError(
            f"expected unconditional of pad, drop, negative in {path}, found {manifest.unconditional!r}; export again"
        )
    for position, identifier in manifest.forced.items():
        if not (position.isdigit() and int(position) < manifest.image_tokens and isinstance(identifier, int)):
            raise InputError(f"expected forced tokens inside the grid in {path}, found {position!r}; export again")
    return manifest


def _check_file(folder: Path, name: str, entry: object, verify: bool) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise InputError(
            f"expected files inside {folder}, found the path {name!r} in {MANIFEST}; do not use this bundle"
        )
    path = folder / name
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("size"), int)
        or not isinstance(entry.get("sha256"), str)
    ):
        raise InputError(f"expected size and sha256 of {name} in {MANIFEST}, found neither; export the bundle again")
    if not path.is_file():
        raise InputError(f"expected {path}, found none; export the bundle again or copy it whole")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"expected {path} inside its bundle, found a link that leaves it; do not use this bundle")
    if path.stat().st_size != entry["size"]:
        raise InputError(
            f"expected {entry['size']} bytes in {path}, found {path.stat().st_size}; copy the bundle again"
        )
    if verify and sha256(path) != entry["sha256"]:
        raise InputError(f"expected the checksum of {MANIFEST} for {path}, found another; copy the bundle again")


@contextmanager
def writing_bundle(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed over it when the block ends well and removed when it does not.

    Either nothing, the previous bundle or the whole new one stands at `folder`. An existing folder is replaced only
    if it is a bundle or empty.
    """
    target = Path(folder).absolute()
    if target.exists() and not target.is_dir():
        raise InputError(f"expected a folder for the bundle, found a file at {target}; name another output")
    if target.is_dir() and any(target.iterdir()) and not (target / MANIFEST).is_file():
        raise InputError(f"expected a bundle or an empty folder at {target}, found other files; name another output")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", dir=target.parent))
    except OSError as error:
        raise MachineError(
            f"expected to write the bundle in {target.parent}, found: {error.strerror}; name another output"
        ) from None
    try:
        yield temporary
        temporary.chmod(0o755)
        previous = temporary.with_name(temporary.name + ".previous")
        if target.is_dir():
            target.rename(previous)
        temporary.rename(target)
        shutil.rmtree(previous, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _recover(target: Path) -> None:
    """Clear up what killed processes left beside `target`; a bundle caught between two renames is put back."""
    for left in target.parent.glob(f".{target.name}.*"):
        process = left.name.removeprefix(f".{target.name}.").partition(".")[0]
        if not process.isdigit() or _alive(int(process)):
            continue
        if left.name.endswith(".previous") and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `bundle.json` for the files that stand in `folder`; call it last."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    document = {"schema": SCHEMA, "model": asdict(manifest), "files": files}
    write_text(folder / MANIFEST, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it; MachineError when it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MachineError(f"expected to write {path}, found: {error.strerror}; name another output") from None
