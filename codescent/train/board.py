"""In: rows of metrics. Out: TensorBoard's event files in the run folder, if tensorboard is installed.
Does not write a metric that metrics.csv lacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Board:
    """Writes the metrics of a step under "train/" and the validation loss under "validation/".

    Does nothing if not `wanted`, or if tensorboard is not installed. Then `missing` is True.
    """

    def __init__(self, folder: Path, first_step: int, *, wanted: bool) -> None:
        self.writer: Any = None
        self.missing = wanted and importlib.util.find_spec("tensorboard") is None
        if wanted and not self.missing:
            # An optional dependency, slow to import.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, row: Mapping[str, float | int | None]) -> None:
        """Write one step's row of metrics."""
        if self.writer is None:
            return
        for name, value in row.items():
            if value is not None and name not in ("step", "val_loss"):
                self.writer.add_scalar(f"train/{name}", value, row["step"])
        if row["val_loss"] is not None:
            self.writer.add_scalar("validation/loss", row["val_loss"], row["step"])

    def close(self) -> None:
        """Flush and close the files."""
        if self.writer is not None:
            self.writer.close()
