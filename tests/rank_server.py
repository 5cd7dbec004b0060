"""In: requests, one JSON line each: a function of a test module, a folder, a number of ranks. Out: exit codes, results.
Does not know what the function does. It imports torch once and forks the ranks; tests use it through `forker`."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from codescent.base.errors import UserError
from codescent.train import choices, world

TIMEOUT_S = 100.0
MOST_SAID = 20_000
"""Characters that are kept of what ranks said, from the end: tracebacks of four ranks, even under a long path."""
PATIENCE_S = 20.0
"""How long the other ranks may go on after one has failed."""
MODULES = (
    "torch._dynamo",
    "torch.utils.checkpoint",
    "numpy.ma",
    "codescent.models.gpt2.module",
    "codescent.models.transformer.module",
    "codescent.own.distribute",
    "codescent.own.metrics",
    "codescent.own.profile",
    "codescent.own.sampler",
    "codescent.own.saved",
    "codescent.strategies.ring",
    "codescent.strategies.shards",
    "codescent.strategies.vocabulary",
    "codescent.train.loop",
)


@dataclass(frozen=True)
class Place:
    """One rank of a request: `listener` is the port at which the ranks of a run meet."""

    rank: int
    ranks: int
    folder: Path
    number: int
    listener: socket.socket

    def join(self, timeout_s: float = 60) -> dist.ProcessGroup:
        """Join a gloo group of all ranks of the request, without a run's store."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store, limit = f"file://{self.folder}/store_{self.number}", timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.ranks, timeout=limit)
        group = dist.group.WORLD
        assert group is not None
        return group


IN_ORDER = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
"""Options of new_group that keep the order of its ranks; none where torch (2.11) sorts them always."""


def serve() -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    prepare()
    for line in sys.stdin:
        number, request = json.loads(line)
        print(json.dumps([number, *answer(number, **request)]), flush=True)


def prepare() -> None:
    """Do once what every fork would do again: imports, a hash of the package, a measurement that only `mfu` needs."""
    for module in MODULES:
        importlib.import_module(module)
    choices._peak = lambda device, precision: (1e9, None)
    digest = world.code_digest()
    world.code_digest = lambda: digest  # an eighth of what a rank of three small steps computes
    refuse_pickles()
    gc.freeze()


def refuse_pickles() -> None:
    """No rank opens a pickle of another rank: all of torch's collectives of objects call these two functions."""

    def refuse(*_: object) -> None:
        raise AssertionError("a pickle is sent from rank to rank")

    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refuse


def answer(
    number: int, function: str, folder: str, ranks: int, options: dict[str, Any]
) -> tuple[list[int | None], list[Any], str]:
    """Fork the ranks and wait for them: exit codes, each rank's result (None without one), the end of their output."""
    act = named(function)
    os.chdir(folder)
    said, found = Path(folder) / "said.txt", [Path(folder) / f"found_{rank}.json" for rank in range(ranks)]
    said.write_text("")
    for path in found:
        path.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        places = [Place(rank, ranks, Path(folder), number, listener) for rank in range(ranks)]
        codes = join([fork(partial(act, place, **options), said, path) for place, path in zip(places, found)])
    results = [json.loads(path.read_text()) if path.exists() else None for path in found]
    return codes, results, said.read_text()[-MOST_SAID:]


def named(function: str) -> Callable[..., Any]:
    """The function `module:name`."""
    module, name = function.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def act_after(place: Place, first: str, function: str, options: dict[str, Any]) -> Any:
    """Call `first` in a rank, then the function that is asked for."""
    named(first)()
    return named(function)(place, **options)


def fork(act: Callable[[], Any], said: Path, found: Path) -> int:
    """Start `act` in a process of its own; `said` gets its output, `found` its result as JSON."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with said.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        found.write_text(json.dumps(act()))
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except UserError as error:
        code = error.exit_code
        sys.stdout.write("".join(f"error: {problem}\n" for problem in error.problems))  # one write: ranks share it
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # without the interpreter's end, where gloo's threads may abort


def join(pids: list[int]) -> list[int | None]:
    """Wait for processes; their exit codes, None for those that had to be killed."""
    descriptors = {os.pidfd_open(pid): pid for pid in pids}
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while descriptors:
        ready, _, _ = select.select(list(descriptors), [], [], max(0.0, deadline - time.monotonic()))
        for descriptor in ready or list(descriptors):
            pid = descriptors.pop(descriptor)
            os.close(descriptor)
            if not ready:
                kill(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[pid] = code if ready else None
            if code:
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
    return [codes[pid] for pid in pids]


def kill(pid: int) -> None:
    """Kill a process and what it has started: a scenario of checkpoint_ranks forks ranks of its own."""
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            one.kill()
