"""In: a run's tensors and state at one step. Out: checkpoints, complete or absent, and tensors loaded back.
Does not know models, optimizers or configs: tensors have names, and the state is the caller's JSON."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from codescent.base.agreement import RanksFailed, alone, rank, shortened, together, world_size
from codescent.base.torch_dtypes import CODE_DTYPES
from codescent.checkpoint.box import Box
from codescent.checkpoint.hold import hold, unheld
from codescent.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    OtherFormat,
    damaged_files,
    read_manifest,
)
from codescent.checkpoint.storage import (
    CheckpointWriter,
    discard,
    read_into,
    remove,
)

__all__ = ["CheckpointError", "Checkpoints", "Saved", "TensorReader", "read_tensors"]

_CHECKPOINT = re.compile(r"(?:\.replaced_)?step_(\d{8,18})")
_LEFTOVER = re.compile(r"\.(?:partial|deleted|replaced)_step_\d{8,18}.*")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its step, its folder, the validation loss it was saved with, and the caller's state."""

    step: int
    path: Path
    validation_loss: float | None
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in `folder/step_00000020/` and so on.

    `save` and `load` are collective where torch.distributed is initialised: every rank calls them, and either all
    return or all raise. The other methods are local; let rank 0 call `clean`.

    Args:
        folder: on a file system that all the ranks share; made at the first save.
        keep_last: how many of the newest checkpoints stay, at least 1.
        keep_best: whether the one with the lowest validation loss stays too, however old.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last = {keep_last}: the newest checkpoint has to stay")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | Box],
        state: Mapping[str, Any],
        validation_loss: float | None = None,
        *,
        rotates: bool = True,
    ) -> Path:
        """Write a checkpoint, which appears under its name when all of it is on the disk; then delete old ones.

        Args:
            step: steps done; an older checkpoint of the same step is replaced.
            tensors: by name. A plain tensor must be equal on the ranks that have it: one of them writes it. Of a Box or
                a DTensor every part is written.
            state: JSON data, rank 0's.
            validation_loss: what `keep_best` compares; None or NaN is never the best.
            rotates: False: nothing is deleted before rank 0 calls `rotate`.

        Returns its folder. Raises CheckpointError, on every rank: the disk is full or refuses; older ones stay.
        """
        writer = CheckpointWriter(self.folder, step, dict(state), validation_loss)
        try:
            writer.write(tensors)
        except (CheckpointError, RanksFailed) as error:  # every rank has reported: none writes any more
            writer.abandon()
            if isinstance(error, RanksFailed):
                raise
            raise CheckpointError(*shortened(error.problems), self._last_good()) from error
        except BaseException:  # a rank was lost: the others may be writing still, so the partial folder stays
            if alone():
                writer.abandon()
            raise
        if rotates and rank() == 0:
            self.rotate()
        return writer.final

    def latest(self, before: int | None = None) -> Saved | None:
        """The newest complete checkpoint (of a step less than `before`), or None where there is none.

        Raises:
            CheckpointError: its manifest is missing or was changed, which no kill does. `latest(before=…)` skips it.
        """
        while True:
            steps = [(step, path) for step, path in self._found().items() if before is None or step < before]
            if not steps:
                return None
            step, path = max(steps)
            try:
                if (saved := _saved_unless_gone(step, path)) is not None:  # else look again
                    return saved
            except OtherFormat:  # nothing to delete: the version that wrote it reads it
                raise
            except CheckpointError as error:
                raise CheckpointError(*error.problems, self._way_back(step, path)) from error

    def best(self) -> Saved | None:
        """The complete checkpoint with the lowest validation loss, of equals the newest; None: none has a loss."""
        looked = [_saved_unless_gone(step, path) for step, path in self._found().items()]
        saved = {one.step: one for one in looked if one is not None}
        best = _best({step: one.validation_loss for step, one in saved.items()})
        return None if best is None else saved[best]

    def at(self, step: int) -> Saved:
        """The complete checkpoint of a step. Raises CheckpointError: there is none, or its manifest was changed."""
        while step in (found := self._found()):
            if (saved := _saved_unless_gone(step, found[step])) is not None:
                return saved
        there = ", ".join(map(str, sorted(found))) or "none"
        raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are: {there}")

    def hold(self, choose: Callable[[], Saved]) -> tuple[Saved, FileIO]:
        """What `choose` gives, by one of the methods above, and a hold: until it is closed the run keeps the folder.

        It is called again where the run has deleted the folder in between. Raises what it raises.
        """
        while True:
            saved = choose()
            if (lock := hold(saved.path)) is not None:
                return saved, lock

    def newest_step(self, before: int | None = None) -> int | None:
        """The step of the newest checkpoint (of a step less than `before`), whether it can be read or not."""
        return max((step for step in self._found() if before is None or step < before), default=None)

    def forget_after(self, step: int) -> list[Path]:
        """Delete the checkpoints of later steps, which the run has given up. Returns their folders.

        Raises CheckpointError: one cannot be deleted.
        """
        later = [path for other, path in self._found().items() if other > step]
        for path in later:
            try:
                discard(path)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}: delete it, then resume the run") from error
        return later

    def rotate(self) -> None:
        """Keep the last k and the best. One that cannot be read is left alone, one that is held until the next time."""
        try:
            self._delete_old()
        except OSError as error:  # the newest one is complete; the other ranks go on, so must this one
            warnings.warn(f"{self.folder}: old checkpoints stay: {error}", RuntimeWarning, stacklevel=2)

    def incomplete(self) -> list[Path]:
        """Folders left by a save or a deletion that was killed. `latest` ignores them."""
        good = set(self._found().values())
        return [path for path in self._inside() if _LEFTOVER.fullmatch(path.name) and path not in good]

    def clean(self) -> None:
        """Delete what `incomplete` lists. Not while a save is under way."""
        for path in self.incomplete():
            remove(path)

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor | Box]) -> dict[str, Any]:
        """Load every tensor in place, in its present layout. No tensor changes before all files are verified.

        Args:
            saved: from `latest`, the same on every rank.
            tensors: by name; the ranks together name all of the checkpoint. A Box or a DTensor gets its own part.

        Returns the state that was saved. Raises CheckpointError, on every rank: files that are missing, truncated or
        changed; tensors that are missing, extra, or of another shape or dtype.
        """
        read: list[Manifest] = []

        def look() -> tuple[str, list[str]]:
            read.append(_manifest_of(saved.step, saved.path))
            return read[0].save_id, list(tensors)

        save_ids, names = zip(*together(CheckpointError, look))
        (manifest,) = read
        if len(set(save_ids)) > 1:
            raise CheckpointError(f"{saved.path}: not the same checkpoint on every rank")
        misfits = together(CheckpointError, lambda: _misfits(manifest, tensors, set(chain.from_iterable(names))))
        _refuse(f"{saved.path} is of another model or config:", misfits)
        damage = together(CheckpointError, lambda: damaged_files(saved.path, manifest, _share_of(manifest)))
        _refuse("", damage, self._way_back(saved.step, saved.path))
        together(CheckpointError, lambda: _read(saved.path, manifest, tensors))
        return manifest.state

    def _found(self) -> dict[int, Path]:
        """Folder of each step. A save killed between its two renames leaves a replaced one under its hidden name."""
        found = {}
        for path in self._inside():  # ".replaced_step_…" comes before "step_…", which then counts
            match = _CHECKPOINT.fullmatch(path.name)
            if match is not None and path.is_dir():
                found[int(match[1])] = path
        return found

    def _inside(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.is_dir() else []

    def _way_back(self, step: int, path: Path) -> str:
        older = self.newest_step(before=step)
        way = "there is no older one" if older is None else f"delete that folder to go back to step {older}"
        return f"{path} cannot be used; {way}"

    def _last_good(self) -> str:
        found = self._found()
        return f"the last checkpoint is {found[max(found)]}" if found else "there is no older checkpoint"

    def _delete_old(self) -> None:
        losses: dict[int, float | None] = {}
        found = self._found()
        for step, path in found.items():
            try:
                losses[step] = _manifest_of(step, path).validation_loss
            except CheckpointError as error:
                warnings.warn(f"left alone: {error}", RuntimeWarning, stacklevel=2)
        keep: set[int | None] = {*sorted(losses)[-self.keep_last :]}
        if self.keep_best:
            keep.add(_best(losses))
        for step in sorted(set(losses) - keep):
            with unheld(found[step]) as free:
                if free:
                    discard(found[step])


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Read whole tensors of a checkpoint (`Saved.path`) into memory, as saved, without the other ranks.

    Only the files that hold the tensors of these names (None: all) are read and verified.
    Raises CheckpointError: a file is missing, truncated or changed, or a name is not in the checkpoint.
    """
    with _told_if_gone(path):
        manifest = _verified(path, names)
        stored = {name: manifest.tensors[name] for name in (manifest.tensors if names is None else names)}
        tensors = {name: torch.empty(tensor.shape, dtype=CODE_DTYPES[tensor.dtype]) for name, tensor in stored.items()}
        _read(path, manifest, tensors)
    return tensors


class TensorReader:
    """Reads boxes of some tensors of a checkpoint on demand; arguments and errors as of `read_tensors`.

    The files that hold the tensors are verified at once.
    """

    def __init__(self, path: Path, names: Collection[str]) -> None:
        with _told_if_gone(path):
            self._path, self._manifest = path, _verified(path, names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._manifest.tensors[name].shape

    def box(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """One box of a tensor: a slice of step 1, with both ends, for each dim."""
        stored = self._manifest.tensors[name]
        local = torch.empty([part.stop - part.start for part in slices], dtype=CODE_DTYPES[stored.dtype])
        piece = Box(local, torch.Size(stored.shape), tuple(part.start for part in slices))
        alone = dataclasses.replace(self._manifest, tensors={name: stored})  # DCP looks at all that it is shown
        with _told_if_gone(self._path):
            _read(self._path, alone, {name: piece})
        return local


@contextmanager
def _told_if_gone(path: Path) -> Iterator[None]:
    """A folder that is deleted while it is read is not damaged."""
    try:
        yield
    except CheckpointError as error:
        if path.is_dir():
            raise
        raise CheckpointError(f"{path}: is not there; if it was a moment ago, somebody has deleted it") from error


def _verified(path: Path, names: Collection[str] | None) -> Manifest:
    """The manifest, where the files that hold these tensors (None: all) are as they were written."""
    manifest = read_manifest(path)
    known = manifest.tensors
    wanted = known if names is None else names
    _refuse(f"{path}:", [[f"{name}: not in the checkpoint" for name in wanted if name not in known]])
    _refuse("", [damaged_files(path, manifest, {chunk.file for name in wanted for chunk in known[name].chunks})])
    return manifest


def _best(losses: Mapping[int, float | None]) -> int | None:
    """The step of the lowest loss, of equals the newest; None: no step has one."""
    measured = [(loss, -step) for step, loss in losses.items() if loss is not None and not math.isnan(loss)]
    return -min(measured)[1] if measured else None


def _saved(step: int, path: Path) -> Saved:
    manifest = _manifest_of(step, path)
    return Saved(step, path, manifest.validation_loss, manifest.state)


def _saved_unless_gone(step: int, path: Path) -> Saved | None:
    """None: the run has deleted or replaced it since it was found. Raises CheckpointError: its manifest was changed."""
    try:
        return _saved(step, path)
    except CheckpointError:
        if path.is_dir():
            raise
        return None


def _manifest_of(step: int, path: Path) -> Manifest:
    manifest = read_manifest(path)
    if manifest.step != step:
        raise CheckpointError(f"{path / MANIFEST}: is of step {manifest.step}, in the folder of step {step}")
    return manifest


def _misfits(manifest: Manifest, tensors: Mapping[str, torch.Tensor | Box], wanted: set[str]) -> list[str]:
    """Tensors that the checkpoint lacks, or has in another shape or dtype, then those that it has too many."""
    problems = []
    for name, tensor in sorted(tensors.items()):
        stored = manifest.tensors.get(name)
        if stored is None:
            problems.append(f"{name}: not in the checkpoint")
            continue
        saved, asked = (
            f"{list(shape)} {str(dtype).removeprefix('torch.')}"
            for shape, dtype in ((stored.shape, CODE_DTYPES[stored.dtype]), (tensor.shape, tensor.dtype))
        )
        if saved != asked:
            problems.append(f"{name}: {saved} in the checkpoint, {asked} in this run")
    extra = sorted(set(manifest.tensors) - wanted)
    return problems + [f"{name}: in the checkpoint, but not in this run" for name in extra]


def _refuse(title: str, by_rank: list[list[str]], advice: str = "") -> None:
    if problems := list(dict.fromkeys(chain.from_iterable(by_rank))):  # each once, although every rank has found it
        raise CheckpointError(*filter(None, [title, *shortened(problems), advice]))


def _share_of(manifest: Manifest) -> list[str]:
    """The files that this rank verifies: each, largest first, goes to the rank with the fewest bytes so far."""
    loads = [0] * world_size()
    mine = []
    for name, file in sorted(manifest.files.items(), key=lambda pair: (-pair[1].size_bytes, pair[0])):
        chosen = loads.index(min(loads))
        loads[chosen] += file.size_bytes
        if chosen == rank():
            mine.append(name)
    return mine


def _read(path: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor | Box]) -> None:
    try:
        with torch.no_grad():
            read_into(path, manifest, tensors)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error
