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
from typing import Any

import torch
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from codescent.base import writing
from codescent.base.safetensors_header import encode_header
from codescent.base.torch_dtypes import CODE_DTYPES, DTYPE_CODES
from codescent.checkpoint import manifest as stored
from codescent.checkpoint.manifest import StoredChunk, refusal

PART_BYTES = 256 << 20  # approximate size of a file; one thread hashes and writes each file
PIECE_BYTES = 1 << 20  # hashed and written while still in the CPU cache
HEADER_ALIGNMENT = 64
HEADER_BYTES = 1024  # upper bound for the entries of a tensor in header and manifest

Values = Callable[[WriteItem], torch.Tensor]
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


def described(item: WriteItem) -> list[Any]:
    """A chunk as JSON data: name, dtype and shape of its tensor; its offsets and sizes.

    Raises TypeError: safetensors lacks the dtype.
    """
    if item.tensor_data is None or _dtype(item) not in DTYPE_CODES:
        raise TypeError(f"{item.index.fqn}: not a tensor of one of {', '.join(map(str, DTYPE_CODES))}")
    data = item.tensor_data
    return [item.index.fqn, DTYPE_CODES[_dtype(item)], *map(list, (data.size, data.chunk.offsets, data.chunk.sizes))]


def stored_bytes(described: Sequence[Any]) -> int:
    """Bytes of a chunk in the form of `described`."""
    return int(math.prod(described[4])) * int(CODE_DTYPES[described[1]].itemsize)


def _data(item: WriteItem) -> TensorWriteData:
    """The chunk and the tensor of an item. All our items are tensors."""
    assert item.tensor_data is not None
    return item.tensor_data


def _dtype(item: WriteItem) -> torch.dtype:
    return _data(item).properties.dtype


def item_bytes(item: WriteItem) -> int:
    """Bytes of the chunk of an item."""
    return _data(item).chunk.sizes.numel() * _dtype(item).itemsize


def cut_into_parts(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Split items into parts of about PART_BYTES, sorted by name. So a reader of the weights skips most other files."""
    parts: list[list[WriteItem]] = []
    part_bytes = 0
    for item in sorted(items, key=lambda item: (item.index.fqn, tuple(item.index.offset or ()))):
        if not parts or part_bytes + item_bytes(item) > PART_BYTES:
            parts.append([])
            part_bytes = 0
        parts[-1].append(item)
        part_bytes += item_bytes(item)
    return parts


def write_part(
    order: SaveOrder, name: str, items: list[WriteItem], values: Values
) -> tuple[stored.StoredFile, list[tuple[WriteItem, StoredChunk]]]:
    """Write one safetensors file. The largest element sizes come first, so each chunk is aligned to its dtype."""
    items = sorted(items, key=lambda item: -_dtype(item).itemsize)
    header, starts = _header(order, items)
    hasher = hashlib.sha256()
    try:
        with writing.open_new(order.folder / name, within=order.within) as file:
            _write_hashed(file, hasher, memoryview(header))
            for item in items:
                _write_hashed(file, hasher, bytes_of(values(item).detach().cpu().contiguous()))
            os.fsync(file.fileno())
            whole = stored.StoredFile(file.tell(), hasher.hexdigest())
    except OSError as error:
        raise refusal(error, order.folder / name, order.needed_bytes) from error
    chunks = []
    for item, start in zip(items, starts):
        box = _data(item).chunk
        chunk = StoredChunk(name, start, start + item_bytes(item), tuple(box.offsets), tuple(box.sizes))
        chunks.append((item, chunk))
    return whole, chunks


def _header(order: SaveOrder, items: Sequence[WriteItem]) -> tuple[bytes, list[int]]:
    """The header of a safetensors file, and the byte at which each item begins in the file."""
    tensors = []
    for item in items:
        box, name = _data(item).chunk, item.index.fqn
        if box.sizes != _data(item).size:  # the name of a shard has its index ranges, as in Python
            name += "[" + ",".join(f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes)) + "]"
        tensors.append((name, DTYPE_CODES[_dtype(item)], box.sizes))
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
