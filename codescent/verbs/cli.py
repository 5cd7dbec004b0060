"""In: a command line. Out: one subcommand executed; exit code 0: success, 1: run failed, 2: wrong input, 128 + signal.
Does not import a subcommand's module before the subcommand is called: `codescent --help` must not wait for torch."""

from __future__ import annotations

import errno
import os
import platform
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from codescent import __version__
from codescent.base import cause
from codescent.base.errors import UserError
from codescent.base.messages import ERROR, at_level, detail
from codescent.base.output import escape_what_a_stream_cannot_write, open_closed_streams, tolerate_write_errors, warn
from codescent.base.own_names import in_a_sentence
from codescent.base.published import in_words, is_full
from codescent.base.rank import Rank
from codescent.base.stopping import report_error
from codescent.base.uncollected import uncollected
from codescent.base.visible import one_line
from codescent.launch.environment import read
from codescent.launch.huge_pages import with_huge_pages
from codescent.launch.once import say_once, say_once_or_tell
from codescent.launch.spin import with_short_spin
from codescent.meeting.agent_store import AgentValues, OpenAgent
from codescent.meeting.failure import Failures, RankFailure
from codescent.record import RunFolder
from codescent.verbs.arguments import parse

VERBS: Mapping[str, str] = {
    "train": "train.main",
    "plan": "plan.main",
    "launch": "launch.main",
    "doctor": "doctor.main",
    "prove": "prove.main",
    "explain": "explain.main",
    "collectives": "collectives.main",
    "measure": "measure.main",
    "config": "config.main",
    "data": "data.main",
    "sample": "sample.main",
    "chat": "chat.main",
    "serve": "serve.main",
    "evaluate": "evaluate.main",
    "plot": "plot.main",
    "compare": "compare.main",
    "study": "study.main",
    "report": "report.main",
    "export": "export_run.main",
    "import": "import_folder.main",
    "fetch": "fetch.main",
    "docs": "docs.main",
}
"""Subcommand: module in this package and its function. The function takes the arguments and returns the exit code."""

OF_PATHS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EROFS)
"""Errors of a path that the user has given, which may be raised wherever it is looked at."""
SHOWN_CHARS = 120
READERS = ("sample", "evaluate", "export")
"""Subcommands that read a run folder."""
GENERATORS = ("sample", "chat", "serve")
"""Subcommands whose time is that of reading the weights for each token."""


def run(words: Sequence[str], *, may_restart: bool = False) -> int:
    """Run one subcommand and return the exit code. Errors that the user can correct are printed without a traceback.

    Args:
        words: the command line, without the program's name.
        may_restart: this process is only the program `codescent`, so `train` may restart it to tune its allocator.
    """
    if may_restart:
        open_closed_streams()
        escape_what_a_stream_cannot_write()
    arguments = parse(words)
    trains = may_restart and "may_restart" in arguments
    if trains:  # training continues even if its output cannot be written
        arguments.may_restart = True
        tolerate_write_errors()
    verb, level = vars(arguments).pop("verb"), vars(arguments).pop("log_level")
    try:
        with at_level(level, details=_is_first()):
            return _run_verb(verb, arguments, trains=trains)
    except UserError as error:  # of the level itself
        _say(*(f"error: {problem}" for problem in error.problems))
        return error.exit_code


def _is_first() -> bool:
    """Whether this process is no rank, or the first one of a launcher that is not ours: ours has the same details."""
    with suppress(UserError):  # the command says what is wrong with a launcher's variables
        rank = read(os.environ)
        return rank is None or not (rank.rank or rank.child)
    return True


def _run_verb(verb: str, arguments: Namespace, *, trains: bool) -> int:
    """Run a subcommand with its arguments; see `run`. `trains`: this process is the program, and trains."""
    module, _, function = VERBS[verb].partition(".")
    begin_s = time.monotonic()
    detail(f"codescent {__version__}, {verb}, process {os.getpid()}, Python {platform.python_version()}")
    try:
        if verb in READERS and arguments.run is not None:
            RunFolder.open(arguments.run)  # says at once what is wrong with it: importing torch takes seconds
        if verb == "import" and isinstance(arguments.folder, Path) and not arguments.folder.is_dir():
            from codescent.huggingface.folder import open_folder

            open_folder(arguments.folder)  # says so, without torch
        os.environ.update(with_short_spin(os.environ))  # before torch is imported, and for the ranks
        if verb in GENERATORS:
            os.environ.update(with_huge_pages(os.environ))
        with uncollected():
            act = getattr(import_module(f"codescent.verbs.{module}"), function)
        with in_a_sentence():
            code: int = act(arguments)
        print(end="", flush=True)
        detail(f"codescent {verb}: exit code {code}, {time.monotonic() - begin_s:.1f} s")
    except UserError as error:
        cause.write_error_file(error, os.environ)
        if trains and not cause.has_begun():
            report_error(error.exit_code, os.environ)
        shared = cause.may_be_shared(os.environ) if trains and not error.everywhere else None
        if shared is not None:
            _say_once(error, shared)
        elif verb == "doctor":
            with suppress(OSError):
                say_once([f"error: {one_line(problem)}" for problem in error.problems], os.environ)
        elif cause.prints(error, os.environ):
            problems = (f"error: {one_line(problem)}" for problem in error.problems)
            _say(*problems, *cause.last_words(error, os.environ))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except OSError as error:
        if error.errno in OF_PATHS and error.filename is not None:
            name = str(error.filename)
            _say(f"error: {one_line(name[:SHOWN_CHARS])}{'...' * (len(name) > SHOWN_CHARS)}: {error.strerror}")
            return 2
        if error.errno == errno.ENOENT and error.filename is None:  # of os.getcwd
            _say("error: the working directory was removed: change to another one")
            return 2
        # The reader of the output has ended (`codescent ... | head`), or the disk is full: stop writing there.
        gone = isinstance(error, BrokenPipeError) and not trains
        if not gone and (error.filename is not None or not is_full(error)):
            raise
        if not gone:
            _say(f"error: {'' if trains else 'the output: '}{in_words(error)}")
        _discard(1)
        return 141 if gone else 2
    return code


def _say_once(error: UserError, rank: Rank) -> None:
    """Print an error that comes before the ranks have met, unless another rank prints the same."""
    lines, more = [f"error: {one_line(problem)}" for problem in error.problems], cause.last_words(error, os.environ)
    with suppress(OSError):
        if rank.local_world_size == rank.world_size:
            return say_once_or_tell(lines, more, rank, os.environ, _opener(rank))
        failure = RankFailure(rank.rank, f"{type(error).__name__}: {error}", cause.place())
        Failures(rank, None, _opener(rank)).refuse([*lines, *more], failure)


def _opener(rank: Rank) -> OpenAgent:
    """What opens the store of torchrun's agent. It imports torch, which takes seconds: under torchrun alone."""
    if rank.agent_store:
        from codescent.train.torch_store import open_agent

        return open_agent
    return _no_agent


def _no_agent(*_: object) -> AgentValues:
    raise AssertionError("no agent has started this rank")


def _say(*lines: str) -> None:
    """Print lines to the standard error; do nothing if that fails."""
    try:
        warn(*lines, level=ERROR)
    except OSError:
        _discard(2)


def _discard(descriptor: int) -> None:
    """Discard what a stream has not written yet, so that the interpreter does not fail at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
