"""In: the folder of one checkpoint. Out: its manifest, and every file of it checked to the last bit.
Does not touch tensors, does not import torch, and trusts nothing that it reads."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from codescent.base.dtypes import DTYPE_BYTES, NAME_OF_CODE
from codescent.base.errors import UserError
from codescent.base.formats import unreadable
from codescent.base.published import is_full

MANIFEST = "manifest.json"
FORMAT = "codescent checkpoint"
VERSION = 2  # 1: before the rows of qkv were head by head
THREADS = min(4, os.cpu_count() or 1)  # of hashing, reading and writing: all release the GIL
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",')


DEEPEST = 100
"""Levels of lists and objects in a state: what copies or encodes it calls itself at every level."""

MOST_CUT = 8
"""Dims along which one tensor is cut into chunks; a forged manifest with more would take forever to check."""

Natural = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]


class CheckpointError(UserError):
    """A checkpoint cannot be written, or cannot be used as it lies on the disk."""


class OtherFormat(CheckpointError):
    """A checkpoint that is whole, in a format that this program does not read."""


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
    validation_loss: Annotated[float, Field(strict=True)] | None
    state: dict[str, Any]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON whose first line is the SHA-256 of all that follows that line: no bit of the file can change unnoticed.

    Raises CheckpointError: the state is nested too deep to be read again.
    """
    if is_too_deep(manifest.state):
        raise CheckpointError(f"the state is nested deeper than {DEEPEST} levels")
    data = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    body = b" " + json.dumps(data, indent=1).encode()[1:].lstrip() + b"\n"
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`, checked.

    Raises CheckpointError: it is missing, changed, or not of a checkpoint. OtherFormat: another version wrote it.
    """
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
        data = json.loads(raw)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, must be {FORMAT!r}")
        if problem := unreadable(data["version"], VERSION, VERSION):
            raise OtherFormat(f"{path}: checkpoint of {problem}")
        return _decode(data)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path}: not the manifest of a checkpoint ({error})") from error


def is_too_deep(value: Any) -> bool:
    """Whether JSON data has more than DEEPEST levels of lists and objects."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    return bool(level)


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
    manifest = _MANIFEST.validate_python(data)
    if is_too_deep(manifest.state):
        raise ValueError(f"its state is nested deeper than {DEEPEST} levels")
    for name in manifest.files:
        if _FILE_NAME.fullmatch(name) is None or name == MANIFEST:
            raise ValueError(f"file name {name!r}")
    for name, tensor in manifest.tensors.items():
        _check(name, tensor, manifest.files)
    return manifest


def _check(name: str, tensor: StoredTensor, files: Mapping[str, StoredFile]) -> None:
    """Raise ValueError where the chunks are not exactly the tensor, or do not lie in their files."""
    shape, chunks, element_bytes = tensor.shape, tensor.chunks, DTYPE_BYTES[NAME_OF_CODE[tensor.dtype]]
    if len(shape) > 64 or math.prod(max(1, size) for size in shape) * element_bytes >= 1 << 63:  # torch has no larger
        raise ValueError(f"the shape of {name!r} is too large")
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape)
        )
        stored_bytes = math.prod(chunk.sizes) * element_bytes
        if not inside or chunk.stop_bytes - chunk.start_bytes != stored_bytes:
            raise ValueError(f"a chunk of {name!r} does not fit it")
        if chunk.stop_bytes > files[chunk.file].size_bytes:
            raise ValueError(f"a chunk of {name!r} lies beyond its file")
    if not _fills(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"the chunks of {name!r} do not fill it, each element once")


def _fills(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes, all inside `shape`, cover each element once. Linear in their number, whatever their sizes.

    How often each element is covered is a function that is known from its differences along all dims. Those of a box
    are +1 or -1 at its corners, by the parity of their ends: the sums over the boxes must be the corners of the whole.
    Dims along which no box is cut have the same ends in all of them, and are left out.
    """
    if math.prod(shape) == 0:
        return True
    cut = [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in boxes)]
    if len(cut) > MOST_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for ends in product((0, 1), repeat=len(cut)):
        sign = (-1) ** sum(ends)
        for offsets, sizes in boxes:
            corners[tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(cut, ends))] += sign
        corners[tuple(end * shape[dim] for dim, end in zip(cut, ends))] -= sign
    return not any(corners.values())


CHUNK = TypeAdapter(StoredChunk)
_MANIFEST = TypeAdapter(Manifest)
