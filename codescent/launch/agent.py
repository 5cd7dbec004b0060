"""In: which ranks of a run this machine has, a command. Out: these ranks, started, watched, and stopped on request.
Does not reach other machines: a script starts it on each host, as `python3 -P -m codescent.launch.agent`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from codescent.base.call import ON_LOSS
from codescent.base.cores import refuse_more_ranks
from codescent.base.early import listen
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.rank import LOOPBACK
from codescent.base.reading import read_text
from codescent.base.stopping import EXIT_FILE, SAVING, reported
from codescent.base.temporary_folder import temporary_folder
from codescent.base.token import TOKEN, fresh
from codescent.base.writing import open_new
from codescent.launch.group import Group
from codescent.launch.local import run_ranks
from codescent.launch.losses import LossCount
from codescent.launch.places import LossPolicy
from codescent.launch.run_layouts import layouts_of_run
from codescent.launch.supervisor import Stopped

SENT = {name: signal.Signals[f"SIG{name}"] for name in ("TERM", "INT", "HUP", "USR1", "USR2")}
"""What a line of the standard input asks for, with --follow."""
VERBS = ("train", "doctor")
"""Words after `codescent` of commands that the agent starts in another way."""


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them. Returns the exit code."""
    asked = _parse(words)
    address, port = asked.master or (LOOPBACK, 0)
    env = dict(os.environ)
    try:
        refuse_more_ranks(f"--ranks {asked.ranks}", asked.ranks)
        if asked.follow:
            env[TOKEN] = sys.stdin.readline().strip()
            if not env[TOKEN]:
                raise UserError("--follow: the standard input must begin with the token of the run, and is empty")
            listen(SENT.values())  # `run_ranks` takes what comes before it listens itself
            threading.Thread(target=_follow, daemon=True).start()
        token = env.get(TOKEN, "").strip()
        if not token and asked.world in (0, asked.ranks):  # agents of other machines would draw another one
            token = fresh()
        group = Group(asked.ranks, asked.first, asked.world, address, port, token)
        verb = _verb(asked.command)
        if verb == "doctor":
            return _examine(asked.command, group, env)
        blocked = SAVING if verb == "train" else ()  # it listens to them from its first moment on
        policy, stopped = _policy(asked, group), Stopped(asked.stopped)
        env[ON_LOSS] = asked.on_loss or "stop"
        return run_ranks(asked.command, group, env, blocked=blocked, reports=True, survive=policy, stopped=stopped)
    except UserError as error:
        warn(*(f"error: {problem}" for problem in error.problems))
        return error.exit_code
    except OSError as error:
        warn(f"error: {asked.command[0]}: {error.strerror}")
        return 2


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="codescent.launch.agent", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", required=True, help="ranks of this machine")
    add("--first", type=int, default=0, help="the lowest of them (default 0)")
    add("--world", type=int, default=0, help="ranks on all machines (default: these)")
    add("--master", type=_endpoint, metavar="ADDRESS:PORT", help="where rank 0 listens")
    follow = "the first line of the standard input is the token, further ones are signals; its end is TERM"
    add("--follow", action="store_true", help=follow)
    add("--on-loss", choices=("restart", "shrink"), help="what the run does if ranks die (survive.on_loss)")
    add("--max-restarts", type=int, default=3, metavar="N", help="survive.max_restarts")
    add("--restart-window", type=float, default=3600.0, metavar="SECONDS", help="survive.restart_window_s")
    add("--spares", type=int, default=0, metavar="N", help="processes of this machine that wait for a place")
    add("--stopped", type=float, metavar="SECONDS", help="when a rank that is stopped is ended (parallel.stopped_s)")
    add("command", nargs="+", help="the command of each rank, after --")
    asked = parser.parse_args(words)
    if asked.ranks < 1:
        parser.error(f"--ranks {asked.ranks}: give at least 1")
    if 0 < asked.world < asked.ranks:
        parser.error(f"--world {asked.world}: is less than --ranks {asked.ranks}")
    if asked.world > asked.ranks and asked.master is None:
        parser.error(
            f"--world {asked.world}: with --ranks {asked.ranks} others are elsewhere: give --master ADDRESS:PORT"
        )
    if not 0 <= asked.first <= (asked.world or asked.ranks) - asked.ranks:
        parser.error(
            f"--first {asked.first}: with --ranks {asked.ranks} of {asked.world or asked.ranks} it is too high"
        )
    return asked


def _policy(asked: argparse.Namespace, group: Group) -> LossPolicy | None:
    """What the run does about losses; None: it ends. The ranks know its layouts: agents read no config."""
    if asked.on_loss is None:
        return None
    losses = LossCount(asked.max_restarts, asked.restart_window, batch=0)
    later = partial(layouts_of_run, wanted=group.world_size, say=warn) if asked.on_loss == "shrink" else None
    return LossPolicy(losses, asked.spares, later=later)


def _verb(words: Sequence[str]) -> str:
    """Which of VERBS a command is; empty: another one. A container may be called codescent, too."""
    return next((two for one, two in pairwise(words) if Path(one).name == "codescent" and two in VERBS), "")


def _examine(command: Sequence[str], group: Group, env: dict[str, str]) -> int:
    """Run the ranks of the doctor. What it finds is no failure of a rank: rank 0 writes its exit code to a file."""
    with temporary_folder("codescent-exit-") as folder:
        open_new(folder / "code", 0o600).close()
        code = run_ranks(command, group, {**env, EXIT_FILE: str(folder / "code")})
        return code or reported(int(read_text(folder / "code") or 0), env)


def _endpoint(text: str) -> tuple[str, int]:
    address, colon, port = text.rpartition(":")
    if not (colon and address and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise argparse.ArgumentTypeError(f"--master {text}: write ADDRESS:PORT, such as 10.0.0.1:29400")
    return address, int(port)


def _follow() -> None:
    """Do what the lines of the standard input ask for. Where it ends, the script or its connection has ended."""
    for line in sys.stdin:
        if (number := SENT.get(line.strip())) is not None:
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
