"""In: log.to of a config. Out: the user's functions, called with a run's description, its metrics, events and end.
Does not decide what is logged: they get what the run folder gets. Only rank 0 of `codescent train` imports them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from codescent.base import own_names
from codescent.base.errors import UserError

KEY = "log.to"
START, METRICS, EVENT, END = "start", "metrics", "event", "end"
"""Values of the argument `kind`; docs/loggers.md describes `data` of each."""

FAILURES_ALLOWED = 10
"""A function is not called any more after this many exceptions in a row."""


class Function(Protocol):
    """A user's function. The arguments have names, so that hardly any function of another purpose can be called."""

    def __call__(self, *, kind: str, data: dict[str, Any]) -> object:
        """Log `data`; the result is not used."""


@dataclass
class Logger:
    """A user's function, and how often it has failed.

    Attributes:
        name: as in log.to.
        function: to call.
        file: of its module.
        failures: number of exceptions.
        in_a_row: number of exceptions since the last call without one.
        needs_start: it is given up if its call at the start fails.
    """

    name: str
    function: Function
    file: str
    failures: int = 0
    in_a_row: int = 0
    needs_start: bool = False


@dataclass(frozen=True)
class Failure:
    """An exception of a user's function that is reported: the first one, and the one after which it is given up.

    Attributes:
        logger: name of the function, as in log.to.
        call: the `kind` with which it was called.
        problem: the exception, in one line.
        given_up: whether it is not called any more.
    """

    logger: str
    call: str
    problem: str
    given_up: bool


class Loggers:
    """Calls the functions of log.to in their order, each before the next step of the run.

    Args:
        loggers: loaded by `load`.
        report: called with the failures that the user should know of. The run goes on after each.
    """

    def __init__(self, loggers: Sequence[Logger], report: Callable[[Failure], None]) -> None:
        self.loggers, self.report = loggers, report

    def send(self, kind: str, data: Mapping[str, Any]) -> None:
        """Call every function that has not been given up. Each gets a dict of its own."""
        for logger in self.loggers:
            if logger.in_a_row < FAILURES_ALLOWED:
                self._call(logger, kind, dict(data))

    def _call(self, logger: Logger, kind: str, data: dict[str, Any]) -> None:
        try:
            logger.function(kind=kind, data=data)
            logger.in_a_row = 0
        except (Exception, SystemExit) as error:
            logger.failures += 1
            lost = logger.needs_start and kind == START
            logger.in_a_row = FAILURES_ALLOWED if lost else logger.in_a_row + 1
            given_up = logger.in_a_row == FAILURES_ALLOWED
            if logger.failures == 1 or given_up:
                self.report(Failure(logger.name, kind, own_names.in_words(error, logger.file), given_up))


def find(log_to: str | None) -> None:
    """Check that the modules of log.to exist, without running their code. Raises UserError: one does not."""
    if problems := [problem for name in _names(log_to) if (problem := own_names.missing(KEY, name))]:
        raise UserError(*problems)


def load(log_to: str | None) -> list[Logger]:
    """Import the functions of log.to.

    Raises:
        UserError: all functions that cannot be imported or called, each with the reason.
    """
    found: list[Logger] = []
    problems: list[str] = []
    for name in _names(log_to):
        try:
            found.append(_load(name))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return found


def _names(log_to: str | None) -> list[str]:
    return [] if log_to is None else list(dict.fromkeys(name.strip() for name in log_to.split(",")))


def _load(name: str) -> Logger:
    function, file = own_names.load(KEY, name, "function")
    if not (callable(function) and _takes(function)):
        attribute = name.partition(":")[2]
        raise UserError(f"{KEY} = {name}: must be a function of kind and data: def {attribute}(kind, data)")
    return Logger(name, function, file)


def _takes(function: Callable[..., object]) -> bool:
    """Whether a function can be called with the arguments `kind` and `data`."""
    try:
        inspect.signature(function).bind(kind="", data={})
    except (TypeError, ValueError):  # ValueError: a function of C without a signature
        return False
    return True
