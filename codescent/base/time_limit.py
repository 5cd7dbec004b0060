"""In: environment variables. Out: when the run has to save and stop; which variables have a limit of another job.
Does not stop anything (early.py, train/stop.py and own/stopping.py do)."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping

from codescent.base.errors import UserError
from codescent.base.visible import one_line

STOP_AT, JOB_END = "CODESCENT_STOP_AT", "SLURM_JOB_END_TIME"
"""Variables with a time in seconds since 1970: when to save and stop; when SLURM will end the job."""
JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
"""Variables of a job of SLURM. Without them JOB_END is of no job: a shell of an earlier one has left it."""
GRACE_S = 60.0
"""Seconds before the end of the job at which a run stops, where nobody has set STOP_AT."""
OLD_S = 86_400.0
"""A STOP_AT that is past for so long is of an earlier job: no job takes a day to save. A younger one is obeyed."""
SECONDS = re.compile(r"[0-9]{1,18}")
SHOWN_CHARS = 40


def stop_at(env: Mapping[str, str]) -> float:
    """When the run has to save and stop, in seconds since 1970; infinite: nobody knows of a limit.

    Call `forget_others` before: here every limit counts.

    Raises UserError: STOP_AT is not a number.
    """
    given = env.get(STOP_AT, "").strip()
    if given:
        if not SECONDS.fullmatch(given):
            raise UserError(
                f'environment: {STOP_AT}: given "{_shown(given)}"; must be seconds since 1970, a whole number'
            )
        return float(given)  # the script has set it, which knows how long a save takes
    end = env.get(JOB_END, "").strip()
    return float(end) - GRACE_S if SECONDS.fullmatch(end) else math.inf


def forget_others(env: MutableMapping[str, str]) -> list[str]:
    """Remove the time limits that are not this run's, as a process begins. Returns a sentence for each.

    A terminal (tmux) or an editor's server that was started in a job keeps the job's variables after its end. SLURM
    writes "Unknown" where it knows no end. Processes that this one starts inherit what is left.
    """
    found = []
    for name, why in _others(env, time.time()):
        given = env.pop(name)
        found.append(f"{name}={_shown(given)} is ignored: {why}")
    return found


def _others(env: Mapping[str, str], now_s: float) -> Iterator[tuple[str, str]]:
    """The variables whose limit is not this run's, and why not."""
    given, end = (env.get(name, "").strip() for name in (STOP_AT, JOB_END))
    if SECONDS.fullmatch(given) and float(given) < now_s - OLD_S:
        yield STOP_AT, f"this time, {_date(given)}, is past for more than a day, so it is of an earlier job"
        given = ""
    if given or not end:  # STOP_AT decides
        return
    if not SECONDS.fullmatch(end):
        yield JOB_END, "it is no time in seconds since 1970, so no end of the job is known"
    elif float(end) <= now_s:
        yield JOB_END, f"this time, {_date(end)}, is past, so it is of a job that has ended"
    elif not any(env.get(name, "").strip() for name in JOB):
        yield JOB_END, f"there is no {JOB[0]}, so it is of no job of this process"


def in_words(env: Mapping[str, str]) -> str:
    """Which variable has the limit, and which time it says: " (X=1700000000, 2023-11-14 22:13:20)"; "": none has."""
    for name, before in ((STOP_AT, ""), (JOB_END, f"{GRACE_S:g} s before ")):
        text = env.get(name, "").strip()
        if SECONDS.fullmatch(text):
            return f" ({before}{name}={text}, {_date(text)})"
    return ""


def _date(seconds: str) -> str:
    """A time in words, in the time zone of this machine."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(seconds)))
    except (OverflowError, ValueError, OSError):  # no calendar has this year
        return "far in the future"


def _shown(text: str) -> str:
    return f"{one_line(text[:SHOWN_CHARS])}{'...' * (len(text) > SHOWN_CHARS)}"
