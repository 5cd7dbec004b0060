"""In: a config, the tokenizer's vocabulary size, the number of ranks. Out: the Plan, or all errors of the config.
Does not start a process, allocate a tensor or import torch. It refuses servers without rows itself; accept.py finds all
other problems."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from codescent import models, tasks
from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal
from codescent.build import mtp
from codescent.build.accept import MOST_TRIED, accepted, changed
from codescent.build.compiled import refusals
from codescent.build.resolve import Resolved, task_request
from codescent.build.waiting import gradients_that_wait
from codescent.config.update_rules import state_tensors
from codescent.operators.saved_tensors import ForwardPass
from codescent.plan import (
    CROSS_ENTROPY,
    WIDE,
    Objective,
    Parameter,
    Placement,
    Plan,
    Role,
    Scalar,
    Schedule,
    TensorPlan,
)
from codescent.plan.activations import SavedTensor
from codescent.plan.operators import LayerOperator
from codescent.plan.schedule import accumulate
from codescent.plan.served import pieces_of
from codescent.strategies import (
    Candidate,
    Strategy,
    active,
    decides,
    deferred_of,
    kept_of,
    operators_of,
    saved_of,
    traffic_of,
)
from codescent.strategies.common_sums import common_sums

if TYPE_CHECKING:
    from codescent.config.sections import Config


def build(config: Config, vocab_size: int | None, world_size: int) -> Plan:
    """Build the plan of a run.

    Args:
        config: of the run.
        vocab_size: see `resolve`.
        world_size: number of ranks.

    Raises:
        UserError: all problems of the config.
    """
    config, resolved, candidate = accepted(config, vocab_size, world_size)
    schedule = accumulate(candidate.work.num_microbatches, len(candidate.model.forward_flops))
    for strategy in active(candidate):
        schedule = strategy.schedule(schedule, candidate)
    if (policy := objective_of(config).policy) is not None and policy.updates > 1:  # a save would part their steps
        schedule = dataclasses.replace(schedule, agreement=policy.updates)
    plan = placed(config, candidate, parameters_of(resolved), schedule, active(candidate))
    if candidate.layout.served and not all(plan.pieces):
        raise UserError(_idle_servers(config, vocab_size, plan))
    traffic = tuple(record for strategy in active(plan) for record in traffic_of(strategy, plan))
    kept = tuple(tensor for strategy in active(plan) for tensor in kept_of(strategy, plan))
    keeps, computes = activations(candidate, plan.objective), operators(candidate, plan.objective)
    again, waiting = made_again(candidate, plan.objective), deferred(plan)
    plan = dataclasses.replace(plan, kept=kept, activations=keeps, again=again, deferred=waiting, operators=computes)
    return dataclasses.replace(plan, traffic=(*traffic, *common_sums(plan)))


def parameters_of(resolved: Resolved) -> tuple[Parameter, ...]:
    """The parameters of a run, with its adapters."""
    return models.parameters_of(resolved.model.kind, resolved.shape, resolved.model.lora)


def placed(
    config: Config,
    candidate: Candidate,
    parameters: Iterable[Parameter],
    schedule: Schedule,
    strategies: Sequence[Strategy],
) -> Plan:
    """A plan of some parameters, as these strategies place them, without messages and operators."""
    tensors = tuple(_placed(parameters, config, candidate, strategies))
    return _plan(config, candidate, tensors, schedule)


def activations(run: Candidate | Plan, objective: Objective) -> tuple[SavedTensor, ...]:
    """What forward keeps for backward of a micro-batch on a rank."""
    return saved_of(models.saved_of(run.model, _forward_pass(run, objective)), run)


def made_again(run: Candidate | Plan, objective: Objective) -> tuple[SavedTensor, ...]:
    """What a block keeps without parallel.recompute: it is there while backward goes through the block."""
    if not run.layout.computes_blocks_again:
        return ()
    without = dataclasses.replace(run, layout=dataclasses.replace(run.layout, recompute="none"))
    return activations(without, objective)


def deferred(plan: Plan) -> tuple[SavedTensor, ...]:
    """What a micro-batch keeps until the gradients of its weights are computed, where they are deferred."""
    if plan.mesh.pp == 1 or not plan.layout.defers_weights:
        return ()
    declared = models.saved_of(plan.model, _forward_pass(plan, plan.objective))
    return (*deferred_of(declared, plan), *gradients_that_wait(plan.tensors, declared))


def operators(run: Candidate | Plan, objective: Objective) -> tuple[LayerOperator, ...]:
    """What a rank computes of a micro-batch beside products with matrices."""
    return operators_of(models.operators_of(run.model, _forward_pass(run, objective)), run)


def _forward_pass(run: Candidate | Plan, objective: Objective = CROSS_ENTROPY) -> ForwardPass:
    work, mesh, model = run.work, run.mesh, run.model
    return ForwardPass(
        samples=work.microbatch_size,
        positions=work.seq_len,
        precision=work.precision,
        # A share of whole numbers is a little more or less than they are.
        head_tokens=round(work.microbatch_size * work.positions(-1) * run.task.head_share) // mesh.cp,
        chunk_tokens=model.head_chunk_tokens,
        padded=run.task.extras,
        documents=run.task.documents,
        selects=mesh.cp > 1,
        splits=mesh.cp > 1 or (mesh.tp > 1 and run.layout.sequence_parallel),
        gathers=mesh.tp > 1 and run.layout.sequence_parallel,
        defers=mesh.pp > 1 and run.layout.defers_weights and model.lora is None,  # adapters do not
        divides=mesh.tp,
        whole=mesh.pp == 1,
        objective=objective,
    )


def _idle_servers(config: Config, vocab_size: int | None, plan: Plan) -> Refusal:
    """The problem that a server would hold nothing: rows of tensors are not divided."""

    def does(change: Change) -> bool:
        try:
            accepted(changed(config, change), vocab_size, change.ranks or plan.world_size)
        except (UserError, ValueError):
            return False
        return True

    servers, workers = len(plan.servers), plan.mesh.world_size
    most = min(servers - 1, sum(tensor.parameter.shape[0] for tensor in plan.trained))
    enough = (number for number in range(most, 0, -1) if all(pieces_of(plan.trained, number)))
    fewer = list(islice(enough, MOST_TRIED))
    on_as_many = (Change({"parallel.servers": number}) for number in fewer)
    with_the_workers = (Change({"parallel.servers": number}, workers + number) for number in fewer)
    said = f"parallel.servers = {json.dumps(plan.layout.servers)}: {servers} servers are more than the rows to share"
    nearest = (next(filter(does, changes), None) for changes in (on_as_many, with_the_workers))
    return Refusal(f"{said}, by bytes", filter(None, nearest))


def trajectory(config: Config, vocab_size: int | None, world_size: int) -> dict[str, Scalar]:
    """`Plan.trajectory` of the plan of `build`, and its errors. A schedule of many micro-batches would take seconds."""
    config, _, candidate = accepted(config, vocab_size, world_size)
    return trajectory_of(config, candidate)


def trajectory_of(config: Config, candidate: Candidate) -> dict[str, Scalar]:
    """See `trajectory`: of a candidate, whether or not anything refuses it."""
    return bare_plan(config, candidate).trajectory()


def bare_plan(config: Config, candidate: Candidate) -> Plan:
    """A plan without tensors and instructions: what is decided before them, whether or not anything refuses it."""
    return _plan(config, candidate, (), Schedule(()))


def _plan(config: Config, candidate: Candidate, tensors: tuple[TensorPlan, ...], schedule: Schedule) -> Plan:
    plan = Plan(
        mesh=candidate.mesh,
        model=candidate.model,
        task=candidate.task,
        work=candidate.work,
        layout=candidate.layout,
        tensors=tensors,
        schedule=schedule,
        seed=config.run.seed,
        update=candidate.update,
        objective=objective_of(config),
        uncompiled=next(refusals(candidate), ""),
        ema=config.train.ema,
        ema_every=config.train.ema_every if config.train.ema else 1,
    )
    return dataclasses.replace(plan, decides=decides(plan))


def objective_of(config: Config) -> Objective:
    """What a run minimises: the loss of answers of its task, if it has one, else the cross-entropy of its targets."""
    request, train = task_request(config), config.train
    task = tasks.task_of(request)
    of_answers = task.preference(request), task.policy(request)
    smoothing, z_loss = (train.label_smoothing, train.z_loss) if of_answers == (None, None) else (0.0, 0.0)
    routers = train.balance_loss, train.balance_rate, train.router_z_loss
    return Objective(smoothing, z_loss, *routers, mtp.weight_of(config), *of_answers)


def _placed(
    parameters: Iterable[Parameter], config: Config, candidate: Candidate, strategies: Sequence[Strategy]
) -> Iterator[TensorPlan]:
    """The tensors as the strategies place them. Blocks are alike: those that differ in name and block are placed once.

    So no strategy places a tensor by its name, or by the number of its block.
    """
    layers = candidate.model.num_layers
    found: dict[tuple[Any, ...], TensorPlan] = {}
    for one in parameters:
        in_block = len(one.depths) == 1 and 1 <= one.depths[0] <= layers
        alike = (
            one.shape,
            one.role,
            () if in_block else one.depths,
            one.stream,
            one.trained,
            one.alternating,
            one.fixed,
            one.quantized,
        )
        if alike not in found:
            tensor = _tensor(one, config, candidate.work.num_microbatches)
            for strategy in strategies:
                tensor = strategy.place(tensor, candidate)
            factor = models.rate_factor(candidate.model, tensor, candidate.update)
            found[alike] = dataclasses.replace(tensor, rate_factor=factor)
        yield dataclasses.replace(found[alike], parameter=one)


def _tensor(parameter: Parameter, config: Config, num_microbatches: int) -> TensorPlan:
    """The plan of a tensor before any strategy changes it.

    Trained bf16 weights have fp32 master copies, optimizer state and sums of gradients. Frozen weights have none.
    """
    precision = config.train.precision
    return TensorPlan(
        parameter=parameter,
        weight_dtype=precision,
        gradient_dtype=WIDE[precision] if num_microbatches > 1 else precision,
        optimizer_dtype=WIDE[precision],
        master_dtype=WIDE[precision] if WIDE[precision] != precision and parameter.trained else "",
        optimizer_tensors=state_tensors(config.optimizer),
        weights=Placement(),
        gradients=Placement(),
        optimizer=Placement(),
        averaged=config.train.ema > 0 and parameter.trained,
        sign_rate=config.train.balance_rate if parameter.role is Role.ROUTER_BIAS else None,
    )
