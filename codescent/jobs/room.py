"""In: a plan, a site. Out: whether a rank fits in its device, the ranks of a node in its memory, and the checkpoints on
the disk. Does not estimate the peak of a step: what it counts is the least that a step needs (cost/stage_memory.py)."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from codescent.base.amounts import of_bytes
from codescent.base.counted import counted
from codescent.base.dtypes import DTYPE_BYTES
from codescent.base.refusal import in_words
from codescent.clusters.by_links import of_device
from codescent.config.decided import compiles, head_chunk_tokens, with_device
from codescent.config.sections import Config
from codescent.cost.stage_memory import StageMemory
from codescent.cost.stage_memory import memory as memory_of
from codescent.jobs.device import Device, device_of
from codescent.jobs.findings import Preflight
from codescent.jobs.site import ALL, NONE, memory_bytes
from codescent.plan import AXES, Plan
from codescent.plan.activations import CPU, CUDA
from codescent.planner.less_memory import SHARE, Shortage, less_memory
from codescent.record.memory import PARTS
from codescent.record.run_folder import CHECKPOINTS

SHOWN = 3
"""The largest number of changes that a message names."""


def memory(asked: Preflight, config: Config, plan: Plan) -> Iterator[str]:
    """Why the ranks do not fit in the memory that the site has."""
    on_devices = asked.site.devices != NONE and config.train.device != "cpu"
    if on_devices and asked.site.device_type is not None:
        yield from _device(config, plan, device_of(asked.site.device_type))
    if node_bytes := memory_bytes(asked.site.memory or ALL):
        yield from _node(asked, plan, node_bytes, on_devices=on_devices)


def _device(config: Config, plan: Plan, device: Device) -> Iterator[str]:
    chunk, compiled = head_chunk_tokens(with_device(config, CUDA)), compiles(config, CUDA)
    ranks = (plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}) for stage in range(plan.mesh.pp))
    machines = of_device(CUDA, device.name, device.memory_bytes)
    found = {rank: memory_of(plan, rank, machines, chunk_tokens=chunk, compiled=compiled) for rank in ranks}
    rank, held = max(found.items(), key=lambda item: item[1].least)
    needed, state = held.least, held.state
    if needed <= device.memory_bytes:
        return
    what = "weights, gradients and optimizer state"
    if needed > state:
        what += f" ({of_bytes(state)}) and {'activations' if held.whole else 'the least activations'}"
    yield (
        f"rank {rank} of {plan.world_size}: {what} take {of_bytes(needed)}, but {device.name} (site.device_type) has "
        f"at most {of_bytes(device.memory_bytes)}; {_advice(config, plan, device, rank, held)}"
    )


def _advice(config: Config, plan: Plan, device: Device, rank: int, held: StageMemory) -> str:
    """The nearest changes with which the rank fits: with room for what is not counted."""
    split = {**dict.fromkeys(PARTS, 0), PARTS[0]: device.memory_bytes}
    full = Shortage(rank, device.memory_bytes, split, held.activations - held.again, CUDA, compiles(config, CUDA))
    found = less_memory(config, plan, plan.model.vocab_size or None, full)
    fitting = [one for one in found if one.needed_bytes <= SHARE * device.memory_bytes][:SHOWN]
    if not fitting:
        least = min(found, key=lambda one: one.needed_bytes, default=None)
        need = "" if least is None else f"{in_words([least.change])} needs {of_bytes(least.needed_bytes)}, too much; "
        return f"{need}take a smaller model or data.seq_len, or divide it over more ranks (parallel.dp_shard, tp, pp)"
    each = (
        f"{in_words([one.change])} ({of_bytes(one.needed_bytes)}{'' if one.same_losses else ', with other losses'})"
        for one in fitting
    )
    return f"nearest that would do: {', or '.join(each)}"


def _node(asked: Preflight, plan: Plan, node_bytes: int, *, on_devices: bool) -> Iterator[str]:
    """The ranks of a node share its memory: all of their state on CPUs, what is offloaded on devices."""
    stages = (plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}) for stage in range(plan.mesh.pp))
    held = [memory_of(plan, rank, of_device(CUDA if on_devices else CPU)) for rank in stages]
    each = sum(one.host + (0.0 if on_devices else one.state) for one in held) / len(held)
    slots = max(asked.shape.slots)
    if (needed := each * slots) > node_bytes:
        what = "what is offloaded" if on_devices else "weights, gradients and optimizer state"
        fewer = math.floor(node_bytes / each)
        instead = f"at most {counted(fewer, 'rank')} on a node, or divide" if fewer else "divide"
        yield (
            f"{what} of {counted(slots, 'rank')} of a node take {of_bytes(needed)}, but site.memory = "
            f"{asked.site.memory}: ask for more, {instead} the model (parallel.dp_shard, tp, pp)"
        )


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint by the plan: weights as the optimizer has them, its state, and what strategies keep."""
    tensors = sum(
        tensor.parameter.numel
        * (
            DTYPE_BYTES[tensor.master_dtype or tensor.weight_dtype]
            + (tensor.optimizer_tensors + tensor.averaged) * DTYPE_BYTES[tensor.optimizer_dtype]
        )
        for tensor in plan.trained
    )
    return tensors + sum(math.prod(kept.shape) * DTYPE_BYTES[kept.dtype] for kept in plan.kept)


@dataclass(frozen=True)
class CheckpointSpace:
    """Those that a run has at once.

    Attributes:
        number: how many: those that are kept, and one more.
        one_bytes: of each: as the newest that is there, else by the plan.
        more_bytes: room for them, beside those that are there already.
    """

    number: int
    one_bytes: int
    more_bytes: int


def checkpoints(config: Config, plan: Plan, run: Path) -> CheckpointSpace:
    """The checkpoints of a run, new or begun, whose folder is `run`."""
    number = most_checkpoints(config)
    saved = sorted((run / CHECKPOINTS).glob("step_*"), key=lambda path: path.name)
    sizes = [size for path in saved if (size := _bytes_in(path))]
    one = sizes[-1] if sizes else checkpoint_bytes(plan)
    return CheckpointSpace(number, one, max(0, one * number - sum(sizes)))


def disk(config: Config, plan: Plan, run: Path) -> Iterator[str]:
    """Why the disk of the run folder has no room for the checkpoints."""
    found = checkpoints(config, plan, run)
    above = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    if found.more_bytes <= free:
        return
    others = 1 + _keeps_best(config)  # beside those that keep_last counts
    fitting = found.number - math.ceil((found.more_bytes - free) / found.one_bytes)
    keep = min(config.checkpoint.keep_last, fitting - others)
    lower = f", or checkpoint.keep_last={keep}" if keep >= 1 else ""
    yield (
        f"{run}: {counted(found.number, 'checkpoint')} of {of_bytes(found.one_bytes)} need "
        f"{of_bytes(found.more_bytes)} more, but {of_bytes(free)} are free there; free some space, give a run.folder "
        f"on another disk{lower}"
    )


def _bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder; 0: a job that runs has deleted it, or it may not be read."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return 0


def _keeps_best(config: Config) -> bool:
    return config.checkpoint.keep_best and config.train.eval_every > 0


def most_checkpoints(config: Config) -> int:
    """How many checkpoints the run has at once: the newest, the best, and one that is being saved."""
    checkpoint, train = config.checkpoint, config.train
    best = _keeps_best(config)
    most = checkpoint.keep_last + best + 1
    if train.num_epochs is not None:  # the steps are not known
        return most
    periods = [period for period in (checkpoint.every, train.eval_every * best) if period]
    saves = sum(train.num_steps // period for period in periods)
    if len(periods) > 1:  # a step that both save is one checkpoint
        saves -= train.num_steps // math.lcm(*periods)
    is_saved = any(train.num_steps % period == 0 for period in periods)
    return min(most, saves + (checkpoint.last and not is_saved))
