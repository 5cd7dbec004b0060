"""In: chunks of tensors, and a way to their values. Out: safetensors files of them in a checkpoint's hidden folder.
Does not choose who writes a chunk and does not complete a checkpoint (storage.py does). No rank waits for another."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from codescent.base import writing
from codescent.base.safetensors_header import encode_header
from codescent.base.torch_dtypes import CODE_DTYPES, DTYPE_CODES
from codescent.checkpoint import manifest as stored
from codescent.checkpoint.areas import Area
from codescent.checkpoint.manifest import StoredChunk, refusal

PART_BYTES = 256 << 20  # approximate size of a file; one thread hashes and writes each file
PIECE_BYTES = 1 << 20  # hashed and written while still in the CPU cache
HEADER_ALIGNMENT = 64
HEADER_BYTES = 1024  # upper bound for the entries of a tensor in header and manifest


class TensorChunk(NamedTuple):
    """An area of a tensor that is written at once: name, dtype and shape of the tensor, and the area."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    area: Area

    @property
    def bytes(self) -> int:
        """Bytes of its values."""
        return self.area.numel * self.dtype.itemsize


Values = Callable[[TensorChunk], torch.Tensor]
"""The values of a chunk."""


@dataclass(frozen=True)
class SaveOrder:
    """Values of a save that rank 0 sends to all ranks: the folder to write to, and metadata of the files.

    `within`: the user's folder around it, see base/writing.py.
    """

    folder: Path
    within: Path
    step: int
    save_id: str
    needed_bytes: int


def described(chunk: TensorChunk) -> list[Any]:
    """A chunk as JSON data: name, dtype and shape of its tensor; its offsets and sizes.

    Raises TypeError: safetensors lacks the dtype.
    """
    if chunk.dtype not in DTYPE_CODES:
        raise TypeError(f"{chunk.name}: not a tensor of one of {', '.join(map(str, DTYPE_CODES))}")
    return [chunk.name, DTYPE_CODES[chunk.dtype], *map(list, (chunk.shape, *chunk.area))]


def stored_bytes(described: Sequence[Any]) -> int:
    """Bytes of a chunk in the form of `described`."""
    return int(math.prod(described[4])) * int(CODE_DTYPES[described[1]].itemsize)


def cut_into_parts(chunks: Sequence[TensorChunk]) -> list[list[TensorChunk]]:
    """Split chunks into parts of about PART_BYTES, by name. So a reader of the weights skips most other files."""
    parts: list[list[TensorChunk]] = []
    part_bytes = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.name, chunk.area.offsets)):
        if not parts or part_bytes + chunk.bytes > PART_BYTES:
            parts.append([])
            part_bytes = 0
        parts[-1].append(chunk)
        part_bytes += chunk.bytes
    return parts


def write_part(
    order: SaveOrder, name: str, chunks: list[TensorChunk], values: Values
) -> tuple[stored.StoredFile, list[tuple[TensorChunk, StoredChunk]]]:
    """Write one safetensors file. The largest element sizes come first, so each chunk is aligned to its dtype."""
    chunks = sorted(chunks, key=lambda chunk: -chunk.dtype.itemsize)
    header, starts = _header(order, chunks)
    hasher = hashlib.sha256()
    try:
        with writing.open_new(order.folder / name, within=order.within) as file:
            _write_hashed(file, hasher, memoryview(header))
            for chunk in chunks:
                _write_hashed(file, hasher, bytes_of(values(chunk).detach().cpu().contiguous()))
            os.fsync(file.fileno())
            whole = stored.StoredFile(file.tell(), hasher.hexdigest())
    except OSError as error:
        raise refusal(error, order.folder / name, order.needed_bytes) from error
    written = [StoredChunk(name, start, start + chunk.bytes, *chunk.area) for chunk, start in zip(chunks, starts)]
    return whole, list(zip(chunks, written))


def _header(order: SaveOrder, chunks: Sequence[TensorChunk]) -> tuple[bytes, list[int]]:
    """The header of a safetensors file, and the byte at which each chunk begins in the file."""
    tensors = []
    for name, dtype, shape, (offsets, sizes) in chunks:
        if sizes != shape:  # the name of a shard has its index ranges, as in Python
            name += "[" + ",".join(f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes)) + "]"
        tensors.append((name, DTYPE_CODES[dtype], sizes))
    metadata = {"format": "pt", "save_id": order.save_id, "step": str(order.step)}
    return encode_header(tensors, metadata, HEADER_ALIGNMENT)


def _write_hashed(file: FileIO, hasher: Any, data: memoryview) -> None:
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        hasher.update(piece)
        while piece:  # a nearly full disk writes a part of a piece, then raises
            piece = piece[file.write(piece) :]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
