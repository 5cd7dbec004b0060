"""In: a question, work that answers it. Out: the answer, asked once for all processes of this user that start together.
Does not ask anything itself. An error is an answer, too: all processes raise the same one.

Many ranks of a machine read the same config at the same time. The first one asks the hub, the others wait for its
answer. An answer counts if it is younger than the process that reads it, so a later start asks again."""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from codescent.base.cache import cache_folder
from codescent.base.durable import write_json
from codescent.base.errors import UserError
from codescent.base.reading import read_json
from codescent.base.writing import make_parents, open_own

FOLDER = "hub"
began_ns = time.time_ns()
"""When this process began, nearly: names of a hub are read early."""


def once(question: str, work: Callable[[], Any]) -> Any:
    """The answer (JSON data) of `work`, or of another process that has answered since this one began.

    Raises UserError: `work` raises it here, or has raised it there.
    """
    path = cache_folder() / FOLDER / f"{hashlib.sha256(question.encode()).hexdigest()[:32]}.json"
    with _locked(path.with_suffix(".lock")):
        if (record := _read(path, question)) is None:
            record = {"question": question, "answer": None, "problems": []}
            try:
                record["answer"] = work()
            except UserError as error:
                record["problems"] = list(error.problems)
            with suppress(OSError):  # where it cannot be written, every process asks
                write_json(path, {**record, "time_ns": time.time_ns()})
    if record["problems"]:
        raise UserError(*record["problems"])
    return record["answer"]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for. Without a file system that can, nobody waits."""
    file = None
    with suppress(OSError):
        make_parents(path.parent)
        file = open_own(path, makes=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _read(path: Path, question: str) -> dict[str, Any] | None:
    """The record of an answer that counts; None: there is none."""
    try:
        record = read_json(path)
    except (OSError, ValueError, RecursionError):
        return None
    match record:
        case {"question": str(asked), "time_ns": int(time_ns), "answer": _, "problems": list(_)}:
            return dict(record) if asked == question and time_ns >= began_ns else None
    return None
