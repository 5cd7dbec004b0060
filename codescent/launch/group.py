"""In: which ranks of a run this machine has, and where rank 0 is. Out: each rank's environment, the socket of rank 0.
Does not start ranks (local.py does)."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from codescent.base.call import AGAIN, SURVIVES
from codescent.base.cores import OUR_THREADS, available_cores, threads_per_rank
from codescent.base.errors import UserError
from codescent.base.loopback import refuse_without_loopback
from codescent.base.progress import PROGRESS_FD
from codescent.base.rank import LOOPBACK
from codescent.base.stacks import STACKS_FD
from codescent.base.token import TOKEN, fresh
from codescent.launch.environment import LATE, STORE_FD
from codescent.launch.launchers import TORCHRUN_SET
from codescent.transport.sockets import listen_at


@dataclass(frozen=True)
class Group:
    """The ranks that one process starts.

    Attributes:
        count: how many.
        first: the lowest.
        world: how many the run has on all machines; 0: only these.
        address: of the machine of rank 0.
        port: at which rank 0 listens; 0: a free one, where all ranks are on this machine.
        token: the secret of the run; each machine needs the same. Empty: the ranks read the user's file.
    """

    count: int
    first: int = 0
    world: int = 0
    address: str = LOOPBACK
    port: int = 0
    token: str = field(default_factory=fresh, repr=False)

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(self.first, self.first + self.count)

    @property
    def world_size(self) -> int:
        """How many ranks the run has on all machines."""
        return self.world or self.count

    @property
    def is_local(self) -> bool:
        """Whether no rank is on another machine."""
        return self.count == self.world_size

    def listen(self) -> socket.socket | None:
        """A socket for the store, on the address of rank 0 alone; None: rank 0 is elsewhere.

        Raises UserError: this machine has no loopback or not the address, or the port is taken.
        """
        if self.address == LOOPBACK:
            refuse_without_loopback()
        if self.first:
            return None
        try:
            return listen_at(self.address, self.port, self.world_size)
        except OSError as error:
            raise UserError(f"rank 0 cannot listen at {self.address}:{self.port}: {error.strerror}") from error

    def environment(self, rank: int, port: int, env: Mapping[str, str]) -> dict[str, str]:
        """Environment of a rank: torchrun's variables, threads, and the network interface, added to `env`.

        Numbers of threads and interfaces that `env` has stay. Across machines each rank finds its own interface.
        """
        own = {
            **({} if "OMP_NUM_THREADS" in env else {OUR_THREADS: "auto"}),
            "OMP_NUM_THREADS": str(threads_per_rank(available_cores(), self.count)),
            "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves the Python stack in the rank's log
        }
        if self.is_local:
            loopback_interface = "lo" if sys.platform == "linux" else "lo0"
            own["GLOO_SOCKET_IFNAME"] = loopback_interface  # listens without a password, so on loopback only
            own["NCCL_SOCKET_IFNAME"] = loopback_interface
        ours = (STORE_FD, PROGRESS_FD, STACKS_FD, TOKEN, OUR_THREADS, LATE, AGAIN, SURVIVES)
        inherited = {k: text for k, text in env.items() if not k.startswith("TORCHELASTIC_") and k not in ours}
        values = map(str, (rank, rank - self.first, self.world_size, self.count, self.address, port))
        return own | inherited | dict(zip(TORCHRUN_SET, values, strict=True))
