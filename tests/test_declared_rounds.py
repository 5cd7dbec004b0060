"""In: replicas that train apart, and gradients, in each format of `wire`. Out: every step issues, and each
rank keeps, what is declared. Does not run a step itself: declared_ranks does."""

from __future__ import annotations

from math import prod

import pytest
from declared_cases import ON_GLOO, ROUNDS
from declared_ranks import Answer, plan_of
from declared_traffic import check_issued
from forker import Forker

from codescent.plan import DTYPE_BYTES, Plan
from codescent.plan.state import state_of_rank


def check(plan: Plan, rank: int, answer: Answer, *, on_gloo: bool = False) -> None:
    assert "failed" not in answer, answer["failed"]
    for number, issued in enumerate(answer["issued"]):
        check_issued(plan, rank, issued, number, on_gloo=on_gloo)
        if rank == 0:
            sent = [record for record in plan.traffic if record.stage in (None, 0) and record.runs_in(number)]
            assert plan.sent_bytes(0, number) == pytest.approx(
                sum(record.times * record.wire_bytes(plan.mesh.degree(record.axis)) for record in sent)
            )
    stage = plan.mesh.coordinates(rank)["pp"]
    declared = {
        kept.name: [list(kept.placement.sizes(kept.shape, plan.mesh, rank)), DTYPE_BYTES[kept.dtype]]
        for kept in plan.kept
        if kept.stage in (None, stage)
    }
    if rank in plan.mesh.group("pp", 0):  # what is kept of a message is declared for the fullest rank of a stage
        assert answer["kept"] == declared
        if plan.mesh.dp_shard == 1:
            assert answer["counted"]["optimizer_bytes"] == state_of_rank(plan, rank).optimizer_bytes
    assert {name: len(shape) for name, (shape, _) in answer["kept"].items()} == {
        name: len(shape) for name, (shape, _) in declared.items()
    }
    for name, (shape, size) in answer["kept"].items():
        assert prod(shape) * size <= prod(declared[name][0]) * declared[name][1]


def test_steps_of_all_rounds_issue_what_is_declared(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rounds")
    (found,) = forker.call("declared_ranks:on_fake_ranks", folder, cases=ROUNDS, rounds=True)
    for name, answers in found.items():
        for rank, answer in answers.items():
            check(plan_of(ROUNDS[name]), int(rank), answer)
    steps = {len(answer["issued"]) for answers in found.values() for answer in answers.values()}
    assert max(steps) >= 14  # opening steps, those before a wire begins, two rounds


@pytest.mark.parametrize("name", ON_GLOO)
def test_real_ranks_issue_what_is_declared(forker: Forker, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder, one = tmp_path_factory.mktemp("rounds"), ROUNDS[name]
    answers = forker.call("declared_ranks:on_gloo_rank", folder, one["world_size"], case=one, rounds=True)
    for rank, answer in enumerate(answers):
        check(plan_of(one), rank, answer, on_gloo=True)
