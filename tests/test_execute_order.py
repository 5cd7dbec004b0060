"""In: pipeline schedules on real ranks. Out: executor and simulator run the same instructions in the same order.
Does not look at what is computed: test_trajectories does, nor at what is sent: test_declared does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from batches import selected
from declared_cases import Case, case
from declared_ranks import plan_of
from forker import Forker

from codescent.cost.simulate import Costs, simulate

LAYERS = {"num_layers": 9, "hidden_dim": 16}


def cases_of(pp: int) -> dict[str, Case]:
    """Every schedule; 1f1b with fewer micro-batches than stages too, with as many, and with more."""
    cases = {
        schedule: case(
            "fp32", 2 * pp, pp=pp, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1, model=LAYERS
        )
        for schedule in ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
    }
    few = {f"1f1b, {m} micro-batches": case("fp32", m, pp=pp, schedule="1f1b", model=LAYERS) for m in (1, pp - 1, pp)}
    recomputed = {"1f1b, recomputed": case("fp32", 2 * pp, pp=pp, schedule="1f1b", recompute="full", model=LAYERS)}
    return {**cases, **few, **recomputed}


CASES = {pp: cases_of(pp) for pp in (2, 4)}


@pytest.fixture(scope="module")
def stages(
    forker: Forker, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[int], list[dict[str, Any]]]:
    """By number of stages: of each stage, by case, what it did."""

    @functools.cache
    def stages_of(pp: int) -> list[dict[str, Any]]:
        names = [params["name"] for params in selected(request) if params.get("pp") == pp]
        cases = {name: CASES[pp][name] for name in names}
        return forker.call("order_ranks:work", tmp_path_factory.mktemp("order"), pp, cases=cases)

    return stages_of


@pytest.mark.parametrize(("pp", "name"), [(pp, name) for pp, cases in CASES.items() for name in cases])
def test_the_executor_runs_what_the_simulator_runs(
    stages: Callable[[int], list[dict[str, Any]]], pp: int, name: str
) -> None:
    plan = plan_of(CASES[pp][name])
    microbatches = plan.work.num_microbatches
    simulation = simulate(plan.schedule, Costs(latency_s=0.1, transfer_s=0.1))
    for stage, of_stage in enumerate(stages(pp)):
        done = of_stage[name]
        assert done["ran"] == [str(span.instruction) for span in simulation.timeline if span.stage == stage]
        assert done["peak_live"] == simulation.stages[stage].peak_live
        if name.startswith("1f1b"):
            assert done["peak_live"] == min(microbatches, pp - stage)
