"""In: a signal, environment variables. Out: the exit code for it, and where that is written.
Does not handle signals (early.py, train/stop.py and launch/local.py do). Time limits: time_limit.py."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from codescent.base.output import warn
from codescent.base.reading import read_text

LATER = 75
"""Exit code of a run that has saved and asks to be started again: EX_TEMPFAIL of sysexits.h."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals of Ctrl-C; of a scheduler or `kill`; of a closed terminal (ignored under nohup)."""

SAVING = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a scheduler that will start the run again: before the time limit, or where others come first."""

TIME_LIMIT = "the time limit of the job"
"""Stands in the place of a signal."""

EXIT_FILE = "CODESCENT_EXIT_FILE"
"""Variable with the path of a file on this host, which gets the exit code of a stop on request: see `reported`."""


def exit_code_of(number: int) -> int:
    """The exit code of a run that has stopped on this signal: 128 and its number, or LATER."""
    return LATER if number in SAVING else 128 + number


def reported(code: int, env: Mapping[str, str], *, writes: bool = True) -> int:
    """The exit code of a process that has stopped on request with `code`: 0 where EXIT_FILE is set, else `code`.

    Launchers take every other code for a failure: they kill the other ranks, or start them again. The script that has
    set the variable reads the code in the file.

    Args:
        code: 0, or of a stop on request.
        env: of this process.
        writes: whether this process writes the file: one for each host.
    """
    path = env.get(EXIT_FILE, "")
    if not (code and path):
        return code
    if writes and not _has_error(path):
        try:
            _write(path, f"{code}\n")
        except OSError as error:
            warn(f"codescent: {EXIT_FILE}: {path}: {error.strerror}: this process ends with {code} instead")
            return code
    return 0


def report_error(code: int, env: Mapping[str, str]) -> None:
    """Write the exit code of a rank that has refused the run before it began.

    Its launcher then ends the other ranks by SIGTERM. Some of them would end by the signal, as if they had saved and
    stopped, and the launcher would take the largest code of all.
    """
    path = env.get(EXIT_FILE, "")
    if path:
        with suppress(OSError):  # the message is printed, and the code of this process says it
            _write(path, f"{code}\n")


def forget_code(env: Mapping[str, str]) -> None:
    """The ranks have met: an earlier start, whose code is in the file, was refused, and this one was not."""
    path = env.get(EXIT_FILE, "")
    if path and _has_error(path):
        with suppress(OSError):
            _write(path, "")


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="ascii")


def _has_error(path: str) -> bool:
    """Whether the file has the code of an error, not of a stop."""
    try:
        text = read_text(Path(path)).strip()
    except (OSError, UnicodeDecodeError):  # it is not there yet, or another program's
        return False
    return text.isdecimal() and int(text[:9]) < 128 and int(text[:9]) != LATER
