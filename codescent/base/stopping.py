"""In: a signal, environment variables. Out: whether it asks a run to stop, the exit code for it; when the time is over.
Does not handle signals (train/stop.py and launch/local.py do)."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping

from codescent.base.errors import UserError

LATER = 75
"""Exit code of a run that has saved and asks to be started again: EX_TEMPFAIL of sysexits.h."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals of Ctrl-C; of a scheduler or `kill`; of a closed terminal (ignored under nohup)."""

SAVING = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a scheduler that will start the run again: before the time limit, or where others come first."""

EXIT_FILE = "CODESCENT_EXIT_FILE"
"""Variable with the path of a file on this host, which gets the exit code of a stop on request."""

STOP_AT, JOB_END = "CODESCENT_STOP_AT", "SLURM_JOB_END_TIME"
"""Variables with a time in seconds since 1970: when to save and stop; when SLURM will end the job."""
GRACE_S = 60.0
"""Seconds before the end of the job at which a run stops, where nobody has set STOP_AT."""


def exit_code_of(number: int) -> int:
    """The exit code of a run that has stopped on this signal: 128 and its number, or LATER."""
    return LATER if number in SAVING else 128 + number


def stop_at(env: Mapping[str, str]) -> float:
    """When the run has to save and stop, in seconds since 1970; infinite: nobody knows of a limit.

    Raises UserError: a variable is not a number.
    """
    found = math.inf
    for name, before_s in ((STOP_AT, 0.0), (JOB_END, GRACE_S)):
        text = env.get(name, "").strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit()):
            raise UserError(f'environment: {name}: given "{text}"; must be seconds since 1970, a whole number')
        if name == JOB_END and STOP_AT in env:
            continue  # the script has set STOP_AT, which knows how long a save takes
        found = min(found, float(text) - before_s)
    return found
