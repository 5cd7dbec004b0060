"""In: the device that is wanted, what this process sees. Out: this rank's device; why the ranks cannot have theirs.
Does not know what a plan needs of devices (machine does), and asks no other rank (rendezvous does)."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence

import torch

from codescent.base.errors import UserError
from codescent.base.rank import Rank

CPU = "cpu"


def choose_device(wanted: str, place: Rank) -> torch.device:
    """The device of this rank. "auto" takes CUDA where the machine has it, one device for each local rank.

    A process that sees one device takes it, whatever its local rank: srun with --gpus-per-task shows each rank its own.
    `refusal` finds out whether all of them see the same one.

    Raises:
        UserError: there are fewer devices than local ranks, or none and CUDA is asked for.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == CPU or (wanted == "auto" and devices == 0):
        return torch.device(CPU)
    if devices != 1 and devices < place.local_world_size:
        few = f"start at most {devices} here, or " if devices else ""
        raise UserError(
            f'train.device = "{wanted}": this machine has {devices} CUDA device(s) for {place.local_world_size} local '
            f'rank(s); {few}set train.device = "cpu"'
        )
    index = 0 if devices == 1 else place.local_rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def name_of(device: torch.device) -> str:
    """A name that no other device of any machine has; CPUs have one in common."""
    if device.type == CPU:
        return CPU
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def refusal(names: Sequence[str], wanted: str) -> str:
    """Why the ranks cannot have the devices of these names: some have none, or two share one. "" where they can."""
    without = [str(rank) for rank, name in enumerate(names) if name == CPU]
    if len(without) == len(names):
        return ""
    if without:
        return (
            f'train.device = "{wanted}": rank(s) {", ".join(without)} of {len(names)} see no CUDA device, the '
            f'others do: have each of them see one, or set train.device = "cpu"'
        )
    counts = Counter(names)
    shared = next((name for name in names if counts[name] > 1), None)
    if shared is None:
        return ""
    ranks = ", ".join(str(rank) for rank, name in enumerate(names) if name == shared)
    return (
        f'train.device = "{wanted}": ranks {ranks} of {len(names)} see one and the same CUDA device ({shared}); '
        f'start one rank for each device, have the launcher show each rank its own, or set train.device = "cpu"'
    )
