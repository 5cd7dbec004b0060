"""In: numbers of each step. Out: metrics.csv and metrics.jsonl, written by the first rank.
Does not measure anything, and does not need `codescent.init`: a process that has not called it is the first rank."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch

from codescent.base.agreement import rank
from codescent.base.errors import UserError
from codescent.record import Table

Number = float | int | torch.Tensor | None


class Metrics:
    """Numbers of a loop, in `folder/metrics.csv` and `folder/metrics.jsonl`; a folder that has them is continued.

        metrics = codescent.Metrics("run")
        metrics.log(step=step, loss=ranks.mean(loss))

    The columns are the names of the first row. What is written survives a kill of the process.

    Raises:
        UserError: the folder cannot be made (on the first rank).
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._table = Table(Path(folder)) if rank() == 0 else None

    def log(self, **row: Number) -> None:
        """Append one row, the first rank's. The other ranks may call it or not.

        Raises:
            UserError: a column that the first row did not have, a value that is no number, or the disk refuses.
        """
        if self._table is not None:
            self._table.append({name: _number(name, value) for name, value in row.items()})


def _number(name: str, value: Number) -> float | int | None:
    if value is None or isinstance(value, bool | int):
        return value if value is None else int(value)
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"codescent.Metrics: {name}: {value!r} is not one number") from error
