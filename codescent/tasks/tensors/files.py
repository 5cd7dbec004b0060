"""In: an HDF5, .pt or safetensors file with "source" [N, S, D] and "target" [N, T, D]. Out: rows, read on demand.
Does not know splits or the order of samples. Does not write."""

from __future__ import annotations

import math
import os
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from codescent.base.counted import a_type
from codescent.base.dtypes import FLOATS, NUMBER_FORMATS
from codescent.base.errors import UserError
from codescent.base.extra import library
from codescent.base.safetensors_header import read_header
from codescent.data.file_array import FileArray, Watched
from codescent.data.samples import Numbers
from codescent.data.text.compressed import MOST_UNPACKED_BYTES
from codescent.tasks.tensors import hdf5
from codescent.tasks.tensors.synthetic import NAMES, Floats, Sizes

SUFFIXES = {".h5": "hdf5", ".hdf5": "hdf5", ".pt": "pt", ".pth": "pt", ".safetensors": "safetensors"}
SUFFIX = {"hdf5": ".h5", "pt": ".pt", "safetensors": ".safetensors"}
"""Suffixes of the files that are written, by format."""
FORMATS = tuple(SUFFIX)
_DTYPES = {NUMBER_FORMATS[name].code: NUMBER_FORMATS[name].numpy for name in FLOATS}  # "": numpy has no such format

DAMAGE = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What h5py may raise of a damaged file: it reads names, types and numbers when they are asked for."""

Arrays = Mapping[str, Any]
"""Arrays by name: a numpy array, `FileArray` or HDF5 dataset, with `shape`, `dtype` and indexing by row number."""


class TensorFile:
    """A file of tensors with a known sha256.

    Each thread of each process opens the file itself at its first read. So a fork shares neither a position in the file
    nor the state of a library.
    """

    def __init__(self, path: Path, sha256: str) -> None:
        self.path, self.format = path, format_of(path)
        self._watched = Watched(path, sha256)
        self._opened = threading.local()
        self._in_memory: Arrays | None = None
        with self._readable():
            arrays = self._arrays()
            self.samples, self.sizes = _check(path, {name: arrays.get(name) for name in NAMES}, list(arrays))
        if self.format == "pt" and _is_compressed(path):
            self._in_memory = arrays  # one copy for all threads
        self._opened = threading.local()  # close what was opened for the check

    def read(self, name: str, numbers: Numbers, out: Floats) -> None:
        """Read rows of "source" or "target" into `out` [n, length, width].
        Raises UserError: the file has changed, or cannot be read.
        """
        with self._readable():
            array = self._arrays()[name]
            if self.format != "hdf5":
                out[:] = array[numbers]
                return
            for row, number in zip(out, numbers.tolist(), strict=True):  # h5py reads numbers in ascending order only
                row[:] = array[number]

    def whole(self, name: str) -> Floats:
        """All rows of "source" or "target", float32. Raises UserError: the file has changed, or cannot be read."""
        with self._readable():
            return np.array(self._arrays()[name][:], np.float32)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        self._watched.check()
        try:
            yield
        except DAMAGE as error:
            raise UserError(f"{self.path}: cannot be read: {error}") from error

    def _arrays(self) -> Arrays:
        """The arrays, open in this thread of this process, or in memory."""
        if self._in_memory is not None:
            return self._in_memory
        if getattr(self._opened, "process", None) != os.getpid():
            self._opened.arrays = _OPEN[self.format](self._watched)
            self._opened.process = os.getpid()
        found: Arrays = self._opened.arrays
        return found


class InMemory:
    """Tensors in memory, shared by all threads. `whole(name)` returns all rows; it is called at the first read."""

    def __init__(self, whole: Callable[[str], Floats]) -> None:
        self._load, self._lock = whole, threading.Lock()
        self._whole: dict[str, Floats] = {}

    def read(self, name: str, numbers: Numbers, out: Floats) -> None:
        """See `TensorFile`."""
        with self._lock:
            if name not in self._whole:
                self._whole[name] = self._load(name)
        np.take(self._whole[name], numbers, axis=0, out=out)


def format_of(path: Path) -> str:
    """The format of a file, by its suffix. Raises UserError: another suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: not a file of tensors: their names end in {', '.join(SUFFIXES)}")
    return SUFFIXES[path.suffix.lower()]


def h5py() -> ModuleType:
    """The library that reads and writes HDF5. Raises UserError: it is not installed."""
    return library("h5py", "HDF5", "hdf5")


def _check(path: Path, arrays: Mapping[str, Any], there: list[object]) -> tuple[int, Sizes]:
    """Number of samples, and sizes. Raises UserError: every problem of the arrays."""
    problems = []
    for name, array in arrays.items():
        if array is None:
            problems.append(f'{path}: has no "{name}"; it holds: {", ".join(sorted(map(str, there))) or "nothing"}')
        elif not hasattr(array, "shape"):
            problems.append(f'{path}: "{name}" is not a tensor')
        elif len(array.shape) != 3 or 0 in array.shape:
            problems.append(f'{path}: "{name}" is {list(array.shape)}, must be [samples, vectors, numbers of each]')
        elif array.dtype.kind != "f":
            problems.append(f'{path}: "{name}" is of {array.dtype}, must be float32, float16 or float64')
    if not problems:
        (samples, source_len, width), (others, target_len, other) = (arrays[name].shape for name in NAMES)
        if samples != others:
            problems.append(f'{path}: "source" has {samples} samples, "target" {others}')
        if width != other:
            problems.append(f'{path}: vectors of "source" have {width} numbers, those of "target" {other}')
        if not problems:
            return samples, Sizes(source_len, target_len, width)
    raise UserError(*problems)


def _open_hdf5(file: Watched) -> Arrays:
    try:
        return hdf5.datasets(h5py(), file.path, NAMES)
    except DAMAGE as error:
        raise UserError(_unreadable(file.path, error, "HDF5")) from error


def _open_pt(file: Watched) -> Arrays:
    import torch  # noqa: PLC0415 - planning reads no tensors

    path, records = file.path, _records(file.path)
    maps = not any(record.compress_type for record in records)  # torch would map compressed bytes as numbers
    try:
        # weights_only: only tensors and plain values are unpickled. mmap: the tensors' bytes stay in the file.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(_unreadable(path, error, "a .pt file of tensors alone, as torch.save writes it")) from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds {a_type(found)}, must be a dict of tensors by name")
    sizes = {record.file_size for record in records}
    for name, value in found.items() if maps else ():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            size_bytes = value.untyped_storage().nbytes()
            if size_bytes and size_bytes not in sizes:  # torch does not look: it would map what follows the record
                raise UserError(f'{path}: damaged: no record has the {size_bytes:,} bytes of "{name}"; save it again')
    return {name: _of_torch(path, name, value) for name, value in found.items()}


def _records(path: Path) -> list[zipfile.ZipInfo]:
    """The records of a .pt file; none if it is no zip archive. Raises UserError: records that cannot be read safely."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):  # torch says what is wrong
        return []
    names = {record.filename for record in records}
    if len(names) < len(records):
        raise UserError(f"{path}: damaged: two records have one name; save it again")
    compressed = sum(record.file_size for record in records if record.compress_type)
    if compressed > MOST_UNPACKED_BYTES:
        raise UserError(
            f"{path}: its records are compressed, and have more than {MOST_UNPACKED_BYTES >> 30} GiB; save it again "
            "with torch.save, which does not compress"
        )
    return records


def _is_compressed(path: Path) -> bool:
    """Whether a .pt file has compressed records, which are read into memory as a whole."""
    return any(record.compress_type for record in _records(path))


def _of_torch(path: Path, name: str, value: Any) -> Any:
    """The tensor as a numpy array. A value that numpy cannot hold is returned unchanged if its name is not read."""
    try:
        return value.detach().numpy()
    except (AttributeError, TypeError, RuntimeError) as error:
        if name not in NAMES or not hasattr(value, "shape"):
            return value
        raise UserError(
            f'{path}: "{name}" is of {value.dtype}, must be a plain tensor of float32, float16 or float64'
        ) from error


def _open_safetensors(file: Watched) -> Arrays:
    """The arrays of a safetensors file: a JSON header, then raw rows."""
    try:
        entries, first = read_header(file.path)
        found = {name: _rows(file, name, entry, first) for name, entry in entries.items()}
        end = 0
        for begin, stop in sorted(entry["data_offsets"] for entry in entries.values()):
            if begin != end:
                raise ValueError(f"tensors overlap, or leave a gap, at byte {first + min(begin, end)}")
            end = stop
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(_unreadable(file.path, error, "safetensors")) from error


def _rows(file: Watched, name: str, entry: dict[str, Any], first: int) -> Any:
    """The rows of one tensor; an object with `shape` and `dtype` alone if it is empty or numpy lacks its dtype."""
    dtype, shape, (begin, end) = _DTYPES.get(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f'"{name}" has the shape {list(shape)}')
    if not 0 <= begin <= end:
        raise ValueError(f'"{name}" lies in bytes [{begin}, {end})')
    if not dtype or not shape or 0 in shape:
        return SimpleNamespace(shape=shape, dtype=_OtherDtype(entry["dtype"]))
    if math.prod(shape) * np.dtype(dtype).itemsize != end - begin:
        raise ValueError(f'"{name}" of {list(shape)} has {end - begin} bytes')
    return FileArray(file, np.dtype((dtype, shape[1:])), first + begin, shape[0])


class _OtherDtype(str):
    kind = "?"


def _unreadable(path: Path, error: Exception, what: str) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{path}: cannot be read: {error.strerror}"
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return f"{path}: not {what}, or cut short: {said[:200]}"


_OPEN = {"hdf5": _open_hdf5, "pt": _open_pt, "safetensors": _open_safetensors}
