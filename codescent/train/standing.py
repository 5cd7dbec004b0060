"""In: what each rank says of itself, the store at which they meet. Out: who is first on its machine, who shares cores.
Does not choose a device (devices does) and makes no process group (world does)."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.train.devices import refusal


@dataclass(frozen=True)
class Standing:
    """Attributes:
    leaders: the first rank of each machine: not every launcher gives a machine numbers that follow one another.
    sharing: how many ranks have the same cores as this one, itself among them. Launchers that bind their ranks give
        each its own.
    """

    leaders: list[int]
    sharing: int


def compare(store: Store, place: Rank, wanted: str, device: str) -> Standing:
    """Let rank 0 compare what all ranks say: every rank calls it. The store is asked a few times by each rank.

    Args:
        store: fresh.
        place: of this rank.
        wanted: train.device.
        device: what `devices.name_of` says of this rank's.

    Raises:
        UserError: on every rank, where two have the same device, or some have none; a rank that does not come.
    """
    mine = {"device": device, "local_rank": place.local_rank, "cores": _cores()}
    store.set(f"rank{place.rank}", json.dumps(mine))
    try:
        if place.rank == 0:
            said = store.multi_get([f"rank{rank}" for rank in range(place.world_size)])
            store.set("ranks", json.dumps(_compared([json.loads(one) for one in said], wanted)))
        found = json.loads(store.get("ranks"))
    except (DistStoreError, DistNetworkError) as error:
        raise UserError(
            f"rank {place.rank} of {place.world_size} on {socket.gethostname()}: not every rank that came to "
            f"{place.master_addr}:{place.master_port} said who it is ({error}); one has ended, and says why, or "
            "another job is at this port: set MASTER_PORT to a free one, for every rank"
        ) from error
    if found["refusal"]:
        raise UserError(found["refusal"])
    return Standing(found["leaders"], found["sharing"][place.rank])


def _compared(ranks: list[dict[str, object]], wanted: str) -> dict[str, object]:
    cores = [rank["cores"] for rank in ranks]
    return {
        "refusal": refusal([str(rank["device"]) for rank in ranks], wanted),
        "leaders": [number for number, rank in enumerate(ranks) if rank["local_rank"] == 0],
        "sharing": [cores.count(mine) for mine in cores],
    }


def _cores() -> str:
    """The cores of this machine that this process may use."""
    mask = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return f"{socket.gethostname()} {','.join(map(str, mask))}"
