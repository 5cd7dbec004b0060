"""In: a plan, the config of the command. Out: the rows of `codescent plan` on the memory of a rank, in words.
Does not count bytes (cost and plan/state.py do) and does not print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_bytes
from codescent.config.decided import HEAD_CHUNK_TOKENS, compiles, head_chunk_tokens, with_device
from codescent.config.sections import Config
from codescent.cost.activations import activations_bytes, is_known
from codescent.cost.memory import head_bytes, kept_kinds, state_bytes
from codescent.plan import Memory, Plan
from codescent.plan.activations import CPU

Row = tuple[str, list[str]]


def memory_rows(plan: Plan, config: Config | None = None) -> Iterator[Row]:
    """A heading, then a row each for weights, gradients, optimizer state, their sum, activations and the head.

    `config`: None: on each kind of device, and without the head.
    """
    state, tensor = state_bytes(plan), plan.trained[0]
    fullest = "; ranks of the fullest stage" if plan.mesh.pp > 1 else ""
    yield "memory per rank", [f"temporary tensors not counted{fullest}"]
    yield "  weights", [of_bytes(state.weights_bytes) + _where(plan.tensors[0].weights_in)]
    yield "  gradients", [of_bytes(state.gradients_bytes) + _where(tensor.gradients_in)]
    yield "  optimizer", [of_bytes(state.optimizer_bytes) + _where(tensor.optimizer_in)]
    if kept := kept_kinds(plan):
        yield "  of it", [", ".join(f"{kind} {of_bytes(size)}" for kind, size in kept.items())]
    if state.host_bytes:
        device, host = of_bytes(state.device_bytes), of_bytes(state.host_bytes)
        yield "  together", [f"{device} on the device, {host} in the host's memory"]
    else:
        yield "  together", [of_bytes(state.total_bytes)]
    yield "  activations", list(_of_activations(plan, config))
    if config is not None and (head := list(_of_head(plan, config))):
        yield "  head", head


def _where(memory: Memory) -> str:
    return ", in the host's memory" if memory is Memory.HOST else ""


def _kinds(config: Config | None) -> Sequence[str]:
    """The kind of the run's device, or each kind: a plan does not look for a device."""
    auto = config is None or config.train.device == "auto"
    return list(HEAD_CHUNK_TOKENS) if config is None or auto else [config.train.device]


def _of_activations(plan: Plan, config: Config | None) -> Iterator[str]:
    """What forward passes keep for backward, on the stage where it is most. The compiler chooses by itself."""
    flying = max(plan.schedule.most_in_flight(stage) for stage in range(plan.mesh.pp))
    several = f", {flying} passes in flight" if flying > 1 else ""
    least = "at least " if plan.mesh.pp > 1 and plan.layout.defers_weights else ""
    for kind in _kinds(config):
        compiled = kind != CPU if config is None else compiles(config, kind)
        plain = ", blocks not compiled" if compiled else ""
        known = is_known(plan, kind)
        yield (
            f"{least}{of_bytes(activations_bytes(plan, kind))} on {kind}{several}{plain}"
            if known
            else (f"not known on {kind} in {plan.work.precision}")
        )


def _of_head(plan: Plan, config: Config) -> Iterator[str]:
    """The memory of the head while it computes the loss."""
    for kind in _kinds(config):
        chunk = head_chunk_tokens(with_device(config, kind))
        if size := head_bytes(plan, chunk, on_cpu=kind == "cpu"):
            of = f"{chunk:,} tokens" if chunk else "all tokens"
            yield f"{of_bytes(size)} on {kind}, logits of {of} at a time"
