"""In: values of [survive], layouts. Out: what is refused before a run begins, and what is only said.
Does not lose a rank: tests/faults/ does."""

from __future__ import annotations

from pathlib import Path

import pytest
from forker import Forker
from refused import Keys, planned

from codescent.base.refusal import Refusal
from codescent.build.survival import (
    copies,
    nothing_to_compare,
    parts,
    short_deadlines,
    wrong_survival,
)
from codescent.config.survive import Survive

RESTART = Survive(on_loss="restart", max_restarts=3)
SHRINK = Survive(on_loss="shrink")
GOOD = {"save_every": 10, "lost_whole": True, "smaller": ""}


def refused(keys: Survive, **values: object) -> list[Refusal]:
    return list(wrong_survival(keys, **{**GOOD, **values}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keys", [Survive(), RESTART, SHRINK, Survive(on_loss="shrink", spares=2), Survive(on_loss="restart", spares=1)]
)
def test_what_can_be_is_not_refused(keys: Survive) -> None:
    """Fault: a policy is refused in a run that has all it needs."""
    assert not refused(keys)


@pytest.mark.parametrize(
    ("keys", "values", "said"),
    [
        (SHRINK, {"smaller": "no layout of at most 1 rank"}, "there is nothing to shrink to: no layout of at most 1"),
        (RESTART, {"save_every": 0}, "checkpoint.every = 0, so a restart would begin with the first step"),
        (SHRINK, {"save_every": 0, "lost_whole": False}, "what a rank holds no other rank has"),
        (Survive(spares=2), {}, "no spare one gets a place"),
    ],
)
def test_a_policy_without_what_it_needs(keys: Survive, values: dict[str, object], said: str) -> None:
    """Fault: the run begins, and ends at the first loss that it should survive."""
    (problem,) = refused(keys, **values)
    assert said in problem


def test_all_problems_are_said_at_once() -> None:
    """Fault: a user corrects one key, starts again, and is told the next one."""
    assert len(refused(SHRINK, save_every=0, lost_whole=False, smaller="the run has one rank")) == 2


def test_a_shrink_needs_no_checkpoint_where_others_hold_what_is_lost() -> None:
    """Fault: copies of all ranks count for nothing, and checkpoints are asked for."""
    assert not refused(SHRINK, save_every=0)


def test_deadlines_below_a_step() -> None:
    """Fault: each healthy step counts as a hang."""
    found = list(short_deadlines({"parallel.timeout_s": 2.0, "parallel.stopped_s": None, "parallel.meet_s": 6.0}, 5.3))
    assert found == [
        "parallel.timeout_s = 2: a step takes 5.30 s, so each would count as a fault; nearest that would do: "
        "parallel.timeout_s = 11"
    ]


@pytest.mark.parametrize(
    ("keys", "ranks", "held"),
    [
        ({}, 4, {4}),
        ({"parallel.dp_shard": 4}, 4, {1}),
        ({"parallel.dp_shard": 4, "parallel.zero_stage": 1}, 4, {1, 4}),
        ({"parallel.dp_shard": 2}, 4, {2}),  # two replicas of shards
        ({"parallel.cp": 2}, 2, {2}),
        ({"parallel.tp": 2}, 2, {1, 2}),  # norms are whole on each rank
        ({"parallel.pp": 2, "train.microbatch_size": 2}, 2, {1, 2}),  # the embedding is the head, too
        ({"parallel.average_every": 4, "train.eval_every": 4, "checkpoint.every": 4}, 4, {1, 4}),
        ({"parallel.servers": 1}, 3, {1}),
    ],
)
def test_how_many_ranks_hold_a_tensor(keys: Keys, ranks: int, held: set[int]) -> None:
    """Fault: survivors go on without a part of the weights or of the optimizer, or ask the disk for what they have."""
    assert copies(planned(keys, ranks)) == held


@pytest.mark.parametrize(
    ("keys", "held"),
    [
        ({}, (0, 0, 0, 0)),
        ({"parallel.dp_shard": 2}, (0, 1, 0, 1)),
        ({"parallel.tp": 2}, (0, 1, 0, 1)),
        ({"parallel.dp_shard": 4, "parallel.zero_stage": 1}, (0, 1, 2, 3)),
        ({"parallel.cp": 2}, (0, 0, 0, 0)),
        ({"parallel.pp": 2, "train.microbatch_size": 2}, (0, 0, 1, 1)),
    ],
)
def test_which_ranks_hold_the_same(keys: Keys, held: tuple[int, ...]) -> None:
    """Fault: ranks of two shards count as copies, or copies as shards, and the wrong ones go on after a loss."""
    assert parts(planned(keys, 4)) == held


def test_a_comparison_without_copies_is_said() -> None:
    """Fault: a user believes that ranks are compared of which each holds another part."""
    sharded = planned({"parallel.dp_shard": 4}, 4)
    assert nothing_to_compare(100, sharded).startswith("train.check_every = 100 has no effect: each of 4 ranks holds")
    assert not nothing_to_compare(0, sharded)
    assert not nothing_to_compare(100, planned({}, 4))
    assert not nothing_to_compare(100, planned({}, 1))


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        (("parallel.dp_shard=2", "train.check_every=5"), True),
        (("parallel.dp_shard=2",), False),  # the default serves all layouts
        (("parallel.dp_replicate=2", "train.check_every=5"), False),
    ],
)
def test_a_run_says_that_it_compares_nothing(
    project: Path, forker: Forker, words: tuple[str, ...], is_said: bool
) -> None:
    """Fault: the sentence is known, and nobody reads it; or each sharded run says it."""
    done = forker.run(project, 2, [*words, "train.num_steps=1", f"run.name=said-{len(words)}-{is_said}"])
    assert done.codes == [0, 0], done.said
    assert ("train.check_every = 5 has no effect" in done.said) == is_said
