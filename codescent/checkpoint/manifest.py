"""In: the folder of one checkpoint. Out: its manifest, and every file of it checked to the last bit.
Does not touch tensors, does not import torch, and trusts nothing that it reads."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from codescent.base.dtypes import DTYPE_BYTES, NAME_OF_CODE
from codescent.base.errors import UserError
from codescent.base.published import is_full

MANIFEST = "manifest.json"
FORMAT = "codescent checkpoint"
VERSION = 2  # 1: before the rows of qkv were head by head
THREADS = min(4, os.cpu_count() or 1)  # of hashing, reading and writing: all release the GIL
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",')


Natural = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]


class CheckpointError(UserError):
    """A checkpoint cannot be written, or cannot be used as it lies on the disk."""


def refusal(error: OSError, path: Path, needed_bytes: int) -> CheckpointError:
    """What the file system refused while a checkpoint of `needed_bytes` was being written to `path`."""
    if is_full(error):
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        return CheckpointError(
            f"{path}: no space left: this checkpoint needs {needed_bytes:,} bytes, {free:,} are free"
        )
    return CheckpointError(f"{path}: {error.strerror or error}: this checkpoint cannot be written")


@dataclass(frozen=True)
class StoredFile:
    """What a file of the checkpoint has to be."""

    size_bytes: Natural
    sha256: str


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor and where its bytes lie: [start_bytes, stop_bytes) of `file`, row-major, little-endian."""

    file: str
    start_bytes: Natural
    stop_bytes: Natural
    offsets: tuple[Natural, ...]
    sizes: tuple[Natural, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: `dtype` is a name of safetensors."""

    dtype: str
    shape: tuple[Natural, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class Manifest:
    """All there is to know of a checkpoint but the tensors' bytes. `save_id` is drawn anew for each save."""

    step: Natural
    save_id: str
    validation_loss: float | None
    state: dict[str, Any]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON whose first line is the SHA-256 of all that follows that line: no bit of the file can change unnoticed."""
    data = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    body = b" " + json.dumps(data, indent=1).encode()[1:].lstrip() + b"\n"
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`, checked. Raises CheckpointError: it is missing, changed, or not of a checkpoint."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing: this checkpoint is not complete") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    first, _, body = raw.partition(b"\n")
    expected = _FIRST_LINE.fullmatch(first)
    found = hashlib.sha256(body).hexdigest()
    if expected is None:
        raise CheckpointError(f"{path}: its bytes were changed: the first line is not its checksum")
    if expected[1].decode() != found:
        raise CheckpointError(f"{path}: its bytes were changed: sha256 {found}, expected {expected[1].decode()}")
    try:
        return _decode(json.loads(raw))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path}: not the manifest of a checkpoint ({error})") from error


def damaged_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Check size and SHA-256 of the named files. Returns a sentence for each one that is not as it was written."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _damage(folder / name, manifest, manifest.files[name]), sorted(names))
        return [problem for problem in found if problem is not None]


def _damage(path: Path, manifest: Manifest, expected: StoredFile) -> str | None:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size_bytes:
                cut = "truncated" if size < expected.size_bytes else "too long"
                return f"{path}: {cut}: {size:,} bytes, expected {expected.size_bytes:,}"
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest == expected.sha256:
                return None
            file.seek(0)
            origin = _origin(file.read(1 << 20), manifest)
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path}: its bytes were changed{origin}: sha256 {digest}, expected {expected.sha256}"


def _origin(start: bytes, manifest: Manifest) -> str:
    """Say it where the file says that it belongs to another save; a damaged header says nothing."""
    stated = re.search(rb'"save_id": "([0-9a-f]+)", "step": "([0-9]{1,19})"', start)
    if stated is None or stated[1].decode() == manifest.save_id:
        return ""
    return f" (it is of another save, of step {int(stated[2])}; this one is of step {manifest.step})"


def _decode(data: Mapping[str, Any]) -> Manifest:
    """Every number is checked before anyone reads by it: a manifest may come from anywhere."""
    if data["format"] != FORMAT or data["version"] != VERSION:
        raise ValueError(f"format {data['format']!r} version {data['version']!r}, this is {FORMAT!r} version {VERSION}")
    manifest = _MANIFEST.validate_python(data)
    for name in manifest.files:
        if _FILE_NAME.fullmatch(name) is None or name == MANIFEST:
            raise ValueError(f"file name {name!r}")
    for name, tensor in manifest.tensors.items():
        _check(name, tensor, manifest.files)
    return manifest


def _check(name: str, tensor: StoredTensor, files: Mapping[str, StoredFile]) -> None:
    """Raise ValueError where the chunks are not exactly the tensor, or do not lie in their files."""
    shape, chunks, element_bytes = tensor.shape, tensor.chunks, DTYPE_BYTES[NAME_OF_CODE[tensor.dtype]]
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape)
        )
        stored_bytes = math.prod(chunk.sizes) * element_bytes
        if not inside or chunk.stop_bytes - chunk.start_bytes != stored_bytes:
            raise ValueError(f"a chunk of {name!r} does not fit it")
        if chunk.stop_bytes > files[chunk.file].size_bytes:
            raise ValueError(f"a chunk of {name!r} lies beyond its file")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {name!r} do not fill it")


CHUNK = TypeAdapter(StoredChunk)
_MANIFEST = TypeAdapter(Manifest)
