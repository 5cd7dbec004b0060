"""In: a config, its plan, what a rank held when its memory ran out. Out: the nearest changes that need less: each has a
plan.
Does not measure. What it says of activations are declared bytes, scaled by those that were counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codescent.base.amounts import of_bytes
from codescent.base.errors import UserError
from codescent.base.nearest import divisors
from codescent.base.refusal import Change, in_words
from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.clusters.by_links import of_device
from codescent.cost.activations import computed_on
from codescent.cost.stage_memory import StageMemory, largest_block, memory
from codescent.plan import AXES, Plan
from codescent.record.memory import PARTS

if TYPE_CHECKING:
    from codescent.config.sections import Config

SHARE = 0.8
"""A change fits if its parts take at most this share of what all parts held. Estimates that take more than 80 % of the
memory are often wrong (Fujii et al. 2024, "Accelerating Large Language Model Training with 4D Parallelism and Memory
Consumption Estimator", section 4)."""
SHOWN = 4
"""The largest number of changes that a message names."""
STATE = ("weights", "gradients", "optimizer")
NAMES = {part: part.removesuffix("_bytes") for part in PARTS}


@dataclass(frozen=True)
class Shortage:
    """What a rank held when its memory ran out.

    Attributes:
        rank: which rank.
        held_bytes: memory of the device, or of the process.
        split: bytes by name of PARTS.
        activations_bytes: about those of a whole step, at its fullest; 0: unknown.
        device: its kind.
        compiled: what torch.compile compiles, see `memory`.
    """

    rank: int
    held_bytes: int
    split: Mapping[str, int]
    activations_bytes: float
    device: str
    compiled: str = "none"

    @property
    def rest_bytes(self) -> int:
        """What no part explains: libraries, the allocator, temporary memory of operations."""
        return self.held_bytes - sum(self.split.values())

    @property
    def limit_bytes(self) -> float:
        """What an estimate may take, together with the rest."""
        return self.rest_bytes + SHARE * (self.held_bytes - self.rest_bytes)


@dataclass(frozen=True)
class Less:
    """A change, the bytes that the rank would need with it, about, and whether the losses stay the same."""

    change: Change
    needed_bytes: float
    same_losses: bool


def held_in_words(plan: Plan, short: Shortage) -> str:
    """The split of a rank, beside what the plan declares for it."""
    held = memory(plan, short.rank, of_device(short.device))
    parts = [f"{name} {of_bytes(short.split[part])}" for part, name in NAMES.items()]
    declared = held.parts() | {"optimizer": held.optimizer + held.host}
    return (
        f"it held {of_bytes(short.held_bytes)}: {', '.join(parts)}, the rest {of_bytes(short.rest_bytes)}; the plan "
        f"declares {', '.join(f'{name} {of_bytes(declared[name])}' for name in STATE)}"
    )


def advice(config: Config, plan: Plan, vocab_size: int | None, short: Shortage) -> tuple[str, Change | None]:
    """The nearest changes with which the rank needs less than it held, in words; and the first of them with the same
    losses."""
    found = less_memory(config, plan, vocab_size, short)
    fitting = [one for one in found if one.needed_bytes <= short.limit_bytes][:SHOWN]
    if not fitting:
        least = min(found, key=lambda one: one.needed_bytes, default=None)
        need = "" if least is None else f"; the least is {_in_words(least)}"
        more = "take a smaller model or data.seq_len, or divide it over more ranks (parallel.dp_shard, tp, pp)"
        return f"no change of batch, layout or precision alone needs less than that{need}; {more}", None
    said = f"nearest that fit, by these numbers: {', or '.join(map(_in_words, fitting))}"
    return said, next((one.change for one in fitting if one.same_losses), None)


def _in_words(one: Less) -> str:
    losses = "the losses stay the same" if one.same_losses else "the losses change: a new run"
    return f"{in_words([one.change])} (about {of_bytes(one.needed_bytes)}; {losses})"


def less_memory(config: Config, plan: Plan, vocab_size: int | None, short: Shortage) -> list[Less]:
    """Changes that have a plan and need less, the nearest first; several of them together only if one is not enough.

    `vocab_size`: see `resolve`.
    """
    tried = list(_of(config, plan, vocab_size, short, _single(config, plan)))
    if not any(one.needed_bytes <= short.limit_bytes for one in tried):
        tried += _of(config, plan, vocab_size, short, _together(config, plan))
    nearest: dict[tuple[str, ...], Less] = {}
    for one in tried:  # of several values of one key the first that fits, else the last
        key = tuple(one.change.values)
        if key not in nearest or nearest[key].needed_bytes > short.limit_bytes:
            nearest[key] = one
    return list(nearest.values())


def _single(config: Config, plan: Plan) -> Iterator[Change]:
    """One step each, the nearest first: those that cost no communication and no arithmetic come before the others."""
    work, layout = plan.work, plan.layout
    share = work.microbatch_size * work.num_microbatches
    smaller = sorted((size for size in divisors(share) if size < work.microbatch_size), reverse=True)
    yield from (Change({"train.microbatch_size": size}) for size in smaller)
    if not layout.computes_blocks_again:
        yield Change({"parallel.recompute": "products"})
    if layout.recompute != "full":
        yield Change({"parallel.recompute": "full"})
    if plan.mesh.dp_shard > 1:
        yield from (Change({"parallel.zero_stage": stage}) for stage in range(layout.zero_stage + 1, 4))
    if (sharded := _sharded(config, plan)) is not None:
        yield sharded
    if work.precision != "bf16":
        yield Change({"train.precision": "bf16"})


def _together(config: Config, plan: Plan) -> Iterator[Change]:
    """More and more of them at once; first those with the same losses."""
    whole = Change({"train.microbatch_size": 1, "parallel.recompute": "full"})
    yield whole
    if (sharded := _sharded(config, plan)) is not None:
        whole = whole.and_also(sharded.values)
    elif plan.mesh.dp_shard > 1:
        whole = whole.and_also({"parallel.zero_stage": 3})
    yield whole
    yield whole.and_also({"train.precision": "bf16"})


def _sharded(config: Config, plan: Plan) -> Change | None:
    """The copies of the model become shards, on the same ranks; None: there is one copy."""
    mesh = plan.mesh
    if mesh.dp_replicate == 1:
        return None
    values: dict[str, int | str] = {"parallel.dp_shard": mesh.dp_replicate * mesh.dp_shard}
    if config.parallel.dp_replicate is not None:
        values["parallel.dp_replicate"] = 1
    return Change({**values, **({"parallel.zero_stage": 3} if plan.layout.zero_stage < 3 else {})})


def _of(
    config: Config, plan: Plan, vocab_size: int | None, short: Shortage, changes: Iterator[Change]
) -> Iterator[Less]:
    """The changes that `build` accepts."""
    before = plan.trajectory()
    for change in changes:
        try:
            other = build(changed(config, change), vocab_size, plan.world_size)
        except (UserError, ValueError):
            continue
        yield Less(change, needed_bytes(other, plan, short), other.trajectory() == before)


def needed_bytes(other: Plan, plan: Plan, short: Shortage) -> float:
    """About what the fullest rank would need with another plan: declared state, activations, and the rest as it was.

    Activations are as declared (cost/stage_memory.py), times a factor: measured over declared, of the first plan. In
    backward one block has also its gradients. With recompute it has all of its activations again (Chen et al. 2016).
    """
    stage = plan.mesh.coordinates(short.rank)["pp"]
    declared = _first(plan, stage, short)
    kept = declared.activations - declared.again
    scale = short.activations_bytes / kept if short.activations_bytes and kept else 1.0
    found = [_first(other, one, short) for one in range(other.mesh.pp)]
    where = computed_on(other, short.device, _declared(other, short))
    gradients = largest_block(other, stage, where)
    needed = scale * (found[stage].activations + gradients)
    return max(one.state for one in found) + needed + short.split["buffers_bytes"] + short.rest_bytes


def _declared(plan: Plan, short: Shortage) -> str:
    """What is compiled; nothing, where it is not declared what compiled blocks keep."""
    return short.compiled if computed_on(plan, short.device, short.compiled) else "none"


def _first(plan: Plan, stage: int, short: Shortage) -> StageMemory:
    """What the first rank of a stage holds."""
    rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
    return memory(plan, rank, of_device(short.device), compiled=_declared(plan, short))
