"""In: a plan, the config of the command. Out: the rows of `codescent plan` on the memory of a rank, in words.
Does not count bytes (cost/stage_memory.py does) and does not print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_bytes
from codescent.base.device_kinds import kernels_of
from codescent.clusters.by_links import of_device
from codescent.config.decided import HEAD_CHUNK_TOKENS, compiles, head_chunk_tokens, with_device
from codescent.config.sections import Config
from codescent.cost.activations import UNDECLARED, computed_on
from codescent.cost.memory import kept_kinds
from codescent.cost.stage_memory import StageMemory, memory
from codescent.plan import AXES, Memory, Plan
from codescent.plan.activations import COMPILED, CPU

Row = tuple[str, list[str]]


def memory_rows(plan: Plan, config: Config | None = None) -> Iterator[Row]:
    """A heading, then a row each for weights, gradients, optimizer state, their sum, activations and the head.

    `config`: None: on each kind of device, and without the head.
    """
    state, tensor = max(_held(plan, CPU), key=lambda held: (held.state, held.state + held.host)), plan.trained[0]
    fullest = "; ranks of the fullest stage" if plan.mesh.pp > 1 else ""
    yield "memory per rank", [f"temporary tensors not counted{fullest}"]
    yield "  weights", [of_bytes(state.weights) + _where(plan.tensors[0].weights_in)]
    yield "  gradients", [of_bytes(state.gradients) + _where(tensor.gradients_in)]
    yield "  optimizer", [of_bytes(state.optimizer + state.host) + _where(tensor.optimizer_in)]
    if kept := kept_kinds(plan):
        yield "  of it", [", ".join(f"{kind} {of_bytes(size)}" for kind, size in kept.items())]
    if state.host:
        device, host = of_bytes(state.state), of_bytes(state.host)
        yield "  together", [f"{device} on the device, {host} in the host's memory"]
    else:
        yield "  together", [of_bytes(state.state)]
    yield "  activations", list(_of_activations(plan, config))
    if config is not None and (head := list(_of_head(plan, config))):
        yield "  head", head


def _where(memory: Memory) -> str:
    return ", in the host's memory" if memory is Memory.HOST else ""


def _kinds(config: Config | None) -> Sequence[str]:
    """The kind of the run's device, or each kind: a plan does not look for a device."""
    auto = config is None or config.train.device == "auto"
    return list(HEAD_CHUNK_TOKENS) if config is None or auto else [kernels_of(config.train.device)]


def _held(plan: Plan, kind: str, chunk_tokens: int | None = None, compiled: str = "none") -> list[StageMemory]:
    """What the first rank of each stage holds on a kind of device. `compiled`: see `memory`."""
    firsts = (plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}) for stage in range(plan.mesh.pp))
    return [memory(plan, rank, of_device(kind), chunk_tokens=chunk_tokens, compiled=compiled) for rank in firsts]


def _of_activations(plan: Plan, config: Config | None) -> Iterator[str]:
    """What forward passes keep for backward, on the stage where it is most.

    A plan does not try the compiler: blocks count as compiled where a run compiles them if it can.
    """
    flying = max(plan.schedule.most_in_flight(stage) for stage in range(plan.mesh.pp))
    several = f", {flying} passes in flight" if flying > 1 else ""
    for kind in _kinds(config):
        compiled = ("none" if kind == CPU else "blocks") if config is None else compiles(config, kind)
        how, words = _declared(plan, kind, compiled)
        most = max(_held(plan, kind, compiled=how), key=lambda held: held.activations)
        again = f", {of_bytes(most.again)} of it computed again" if most.again else ""
        yield (
            f"{of_bytes(most.activations)} on {kind}{several}{again}{words}"
            if most.whole
            else f"not known on {kind} in {plan.work.precision}"
        )


def _declared(plan: Plan, kind: str, compiled: str) -> tuple[str, str]:
    """What is declared that a run compiles, in place of what it compiles; and words on it."""
    where = computed_on(plan, kind, compiled)
    if where == COMPILED:
        at_most = ", at most" if plan.model.dropout and not plan.layout.computes_blocks_again else ""
        return "blocks", f"{at_most}, blocks compiled"
    return "none", ", blocks not compiled" if where == UNDECLARED else ""


def _of_head(plan: Plan, config: Config) -> Iterator[str]:
    """The memory of the head while it computes the loss."""
    for kind in _kinds(config):
        chunk = head_chunk_tokens(with_device(config, kind))
        if size := max(held.logits for held in _held(plan, kind, chunk)):
            of = f"{chunk:,} tokens" if chunk else "all tokens"
            yield f"{of_bytes(size)} on {kind}, logits of {of} at a time"
