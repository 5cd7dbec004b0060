"""In: words of a config. Out: which files of the package one steady step enters, and which calls cross between files.
Does not assert anything: tests/test_one_batch.py does."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import layout_ranks
from rank_server import Place

import codescent
from codescent.train.loop import _Steps

PACKAGE = f"{Path(codescent.__file__).parent}/"
HOOKS = "own/"
"""Hooks of our own-loop API on torch's optimizers. The tests' process has imported it, `codescent train` does not."""
STEADY = 5
"""The step that is followed, from 1. Nothing is due at it."""


class Followed:
    """The calls of the main thread while it is followed.

    Attributes:
        files: that were entered.
        crossings: how often a function of one file has called one of another file: both names, the caller's first. What
            torch calls, such as a module's forward or a backward pass, has the nearest function of ours as its caller.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.crossings: Counter[tuple[str, str]] = Counter()

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """What sys.setprofile calls. A generator that goes on counts as a call, too."""
        if event != "call" or not _is_ours(frame):
            return
        self.files.add(_file(frame))
        caller = frame.f_back
        while caller is not None and not _is_ours(caller):
            caller = caller.f_back
        if caller is not None and _file(caller) != _file(frame):
            self.crossings[_name(caller), _name(frame)] += 1


def steady_step(place: Place, words: list[str]) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Train as one rank. What was followed from the launch of step STEADY to that of the next one: files, and crossings
    with their numbers."""
    followed, launch = Followed(), _Steps._launch

    def launched(self: _Steps, step: int) -> Any:
        sys.setprofile(followed.see if step == STEADY else None)
        return launch(self, step)

    _Steps._launch = launched  # type: ignore[method-assign]
    try:
        layout_ranks.run(place, words, resume=False)
    except SystemExit as end:
        if end.code:
            raise
    return sorted(followed.files), sorted((*pair, number) for pair, number in followed.crossings.items())


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE) and not _file(frame).startswith(HOOKS)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(PACKAGE)


def _name(frame: FrameType) -> str:
    return f"{_file(frame)}:{frame.f_code.co_qualname}"
