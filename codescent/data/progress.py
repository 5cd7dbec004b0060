"""In: the total size of some work, and the size of each finished piece. Out: a bar on a terminal, else lines.
Does not print a line about little work. A request to stop ends the work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from codescent.base.amounts import of_seconds
from codescent.base.console import new_console
from codescent.base.early import raise_if_asked
from codescent.base.messages import INFO, message, shows_progress
from codescent.base.visible import visible

LINE_EVERY_S = 10.0
LITTLE_BYTES = 1_000_000
"""Less work has no lines: it ends at once."""


@contextmanager
def stage(
    title: str, total: int, enabled: bool, done: int = 0, *, may_end: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show the progress of a stage on the standard error. Yields a function to call with each piece's size.

    `total` is in bytes or characters, 0 if it is not known; `done` of it was finished before. The function raises
    StopAsked where the work may end so (base/early.py), and `may_end` is true.
    """
    with _shown(visible(title), total, enabled, done) as show:

        def advance(count: int) -> None:
            show(count)
            if may_end:
                raise_if_asked()

        yield advance


@contextmanager
def _shown(title: str, total: int, enabled: bool, done: int) -> Iterator[Callable[[int], None]]:
    if not (enabled and shows_progress()):
        yield lambda _: None
    elif sys.stderr.isatty():
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), TaskProgressColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=new_console(stderr=True), transient=True) as bars:
            bar = bars.add_task(title, total=total or None, completed=done)
            yield lambda count: bars.advance(bar, count)
    else:
        with _lines(title, total, done) as advance:
            yield advance


@contextmanager
def _lines(title: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A line at the begin, one in LINE_EVERY_S, and one at the end."""
    last_s = begin_s = time.monotonic()
    has_lines = total >= LITTLE_BYTES
    if has_lines:
        message(f"{title}: {total / 1e6:,.0f} MB", INFO)

    def advance(count: int) -> None:
        nonlocal done, last_s, has_lines
        done += count
        if not (total or has_lines):  # of unknown size, and there is something to do
            has_lines = True
            message(f"{title} ...", INFO)
        if time.monotonic() - last_s >= LINE_EVERY_S:
            last_s = time.monotonic()
            share = f" ({100 * done / total:.0f} %)" if total else ""
            message(f"{title}: {done / 1e6:,.0f} MB{share}", INFO)

    yield advance
    if has_lines:
        message(f"{title}: done in {of_seconds(time.monotonic() - begin_s)}", INFO)
