"""In: train.device, the CUDA devices of this process, device names of all ranks. Out: this rank's device, the backends
of its process groups and their versions, or an error.
Does not check whether a plan fits a device (machine.py does), and does not communicate with other ranks."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from codescent.base.counted import counted, plural
from codescent.base.errors import UserError
from codescent.base.rank import Rank

CPU = "cpu"
IN_CONFIG = 'train.device = "{}"'
"""How a device is asked for in a config, in messages."""


def choose_device(wanted: str, this_rank: Rank, option: str = IN_CONFIG) -> torch.device:
    """Choose the device of this rank. "auto" is CUDA where the machine has it, one device for each local rank.

    A process that sees one device takes it, whatever its local rank: with srun --gpus-per-task each rank sees only its
    own. `refusal` checks that no two ranks have taken one device. `option`: how a user asks for a device.

    Raises:
        UserError: there are fewer devices than local ranks, or `wanted` is "cuda" and there is none.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == CPU or (wanted == "auto" and devices == 0):
        return torch.device(CPU)
    if devices != 1 and devices < this_rank.local_world_size:
        few = f"start at most {devices} here, or " if devices else ""
        raise UserError(
            f"{option.format(wanted)}: this machine has {counted(devices, 'CUDA device')} for "
            f"{counted(this_rank.local_world_size, 'local rank')}; {few}set {option.format(CPU)}"
        )
    index = 0 if devices == 1 else this_rank.local_rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def name_of(device: torch.device) -> str:
    """A name that is unique among the CUDA devices of all machines; "cpu" for every CPU."""
    if device.type == CPU:
        return CPU
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def backends(device: torch.device, ranks: int, *, shards_alone: bool) -> tuple[str, torch.device | None]:
    """The backends of a rank's process groups, and the device on which NCCL starts at once (None: it does not).

    Ranks on CUDA have NCCL for tensors of the device, gloo for the others. A single rank sends nothing. So a run does
    not start NCCL there, which takes a second, memory and a network interface.

    Args:
        device: of this rank.
        ranks: their number.
        shards_alone: a single rank may have a module of fully_shard, whose mesh of one rank needs NCCL. NCCL then
            starts with the first message of such a module.
    """
    if device.type != "cuda":
        return "gloo", None
    if ranks > 1:
        return "cpu:gloo,cuda:nccl", device
    return ("cpu:gloo,cuda:nccl" if shards_alone else "gloo"), None


def versions(backend: str) -> dict[str, str]:
    """The versions of torch, and of NCCL where the process groups use it. They must be equal on all ranks."""
    if "nccl" not in backend or not dist.is_nccl_available():
        return {"torch": torch.__version__}
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {"torch": torch.__version__, "NCCL": ".".join(map(str, nccl))}


def refusal(names: Sequence[str], wanted: str, option: str = IN_CONFIG) -> str:
    """The error text if some ranks but not all have a CUDA device, or two ranks share one; otherwise "".

    Args:
        names: of each rank's device, by `name_of`.
        wanted: train.device.
        option: how a user asks for a device.
    """
    without = [str(rank) for rank, name in enumerate(names) if name == CPU]
    if len(without) == len(names):
        return ""
    if without:
        return (
            f"{option.format(wanted)}: {plural(len(without), 'rank')} {', '.join(without)} of {len(names)}: no CUDA "
            f"device, the others have one: give each rank a device, or set {option.format(CPU)}"
        )
    counts = Counter(names)
    shared = next((name for name in names if counts[name] > 1), None)
    if shared is None:
        return ""
    ranks = ", ".join(str(rank) for rank, name in enumerate(names) if name == shared)
    return (
        f"{option.format(wanted)}: ranks {ranks} of {len(names)} see the same CUDA device ({shared}); start one rank "
        f"for each device, let the launcher give each rank its own device, or set {option.format(CPU)}"
    )
