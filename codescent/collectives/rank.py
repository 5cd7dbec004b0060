"""In: a folder with a task, a rank's environment. Out: the task done with the other ranks; lines in the folder.
Does not start ranks and prints nothing. It trusts no group: the ranks agree through the store of their run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from codescent.base.device import count, make_current
from codescent.base.device_kinds import GPUS
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.parent import end_with_parent
from codescent.base.rank import Rank
from codescent.collectives import holdings, timing
from codescent.collectives.calls import CALLS, Call, Here
from codescent.collectives.probe import Probe, check
from codescent.collectives.task import BF16, FP32, GROUP, PROBE, TIME, YES, Task, name_of
from codescent.launch.environment import read
from codescent.meeting.addresses import is_local
from codescent.meeting.interfaces import name_interface
from codescent.meeting.rendezvous import Meeting, meet
from codescent.train.torch_store import TorchStore, open_agent

MEET_S = 300.0
DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}


def main(folder: Path, calls: Mapping[str, Call] = CALLS) -> None:
    """Do the task of `folder` as one of its ranks. Ends the process, also with a broken group. Collective.

    Raises:
        UserError: the ranks do not find each other.
    """
    this_rank = read(os.environ)
    assert this_rank is not None, "survey.py starts the ranks"
    end_with_parent(f"rank {this_rank.rank} of {this_rank.world_size}")
    warnings.simplefilter("ignore")
    task = Task.read(folder)
    meeting = meet(this_rank, timedelta(seconds=MEET_S), open_agent)
    name_interface(f"rank {this_rank.rank}", meeting.address, is_local=is_local(this_rank))
    device = _device(task.device, this_rank)
    probe = Probe(folder, meeting.store, this_rank, task.limit_s)
    store = TorchStore(meeting.store)
    if all_are(probe(GROUP, partial(_join, task, store, this_rank)), YES):
        if task.does == PROBE:
            _probe_calls(
                task, probe, Here(this_rank.rank, this_rank.world_size, device, torch.float32, meeting.store), calls
            )
        else:
            probe(task.does, partial(timing.measure, task, device) if task.does == TIME else holdings.record)
    leave(meeting)


def _probe_calls(task: Task, probe: Probe, here: Here, calls: Mapping[str, Call]) -> None:
    """Try each call in each dtype. Ends early when ranks differ: then some may still be inside a collective."""
    for call in task.calls:
        for name, dtype in DTYPES.items():
            mine = Here(here.rank, here.ranks, here.device, dtype, here.store)
            states = probe(name_of(call, name), partial(_try, call, calls[call], mine))
            if len(set(states)) > 1:
                return
            if not all_are(states, YES):
                break


def _try(name: str, call: Call, here: Here) -> None:
    check(call(here), name)


def _join(task: Task, store: TorchStore, this_rank: Rank) -> None:
    """Make the process group. Raises RuntimeError: it has other ranks than we have started."""
    make_current(_device(task.device, this_rank))
    limit = timedelta(seconds=2 * task.limit_s)  # the probe's own limit comes first
    dist.init_process_group(
        task.backend, store=store, rank=this_rank.rank, world_size=this_rank.world_size, timeout=limit
    )
    if (ranks := dist.get_world_size()) != this_rank.world_size:
        raise RuntimeError(
            f"the group has {ranks} of {this_rank.world_size} ranks: the backend counts them in its own way"
        )


def _device(kind: str, this_rank: Rank) -> torch.device:
    """The device of this rank. Ranks share devices if there are too few."""
    return torch.device(kind, this_rank.local_rank % count(kind)) if kind in GPUS else torch.device(kind)


def all_are(states: object, state: str) -> bool:
    """Whether each of some states is `state`."""
    return set(states) == {state}  # type: ignore[call-overload,no-any-return]


def leave(meeting: Meeting) -> NoReturn:
    """End the process without the destructors of a group, some of which wait for other ranks."""
    meeting.close()  # rank 0 first answers what it has been asked
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(folder: Path, calls: Mapping[str, Call] = CALLS) -> None:
    """`main`, with the error message and the exit code of a command."""
    try:
        main(folder, calls)
    except UserError as error:
        warn(*(f"error: {problem}" for problem in error.problems))
        sys.exit(error.exit_code)
