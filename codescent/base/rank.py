"""In: nothing. Out: the dataclass Rank: the rank, world size and master address of a process.
Does not read environment variables (launch does) and opens no connection (train does)."""

from __future__ import annotations

import socket
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
"""The loopback address: only processes of this machine reach it."""
AGENT_RUN = "TORCHELASTIC_RUN_ID"
"""A variable that an agent of torchrun sets for its ranks. It is not set if a user exports RANK and WORLD_SIZE."""


@dataclass(frozen=True)
class Rank:
    """Rank of this process, as its launcher set it. The default is a single process: rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    attempt: int = 0  # restarts of the job so far; ranks of an earlier one are refused
    agent_store: bool = False  # True: torchrun serves the store, so rank 0 must not
    store_fd: int | None = None  # our launcher, rank 0: listening socket for the store
    launcher: str = ""  # name of the launcher in messages
    child: bool = False  # True: the parent process is the launcher; this process ends when it ends
    late: bool = False  # True: our launcher has started this process for a rank that died; the others train already
    job: str = ""  # the launcher's identifier of this start of the job; "": none. Separates keys of different jobs

    def here(self) -> str:
        """This process in messages, such as "rank 1 of 4 on node1"."""
        return f"rank {self.rank} of {self.world_size} on {socket.gethostname()}"
