"""In: a config file and overrides. Out: a run, done by `codescent train` in a process of its own; why it failed.
Does not read the run folder (run.py does), and does not decide what is run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

from codescent.base.parent import PARENT
from codescent.base.stopping import EXIT_FILE
from codescent.launch.launchers import TORCHRUN_SET

STOP_S = 30.0
"""Seconds for a stopped run to save and to end its ranks."""


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit code of its process, negative for a signal; why, in one line, "" if it succeeded."""

    code: int
    why: str = ""


def train_words(config: str, words: Sequence[str]) -> list[str]:
    """The command that `train_run` starts."""
    return [sys.executable, "-P", "-m", "codescent", "train", config, *words]


Beside = Callable[[int], AbstractContextManager[object]]
"""What goes on while a run goes on, made of the id of its process."""


def train_run(
    config: str,
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    beside: Beside = lambda _: nullcontext(),
) -> Ended:
    """Run `codescent train CONFIG WORDS` and wait for its end. If this process is stopped, the run is stopped first.

    Args:
        config: the config file.
        words: overrides and flags.
        environment: more environment variables. Those of a launcher are not passed on.
        beside: is entered when the process has started, and left when it has ended.
    """
    ours = (*TORCHRUN_SET, EXIT_FILE)  # the run reports to this process
    env = {key: value for key, value in os.environ.items() if key not in ours} | dict(environment or {})
    env[PARENT] = str(os.getpid())
    command, pipe = train_words(config, words), subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, errors="replace") as child:
        try:
            with beside(child.pid):
                _, stderr = child.communicate()
        except BaseException:  # this process is being stopped: give the run time to stop its ranks
            try:
                with suppress(subprocess.TimeoutExpired):
                    child.terminate()
                    child.communicate(timeout=STOP_S)
            finally:  # too slow, or a second Ctrl-C: its ranks end with it
                child.kill()
            raise
    return Ended(child.returncode, _cause(child.returncode, stderr) if child.returncode else "")


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that runs are stopped and temporary folders removed.

    A signal that is ignored stays so: `nohup codescent study` goes on when its terminal is closed.
    """

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # that of native code from before Python, which cannot put it back
                signal.signal(number, handler)


def _cause(code: int, stderr: str) -> str:
    """Why a run failed, in one line: its error message, else the launcher's message about the first failed rank."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for beginning in ("error: ", "codescent: "):
        for line in lines:
            if line.startswith(beginning):
                return line.removeprefix(beginning)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return lines[-1] if lines else f"exit code {code}"
