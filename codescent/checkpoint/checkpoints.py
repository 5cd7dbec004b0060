"""In: named tensors of a run, and JSON data. Out: checkpoints of the run: saved, found, loaded; old ones deleted.
Does not know models, optimizers or configs."""

from __future__ import annotations

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

from codescent.base.agreement import RanksFailed, alone, rank, shortened, together
from codescent.base.torch_dtypes import CODE_DTYPES
from codescent.checkpoint.box import Box
from codescent.checkpoint.folders import by_step, discard, listed, remove
from codescent.checkpoint.hold import hold, unheld
from codescent.checkpoint.judged import lacks_room, misfits, refuse, share_of
from codescent.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    NoRoom,
    OtherFormat,
    damaged_files,
    read_manifest,
)
from codescent.checkpoint.storage import CheckpointWriter, read_into

__all__ = ["CheckpointError", "Checkpoints", "NoRoom", "Saved", "TensorReader", "read_tensors"]

_LEFTOVER = re.compile(r"\.(?:partial|deleted|replaced)_step_\d{8,18}.*")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its step, folder, validation loss, and the JSON data (`state`) of the caller."""

    step: int
    path: Path
    validation_loss: float | None
    state: dict[str, Any]

    @property
    def where(self) -> str:
        """Where it is, in messages."""
        return f"{self.path} at step {self.step}"

    def load_into(self, tensors: Mapping[str, torch.Tensor | Box], checkpoints: Checkpoints) -> None:
        """Load all tensors in place, in their current layout. See `Checkpoints.load`."""
        checkpoints.load(self, tensors)


class Checkpoints:
    """The checkpoints of one run, in `folder/step_00000020/` and so on.

    With torch.distributed `save` and `load` are collective: every rank calls them, and all ranks return or all raise.
    The other methods are local. Only rank 0 should call `clean`.

    Args:
        folder: on a file system that all ranks share; created at the first save.
        keep_last: number of newest checkpoints that are not deleted, at least 1.
        keep_best: True: the checkpoint with the lowest validation loss is not deleted either.
        of_run: the folder is one of a run, so it may be no link (base/writing.py). Else the user has named it.

    Attributes:
        may_commit: is called by rank 0 before a checkpoint gets its name. It raises an error, if it must not.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool, *, of_run: bool = False) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last = {keep_last}: the newest checkpoint has to stay")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.of_run = of_run
        self.may_commit: Callable[[], object] = object

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | Box],
        state: Mapping[str, Any],
        validation_loss: float | None = None,
        *,
        rotates: bool = True,
    ) -> Path:
        """Write a checkpoint atomically; then delete old checkpoints.

        Args:
            step: number of steps done. An existing checkpoint of this step is replaced.
            tensors: by name. A plain tensor must be equal on all ranks that pass it; one of them writes it. The parts
                of a Box or a DTensor are all written.
            state: JSON data; the data of rank 0 is saved.
            validation_loss: loss for `keep_best`; None and NaN are never the best.
            rotates: False: old checkpoints stay until rank 0 calls `rotate`.

        Returns the folder. Raises CheckpointError on every rank: the file system failed; NoRoom: the disk is full.
        Older checkpoints stay.
        """
        writer = self.writer(step, state, validation_loss)
        with self.completing(writer):
            writer.write(tensors)
        if rotates and rank() == 0:
            self.rotate()
        return writer.final

    def writer(self, step: int, state: Mapping[str, Any], validation_loss: float | None) -> CheckpointWriter:
        """What writes the checkpoint of a step. Arguments as of `save`."""
        return CheckpointWriter(self.folder, step, dict(state), validation_loss, self.within, self.may_commit)

    @contextmanager
    def completing(self, writer: CheckpointWriter) -> Iterator[None]:
        """A block in which ranks write together. If it is refused, what was written is deleted. Errors as of `save`."""
        try:
            yield
        except (CheckpointError, RanksFailed) as error:  # every rank has finished writing
            writer.abandon()
            if isinstance(error, RanksFailed):
                raise
            kind = NoRoom if lacks_room(error) else CheckpointError
            raise kind(*shortened(error.problems), self._last_good()) from error
        except BaseException:  # a rank was lost; other ranks may still write, so the partial folder stays
            if alone():
                writer.abandon()
            raise

    def latest(self, before: int | None = None) -> Saved | None:
        """The newest complete checkpoint (of a step less than `before`); None without one.

        Raises:
            CheckpointError: its manifest is missing or was changed, which a kill cannot cause. `latest(before=…)`
                finds an older checkpoint.
        """
        while True:
            steps = [(step, path) for step, path in self._found().items() if before is None or step < before]
            if not steps:
                return None
            step, path = max(steps)
            try:
                if (saved := _saved_unless_gone(step, path)) is not None:  # None: deleted meanwhile, search again
                    return saved
            except OtherFormat:  # not damaged: another version can read it
                raise
            except CheckpointError as error:
                raise CheckpointError(*error.problems, self.way_back(step, path)) from error

    def best(self) -> Saved | None:
        """The complete checkpoint with the lowest validation loss, the newest among equals; None without a loss."""
        looked = [_saved_unless_gone(step, path) for step, path in self._found().items()]
        saved = {one.step: one for one in looked if one is not None}
        best = _best({step: one.validation_loss for step, one in saved.items()})
        return None if best is None else saved[best]

    def best_loss(self) -> float | None:
        """The lowest validation loss of the readable checkpoints; None: none has a validation loss."""
        losses = self._losses(self._found())
        best = _best(losses)
        return None if best is None else losses[best]

    def at(self, step: int) -> Saved:
        """The complete checkpoint of a step. Raises CheckpointError: it does not exist, or its manifest was changed."""
        while step in (found := self._found()):
            if (saved := _saved_unless_gone(step, found[step])) is not None:
                return saved
        there = ", ".join(map(str, sorted(found))) or "none"
        raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are: {there}")

    def hold(self, choose: Callable[[], Saved]) -> tuple[Saved, FileIO]:
        """Choose a checkpoint and lock it. Until the returned file is closed, the run does not delete the folder.

        Args:
            choose: calls `latest`, `best` or `at`. It is called again if the run deletes the folder before the lock.

        Raises the errors of `choose`.
        """
        while True:
            saved = choose()
            if (lock := hold(saved.path)) is not None:
                return saved, lock

    def newest_step(self, before: int | None = None) -> int | None:
        """The step of the newest checkpoint (less than `before`), readable or damaged; None without one."""
        return max((step for step in self._found() if before is None or step < before), default=None)

    def damage(self, saved: Saved) -> list[str]:
        """What is wrong with the files of a checkpoint, in sentences. Collective: the ranks share the files."""

        def look() -> list[str]:
            try:
                manifest = _manifest_of(saved.step, saved.path)
            except CheckpointError as error:
                return list(error.problems)
            return damaged_files(saved.path, manifest, share_of(manifest))

        return list(dict.fromkeys(chain.from_iterable(together(CheckpointError, look))))

    def delete_after(self, step: int) -> list[Path]:
        """Delete the checkpoints of all later steps. Returns their folders.

        Raises CheckpointError: a checkpoint cannot be deleted.
        """
        later = [path for other, path in self._found().items() if other > step]
        for path in later:
            try:
                discard(path, self.within)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}: delete it, then resume the run") from error
        return later

    def rotate(self) -> None:
        """Delete all checkpoints except the last `keep_last` and the best. Unreadable and locked checkpoints stay."""
        try:
            self._delete_old()
        except OSError as error:  # the new checkpoint is complete, and other ranks continue: only warn
            warnings.warn(f"{self.folder}: old checkpoints were not deleted: {error}", RuntimeWarning, stacklevel=2)

    def incomplete(self) -> list[Path]:
        """Folders of saves and deletions that were killed. `latest` ignores them."""
        good = set(self._found().values())
        return [path for path in self._inside() if _LEFTOVER.fullmatch(path.name) and path not in good]

    def clean(self) -> None:
        """Delete the folders of `incomplete`. Must not run during a save."""
        for path in self.incomplete():
            remove(path, self.within)

    def load(
        self, saved: Saved, tensors: Mapping[str, torch.Tensor | Box], is_optional: Callable[[str], bool] | None = None
    ) -> dict[str, Any]:
        """Load all tensors in place, in their current layout. First all files are verified.

        Args:
            saved: result of `latest`, equal on every rank.
            tensors: by name. All ranks together must name all tensors of the checkpoint. Each rank gets its parts.
            is_optional: tensors of the checkpoint, by name, that need not be named. None: no tensor.

        Returns the saved state. Raises CheckpointError on every rank: files are missing, truncated or changed; or
        tensors are missing, extra, or have another shape or dtype.
        """
        read: list[Manifest] = []

        def look() -> tuple[str, list[str]]:
            read.append(_manifest_of(saved.step, saved.path))
            return read[0].save_id, list(tensors)

        save_ids, names = zip(*together(CheckpointError, look))
        (manifest,) = read
        if len(set(save_ids)) > 1:
            raise CheckpointError(f"{saved.path}: not the same checkpoint on every rank")
        wanted = {*chain.from_iterable(names), *(filter(is_optional, manifest.tensors) if is_optional else ())}
        problems = together(CheckpointError, lambda: misfits(manifest.tensors, tensors, wanted))
        refuse(f"{saved.path} is of another model or config:", problems)
        damage = together(CheckpointError, lambda: damaged_files(saved.path, manifest, share_of(manifest)))
        refuse("", damage, self.way_back(saved.step, saved.path))
        together(CheckpointError, lambda: _read(saved.path, manifest, tensors))
        return manifest.state

    def _found(self) -> dict[int, Path]:
        return by_step(self.folder)

    def _inside(self) -> list[Path]:
        return listed(self.folder)

    @property
    def within(self) -> Path:
        """The folder that the user has named: see base/writing.py."""
        return self.folder.parent if self.of_run else self.folder

    def way_back(self, step: int, path: Path) -> str:
        """What to do where the checkpoint of a step cannot be used."""
        older = self.newest_step(before=step)
        way = "there is no older checkpoint" if older is None else f"delete that folder to go back to step {older}"
        return f"{path} cannot be used; {way}"

    def _last_good(self) -> str:
        found = self._found()
        return f"the last checkpoint is {found[max(found)]}" if found else "there is no older checkpoint"

    def _losses(self, found: Mapping[int, Path]) -> dict[int, float | None]:
        """The validation loss of each readable checkpoint, by step. Warns of the others, which stay."""
        losses: dict[int, float | None] = {}
        for step, path in found.items():
            try:
                losses[step] = _manifest_of(step, path).validation_loss
            except CheckpointError as error:
                warnings.warn(f"not deleted: {error}", RuntimeWarning, stacklevel=2)
        return losses

    def _delete_old(self) -> None:
        losses = self._losses(found := self._found())
        keep: set[int | None] = {*sorted(losses)[-self.keep_last :]}
        if self.keep_best:
            keep.add(_best(losses))
        for step in sorted(set(losses) - keep):
            with unheld(found[step]) as free:
                if free:
                    discard(found[step], self.within)


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Read whole tensors of a checkpoint (`Saved.path`) into memory, by one process alone.

    `names`: the tensors to read; None: all. Only the files of these tensors are verified and read.
    Raises CheckpointError: a file is missing, truncated or changed, or a name is not in the checkpoint.
    """
    with _error_if_deleted(path):
        manifest = _verified(path, names)
        stored = {name: manifest.tensors[name] for name in (manifest.tensors if names is None else names)}
        tensors = {name: torch.empty(tensor.shape, dtype=CODE_DTYPES[tensor.dtype]) for name, tensor in stored.items()}
        _read(path, manifest, tensors)
    return tensors


class TensorReader:
    """Reads parts of some tensors of a checkpoint on demand. Arguments and errors are those of `read_tensors`.

    The constructor verifies the files of the tensors.
    """

    def __init__(self, path: Path, names: Collection[str]) -> None:
        with _error_if_deleted(path):
            self._path, self._manifest = path, _verified(path, names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return self._manifest.tensors[name].shape

    def box(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor. `slices`: a slice with start and stop, of step 1, for each dim."""
        stored = self._manifest.tensors[name]
        local = torch.empty([part.stop - part.start for part in slices], dtype=CODE_DTYPES[stored.dtype])
        piece = Box(local, torch.Size(stored.shape), tuple(part.start for part in slices))
        with _error_if_deleted(self._path):
            _read(self._path, self._manifest, {name: piece})
        return local


@contextmanager
def _error_if_deleted(path: Path) -> Iterator[None]:
    """Change the error if the folder was deleted during the block: then the checkpoint is not damaged."""
    try:
        yield
    except CheckpointError as error:
        if path.is_dir():
            raise
        raise CheckpointError(f"{path}: does not exist; perhaps it was deleted while it was read") from error


def _verified(path: Path, names: Collection[str] | None) -> Manifest:
    """Read the manifest, and verify the files of the named tensors (None: all)."""
    manifest = read_manifest(path)
    known = manifest.tensors
    wanted = known if names is None else names
    refuse(f"{path}:", [[f"{name}: not in the checkpoint" for name in wanted if name not in known]])
    refuse("", [damaged_files(path, manifest, {chunk.file for name in wanted for chunk in known[name].chunks})])
    return manifest


def _best(losses: Mapping[int, float | None]) -> int | None:
    """The step with the lowest loss, the newest among equals; None without a loss."""
    measured = [(loss, -step) for step, loss in losses.items() if loss is not None and not math.isnan(loss)]
    return -min(measured)[1] if measured else None


def _saved(step: int, path: Path) -> Saved:
    manifest = _manifest_of(step, path)
    return Saved(step, path, manifest.validation_loss, manifest.state)


def _saved_unless_gone(step: int, path: Path) -> Saved | None:
    """The checkpoint of a folder. None: it was deleted meanwhile. Raises CheckpointError: its manifest was changed."""
    try:
        return _saved(step, path)
    except CheckpointError:
        if path.is_dir():
            raise
        return None


def _manifest_of(step: int, path: Path) -> Manifest:
    manifest = read_manifest(path)
    if manifest.step != step:
        raise CheckpointError(f"{path / MANIFEST}: belongs to step {manifest.step}, not to step {step}")
    return manifest


def _read(path: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor | Box]) -> None:
    try:
        with torch.no_grad():
            read_into(path, manifest, tensors)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error
