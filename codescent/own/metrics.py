"""In: numbers of each step. Out: metrics.csv and metrics.jsonl, written by rank 0.
Does not measure anything. It also works without `codescent.init`: the process then counts as rank 0."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch

from codescent.base.agreement import rank
from codescent.base.errors import UserError
from codescent.record import Table

Number = float | int | torch.Tensor | None


class Metrics:
    """Writes numbers of a loop to `folder/metrics.csv` and `folder/metrics.jsonl`. Appends if the files exist.

        metrics = codescent.Metrics("run")
        metrics.log(step=step, loss=ranks.mean(loss))

    The columns are the names of the first row. A written row survives a kill of the process.

    Raises:
        UserError: the folder cannot be created (on rank 0).
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._table = Table(Path(folder)) if rank() == 0 else None

    def log(self, **row: Number) -> None:
        """Append a row on rank 0. On other ranks the call does nothing and is not needed.

        Raises:
            UserError: a column that the first row does not have, a value that is no number, or a failed write.
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
