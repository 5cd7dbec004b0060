"""In: a checkpoint folder. Out: its manifest, encoded as JSON, or read and checked; a list of damaged files.
Does not decode tensors or import torch. The manifest lists all tensors, and size and SHA-256 of every file."""

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
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from codescent.base.dtypes import DTYPE_BYTES, NAME_OF_CODE
from codescent.base.errors import UserError
from codescent.base.formats import unreadable
from codescent.base.published import is_full
from codescent.base.reading import open_unbuffered, read_bytes

MANIFEST = "manifest.json"
FORMAT = "codescent checkpoint"
VERSION = 2  # version 1 had another order of the rows of qkv
THREADS = min(4, os.cpu_count() or 1)  # threads that hash, read and write; all release the GIL
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",')


DEEPEST = 100
"""Highest number of nested lists and objects in a state. Copying and encoding recurse once per level."""

SMALL_BYTES, MOST_BYTES = 1 << 26, 1 << 30
"""Most bytes of a manifest: some hundred for each chunk of a tensor. One of more than SMALL_BYTES is smaller than the
files that it describes."""

MOST_CUT = 8
"""Highest number of dims along which a tensor is cut. The time of the check doubles with each dim."""

Natural = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]


class CheckpointError(UserError):
    """A checkpoint cannot be written, or its files cannot be used."""


class NoRoom(CheckpointError):
    """A checkpoint cannot be written for want of room: the disk is full, or the quota is used up."""


class OtherFormat(CheckpointError):
    """A complete checkpoint in a format that this program does not read."""


def refusal(error: OSError, path: Path, needed_bytes: int) -> CheckpointError:
    """The error for the user: the file system failed while a checkpoint of `needed_bytes` was written to `path`."""
    if is_full(error):
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        return NoRoom(f"{path}: no space left: this checkpoint needs {needed_bytes:,} bytes, {free:,} are free")
    return CheckpointError(f"{path}: {error.strerror or error}: this checkpoint cannot be written")


@dataclass(frozen=True)
class StoredFile:
    """Expected size and SHA-256 of a file of the checkpoint."""

    size_bytes: Natural
    sha256: str


@dataclass(frozen=True)
class StoredChunk:
    """A part of a tensor: `sizes` elements from `offsets` on, one number per dim.

    Its bytes are [start_bytes, stop_bytes) of `file`, row-major and little-endian.
    """

    file: str
    start_bytes: Natural
    stop_bytes: Natural
    offsets: tuple[Natural, ...]
    sizes: tuple[Natural, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor. `dtype` is a safetensors name."""

    dtype: str
    shape: tuple[Natural, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class Manifest:
    """All data of a checkpoint except the bytes of the tensors. `save_id` is a random text, new for each save."""

    step: Natural
    save_id: str
    validation_loss: Annotated[float, Field(strict=True)] | None
    state: dict[str, Any]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode as JSON. The first line has the SHA-256 of all other lines, so any change of the file is detected.

    Raises CheckpointError: the state is nested too deeply to be read again.
    """
    if is_too_deep(manifest.state):
        raise CheckpointError(f"the state is nested deeper than {DEEPEST} levels")
    data = {"format": FORMAT, "version": VERSION, **vars(manifest)}
    body = b" " + json.dumps(data, indent=1, default=vars).encode()[1:].lstrip() + b"\n"
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest in `folder`.

    Raises CheckpointError: it is missing, changed or no manifest. Raises OtherFormat: another version wrote it.
    """
    path = folder / MANIFEST
    try:
        raw = read_bytes(path, _most_bytes(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing: this checkpoint is not complete") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    first, _, body = raw.partition(b"\n")
    expected = _FIRST_LINE.fullmatch(first)
    found = hashlib.sha256(body).hexdigest()
    if expected is None:
        raise CheckpointError(f"{path}: its bytes were changed: the first line is not the checksum")
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


def _most_bytes(path: Path) -> int:
    """Most bytes that this manifest may have. Raises OSError: it cannot be looked at."""
    if path.stat().st_size <= SMALL_BYTES:
        return SMALL_BYTES
    described_bytes = sum(file.stat().st_size for file in path.parent.iterdir() if file != path)
    return max(SMALL_BYTES, min(MOST_BYTES, described_bytes))


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
    """Compare size and SHA-256 of the named files with the manifest. Returns a sentence for each damaged file."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _damage(folder / name, manifest, manifest.files[name]), sorted(names))
        return [problem for problem in found if problem is not None]


def _damage(path: Path, manifest: Manifest, expected: StoredFile) -> str | None:
    try:
        with open_unbuffered(path) as file:
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
    """Text if the header of a file names another save; "" if it does not, or is damaged."""
    stated = re.search(rb'"save_id": "([0-9a-f]+)", "step": "([0-9]{1,19})"', start)
    if stated is None or stated[1].decode() == manifest.save_id:
        return ""
    return f" (the file belongs to another save, of step {int(stated[2])}; this checkpoint is of step {manifest.step})"


def _decode(data: Mapping[str, Any]) -> Manifest:
    """Build the manifest and check every value: the file may come from an untrusted source."""
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
    """Raise ValueError: the chunks do not cover the tensor exactly once, or exceed their files."""
    shape, chunks, element_bytes = tensor.shape, tensor.chunks, DTYPE_BYTES[NAME_OF_CODE[tensor.dtype]]
    if len(shape) > 64 or math.prod(max(1, size) for size in shape) * element_bytes >= 1 << 63:  # limits of torch
        raise ValueError(f"the shape of {name!r} is too large")
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape)
        )
        stored_bytes = math.prod(chunk.sizes) * element_bytes
        if not inside or chunk.stop_bytes - chunk.start_bytes != stored_bytes:
            raise ValueError(f"a chunk of {name!r} does not fit it")
        if chunk.stop_bytes > files[chunk.file].size_bytes:
            raise ValueError(f"a chunk of {name!r} ends after its file")
    if not _fills(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"the chunks of {name!r} do not cover each element once")


def _fills(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes inside `shape` cover each element exactly once. The time is linear in the number of boxes.

    Let c(x) be the number of boxes that cover element x. The differences of c along all dims determine c. One box has
    differences only at its corners: +1 or -1, by the number of dims where the corner is at the end of the box. So c is
    1 everywhere exactly if the corners of all boxes sum to the corners of the whole tensor. Dims in which every box
    has the full size are left out.
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
