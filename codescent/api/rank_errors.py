"""In: a block in which ranks are processes of their own. Out: the sentences of their errors, for an exception.
Does not read their logs: launch/local.py does, and logs the end of the log of the rank that has failed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from codescent.base.messages import LOGGER

ERROR = "error: "
"""What a line of an error begins with."""


class _Errors(logging.Filter):
    """Takes the lines of errors out of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message has other lines. They are what stays of it."""
        lines = record.getMessage().splitlines()
        errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        if errors:
            self.problems += errors
            record.msg, record.args = "\n".join(line for line in lines if not line.startswith(ERROR)), None
        return bool(record.msg) or not errors


@contextmanager
def errors_of_ranks() -> Iterator[list[str]]:
    """The sentences that ranks have logged as errors. They are not printed: the caller raises them."""
    errors = _Errors()
    LOGGER.addFilter(errors)
    try:
        yield errors.problems
    finally:
        LOGGER.removeFilter(errors)
