"""In: rows of metrics. Out: TensorBoard's event files in the run folder, if tensorboard is installed.
Does not write a metric that metrics.csv lacks. A file that cannot be written never ends the run."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from codescent.base.writing import make_folder


class Board:
    """Writes the metrics of a step under "train/" and the validation loss under "validation/".

    Does nothing if not `wanted`, or if tensorboard is not installed. Then `missing` is True.
    """

    def __init__(self, folder: Path, first_step: int, *, wanted: bool) -> None:
        self.writer: Any = None
        self.missing = wanted and importlib.util.find_spec("tensorboard") is None
        if wanted and not self.missing:
            self.writer = _writer(folder / "tensorboard", first_step)

    def write(self, row: Mapping[str, float | int | None]) -> str:
        """Write one step's row of metrics.

        Returns:
            why nothing is written from now on; "" if all is well.
        """
        if self.writer is None:
            return ""
        try:
            self._write(row)
        except Exception as error:  # its thread has failed earlier, and raises here what it was: any error
            self.close()
            return f"no more TensorBoard files: {error}"
        return ""

    def _write(self, row: Mapping[str, float | int | None]) -> None:
        for name, value in row.items():
            if value is not None and name not in ("step", "val_loss"):
                self.writer.add_scalar(f"train/{name}", value, row["step"])
        if row["val_loss"] is not None:
            self.writer.add_scalar("validation/loss", row["val_loss"], row["step"])

    def close(self) -> None:
        """Flush and close the files, if they are still there."""
        writer, self.writer = self.writer, None
        with suppress(Exception):  # see `write`
            if writer is not None:
                writer.close()


def _writer(folder: Path, first_step: int) -> Any:
    """A writer that goes on if the run folder is renamed: it opens its files by name, again and again."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional dependency, slow to import

    make_folder(folder)
    by_descriptor = Path(f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)}")
    threading.excepthook = partial(_unless_of_the_writer, threading.excepthook)
    return SummaryWriter(str(by_descriptor if by_descriptor.exists() else folder), purge_step=first_step + 1)


def _unless_of_the_writer(before: Callable[[Any], object], args: Any) -> None:
    """A threading.excepthook: the writer's thread prints no traceback, as `write` says what happened to it."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        before(args)
