"""In: a list of their tensors, a function that reads boxes of our parameters. Out: safetensors files, block by block.
Does not hold a whole tensor: memory is some blocks, however large the tensors and the files are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch

from codescent.base.durable import write_synced
from codescent.base.safetensors_header import encode_header
from codescent.base.torch_dtypes import CODE_DTYPES
from codescent.huggingface.correspond import TheirTensor
from codescent.huggingface.folder import INDEX, WEIGHTS
from codescent.huggingface.read import take

BLOCK_NUMEL = 1 << 21  # about how many elements of a tensor are written, or of a parameter read, at a time
Read = Callable[[str, tuple[slice, ...]], torch.Tensor]  # a box of the parameter of that name


@dataclass(frozen=True)
class Shard:
    """A file of tensors: its name, its parts in order, its bytes without the header."""

    file: str
    parts: tuple[TheirTensor, ...]
    size_bytes: int


def shards(parts: Sequence[TheirTensor], dtype: str, max_bytes: int) -> list[Shard]:
    """Divide tensors, in their order, into files of at most `max_bytes`; a larger tensor is a file of its own."""
    element_bytes = CODE_DTYPES[dtype].itemsize
    groups: list[list[TheirTensor]] = [[]]
    sizes = [0]
    for part in parts:
        size = math.prod(part.shape) * element_bytes
        if groups[-1] and sizes[-1] + size > max_bytes:
            groups.append([])
            sizes.append(0)
        groups[-1].append(part)
        sizes[-1] += size
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = zip([WEIGHTS] if count == 1 else names, groups, sizes, strict=True)
    return [Shard(name, tuple(group), size) for name, group, size in files]


def write_weights(folder: Path, files: Sequence[Shard], dtype: str, read: Read, zeros: Collection[str]) -> None:
    """Write the files, and the index where there are several; each is on the disk when this returns.

    Args:
        folder: to write into.
        files: from `shards`.
        dtype: a key of CODE_DTYPES.
        read: reads boxes of parameters.
        zeros: parameters that our model lacks: their tensors are zeros.
    """
    for shard in files:
        with (folder / shard.file).open("xb", buffering=0) as file:
            tensors = ((part.tensor, dtype, part.shape) for part in shard.parts)
            _write_all(file, encode_header(tensors, {"format": "pt"})[0])
            for part in shard.parts:
                for block in _blocks(part, None if part.parameter.name in zeros else read):
                    data = block.to(CODE_DTYPES[dtype]).contiguous()
                    _write_all(file, data.reshape(-1).view(torch.uint8).numpy().data)
            os.fsync(file.fileno())
    if len(files) > 1:
        where = {part.tensor: shard.file for shard in files for part in shard.parts}
        total = sum(shard.size_bytes for shard in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _blocks(part: TheirTensor, read: Read | None) -> Iterator[torch.Tensor]:
    """One of their tensors, some indices of its first dim at a time."""
    inner = math.prod(part.shape[1:])
    step = max(1, BLOCK_NUMEL // inner)
    for first in range(0, part.shape[0], step):
        stop = min(first + step, part.shape[0])
        if read is None:
            yield torch.zeros(stop - first, *part.shape[1:])
        else:
            yield _block(part, first, stop, read)


def _block(part: TheirTensor, first: int, stop: int, read: Read) -> torch.Tensor:
    """Indices [first, stop) of the first dim of their tensor, gathered from boxes of rows of our parameter."""
    shape = part.parameter.shape
    wanted = [part.of_ours(dim) for dim in range(len(shape))]
    wanted[part.ours_of[0]] = part.to_ours(0, np.arange(first, stop))
    starts = [int(indices.min()) for indices in wanted]
    stops = [int(indices.max()) + 1 for indices in wanted]
    rows = wanted[0]
    order = np.argsort(rows, kind="stable")
    out: torch.Tensor | None = None
    step = max(1, BLOCK_NUMEL // math.prod(shape[1:]))
    for low in range(starts[0], stops[0], step):
        some = order[np.searchsorted(rows, low, sorter=order) : np.searchsorted(rows, low + step, sorter=order)]
        if not len(some):
            continue
        end = int(rows[some[-1]]) + 1
        low = int(rows[some[0]])
        bounds = (slice(low, end), *(slice(start, stop) for start, stop in zip(starts[1:], stops[1:])))
        values = take(read(part.parameter.name, bounds), 0, rows[some] - low)
        for dim in range(1, len(shape)):
            values = take(values, dim, wanted[dim] - starts[dim])
        if len(some) == len(rows) and bool(np.all(np.diff(some) == 1)):
            out = values  # all of them at once, in order
            break
        if out is None:
            out = torch.empty([len(indices) for indices in wanted], dtype=values.dtype)
        out.index_copy_(0, torch.from_numpy(some), values)
    assert out is not None
    absent = [dim for dim in range(len(shape)) if dim not in part.ours_of]
    theirs = out.permute(*absent, *part.ours_of)
    return theirs.reshape([stop - first, *part.shape[1:]])


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:  # a nearly full disk takes a part, then says that it is full
        view = view[file.write(view[: 1 << 26]) :]
