"""In: nothing. Out: the dataclass that says how a run has ended.
Does not end a run (loop.py does) and prints nothing (report.py does)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GOES_ON = -1
"""Exit code of a run that has stopped at a step to go on at once, with other ranks."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        folder: of the run.
        step: the number of steps done.
        exit_code: 0; of a stop on request: 75 (to be started again), or 128 + the signal; or GOES_ON.
        suggests_best: the run ended early, and `checkpoint.keep_best` has kept a better checkpoint than the newest.
        rank: of this process at the end; None: that with which it was started.
        has_trained: False: the run had no step left to do.
    """

    folder: Path
    step: int
    exit_code: int
    suggests_best: bool = False
    has_trained: bool = True
    rank: int | None = None
