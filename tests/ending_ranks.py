"""In: a rank that fails alone, and what hangs on its way out. Out: how its process ends, what it has called and said.
Does not assert anything (test_ending does) and starts no process (rank_server does)."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from layout_ranks import at_step
from rank_server import Place

import codescent
from codescent.__main__ import main
from codescent.base import ending
from codescent.base.token import TOKEN
from codescent.data.loader import Loader
from codescent.launch.environment import STORE_FD
from codescent.launch.group import Group
from codescent.train import world

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "gather", "barrier", "isend", "irecv", "new_group")


def hang(*_: Any) -> None:
    """What waits for another rank."""
    time.sleep(1000)


def watch() -> None:
    """From now on each collective and each teardown of this rank is printed; a teardown hangs then, as NCCL's."""

    def shown(name: str, then: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            print(f"called: {name}", flush=True)
            return then(*arguments, **options)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, shown(name, getattr(dist, name)))
    dist.destroy_process_group = shown("destroy_process_group", hang)


def planted() -> None:
    """The error of one rank."""
    watch()
    raise RuntimeError("planted")


def train(place: Place, words: list[str], hangs: bool = False) -> None:
    """`codescent train run.toml WORDS` as one rank of our launcher, to the end of the program. The last one fails alone
    in step 3. With `hangs` it does not get beyond closing its files, either."""
    port = place.listener.getsockname()[1]
    env = Group(place.ranks).environment(place.rank, port, {**os.environ, TOKEN: "of the test"})
    os.environ.update(env | {TOKEN: "of the test"})
    if place.rank == 0:
        os.environ[STORE_FD] = str(os.dup(place.listener.fileno()))
    place.listener.close()
    if place.rank == place.ranks - 1:
        at_step(3, "_reduce", lambda executor: planted())
        if hangs:
            ending.LIMIT_S = 3.0
            Loader.close = hang  # type: ignore[method-assign]
    sys.argv = ["codescent", "train", "run.toml", *words, "--ranks", str(place.ranks)]
    main()


def own(place: Place, what: str) -> None:
    """A script with `codescent.init`, whose last rank fails alone; then the interpreter ends, as far as it gets."""
    port = place.listener.getsockname()[1]
    os.environ.update(Group(place.ranks).environment(place.rank, port, {**os.environ}) | {TOKEN: "of the test"})
    if place.rank == 0:
        os.environ[STORE_FD] = str(os.dup(place.listener.fileno()))
    place.listener.close()
    ranks = codescent.init(device="cpu")
    atexit.register(print, f"rank {ranks.rank}: the script's own handler", flush=True)
    try:
        if what == "everywhere":
            watch()
            codescent.distribute(torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
        if ranks.rank == place.ranks - 1:
            if what == "caught":
                return _caught(ranks)
            if what == "the script's handler hangs":
                ending.LIMIT_S = 3.0
                atexit.register(hang)
            planted()
        dist.all_reduce(torch.zeros(1))
    except Exception as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            print(f"SystemExit {end.code}", flush=True)
    atexit._run_exitfuncs()  # as the interpreter does
    raise AssertionError("the interpreter has ended by itself")


def _caught(ranks: Any) -> None:
    """An error leaves the `with` block, and the script goes on; of NCCL the groups are given up, not destroyed."""
    watch()
    torch.cuda.synchronize = lambda *_: print("awaited", flush=True)
    world.abort_groups = lambda: print("given up", flush=True)
    try:
        with ranks:
            raise RuntimeError("planted")
    except RuntimeError:
        ranks.world.device = torch.device("cuda")
    atexit._run_exitfuncs()


def alone_on_cuda(place: Place, hangs: bool) -> None:
    """A rank of two on CUDA gives up its groups; with `hangs` NCCL does not answer."""

    def abort() -> None:
        print("given up", flush=True)
        if hangs:
            hang()

    world.abort_groups, ending.FREE_S = abort, 0.5
    here = world.World.__new__(world.World)
    place = SimpleNamespace(rank=0, world_size=2, local_world_size=2)
    here.device, here.this_rank = torch.device("cuda", 0), place  # type: ignore[assignment]
    watch()
    try:
        with here:
            raise RuntimeError("planted")
    except RuntimeError as error:
        ending.end_by(error)
    raise AssertionError("the process goes on")
