"""In: the words of a command line. Out: a verb done, its exit code: 0 done, 1 a run failed, 2 the input is of no use.
Does not know what a verb does: its module is imported when it is called, and torch only where a verb needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from codescent.base.errors import UserError
from codescent.base.published import in_words, is_full
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
    arguments = parse(words)
    if "may_restart" in arguments:
        arguments.may_restart = may_restart
    module, _, function = VERBS[vars(arguments).pop("verb")].partition(".")
    try:
        code: int = getattr(import_module(f"codescent.verbs.{module}"), function)(arguments)
        print(end="", flush=True)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`codescent ... | head`): nothing is wrong, and nothing more can be said.
        _say_no_more()
        return 141
    except OSError as error:
        if error.filename is not None or not is_full(error):
            raise
        print(f"error: the output: {in_words(error)}", file=sys.stderr)
        _say_no_more()
        return 2
    return code


def _say_no_more() -> None:
    """What stdout still holds cannot be written: it is dropped when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
