"""In: plans of torch's distributed checkpoint (DCP). Out: a folder of hashed safetensors files, and tensors read back.
Does not delete old checkpoints, and neither writes nor reads a pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import socket
import warnings
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
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

from codescent.base.agreement import rank
from codescent.base.durable import write_synced
from codescent.base.published import begin, commit
from codescent.base.safetensors_header import encode_header
from codescent.base.torch_dtypes import CODE_DTYPES, DTYPE_CODES
from codescent.checkpoint import manifest as stored
from codescent.checkpoint.box import Box
from codescent.checkpoint.manifest import MANIFEST, THREADS, CheckpointError, Manifest, StoredChunk, refusal

T = TypeVar("T")

PART_BYTES = 256 << 20  # a rank's tensors are cut into files of about this size: as many threads hash and write them
PIECE_BYTES = 1 << 20  # hashed, then written while it is still in the cache
HEADER_ALIGNMENT = 64
HEADER_BYTES = 1024  # of one tensor's entries in a header and in the manifest, generously


@dataclass(frozen=True)
class SaveOrder:
    """What rank 0 sends to every rank of a save: where to write, and what the files say of themselves."""

    folder: Path
    step: int
    save_id: str
    needed_bytes: int


class BalancedSavePlanner(DefaultSavePlanner):
    """A chunk that several ranks hold is written by the one with the fewest bytes to write so far."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
        """Largest chunks first. Raises ValueError: the ranks hold the same chunk in different shapes or dtypes."""
        holders: dict[dcp.MetadataIndex, list[int]] = defaultdict(list)
        items: dict[dcp.MetadataIndex, WriteItem] = {}
        for holder, plan in enumerate(all_plans):
            for item in plan.items:
                first = items.setdefault(item.index, item)
                if _shape_and_dtype(first) != _shape_and_dtype(item):
                    raise ValueError(f"{item.index.fqn}: rank {holder} holds it in another shape or dtype")
                holders[item.index].append(holder)
        load_bytes = [0] * len(all_plans)
        chosen: list[list[WriteItem]] = [[] for _ in all_plans]
        for index, item in sorted(items.items(), key=lambda pair: (-item_bytes(pair[1]), pair[0].fqn)):
            writer = min(holders[index], key=load_bytes.__getitem__)
            load_bytes[writer] += item_bytes(item)
            chosen[writer].append(item)
        plans = [dataclasses.replace(plan, items=items) for plan, items in zip(all_plans, chosen)]
        return super().create_global_plan(plans)

    def lookup_object(self, index: dcp.MetadataIndex) -> Any:
        """The values to write."""
        found = self.state_dict[index.fqn]
        return found.chunk(tuple(index.offset or ())) if isinstance(found, Box) else super().lookup_object(index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """DCP's planner that can read into a Box."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Hide boxes from DCP's planner, which would fill a copy of them."""
        known = {name: tensor for name, tensor in state_dict.items() if not isinstance(tensor, Box)}
        super().set_up_planner(known, metadata, is_coordinator)
        self.state_dict = self.original_state_dict = state_dict

    def lookup_tensor(self, index: dcp.MetadataIndex) -> torch.Tensor:
        """The memory to fill."""
        found = self.state_dict[index.fqn]
        return found.local if isinstance(found, Box) else super().lookup_tensor(index)


class _OneUse:
    """What DCP asks of a writer or reader that serves one checkpoint."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class CheckedWriter(_OneUse, StorageWriter):
    """DCP's storage writer of one checkpoint: a hidden folder, renamed to `final` when all of it is on the disk.

    Each rank writes its chunks into safetensors files, hashed while they are written. Rank 0 alone makes the folder,
    writes the manifest and renames.

    Args:
        folder: of all checkpoints of the run.
        step: the step being saved; every rank has to agree.
        state, validation_loss: for the manifest.
    """

    def __init__(self, folder: Path, step: int, state: dict[str, Any], validation_loss: float | None) -> None:
        self.final = folder / f"step_{step:08d}"
        save_id = os.urandom(4).hex()
        self._order = SaveOrder(folder / f".partial_{self.final.name}_{save_id}", step, save_id, 0)
        self._state = state
        self._validation_loss = None if validation_loss is None else float(validation_loss)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the folder is made once the plan is known to fit on the disk."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell rank 0 which step this rank saves. Raises TypeError: a dtype that the files have no name for."""
        for item in plan.items:
            if item.tensor_data is None or item.tensor_data.properties.dtype not in DTYPE_CODES:
                raise TypeError(f"{item.index.fqn}: not a tensor of one of {', '.join(map(str, DTYPE_CODES))}")
        return dataclasses.replace(plan, storage_data=self._order.step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder (rank 0), if the checkpoint fits on the disk, and send its name to every rank.

        Raises CheckpointError: the disk refuses; RuntimeError: the ranks are not at the same step.
        """
        steps = [plan.storage_data for plan in plans]
        if len(set(steps)) > 1:
            raise RuntimeError(f"the ranks save different steps: {steps}")
        tensors_bytes = sum(item_bytes(item) + HEADER_BYTES for plan in plans for item in plan.items)
        needed_bytes = tensors_bytes + len(json.dumps(self._state)) + 4096  # a state that is no JSON fails here
        order = self._order = dataclasses.replace(self._order, needed_bytes=needed_bytes)
        try:
            begin(order.folder, needed_bytes)
        except OSError as error:
            raise refusal(error, Path(error.filename or order.folder), needed_bytes) from error
        return [dataclasses.replace(plan, storage_data=order) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks. Raises CheckpointError: the disk refuses, or rank 0's folder is not visible."""
        order: SaveOrder = plan.storage_data
        if not order.folder.is_dir():
            raise CheckpointError(
                f"{order.folder}: rank {rank()} on {socket.gethostname()} does not see it: checkpoints need a file "
                "system that all share"
            )
        parts = _cut(plan.items)
        names = [f"rank_{rank():05d}_part_{number:03d}.safetensors" for number in range(len(parts))]
        with ThreadPoolExecutor(THREADS) as pool:
            writes = pool.map(lambda name, part: _write_part(order, name, part, planner), names, parts)
            results = [result for part in writes for result in part]
        return _done(results)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename the folder: now it is complete. Raises CheckpointError: the disk refuses."""
        files: dict[str, stored.StoredFile] = {}
        chunks: dict[str, list[StoredChunk]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            chunk, file = result.storage_data
            files[chunk.file] = file
            chunks[result.index.fqn].append(chunk)
        tensors = {}
        for name, found in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(found, dcp.TensorStorageMetadata)
            boxes = tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets))
            tensors[name] = stored.StoredTensor(DTYPE_CODES[found.properties.dtype], tuple(found.size), boxes)
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
        write_synced(order.folder / MANIFEST, stored.encode_manifest(manifest))
        if self.final.exists():  # only an empty folder can be renamed over: set it aside, where it still counts
            if replaced.exists():
                discard(replaced)
            self.final.rename(replaced)
        commit(order.folder, self.final)
        if replaced.exists():
            discard(replaced)

    def abandon(self) -> None:
        """Remove the hidden folder (rank 0), so that a full disk is not kept full."""
        if rank() == 0 and self._order.folder.exists():
            remove(self._order.folder)


class CheckedReader(_OneUse, StorageReader):
    """DCP's storage reader over a manifest: bytes go straight into the tensors. The caller has verified them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._chunks = {
            dcp.MetadataIndex(name, chunk.offsets): (tensor, chunk)
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The manifest as DCP's metadata."""
        found: dict[str, Any] = {}
        for name, tensor in self._manifest.tensors.items():
            places = ((torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks)
            chunks = [dcp.ChunkStorageMetadata(*place) for place in places]
            properties = dcp.TensorProperties(dtype=CODE_DTYPES[tensor.dtype])
            found[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return dcp.Metadata(found)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
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
    """The chunk that an item writes, and its whole: our items are all tensors."""
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
            whole = stored.StoredFile(file.tell(), hasher.hexdigest())
    except OSError as error:
        raise refusal(error, order.folder / name, order.needed_bytes) from error
    results = []
    for item, start in zip(items, starts):
        box = _data(item).chunk
        chunk = StoredChunk(name, start, start + item_bytes(item), tuple(box.offsets), tuple(box.sizes))
        results.append(WriteResult(item.index, item_bytes(item), (chunk, whole)))
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


def discard(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill halfway leaves no half of it under a name that counts."""
    leaving = path.with_name(f".deleted_{path.name.removeprefix('.replaced_')}_{os.urandom(4).hex()}")
    path.rename(leaving)
    remove(leaving)


def remove(path: Path) -> None:
    """Delete a folder, with a warning if that fails."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as error:  # the training goes on: `incomplete` lists it, and the next `clean` tries again
        warnings.warn(f"{path}: not deleted: {error.strerror}", RuntimeWarning, stacklevel=2)
