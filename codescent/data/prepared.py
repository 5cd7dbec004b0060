"""In: a folder's name, a function that fills it. Out: a prepared folder: made once, by one process, described, checked.
Does not know what is in the files: the source of each task does."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from codescent.base.durable import sha256_of, write_synced
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.published import NO_SPACE, commit, is_full
from codescent.base.sealed import SEAL, digest, is_sealed, write_sealed
from codescent.data.verified import hashes

DESCRIPTION = "description.json"
TOKENIZER = "tokenizer.json"
JOURNAL = "progress.json"
"""A hidden folder with a journal is continued by the next process; another one is thrown away."""
SPLITS = ("train", "validation")
AGAIN = "delete this folder and prepare it again"
_EDGE_BYTES = 1 << 16

T = TypeVar("T")


class Fields(BaseModel):
    """Fields of description.json, or of a table in it. Types are checked strictly; other fields are for people."""

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
    """description.json of a folder whose files are hashed. Each task adds its format and fields."""

    format: str
    request: dict[str, Any]
    tokenizer: TokenizerFields
    files: dict[str, str]  # name -> sha256


def folder_of(root: Path, key: Any, corpus: str, tokenizer: str) -> Path:
    """Where samples are once prepared: readable names and the digest of all that the samples depend on."""
    names = "-".join(Path(part).stem[:40] for part in (corpus, tokenizer.split(":")[0]))
    return root / f"{names}-{digest(key)[:8]}"


def existing(target: Path, verify: Callable[[Path], object]) -> Path | None:
    """The prepared folder at `target`, after `verify`; None: there is none. Raises what `verify` raises."""
    if not (target / DESCRIPTION).is_file():
        return None
    verify(target)
    return target


def prepared(target: Path, make: Callable[[Path], None], verify: Callable[[Path], object]) -> Path:
    """The prepared folder at `target`, made now if it does not exist. A second process waits for the first.

    The name of `target` holds a digest of all that its content depends on. `make` fills an empty hidden folder, the
    description last; nothing half-made is left. `verify` checks an existing folder.

    Raises UserError: what the disk refuses, and what `make` and `verify` raise.
    """
    if existing(target, verify):
        return target
    partial = target.with_name(f".partial-{target.name}")
    with claimed(partial):
        if not existing(target, verify):  # else another process has made it in the meantime
            for leftover in partial.iterdir():
                leftover.unlink()
            make(partial)
            commit(partial, target)
    return target


@contextmanager
def claimed(partial: Path) -> Iterator[None]:
    """Lock a hidden folder, or wait for it; remove it without a journal. Raises UserError: the disk refuses."""
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock(partial)
        try:
            yield
        finally:
            if _is_held(partial, handle) and not (partial / JOURNAL).exists():
                shutil.rmtree(partial, ignore_errors=True)
            os.close(handle)
    except OSError as error:
        if not is_full(error) and error.errno != errno.EFBIG:
            raise UserError(f"{error.filename or partial}: {error.strerror or error}") from error
        said = "; ".join([error.strerror or "full", *getattr(error, "__notes__", [])])
        kept = "what was prepared is kept; the same command continues when there is room"
        rest = kept if (partial / JOURNAL).exists() else "nothing was kept"
        raise UserError(f"{partial}: {NO_SPACE} ({said}): {rest}") from error


def describe(folder: Path, fields: Mapping[str, Any], files: Iterable[str]) -> None:
    """Write description.json, the last file: the fields, then the sha256 of each of `files`."""
    write_sealed(folder / DESCRIPTION, {**fields, "files": {name: sha256_of(folder / name) for name in files}})


def write_array(path: Path, array: np.ndarray[Any, Any]) -> None:
    """Write an array as np.save does, but keep the reason why the disk refused."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    write_synced(path, header.getvalue() + array.tobytes())


def noted(folder: Path) -> dict[str, Any]:
    """description.json, unchecked; empty where it is missing or cannot be read."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return {}
    return description if isinstance(description, dict) else {}


def described(folder: Path, model: type[BaseModel], what: str) -> dict[str, Any]:
    """description.json, checked by `model`. Raises UserError: every field that is wrong, and `what` it should hold."""
    path = folder / DESCRIPTION
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model.model_validate(description)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, detail['loc'])) or 'the whole'}: {detail['msg']}" for detail in error.errors()]
        raise UserError(f"{path}: damaged, or not {what}: {'; '.join(wrong)}: {AGAIN}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}: {AGAIN}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: {AGAIN}") from error
    if SEAL in description and not is_sealed(description):  # earlier versions did not seal it
        raise UserError(f"{path}: changed since it was written: {AGAIN}")
    return description


def changed(folder: Path, files: Mapping[str, str], *, again: bool = False) -> list[str]:
    """A sentence for each file that is missing or has another sha256; see `hashes`."""
    found, problems = hashes(folder, files, again=again)
    return [
        problems.get(name) or f"{folder / name}: changed: sha256 {found[name]}, expected {expected}"
        for name, expected in files.items()
        if found.get(name) != expected
    ]


def resized(folder: Path, sizes_bytes: Mapping[str, int]) -> list[str]:
    """A sentence for each file that is missing or has another length."""
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
    """Raise UserError with the problems, if there are any, and what to do."""
    if problems:
        raise UserError(*problems, f"{folder}: damaged: {AGAIN}")


def given_sha256(path: Path, what: str) -> str:
    """sha256 of a user's file. Raises UserError where it cannot be read: `what` it should be."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: {what}") from error


def edges_of(path: Path) -> bytes:
    """The first and the last 64 KiB of a file."""
    with path.open("rb") as stream:
        first = stream.read(_EDGE_BYTES)
        stream.seek(-min(_EDGE_BYTES, path.stat().st_size), 2)
        return first + stream.read(_EDGE_BYTES)


def _lock(partial: Path) -> int:
    """Make the folder if need be, and lock it. Returns an open descriptor."""
    while True:
        with suppress(FileExistsError):  # not exist_ok, which looks again whether it is there: it may have gone
            partial.mkdir()
        try:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another process has just removed it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = f"another process is preparing this dataset in {partial}: waiting for it"
            warn(said)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            said = f"{partial}: this disk has no locks ({error.strerror}): prepare it once at a time"
            warnings.warn(said, stacklevel=4)
        if _is_held(partial, handle):
            return handle
        os.close(handle)  # the process that held it has finished and renamed it


def _is_held(partial: Path, handle: int) -> bool:
    """Whether the locked folder still has this name."""
    try:
        return os.path.samestat(partial.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
