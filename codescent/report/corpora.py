"""In: summaries of runs. Out: a table of the corpora of their mixtures: shares and validation losses.
Does not read metrics (results does) and does not know how many epochs a corpus had: its size is not in the folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from codescent.record.corpora import SHARE, VAL_LOSS, names_of
from codescent.report.content import Cell, Column, Table
from codescent.report.run_tables import number, share
from codescent.report.summary import Summary
from codescent.results.statistics import Values


def tables(known: Sequence[Summary]) -> Iterator[Table]:
    """A row for each corpus of each run with a mixture; without one no table."""
    columns = [
        Column("run"),
        Column("corpus"),
        Column("share", "of the samples, mean of all rows"),
        Column("val loss", "the last one, nats per token"),
        Column("lowest", "the lowest validation loss of the corpus"),
    ]
    rows = [
        [
            Cell(one.name),
            Cell(name),
            share(_finite(one, SHARE, name).mean()),
            *(number(value, f"{value:.4f}") for value in _last_and_lowest(_finite(one, VAL_LOSS, name))),
        ]
        for one in known
        for name in names_of(one.run.folder.plan)
    ]
    if rows:
        yield Table(columns, rows, "val loss of a run is the mean of its corpora, by their weights.")


def _finite(one: Summary, begin: str, name: str) -> Values:
    values = one.run.columns[f"{begin}{name}"]
    found = values[np.isfinite(values)]
    return found if len(found) else np.array([np.nan])


def _last_and_lowest(losses: Values) -> tuple[float, float]:
    return float(losses[-1]), float(losses.min())
