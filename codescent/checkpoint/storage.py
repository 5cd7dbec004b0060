"""In: plans of torch's distributed checkpoint (DCP). Out: hashed safetensors files, and tensors read from them.
Does not choose folders, does not commit, and neither writes nor reads a pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from codescent.base.safetensors_header import encode_header
from codescent.base.torch_dtypes import CODE_DTYPES, DTYPE_CODES
from codescent.checkpoint.box import Box
from codescent.checkpoint.manifest import (
    THREADS,
    CheckpointError,
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    refusal,
)

T = TypeVar("T")

PART_BYTES = 256 << 20  # a rank's tensors are cut into files of about this size: as many threads hash and write them
PIECE_BYTES = 1 << 20  # hashed, then written while it is still in the cache
HEADER_ALIGNMENT = 64
HEADER_BYTES = 1024  # of one tensor's entries in a header and in the manifest, generously


@dataclass(frozen=True)
class SaveOrder:
    """What the coordinator tells every rank of a save: where to write, and under which name."""

    folder: Path
    step: int
    save_id: str
    needed_bytes: int


@dataclass(frozen=True)
class _Written:
    """What a rank tells the coordinator of one chunk that it wrote."""

    chunk: StoredChunk
    file: StoredFile


class BalancedSavePlanner(DefaultSavePlanner):
    """Every chunk is written once: the rank with the fewest bytes to write so far, of those that hold it, writes it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Largest chunks first, so that the ranks end within one small chunk of each other.

        Raises:
            ValueError: the ranks hold the same chunk in different shapes or dtypes.
        """
        holders: dict[MetadataIndex, list[int]] = defaultdict(list)
        items: dict[MetadataIndex, WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                first = items.setdefault(item.index, item)
                if _shape_and_dtype(first) != _shape_and_dtype(item):
                    raise ValueError(f"{item.index.fqn}: rank {rank} holds it in another shape or dtype")
                holders[item.index].append(rank)
        load_bytes = [0] * len(all_plans)
        chosen: list[list[WriteItem]] = [[] for _ in all_plans]
        for index, item in sorted(items.items(), key=lambda pair: (-item_bytes(pair[1]), pair[0].fqn)):
            rank = min(holders[index], key=lambda rank: load_bytes[rank])
            load_bytes[rank] += item_bytes(item)
            chosen[rank].append(item)
        plans = [dataclasses.replace(plan, items=items) for plan, items in zip(all_plans, chosen)]
        return super().create_global_plan(plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values to write."""
        found = self.state_dict[index.fqn]
        return found.chunk(tuple(index.offset or ())) if isinstance(found, Box) else super().lookup_object(index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, which reads into a Box, too."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Hide boxes from DCP's own, which would fill a copy of them."""
        known = {name: tensor for name, tensor in state_dict.items() if not isinstance(tensor, Box)}
        super().set_up_planner(known, metadata, is_coordinator)
        self.state_dict = self.original_state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory to fill."""
        found = self.state_dict[index.fqn]
        return found.local if isinstance(found, Box) else super().lookup_tensor(index)


class CheckedWriter(StorageWriter):
    """DCP's storage writer: each rank's chunks into safetensors files, hashed while they are written, synced to disk.

    Args:
        rank: this process's rank.
        step: the step being saved; every rank has to agree.
        begin: called on rank 0 alone, with the number of bytes to be written: makes the folder.
        finish: called on rank 0 alone, when every rank has written: commits.
    """

    def __init__(
        self,
        rank: int,
        step: int,
        begin: Callable[[int], SaveOrder],
        finish: Callable[[dict[str, StoredFile], dict[str, StoredTensor]], None],
    ) -> None:
        self._rank, self._step, self._begin, self._finish = rank, step, begin, finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: one writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the folder is made once the plan is known to fit on the disk."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell the coordinator which step this rank saves.

        Raises:
            TypeError: a dtype that the files have no name for.
        """
        for item in plan.items:
            if item.tensor_data is None or item.tensor_data.properties.dtype not in DTYPE_CODES:
                raise TypeError(f"{item.index.fqn}: not a tensor of one of {', '.join(map(str, DTYPE_CODES))}")
        return dataclasses.replace(plan, storage_data=self._step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder (rank 0) and send its name to every rank.

        Raises:
            RuntimeError: the ranks are not at the same step.
        """
        steps = [plan.storage_data for plan in plans]
        if len(set(steps)) > 1:
            raise RuntimeError(f"the ranks save different steps: {steps}")
        order = self._begin(sum(item_bytes(item) + HEADER_BYTES for plan in plans for item in plan.items))
        return [dataclasses.replace(plan, storage_data=order) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks.

        Raises:
            CheckpointError: the disk is full or refuses, or this rank does not see the folder that rank 0 made.
        """
        order: SaveOrder = plan.storage_data
        if not order.folder.is_dir():
            here = f"rank {self._rank} on {socket.gethostname()}"
            raise CheckpointError(
                f"{order.folder}: {here} does not see it: checkpoints need a file system that all share"
            )
        parts = _cut(plan.items)
        names = [f"rank_{self._rank:05d}_part_{number:03d}.safetensors" for number in range(len(parts))]
        with ThreadPoolExecutor(THREADS) as pool:
            writes = pool.map(lambda name, part: _write_part(order, name, part, planner), names, parts)
            results = [result for part in writes for result in part]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Hand what all the ranks wrote to the caller, which commits it."""
        files: dict[str, StoredFile] = {}
        chunks: dict[str, list[StoredChunk]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            files[written.chunk.file] = written.file
            chunks[result.index.fqn].append(written.chunk)
        tensors = {}
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata)
            code = DTYPE_CODES[stored.properties.dtype]
            boxes = sorted(chunks[name], key=lambda chunk: chunk.offsets)
            tensors[name] = StoredTensor(code, tuple(stored.size), tuple(boxes))
        self._finish(dict(sorted(files.items())), tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP asks this only where no writer is given."""
        return False


class CheckedReader(StorageReader):
    """DCP's storage reader over a manifest: bytes go straight into the tensors. The caller has verified them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._chunks = {
            MetadataIndex(name, chunk.offsets): (tensor, chunk)
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: one reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in DCP's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=CODE_DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in tensor.chunks
                    ],
                )
                for name, tensor in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the manifest was read before."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Each rank reads what it needs."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads what it needs."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of the plan, file by file, several files at a time."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._chunks[item.storage_index][1].file].append(item)
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda file: self._read_file(file, by_file[file], planner), by_file):
                pass
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP asks this only where no reader is given."""
        return False

    def _read_file(self, name: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        with (self._folder / name).open("rb", buffering=0) as file:
            for item in items:
                tensor, chunk = self._chunks[item.storage_index]
                target = planner.resolve_tensor(item).detach()
                _read_box(file, chunk, CODE_DTYPES[tensor.dtype], item, target)
                planner.commit_tensor(item, target)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _data(item: WriteItem) -> TensorWriteData:
    """The chunk that an item writes, and the whole that it is of: ours are all tensors."""
    assert item.tensor_data is not None
    return item.tensor_data


def _dtype(item: WriteItem) -> torch.dtype:
    return _data(item).properties.dtype


def item_bytes(item: WriteItem) -> int:
    """Bytes of the chunk that an item writes."""
    return _data(item).chunk.sizes.numel() * _dtype(item).itemsize


def _shape_and_dtype(item: WriteItem) -> tuple[object, ...]:
    return _data(item).size, _data(item).chunk.sizes, _dtype(item)


def _cut(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Parts of about PART_BYTES in the order of the names: a reader of the weights alone skips most of the rest."""
    parts: list[list[WriteItem]] = []
    part_bytes = 0
    for item in sorted(items, key=lambda item: (item.index.fqn, tuple(item.index.offset or ()))):
        if not parts or part_bytes + item_bytes(item) > PART_BYTES:
            parts.append([])
            part_bytes = 0
        parts[-1].append(item)
        part_bytes += item_bytes(item)
    return parts


def _write_part(order: SaveOrder, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """One safetensors file: widest elements first, so that each chunk is aligned to its element."""
    items = sorted(items, key=lambda item: -_dtype(item).itemsize)
    header, starts = _header(order, items)
    hasher = hashlib.sha256()
    try:
        with (order.folder / name).open("xb", buffering=0) as file:
            _write_hashed(file, hasher, memoryview(header))
            for item in items:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor)
                _write_hashed(file, hasher, _bytes_of(data.detach().cpu().contiguous()))
            os.fsync(file.fileno())
            stored = StoredFile(file.tell(), hasher.hexdigest())
    except OSError as error:
        raise refusal(error, order.folder / name, order.needed_bytes) from error
    results = []
    for item, start in zip(items, starts):
        box = _data(item).chunk
        chunk = StoredChunk(name, start, start + item_bytes(item), tuple(box.offsets), tuple(box.sizes))
        results.append(WriteResult(item.index, item_bytes(item), _Written(chunk, stored)))
    return results


def _header(order: SaveOrder, items: Sequence[WriteItem]) -> tuple[bytes, list[int]]:
    """The header of a safetensors file, and where in the file each item's bytes start."""
    tensors = []
    for item in items:
        box, name = _data(item).chunk, item.index.fqn
        if box.sizes != _data(item).size:  # a shard says which part it is, as one would write it in Python
            name += "[" + ",".join(f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes)) + "]"
        tensors.append((name, DTYPE_CODES[_dtype(item)], box.sizes))
    metadata = {"format": "pt", "save_id": order.save_id, "step": str(order.step)}
    return encode_header(tensors, metadata, HEADER_ALIGNMENT)


def _write_hashed(file: FileIO, hasher: Any, data: memoryview) -> None:
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        hasher.update(piece)
        while piece:  # a nearly full disk takes a part of a piece, then says that it is full
            piece = piece[file.write(piece) :]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_box(file: FileIO, chunk: StoredChunk, dtype: torch.dtype, item: ReadItem, target: torch.Tensor) -> None:
    """Read whole rows of the chunk (its first dim), straight into the target where the box is just those rows."""
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    rows_shape = lengths[:1] + chunk.sizes[1:]
    row_bytes = torch.Size(chunk.sizes[1:]).numel() * dtype.itemsize
    file.seek(chunk.start_bytes + (offsets[0] * row_bytes if offsets else 0))
    direct = rows_shape == lengths and target.device.type == "cpu" and target.is_contiguous()
    rows = target if direct else torch.empty(rows_shape, dtype=dtype)
    _read_exactly(file, _bytes_of(rows))
    if not direct:
        for dim in range(1, len(lengths)):
            rows = rows.narrow(dim, offsets[dim], lengths[dim])
        target.copy_(rows)


def _read_exactly(file: FileIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view[: 1 << 30])
        if not count:
            raise OSError(f"{file.name!s}: ended early")
        view = view[count:]
