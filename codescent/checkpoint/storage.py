"""In: this rank's tensors. Out: a checkpoint folder of safetensors files; or tensors loaded from such files.
Does not choose old checkpoints to delete (checkpoints.py does). Ranks exchange JSON, no pickle."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from codescent.base import writing
from codescent.base.agreement import all_same, decided, from_first, rank
from codescent.base.durable import write_synced
from codescent.base.errors import UserError
from codescent.base.published import begin, commit
from codescent.base.reading import open_unbuffered
from codescent.checkpoint import manifest as stored
from codescent.checkpoint.areas import Area, shared
from codescent.checkpoint.box import Box, box_of
from codescent.checkpoint.folders import discard, remove
from codescent.checkpoint.manifest import MANIFEST, THREADS, CheckpointError, Manifest, StoredChunk, refusal
from codescent.checkpoint.parts import (
    HEADER_BYTES,
    SaveOrder,
    TensorChunk,
    Values,
    bytes_of,
    cut_into_parts,
    described,
    stored_bytes,
    write_part,
)


@dataclasses.dataclass(frozen=True)
class Division:
    """Who writes which chunks of a checkpoint, as the ranks have agreed.

    Attributes:
        described: the chunks that this rank holds.
        chosen: indices of those that it writes.
        tensors_bytes: that all ranks write.
    """

    described: list[list[Any]]
    chosen: list[int]
    tensors_bytes: int


class CheckpointWriter:
    """Writes one checkpoint into a hidden folder, and renames it to `final` when all files are on the disk.

    Each rank writes its chunks into safetensors files and hashes them. Only rank 0 creates the folder, writes the
    manifest and renames the folder.

    Args:
        folder: folder of all checkpoints of the run.
        step: the step to save, equal on every rank.
        state, validation_loss: values for the manifest.
        within: `folder`, or a folder above it that the user has named.
        may_commit: is called by rank 0 before the folder gets its name. It raises UserError if it must not.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        state: dict[str, Any],
        validation_loss: float | None,
        within: Path,
        may_commit: Callable[[], object] = object,
    ) -> None:
        self._may_commit = may_commit
        self.final = folder / f"step_{step:08d}"
        save_id = os.urandom(4).hex()
        self._order = SaveOrder(folder / f".partial_{self.final.name}_{save_id}", within, step, save_id, 0)
        self._state = state
        self._validation_loss = None if validation_loss is None else float(validation_loss)

    def write(self, tensors: Mapping[str, torch.Tensor | Box]) -> None:
        """Write this rank's chunks; rank 0 then completes the checkpoint. Collective; raises on every rank.

        Raises:
            CheckpointError: the file system failed, or a rank does not see the folder of rank 0.
            RanksFailed: the ranks save different steps or shapes, or a dtype that safetensors lacks.
        """
        self.divide(tensors)
        decided(CheckpointError, lambda: self.write_own(self.values), self.complete)

    def divide(self, tensors: Mapping[str, torch.Tensor | Box], before: Division | None = None) -> Division:
        """Decide which chunks this rank writes (`chunks`), and create the hidden folder. Collective, errors as `write`.

        Then `write_own` on every rank and `complete` on rank 0 make the checkpoint.

        `before`: the result for an earlier save. It holds again if all ranks have the same chunks as then.
        """
        self._rank = rank()
        chunks: list[TensorChunk] = []

        def describe() -> list[list[Any]]:
            if strange := [name for name, one in tensors.items() if not isinstance(one, (torch.Tensor, Box))]:
                raise TypeError(f"{strange[0]}: not a tensor")
            self._boxes = {name: box_of(tensor) for name, tensor in tensors.items()}
            chunks[:] = (
                TensorChunk(name, box.dtype, tuple(box.shape), area)
                for name, box in self._boxes.items()
                for area in box.chunks
            )
            return [described(chunk) for chunk in chunks]

        if before is not None and self._still_holds(before, describe):
            order, division = from_first(CheckpointError, lambda: self._begin(before.tensors_bytes)), before
        else:
            order, chosen, tensors_bytes = decided(
                CheckpointError, lambda: {"step": self._order.step, "items": describe()}, self._divide
            )
            division = Division([described(chunk) for chunk in chunks], chosen[self._rank], tensors_bytes)
        self._order = SaveOrder(Path(order.pop("folder")), Path(order.pop("within")), **order)
        self.chunks = [chunks[number] for number in division.chosen]
        return division

    def _still_holds(self, before: Division, describe: Callable[[], list[list[Any]]]) -> bool:
        """Whether no rank has other chunks than before, and all save the same step. Collective."""
        try:
            same = describe() == before.described
        except Exception:  # raised again, on every rank, where the ranks divide anew
            same = False
        return all_same([self._order.step, same]) and same

    def values(self, chunk: TensorChunk) -> torch.Tensor:
        """The present values of a chunk."""
        return self._boxes[chunk.name].values(chunk.area)

    def abandon(self) -> None:
        """Delete the hidden folder (rank 0), to free the disk space."""
        if rank() == 0 and self._order.folder.exists():
            remove(self._order.folder, self._order.within)

    def _divide(self, ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], list[list[int]], int]:
        """Divide the chunks, and create the folder. Returns what `_begin` does, each rank's items, and their bytes."""
        steps = [one["step"] for one in ranks]
        if len(set(steps)) > 1:
            raise RuntimeError(f"the ranks save different steps: {steps}")
        chosen = balanced([one["items"] for one in ranks])
        tensors_bytes = sum(
            stored_bytes(one["items"][number]) + HEADER_BYTES for one, of in zip(ranks, chosen) for number in of
        )
        return self._begin(tensors_bytes), chosen, tensors_bytes

    def _begin(self, tensors_bytes: int) -> dict[str, Any]:
        """Create the folder if the disk has enough space. Returns the SaveOrder as JSON data."""
        needed_bytes = tensors_bytes + len(json.dumps(self._state)) + 4096  # fails if the state is not JSON data
        order = self._order = dataclasses.replace(self._order, needed_bytes=needed_bytes)
        try:
            begin(order.folder, needed_bytes, order.within)
        except OSError as error:
            raise refusal(error, Path(error.filename or order.folder), needed_bytes) from error
        return dataclasses.asdict(order) | {"folder": str(order.folder), "within": str(order.within)}

    def write_own(self, values: Values, threads: int = THREADS) -> dict[str, Any]:
        """Write this rank's chunks, by so many threads. Not collective: any thread may call it.

        Returns its files, and each chunk with its tensor's name, dtype and shape.
        """
        order = self._order
        if not order.folder.is_dir():
            raise CheckpointError(
                f"{order.folder}: rank {self._rank} on {socket.gethostname()} does not see it: checkpoints need a file "
                "system that all ranks share"
            )
        parts = cut_into_parts(self.chunks)
        names = [f"rank_{self._rank:05d}_part_{number:03d}.safetensors" for number in range(len(parts))]
        each = partial(write_part, order)
        if threads == 1:  # by the caller: a pool would hold up the end of the process until all is written
            files = [each(name, part, values) for name, part in zip(names, parts)]
        else:
            with ThreadPoolExecutor(threads) as pool:
                files = list(pool.map(lambda name, part: each(name, part, values), names, parts))
        return {
            "files": {name: dataclasses.asdict(file) for name, (file, _) in zip(names, files)},
            "chunks": [[*described(chunk)[:3], dataclasses.asdict(place)] for _, of in files for chunk, place in of],
        }

    def complete(self, ranks: list[dict[str, Any]]) -> None:
        """Write the manifest and rename the folder, on rank 0. Raises CheckpointError: the file system failed.

        `ranks`: what `write_own` has returned on each rank.
        """
        files = {name: stored.StoredFile(**file) for one in ranks for name, file in one["files"].items()}
        found: dict[str, tuple[str, tuple[int, ...], list[StoredChunk]]] = {}
        for name, dtype, shape, chunk in (entry for one in ranks for entry in one["chunks"]):
            of_name = found.setdefault(name, (dtype, tuple(shape), []))
            of_name[2].append(
                StoredChunk(**{**chunk, "offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])})
            )
        tensors = {
            name: stored.StoredTensor(dtype, shape, tuple(sorted(chunks, key=lambda chunk: chunk.offsets)))
            for name, (dtype, shape, chunks) in sorted(found.items())
        }
        try:
            self._commit(dict(sorted(files.items())), tensors)
        except OSError as error:
            raise refusal(error, self._order.folder, self._order.needed_bytes) from error

    def _commit(self, files: dict[str, stored.StoredFile], tensors: dict[str, stored.StoredTensor]) -> None:
        order, replaced = self._order, self.final.with_name(f".replaced_{self.final.name}")
        for name, expected in files.items():
            if (size := (order.folder / name).stat().st_size) != expected.size_bytes:
                raise CheckpointError(f"{order.folder / name}: {size:,} bytes, expected {expected.size_bytes:,}")
        manifest = Manifest(order.step, order.save_id, self._validation_loss, self._state, files, tensors)
        write_synced(order.folder / MANIFEST, stored.encode_manifest(manifest), within=order.within)
        try:
            self._may_commit()
        except UserError as error:
            raise CheckpointError(*error.problems) from error
        if self.final.exists():  # rename replaces empty folders only. The set-aside folder still counts as a checkpoint
            if replaced.exists():
                discard(replaced, order.within)
            writing.move(self.final, replaced, order.within)
        commit(order.folder, self.final, order.within)
        if replaced.exists():
            discard(replaced, order.within)


def balanced(ranks: Sequence[Sequence[Sequence[Any]]]) -> list[list[int]]:
    """Assign each chunk to one rank for writing: among the ranks that hold it, the rank with the fewest bytes so far.

    Args:
        ranks: for each rank its chunks, in the form of `described`.

    Returns for each rank the indices of its chunks to write.

    Raises ValueError: the ranks hold the same chunk in different shapes or dtypes.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    items_of: dict[tuple[str, tuple[int, ...]], Sequence[Any]] = {}
    for holder, items in enumerate(ranks):
        for number, item in enumerate(items):
            key = (item[0], tuple(item[3]))
            if items_of.setdefault(key, item) != item:
                raise ValueError(f"{item[0]}: rank {holder} holds it in another shape or dtype")
            holders[key].append((holder, number))
    load_bytes = [0] * len(ranks)
    chosen: list[list[int]] = [[] for _ in ranks]
    chunk_bytes = {key: stored_bytes(item) for key, item in items_of.items()}
    for key in sorted(holders, key=lambda key: (-chunk_bytes[key], key[0])):  # largest first
        writer, number = min(holders[key], key=lambda one: load_bytes[one[0]])
        load_bytes[writer] += chunk_bytes[key]
        chosen[writer].append(number)
    return chosen


def read_into(folder: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor | Box]) -> None:
    """Fill this rank's tensors from the files of a checkpoint. The caller has verified the files. Not collective."""
    by_file: dict[str, list[tuple[StoredChunk, Box, Area]]] = defaultdict(list)
    for name, tensor in tensors.items():
        box = box_of(tensor)
        if not box.local.numel():
            continue
        for chunk in manifest.tensors[name].chunks:
            if (both := shared(box.area, Area(chunk.offsets, chunk.sizes))) is not None:
                by_file[chunk.file].append((chunk, box, both))

    def read_file(name: str) -> None:
        with open_unbuffered(folder / name) as file:
            for chunk, box, area in by_file[name]:
                _read_area(file, chunk, area, box.values(area))

    with ThreadPoolExecutor(THREADS) as pool:  # several files at a time
        list(pool.map(read_file, by_file))


def _read_area(file: FileIO, chunk: StoredChunk, area: Area, target: torch.Tensor) -> None:
    """Read the rows (first dim) of a chunk that an area needs, and fill `target`.

    Complete rows are read into a contiguous CPU target without a copy.
    """
    offsets = tuple(first - begin for first, begin in zip(area.offsets, chunk.offsets))
    rows_shape = area.sizes[:1] + chunk.sizes[1:]
    row_bytes = math.prod(chunk.sizes[1:]) * target.dtype.itemsize
    file.seek(chunk.start_bytes + (offsets[0] * row_bytes if offsets else 0))
    direct = rows_shape == area.sizes and target.device.type == "cpu" and target.is_contiguous()
    rows = target if direct else torch.empty(rows_shape, dtype=target.dtype)
    _read_exactly(file, bytes_of(rows))
    if not direct:
        for dim in range(1, len(offsets)):
            rows = rows.narrow(dim, offsets[dim], area.sizes[dim])
        target.copy_(rows)


def _read_exactly(file: FileIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view[: 1 << 30])
        if not count:
            raise OSError(f"{file.name!s}: ended early")
        view = view[count:]
