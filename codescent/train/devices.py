"""In: train.device, the devices of this process, device names of all ranks. Out: this rank's device, the backends of
its process groups and their versions, or an error.
Does not check whether a plan fits a device (machine.py does), and does not communicate with other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch

from codescent.base import device as devices
from codescent.base.counted import counted, plural
from codescent.base.device_kinds import AUTO, CPU, GPUS, KINDS, DeviceKind
from codescent.base.errors import UserError
from codescent.base.rank import Rank

AND = " + "
"""Between the names of the devices of a rank."""
IN_CONFIG = 'train.device = "{}"'
"""How a device is asked for in a config, in messages."""


def choose_devices(wanted: str, this_rank: Rank, option: str = IN_CONFIG, *, each: int = 1) -> tuple[torch.device, ...]:
    """Choose the devices of this rank, `each` in number, and make the first the current one.

    "auto" is the first kind of GPU that the machine has and that can serve a run of so many ranks; else the CPU, which
    counts as `each` devices. Local rank 0 has the first ones, local rank 1 the next.

    A process that sees as many devices as it needs takes them, whatever its local rank: with srun --gpus-per-task each
    rank sees only its own. `refusal` checks that no two ranks have taken one device. `option`: how a user asks for a
    device.

    Raises:
        UserError: there are fewer devices than local ranks, or none of the kind that is `wanted`; several ranks cannot
            exchange on such devices.
    """
    kind = KINDS[_first_kind(this_rank) if wanted == AUTO else wanted]
    if kind.name == CPU:
        return (torch.device(CPU),) * each
    asked, found = option.format(wanted), devices.count(kind.name)
    if this_rank.world_size > 1 and not kind.backend:
        raise UserError(
            f"{asked}: {kind.label}s have no collectives in torch, so the {counted(this_rank.world_size, 'rank')} of "
            f"this run cannot exchange; start one rank, or set {option.format(CPU)}"
        )
    if found != each and found < this_rank.local_world_size * each:
        few = f"start at most {found // each} here, or " if found // each else ""
        of_each = f" with {each} devices each" if each > 1 else ""
        raise UserError(
            f"{asked}: this machine has {counted(found, kind.label)} for "
            f"{counted(this_rank.local_world_size, 'local rank')}{of_each}; {few}set {option.format(CPU)}"
        )
    first = 0 if found == each else this_rank.local_rank * each
    device = devices.take(kind.name, first)
    if this_rank.world_size > 1:
        _refuse_without_sums(kind, device, asked, option)
    return device, *(torch.device(kind.name, number) for number in range(first + 1, first + each))


def _first_kind(this_rank: Rank) -> str:
    """What "auto" means on this machine."""
    able = (kind for kind in GPUS if this_rank.world_size == 1 or KINDS[kind].backend)
    return next((kind for kind in able if devices.count(kind)), CPU)


def _refuse_without_sums(kind: DeviceKind, device: torch.device, asked: str, option: str) -> None:
    """Ranks sum their losses and norms in fp64 (`plan.traffic`). Raises UserError: this device has none."""
    if not devices.has_fp64(device):
        raise UserError(
            f"{asked}: ranks sum losses in fp64, and this {kind.label} ({devices.device_name(device)}) has no fp64; "
            f"start one rank, or set {option.format(CPU)}"
        )


def backends(device: torch.device, ranks: int, *, shards_alone: bool, each: int = 1) -> tuple[str, torch.device | None]:
    """The backends of a rank's process groups, and the device on which NCCL starts at once (None: it does not).

    Ranks on GPUs have the backend of their kind (NCCL, xccl) for tensors of the device, gloo for the others. A single
    rank sends nothing. So a run does not start NCCL there, which takes a second, memory and a network interface.

    Args:
        device: of this rank.
        ranks: their number.
        each: devices of a rank. NCCL that starts at once, on one device, refuses tensors of another.
        shards_alone: a single rank may have a module of fully_shard, whose mesh of one rank needs NCCL. NCCL then
            starts with the first message of such a module.
    """
    kind = devices.offered(device)
    if device.type not in GPUS or not kind.backend:
        return "gloo", None
    both = f"{CPU}:gloo,{kind.name}:{kind.backend}"
    if ranks > 1:
        return both, device if each == 1 else None
    return (both if shards_alone else "gloo"), None


def versions(backend: str) -> dict[str, str]:
    """The versions of torch, and of NCCL where the process groups use it. They must be equal on all ranks."""
    return {"torch": torch.__version__, **devices.backend_versions(backend)}


def refusal(names: Sequence[str], wanted: str, option: str = IN_CONFIG, each: int = 1) -> str:
    """The error text if some ranks but not all have a GPU, or two ranks share one; otherwise "".

    Args:
        names: of each rank's devices, by `unique_name`, each once, joined by AND.
        wanted: train.device.
        option: how a user asks for a device.
        each: devices of a rank.
    """
    without = [str(rank) for rank, name in enumerate(names) if name == CPU]
    if len(without) == len(names):
        return ""
    if without:
        return (
            f"{option.format(wanted)}: {plural(len(without), 'rank')} {', '.join(without)} of {len(names)}: no GPU, "
            f"the others have one: give each rank a device, or set {option.format(CPU)}"
        )
    of_ranks = [name.split(AND) for name in names]
    counts = Counter(chain.from_iterable(of_ranks))
    shared = next((name for name in chain.from_iterable(of_ranks) if counts[name] > 1), None)
    if shared is None:
        return ""
    ranks = ", ".join(str(rank) for rank, some in enumerate(of_ranks) if shared in some)
    one = "each device" if each == 1 else f"{each} devices"
    return (
        f"{option.format(wanted)}: ranks {ranks} of {len(names)} see the same GPU ({shared}); start one rank "
        f"for {one}, let the launcher give each rank its own device, or set {option.format(CPU)}"
    )
