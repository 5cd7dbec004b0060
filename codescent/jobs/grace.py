"""In: the folder of a run. Out: how many seconds before its time limit a job has to save, by the run's checkpoints.
Does not stop a run. Scripts ask it at their start, as `python3 -P -m codescent.jobs.grace RUN MOST`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.record.run_folder import EVENTS, RunFolder

LEAST_GRACE_S = 60
LONGEST_S = 7 * 86400.0
"""No save takes a week: an event that says so is no measurement."""
SECONDS = re.compile(r"[0-9]{1,9}")


def grace_of(saves_s: Sequence[float]) -> int:
    """Twice as long as the longest save, and half a minute for a step; at least a minute."""
    return max(LEAST_GRACE_S, round(30 + 2 * max(saves_s, default=0.0)))


def saves_s(run: Path) -> list[float]:
    """Seconds of the checkpoints that a run has saved; none if it has not begun. Raises UserError: it is damaged."""
    if not (run / EVENTS).is_file():
        return []
    saves = (one.get("seconds") for one in RunFolder.open(run).read_events() if one.get("kind") == "checkpoint")
    return [seconds for seconds in saves if isinstance(seconds, int | float) and 0 <= seconds < LONGEST_S]


def main() -> int:
    """Print the seconds, at most MOST. Returns the exit code."""
    words = sys.argv[1:]
    if len(words) != 2 or SECONDS.fullmatch(words[1]) is None:
        warn("usage: python3 -P -m codescent.jobs.grace RUN MOST; MOST is a whole number of seconds, such as 3600")
        return 2
    try:
        print(min(grace_of(saves_s(Path(words[0]))), int(words[1])))
    except UserError as error:
        warn(*(f"error: {problem}" for problem in error.problems))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
