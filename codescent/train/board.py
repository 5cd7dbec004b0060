"""In: rows of metrics. Out: TensorBoard's event files in the run folder, if tensorboard is installed.
Does not write a metric that metrics.csv lacks. A file that cannot be written never ends the run."""

from __future__ import annotations

import errno
import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.extra import is_installed
from codescent.base.published import in_words

VERSION = "brain.Event:2"
"""The first event of each file says the version of its format."""


class Board:
    """Writes the metrics of a step under "train/" and the validation loss under "validation/".

    TensorBoard's own writer opens its file by name, again and again, and others may put a link there. So the file is
    opened here, once. It stays open if the run folder is renamed.

    Does nothing if not `wanted`, or if tensorboard is not installed: then `missing` is True.
    """

    def __init__(self, folder: Path, first_step: int, *, wanted: bool) -> None:
        self.file: io.FileIO | None = None
        self.missing = wanted and not is_installed("tensorboard")
        self.why = ""  # nothing is written, and `write` has not said so yet
        if wanted and not self.missing:
            self._try(lambda: self._open(folder / "tensorboard", first_step))

    def write(self, row: Mapping[str, float | int | None]) -> str:
        """Write one step's row of metrics.

        Returns:
            why nothing is written from now on; "" if all is well.
        """
        if self.file is not None:
            self._try(lambda: self._write(row))
        why, self.why = self.why, ""
        return why

    def close(self) -> None:
        """Close the file."""
        file, self.file = self.file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self.close()
            self.why = f"no more TensorBoard files: {error.filename}: {in_words(error)}"

    def _open(self, folder: Path, first_step: int) -> None:
        self.events, self.summaries, self.records = _formats()
        writing.make_folder(folder)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"
        self.path = folder / name
        self.file = writing.open_new(self.path)
        log = self.events.SessionLog
        self._event(first_step + 1, file_version=VERSION)
        self._event(first_step + 1, session_log=log(status=log.START))  # hides the steps that are taken again

    def _write(self, row: Mapping[str, float | int | None]) -> None:
        values = {_tag(name): value for name, value in row.items() if name != "step"}
        of = self.summaries.Summary
        known = [of.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        self._event(row["step"], summary=of(value=known))

    def _event(self, step: float | int | None, **what: Any) -> None:
        assert self.file is not None
        if not os.fstat(self.file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was deleted", str(self.path))
        record = io.BytesIO()
        event = self.events.Event(wall_time=time.time(), step=step, **what)
        self.records(record).write(event.SerializeToString())
        writing.write_all(self.file, record.getvalue())


def _tag(column: str) -> str:
    """The name of a column of the metrics in TensorBoard."""
    return f"validation/{column.removeprefix('val_')}" if column.startswith("val_loss") else f"train/{column}"


def _formats() -> tuple[Any, Any, Any]:
    """What TensorBoard writes: messages, their values, and the frame around each. An optional dependency."""
    from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]  # noqa: PLC0415
    from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]  # noqa: PLC0415
        RecordWriter,
    )

    return event_pb2, summary_pb2, RecordWriter
