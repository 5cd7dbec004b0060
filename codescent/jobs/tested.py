"""In: a target, a script, a site. Out: what the scheduler itself says against the script, without submitting it.
Does not look at the run (checks.py does)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from codescent.base.errors import UserError
from codescent.jobs.findings import Findings, Preflight
from codescent.jobs.schedulers import call
from codescent.jobs.site import LIMIT, seconds_of

TESTS = {"slurm": ("sbatch", "--test-only")}
"""The commands with which a scheduler looks at a script and submits nothing, by target."""
NO_TEST = {"pbs": "PBS has no test of a script: whether its limits allow the job, qsub says"}


def check(asked: Preflight, script: Callable[[], str], found: Findings) -> None:
    """Ask the scheduler."""
    found.notes += [NO_TEST[asked.target]] if asked.target in NO_TEST else []
    if asked.target not in TESTS:
        return
    found.refuse(_test(asked.target, script()))
    try:
        found.refuse(_limit(asked, call(["sinfo", "--noheader", "--format", "%P|%l"])))
    except UserError as error:
        found.notes += [f"the time limits of partitions are not known: {problem}" for problem in error.problems]


def _test(target: str, text: str) -> list[str]:
    """What the scheduler's own test refuses."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            call([*TESTS[target], file.name], Path.cwd())
        except UserError as error:
            return [problem.replace(f" {file.name}", "") for problem in error.problems]
    return []


def _limit(asked: Preflight, said: str) -> Iterator[str]:
    """A time limit above that of the partition, with which SLURM by default lets a job wait forever.

    `said`: a line "NAME|LIMIT" for each partition; that of the default one has a star.
    """
    if asked.site.time is None:
        return
    rows = dict(line.split("|", 1) for line in said.splitlines() if "|" in line)
    default = next((name for name in rows if name.endswith("*")), "")
    wanted = asked.site.partition or default.rstrip("*")
    for name in wanted.split(","):  # SLURM takes the first of several that can start the job
        limit = _seconds(rows.get(name, rows.get(f"{name}*", "")))
        if limit is None or seconds_of(asked.site.time) <= limit:
            return
    if wanted:
        shown = rows.get(wanted, rows.get(f"{wanted}*", "less"))
        yield (
            f"site.time = {asked.site.time}: partition {wanted} allows {shown}: the job would wait forever; give at "
            "most that, or another site.partition"
        )


def _seconds(limit: str) -> int | None:
    """A time limit of sinfo in seconds; None: none ("infinite"), or not known."""
    text = limit.strip()
    text = f"0:{text}" if text.count(":") == 1 else text  # sinfo leaves out hours, Site does not
    return None if LIMIT.fullmatch(text) is None else seconds_of(text)
