"""In: the folder of a task, as codescent.collectives.rank gets it. Out: the same, with calls that fail in known ways.
Does not assert anything: test_collectives_command does."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from codescent.collectives.calls import CALLS, Here, Result
from codescent.collectives.rank import run


def raises(here: Here) -> list[Result]:
    raise RuntimeError("this backend cannot do that\n  at all\nException raised from nowhere\nframe #0: hidden")


def raises_in_bf16(here: Here) -> list[Result]:
    if here.dtype == torch.bfloat16:
        raise ValueError("no bf16")
    return []


def waits(here: Here) -> list[Result]:
    """A message that nobody sends."""
    dist.recv(here.blank(), here.preceding)
    return []


def one_raises(here: Here) -> list[Result]:
    """The other rank waits for it."""
    if here.rank:
        raise RuntimeError("only here")
    dist.barrier()
    return []


def wrong(here: Here) -> list[Result]:
    return [Result(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + here.rank]))]


def crashes(here: Here) -> list[Result]:
    if here.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return []


def holds_the_interpreter(here: Here) -> list[Result]:
    """No thread of Python can run here, so no watchdog of ours."""
    sys.setswitchinterval(1000)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        pass
    return []


if __name__ == "__main__":
    own = {call.__name__: call for call in (raises, raises_in_bf16, waits, one_raises, wrong, crashes)}
    run(Path(sys.argv[1]), {**CALLS, **own, "holds_the_interpreter": holds_the_interpreter})
