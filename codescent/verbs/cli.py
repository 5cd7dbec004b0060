"""In: the words of a command line. Out: a verb done, its exit code: 0 done, 1 a run failed, 2 the input is of no use.
Does not know what a verb does: its module is imported when it is called, and torch only where a verb needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from codescent.base.errors import UserError
from codescent.base.output import open_closed_streams, tolerate_write_errors
from codescent.base.published import in_words, is_full
from codescent.base.visible import visible
from codescent.verbs.arguments import parse

VERBS: Mapping[str, str] = {
    "train": "train.main",
    "plan": "plan.main",
    "prove": "prove.main",
    "config": "config.main",
    "data": "data.main",
    "sample": "sample.main",
    "evaluate": "evaluate.main",
    "export": "exchange.export_main",
    "import": "exchange.import_main",
}
"""Verb to the module in this room and its function: it takes the arguments and returns the exit code."""


def run(words: Sequence[str], *, may_restart: bool = False) -> int:
    """Run one verb and return the exit code; what the user can mend is told in plain lines, without a traceback.

    Args:
        words: the command line, without the program's name.
        may_restart: this process is the program and nothing else, so `train` may start it anew to tune its allocator.
    """
    if may_restart:
        open_closed_streams()
    arguments = parse(words)
    trains = may_restart and "may_restart" in arguments
    if trains:  # output is never worth a run
        arguments.may_restart = True
        tolerate_write_errors()
    module, _, function = VERBS[vars(arguments).pop("verb")].partition(".")
    try:
        code: int = getattr(import_module(f"codescent.verbs.{module}"), function)(arguments)
        print(end="", flush=True)
    except UserError as error:
        _say(*(f"error: {problem}" for problem in error.problems))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except OSError as error:
        # Whoever read our output has gone (`codescent ... | head`), or its disk is full: no more can be said there.
        gone = isinstance(error, BrokenPipeError) and not trains
        if not gone and (error.filename is not None or not is_full(error)):
            raise
        if not gone:
            _say(f"error: {'' if trains else 'the output: '}{in_words(error)}")
        _say_no_more(1)
        return 141 if gone else 2
    return code


def _say(*lines: str) -> None:
    """Print lines for people to the standard error; where it takes none, the exit code alone answers."""
    try:
        print(*map(visible, lines), sep="\n", file=sys.stderr, flush=True)
    except OSError:
        _say_no_more(2)


def _say_no_more(descriptor: int) -> None:
    """What a stream still holds cannot be written: it is dropped when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
