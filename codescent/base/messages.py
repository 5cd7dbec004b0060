"""In: messages of a command, by importance. Out: records of the logger "codescent", which prints them by itself.
Does not write results of a command (output.py does) and knows no other logger."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from codescent.base.errors import UserError

LOGGER = logging.getLogger("codescent")
DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
LEVEL = "CODESCENT_LOG_LEVEL"
"""Variable with the level of this process and of those that it starts: a name of `LEVELS`."""
LEVELS: Mapping[str, int] = {"DEBUG": DEBUG, "INFO": INFO, "WARNING": WARNING, "ERROR": ERROR}


class Terminal(logging.Handler):
    """Writes each message to the standard error, or where its record says. Raises OSError: it cannot be written."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        write: Callable[[str], object] = getattr(record, "write", _to_standard_error)
        write(record.getMessage())


def _to_standard_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


_said: set[str] = set()  # texts of this command that are logged once


def _set_up() -> None:
    """Give the logger its handler, once: IPython may load this file again. A level that a program has set stays."""
    handler = Terminal()
    handler.set_name(LOGGER.name)
    for old in [one for one in LOGGER.handlers if one.get_name() == LOGGER.name]:
        LOGGER.removeHandler(old)
    LOGGER.addHandler(handler)
    LOGGER.propagate = False  # else a program that configures the root logger would print each message twice
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(LEVELS.get(os.environ.get(LEVEL, ""), INFO))


_set_up()


def message(text: str, level: int, write: Callable[[str], object] | None = None) -> None:
    """Log a text. `write`: prints it in the place of the standard error, such as above a bar."""
    LOGGER.log(level, text, extra={} if write is None else {"write": write})


def detail(text: str) -> None:
    """Log a text that only --verbose shows."""
    message(text, DEBUG)


def detail_once(text: str) -> None:
    """Log a text that only --verbose shows, once in a command."""
    if LOGGER.isEnabledFor(DEBUG):
        message_once(text, DEBUG)


def message_once(text: str, level: int) -> None:
    """Log a text once in a command."""
    if text not in _said:
        _said.add(text)
        message(text, level)


def shows_progress() -> bool:
    """Whether progress is shown: not with --quiet."""
    return LOGGER.isEnabledFor(INFO)


def given_level() -> str | None:
    """The level of the environment; None: it has none. Raises UserError: it is no level."""
    given = os.environ.get(LEVEL)
    if given and given not in LEVELS:
        raise UserError(f"{LEVEL}={given}: must be one of {', '.join(LEVELS)}")
    return given


def nearest_level() -> str:
    """The first of `LEVELS` that shows no more than the logger does: a program may have set any number."""
    return next((name for name, level in LEVELS.items() if level >= LOGGER.getEffectiveLevel()), "ERROR")


@contextmanager
def at_level(name: str | None, *, details: bool = True) -> Iterator[None]:
    """A block in which this process, and those that it starts, log from a level on.

    Args:
        name: of `LEVELS`; None: the level of the environment, else of the logger.
        details: whether this process logs them, if the level asks for them. Of many ranks one does.

    Raises:
        UserError: the environment has no level.
    """
    given = given_level()
    _said.clear()
    level, wanted = LOGGER.level, name or given
    if wanted:
        LOGGER.setLevel(LEVELS[wanted] if details else max(LEVELS[wanted], INFO))
        os.environ[LEVEL] = wanted
    try:
        yield
    finally:
        LOGGER.setLevel(level)
        if given is None:
            os.environ.pop(LEVEL, None)
        else:
            os.environ[LEVEL] = given
