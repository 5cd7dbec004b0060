"""In: nothing. Out: the noun for where a process stands among the ranks of a run.
Does not read the environment (launch does) and connects to nothing (train does)."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
"""The address of this machine that no other reaches."""


@dataclass(frozen=True)
class Rank:
    """This process among the others, as its launcher numbered it; one process alone is rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    attempt: int = 0  # the launcher's count of restarts: keys of an earlier attempt may still be in the store
    agent_store: bool = False  # torchrun itself serves the store: rank 0 must not
    store_fd: int | None = None  # rank 0 of our own launcher: serve the store on this listening socket
    launcher: str = ""  # who numbered it, as messages say it
    child: bool = False  # its parent process is the launcher, and it ends with it
    job: str = ""  # the launcher's name for this start of this job, if it has one: keeps keys of other jobs apart
