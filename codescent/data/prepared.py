"""In: a folder name and a function that fills the folder. Out: a prepared folder with description.json and checksums.
Does not build a folder twice: one process builds it, and the others wait. Does not interpret the files in it."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from codescent.base import writing
from codescent.base.durable import sha256_of, write_synced
from codescent.base.early import raise_if_asked
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.output import note
from codescent.base.published import NO_SPACE, commit, is_full
from codescent.base.reading import open_regular, read_json
from codescent.base.sealed import SEAL, digest, is_sealed, write_sealed
from codescent.data.verified import hashes

DESCRIPTION = "description.json"
TOKENIZER = "tokenizer.json"
JOURNAL = "progress.json"
"""A file in an unfinished folder. The next process continues a folder with a journal, and deletes one without."""
SPLITS = ("train", "validation")
AGAIN = "delete this folder and prepare it again"
WAIT_S = 0.2
_EDGE_BYTES = 1 << 16

T = TypeVar("T")


class Fields(BaseModel):
    """Base class of the fields of description.json. Types are checked strictly; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


class TokenizerFields(Fields):
    """The tokenizer of the samples."""

    kind: str
    vocab_size: Annotated[int, Field(ge=1)]


class Splits(Fields, Generic[T]):
    """One entry for each split."""

    train: T
    validation: T


class Description(Fields):
    """description.json of a folder whose files are hashed. Each task sets the format and adds its own fields."""

    format: str
    request: dict[str, Any]
    tokenizer: TokenizerFields
    files: dict[str, str]  # name -> sha256


def folder_of(root: Path, key: Any, corpus: str, tokenizer: str) -> Path:
    """Path of a prepared folder. Its name has corpus, tokenizer and a digest of `key` (all that samples depend on)."""
    names = "-".join(Path(part).stem[:40] for part in (corpus, tokenizer.split(":")[0]))
    return root / f"{names}-{digest(key)[:8]}"


def existing(target: Path, verify: Callable[[Path], object]) -> Path | None:
    """Verify the prepared folder at `target` and return it; None: it does not exist. Raises what `verify` raises."""
    if not (target / DESCRIPTION).is_file():
        return None
    verify(target)
    return target


def prepared(target: Path, make: Callable[[Path], None], verify: Callable[[Path], object]) -> Path:
    """Return the prepared folder at `target`; build it if it does not exist. A second process waits for the first.

    The name of `target` holds a digest of everything that its content depends on. `make` fills an empty hidden folder
    and writes the description last; the folder then gets its name. After an error the hidden folder is deleted.
    `verify` checks an existing folder.

    Raises UserError: the disk cannot be used, and the errors of `make` and `verify`.
    """
    if existing(target, verify):
        return target
    partial = target.with_name(f".partial-{target.name}")
    with claimed(partial) as handle:
        if not existing(target, verify):  # else another process has built it in the meantime
            writing.empty_folder(handle)
            make(partial)
            commit(partial, target)
    return target


@contextmanager
def claimed(partial: Path) -> Iterator[int]:
    """Create a hidden folder and hold its lock; wait while another process holds it. Yields its open descriptor.

    At the end a folder without a journal is deleted. Raises UserError: the disk is full or cannot be used.
    """
    try:
        writing.make_parents(partial.parent)
        handle = _lock(partial)
        try:
            yield handle
        finally:
            if _is_held(partial, handle) and not (partial / JOURNAL).exists():
                writing.remove_folder(partial, ignore_errors=True)
            os.close(handle)
    except OSError as error:
        if not is_full(error) and error.errno != errno.EFBIG:
            raise UserError(f"{error.filename or partial}: {error.strerror or error}") from error
        reason = "; ".join([error.strerror or "full", *getattr(error, "__notes__", [])])
        saved = "the finished part is saved; free some space and run the same command again to continue"
        result = saved if (partial / JOURNAL).exists() else "nothing was saved"
        raise UserError(f"{partial}: {NO_SPACE} ({reason}): {result}") from error


def describe(folder: Path, fields: Mapping[str, Any], files: Iterable[str]) -> None:
    """Write description.json, the last file of a folder: `fields`, and the sha256 of each file in `files`."""
    write_sealed(folder / DESCRIPTION, {**fields, "files": {name: sha256_of(folder / name) for name in files}})


def write_array(path: Path, array: np.ndarray[Any, Any]) -> None:
    """Write an array in the format of np.save. Unlike np.save, an OSError has the reason that the disk gave."""
    array = np.ascontiguousarray(array)  # its bytes are written row by row, as the header then says
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    write_synced(path, header.getvalue() + array.tobytes())


def unchecked_description(folder: Path) -> dict[str, Any]:
    """The content of description.json, without a check; {} if the file is missing or cannot be read."""
    try:
        description = read_json(folder / DESCRIPTION)
    except (ValueError, RecursionError, OSError):
        return {}
    return description if isinstance(description, dict) else {}


def checked_description(folder: Path, model: type[BaseModel], what: str) -> dict[str, Any]:
    """The content of description.json, validated by `model`.
    Raises UserError: every wrong field; `what` names the expected content of the folder.
    """
    path = folder / DESCRIPTION
    try:
        description: dict[str, Any] = read_json(path)
        model.model_validate(description)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, detail['loc'])) or 'the whole'}: {detail['msg']}" for detail in error.errors()]
        raise UserError(f"{path}: damaged, or not {what}: {'; '.join(wrong)}: {AGAIN}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {json_problem(error)}: {AGAIN}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: {AGAIN}") from error
    if SEAL in description and not is_sealed(description):  # earlier versions did not seal it
        raise UserError(f"{path}: changed since it was written: {AGAIN}")
    return description


def hash_problems(folder: Path, files: Mapping[str, str], *, again: bool = False) -> list[str]:
    """A message for each file that is missing or does not have the expected sha256. `again`: see `hashes`."""
    found, problems = hashes(folder, files, again=again)
    return [
        problems.get(name) or f"{folder / name}: changed: sha256 {found[name]}, expected {expected}"
        for name, expected in files.items()
        if found.get(name) != expected
    ]


def size_problems(folder: Path, sizes_bytes: Mapping[str, int]) -> list[str]:
    """A message for each file that is missing or does not have the expected size."""
    problems = []
    for name, expected in sizes_bytes.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif (size_bytes := path.stat().st_size) != expected:
            what = "truncated" if size_bytes < expected else "too long"
            problems.append(f"{path}: {what}: ends at byte {size_bytes}, expected {expected}")
    return problems


def refuse_damaged(folder: Path, problems: list[str]) -> None:
    """Raise UserError if there are problems: the problems, and what to do."""
    if problems:
        raise UserError(*problems, f"{folder}: damaged: {AGAIN}")


def user_file_sha256(path: Path, what: str) -> str:
    """sha256 of a user's file. Raises UserError if it cannot be read; `what` names the expected content."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: {what}") from error


def edges_of(path: Path) -> bytes:
    """The first and the last 64 KiB of a file."""
    with open_regular(path) as stream:
        first = stream.read(_EDGE_BYTES)
        stream.seek(-min(_EDGE_BYTES, path.stat().st_size), 2)
        return first + stream.read(_EDGE_BYTES)


def _lock(partial: Path) -> int:
    """Create the folder if it does not exist, and lock it. Returns its open file descriptor."""
    while True:
        try:
            writing.make_folder(partial)
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # another process has just removed it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"another process is preparing this dataset in {partial}: waiting for it")
            _wait_for(handle)
        except OSError as error:
            message = f"{partial}: no file locks on this disk ({error.strerror}): prepare a dataset in one process only"
            warnings.warn(message, stacklevel=4)
        if _is_held(partial, handle):
            return handle
        os.close(handle)  # the process that held the lock has renamed the folder


def _wait_for(handle: int) -> None:
    """Lock a file when no other process holds its lock. A request to stop ends the wait: StopAsked."""
    try:
        while True:
            with suppress(BlockingIOError):
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise_if_asked()
            time.sleep(WAIT_S)
    except BaseException:
        os.close(handle)
        raise


def _is_held(partial: Path, handle: int) -> bool:
    """Whether the locked folder still has the name `partial`."""
    try:
        return os.path.samestat(partial.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False
