"""In: names and shapes of Hugging Face tensors, a function that reads our parameters in slices. Out: safetensors files.
Does not hold a whole tensor in memory: it writes block by block, so memory does not depend on the model's size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from codescent.base.durable import write_synced
from codescent.base.safetensors_header import encode_header
from codescent.base.torch_dtypes import CODE_DTYPES
from codescent.base.writing import open_new, write_all
from codescent.huggingface.correspond import TheirTensor
from codescent.huggingface.folder import INDEX, WEIGHTS
from codescent.huggingface.read import take
from codescent.huggingface.rounding import Rounding

BLOCK_NUMEL = 1 << 21  # about how many elements are read or written at a time
Read = Callable[[str, tuple[slice, ...]], torch.Tensor]  # a box of the parameter of that name


@dataclass(frozen=True)
class Shard:
    """A file of tensors: its name, its tensors in order, its bytes without the header. A tensor may be several parts,
    one for each of its pieces, which follow each other."""

    file: str
    parts: tuple[TheirTensor, ...]
    size_bytes: int


def shards(parts: Sequence[TheirTensor], dtype: str, max_bytes: int) -> list[Shard]:
    """Divide tensors, in their order, into files of at most `max_bytes`. A larger tensor gets its own file."""
    element_bytes = CODE_DTYPES[dtype].itemsize
    groups: list[list[TheirTensor]] = [[]]
    sizes = [0]
    for _, pieces in groupby(parts, lambda part: part.tensor):
        whole = list(pieces)
        size = math.prod(whole[0].whole) * element_bytes
        if groups[-1] and sizes[-1] + size > max_bytes:
            groups.append([])
            sizes.append(0)
        groups[-1] += whole
        sizes[-1] += size
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = zip([WEIGHTS] if count == 1 else names, groups, sizes, strict=True)
    return [Shard(name, tuple(group), size) for name, group, size in files]


def write_weights(
    folder: Path, files: Sequence[Shard], dtype: str, read: Read, zeros: Collection[str], rounding: Rounding
) -> None:
    """Write the files, and an index if there are several. All files are on the disk when this returns.

    Args:
        folder: folder to write into.
        files: from `shards`.
        dtype: number format of the files, a key of CODE_DTYPES.
        read: reads slices of our parameters.
        zeros: parameters that our model lacks. Their tensors are written as zeros.
        rounding: gets how far each tensor is from the trained one.
    """
    for shard in files:
        with open_new(folder / shard.file) as file:
            tensors = ((part.tensor, dtype, part.whole) for part in shard.parts if part.first == 0)
            write_all(file, encode_header(tensors, {"format": "pt"})[0])
            for tensor, pieces in groupby(shard.parts, lambda part: part.tensor):
                for part in pieces:
                    for block in _blocks(part, None if part.parameter.name in zeros else read):
                        data = block.to(CODE_DTYPES[dtype]).contiguous()
                        rounding.add(block, data)
                        write_all(file, data.reshape(-1).view(torch.uint8).numpy().data)
                rounding.end(tensor)
            os.fsync(file.fileno())
    if len(files) > 1:
        where = {part.tensor: shard.file for shard in files for part in shard.parts}
        total = sum(shard.size_bytes for shard in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _blocks(part: TheirTensor, read: Read | None) -> Iterator[torch.Tensor]:
    """The values of one of their tensors, as blocks of indices of its first dim."""
    inner = math.prod(part.shape[1:])
    step = max(1, BLOCK_NUMEL // inner)
    for first in range(0, part.shape[0], step):
        stop = min(first + step, part.shape[0])
        if read is None:
            yield torch.zeros(stop - first, *part.shape[1:])
        else:
            yield _block(part, first, stop, read)


def _block(part: TheirTensor, first: int, stop: int, read: Read) -> torch.Tensor:
    """Indices [first, stop) of the first dim of their tensor, read from blocks of rows of our parameter."""
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
            out = values  # one block had all the rows, in order
            break
        if out is None:
            out = torch.empty([len(indices) for indices in wanted], dtype=values.dtype)
        out.index_copy_(0, torch.from_numpy(some), values)
    assert out is not None
    absent = [dim for dim in range(len(shape)) if dim not in part.ours_of]
    theirs = out.permute(*absent, *part.ours_of)
    return theirs.reshape([stop - first, *part.shape[1:]])
