"""In: numbers of each step. Out: metrics.csv and metrics.jsonl, written by rank 0; `load` deletes rows after a save.
Does not measure anything. It also works in a single process without `codescent.init`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import torch

from codescent.base import output
from codescent.base.agreement import rank
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.own.arguments import PATH, number, public, shown
from codescent.own.session import joined_or_alone
from codescent.record import Table

Number = float | int | torch.Tensor | None

_tables: dict[Path, Table] = {}
"""The tables that this process has opened, by folder. Only rank 0 has any."""
_kept: dict[Path, int] = {}
"""Folders of a loaded save that this process has not opened yet: how many of their rows are older than the save."""
_begins = False
"""Whether `load` has found no save, so that rows of all folders are of an earlier start, which has saved nothing."""


class Metrics:
    """Writes numbers of a loop to `folder/metrics.csv` and `folder/metrics.jsonl`. Appends if the files exist.

        metrics = codescent.Metrics("run")
        metrics.log(step=step, loss=ranks.mean(loss))

    The columns are the names of the first row. A written row survives a kill of the process. `codescent.save` notes how
    many rows there are. When `codescent.load` continues from the save, later rows are deleted: their steps come again.
    So log a step before you save it.

    Raises:
        UserError: the folder cannot be created (on rank 0), or one of several ranks has not called `codescent.init`.
    """

    @public("codescent.Metrics", folder=PATH)
    def __init__(self, folder: str | PathLike[str]) -> None:
        joined_or_alone("Metrics")
        self._table = None
        if rank() == 0:
            path = Path(folder).resolve()
            self._table = _tables[path] = Table(Path(folder))
            if path in _kept or _begins:
                _keep(path, _kept.pop(path, 0))

    @public("codescent.Metrics.log")
    def log(self, **row: Number) -> None:
        """Append a row on rank 0. On other ranks the call does nothing and is not needed.

        Raises:
            UserError: a column that the first row does not have, a value that is no number, or a failed write.
        """
        if self._table is not None:
            self._table.append({name: _number(name, value) for name, value in row.items()})


def rows_before(save: Path) -> dict[str, int]:
    """The number of rows in each open table, by its folder relative to that of the saves: both may be moved."""
    return {os.path.relpath(folder, save.resolve()): len(table) for folder, table in _tables.items()}


def begin() -> None:
    """There is no save to continue from. Delete all rows: now in open tables, in others when they are opened."""
    global _begins
    _begins = True
    for folder in _tables:
        _keep(folder, 0)


def continue_from(save: Path, rows: Mapping[str, int]) -> None:
    """Delete the rows after a save, given by `rows_before`: now in open tables, in others when they are opened."""
    global _begins
    _begins = False
    for relative, count in rows.items():
        folder = (save.resolve() / relative).resolve()
        if folder in _tables:
            _keep(folder, count)
        else:
            _kept[folder] = count


def _keep(folder: Path, rows: int) -> None:
    if deleted := _tables[folder].keep(rows):
        since = "of an earlier start, which saved nothing" if _begins else "written after the save that was loaded"
        output.warn(f"codescent.Metrics: {folder}: deleted {counted(deleted, 'row')}, {since}")


def _number(name: str, value: Number) -> float | int | None:
    if value is None or isinstance(value, bool | int):
        return value if value is None else int(value)
    found = number(value)
    if found is None:
        raise UserError(f"codescent.Metrics: {name}: must be one number, not {shown(value)}")
    return found
