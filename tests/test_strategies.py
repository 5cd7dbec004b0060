"""In: candidates and plans. Out: strategies without state, that see of a run its layout, model, task and batch alone.
Does not look at what a strategy does to a model: tests of each strategy do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from codescent.plan import AXES, Layout, Mesh, ModelFacts, Parameter, Plan, Role, TaskFacts, TensorPlan, Work
from codescent.plan.schedule import accumulate
from codescent.strategies import ORDER, Candidate, Strategy, ThisRank, active, traffic_of
from codescent.strategies.strategy import Strategy as Base

MODEL = ModelFacts("gpt2", 6, 24, 12, 12, 2, 11, forward_flops=(1.0,) * 8, sizes={"seq_len": 48})
WORK = Work(seq_len=48, global_batch_size=12, microbatch_size=2, num_microbatches=6, precision="bf16")
KEYS: list[dict[str, Any]] = [{}, *(variant for strategy in ORDER for variant in strategy.variants)]


def candidate(mesh: Mesh, **layout: Any) -> Candidate:
    return Candidate(mesh, MODEL, TaskFacts("lm"), WORK, Layout(**layout), mesh.world_size, 2)


def test_strategies_have_no_state_of_their_own() -> None:
    assert all(isinstance(strategy, Base) and not vars(strategy) for strategy in ORDER)


@pytest.mark.parametrize("strategy", ORDER, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_a_candidate_is_all_that_refusing_takes(strategy: Strategy, keys: dict[str, Any]) -> None:
    """Frozen, and equal before and after; whatever is wrong with it is said in words."""
    for degrees in ({}, *({axis: 5} for axis in AXES)):
        asked = candidate(Mesh(**degrees), **keys)
        before = dataclasses.replace(asked)
        assert all(isinstance(problem, str) and problem for problem in strategy.refuse(asked))
        assert asked == before


def test_every_variant_is_a_key_of_the_layout() -> None:
    fields = {field.name for field in dataclasses.fields(Layout)}
    assert {key for strategy in ORDER for variant in strategy.variants for key in variant} <= fields


def test_one_rank_without_keys_is_served_by_none() -> None:
    assert active(candidate(Mesh())) == ()


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_served_by_its_strategy(axis: str) -> None:
    served = [strategy.axis for strategy in active(candidate(Mesh(**{axis: 2})))]
    # Ranks that share a sequence are replicas of the model, too.
    assert served == ([axis] if axis != "cp" else ["cp", "dp_replicate"])


def test_what_a_strategy_does_not_override_does_nothing() -> None:
    class Idle(Strategy):
        """Overrides nothing."""

    asked, idle = candidate(Mesh(pp=2)), Idle()
    tensor = TensorPlan(Parameter("w", (4, 2), Role.COLUMN), "bf16", "bf16", "fp32", "fp32", 2)
    schedule = accumulate(6)
    plan = Plan(Mesh(), MODEL, asked.task, WORK, asked.layout, (tensor,), schedule)
    assert not list(idle.refuse(asked))
    assert idle.place(tensor, asked) is tensor
    assert idle.schedule(schedule, asked) is schedule
    assert traffic_of(idle, plan) == ()
    assert not idle.active(asked)
    owner: Any = object()
    assert idle.gradients([], ThisRank(plan, 0, {}), owner) is owner


def test_a_tensor_is_placed_by_neither_its_name_nor_its_block() -> None:
    """`build` places one of the tensors that differ in these alone. The embedding is no block."""
    meshes = [Mesh(), *(Mesh(**{axis: 2}) for axis in AXES), Mesh(pp=2, tp=2, dp_shard=2)]
    for mesh in meshes:
        for keys in (*KEYS, {"offload": "optimizer"}, {"zero_stage": 1}):
            asked = candidate(mesh, **keys)
            for role in Role:
                first = Parameter("blocks.0.a.weight", (6, 24), role, depths=(1,))
                other = dataclasses.replace(first, name="blocks.5.z.weight", depths=(6,))
                placed = [TensorPlan(one, "bf16", "fp32", "fp32", "fp32", 2) for one in (first, other)]
                for strategy in active(asked):
                    placed = [strategy.place(tensor, asked) for tensor in placed]
                assert dataclasses.replace(placed[0], parameter=other) == placed[1]
