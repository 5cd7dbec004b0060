"""In: layouts that cannot be. Out: refusals that name key, value, reason and the nearest layouts, which can be.
Does not start a rank: what is refused here is refused by `build`, before there are any."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import called

from codescent import tasks
from codescent.advice import Began, on_resume
from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal
from codescent.build import build, task_request
from codescent.config.load import load, to_toml
from codescent.config.sections import Config
from codescent.plan import Plan
from codescent.preflight import check, plan_with, run_folder
from codescent.record import RunFolder

MODEL = {"num_layers": 6, "num_heads": 12, "hidden_dim": 24, "seq_len": 48}
Keys = Mapping[str, Any]


def config_of(keys: Keys) -> Config:
    """The config of MODEL and a batch of 12, changed by "section.key": value; None is auto."""
    batch = {} if keys.get("train.global_batch_tokens") else {"global_batch_size": 12}
    sections: dict[str, dict[str, Any]] = {"model": dict(MODEL), "train": batch}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections)


def planned(keys: Keys, ranks: int) -> Plan:
    """The plan of `config_of`."""
    return build(config_of(keys), 11, ranks)


def advised(problem: str) -> tuple[Change, ...]:
    """The changes with which it would do. A problem without any may be a plain sentence."""
    return problem.changes if isinstance(problem, Refusal) else ()


def refusals(keys: Keys, ranks: int) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        planned(keys, ranks)
    return caught.value.problems


CASES: dict[str, tuple[dict[str, Any], int, list[str], list[tuple[dict[str, Any], int]]]] = {
    # what it is: (keys, ranks, what is said in one problem, [(other keys, ranks) that are said to do])
    "copies that are not the world": (
        {"parallel.dp_replicate": 3},
        2,
        ["dp_replicate 3 x dp_shard 1 x cp 1 x tp 1 = 3 ranks, but the run has 2", "dp_replicate = 2, or 3 ranks"],
        [({"parallel.dp_replicate": 2}, 2), ({}, 3)],
    ),
    "copies that no number of would be the world": (
        {"parallel.dp_replicate": 2, "parallel.tp": 4},
        6,
        [
            "= 8 ranks, but the run has 6; nearest that would do: parallel.tp = 3 and parallel.dp_replicate = 2, or ",
            ", or 8 ranks",
        ],
        [({"parallel.tp": 3, "parallel.dp_replicate": 2}, 6), ({}, 8)],
    ),
    "one copy that does not divide the world": (
        {"parallel.tp": 2, "parallel.pp": 2},
        6,
        ["pp 2 x dp_shard 1 x cp 1 x tp 2 = 4 ranks for one copy", "the run's 6", "4 or 8 ranks"],
        [({}, 4), ({}, 8)],
    ),
    "the nearest worlds are those that the batch divides among": (
        {"parallel.tp": 2, "train.microbatch_size": 2},
        9,
        [
            "which do not divide the run's 9 ranks; nearest that would do: parallel.tp = 1 and "
            "parallel.dp_replicate = 9 and "
            "train.global_batch_size = 18, or parallel.tp = 3 and parallel.dp_replicate = 3, or 6 or 12 ranks"
        ],
        [({"parallel.tp": 1, "train.global_batch_size": 18}, 9), ({"parallel.tp": 3}, 9), ({}, 6), ({}, 12)],
    ),
    "heads that no degree above 1 divides on these ranks": (
        {"parallel.tp": 2, "model.num_heads": 5, "model.hidden_dim": 20, "train.global_batch_size": 16},
        8,
        ["5 heads do not divide into 2 parts; nearest that would do: parallel.tp = 1 and parallel.dp_replicate = 8"],
        [({"parallel.tp": 1}, 8)],
    ),
    "heads, where the batch of the other degree does not divide among the ranks": (
        {"parallel.tp": 2, "model.num_heads": 5, "model.hidden_dim": 20, "train.global_batch_size": 32},
        64,
        [
            "5 heads do not divide into 2 parts",
            "do: parallel.tp = 1 and parallel.dp_replicate = 64 and train.global_batch_size = 64, or "
            "parallel.tp = 1 on 32 ranks",
        ],
        [({"parallel.tp": 1, "train.global_batch_size": 64}, 64)],
    ),
    "copies, where the batch does not divide among the ranks": (
        {"parallel.dp_replicate": 2, "parallel.tp": 2},
        64,
        ["= 4 ranks, but the run has 64", "parallel.dp_replicate = 32 and train.global_batch_size = 32, or 4 ranks"],
        [({"parallel.dp_replicate": 32, "train.global_batch_size": 32}, 64)],
    ),
    "one copy that does not divide the ranks, and a batch that does not either": (
        {"parallel.tp": 3},
        64,
        [
            "do not divide the run's 64 ranks; nearest that would do: parallel.tp = 2 and parallel.dp_replicate "
            "= 32 and train.",
            "global_batch_size = 32, or parallel.tp = 4 and parallel.dp_replicate = 16 and "
            "train.global_batch_size = 16, or 36 ranks",
        ],
        [
            ({"parallel.tp": 2, "train.global_batch_size": 32}, 64),
            ({"parallel.tp": 4, "train.global_batch_size": 16}, 64),
            ({}, 36),
        ],
    ),
    "heads, where the micro-batch does not divide the share of a rank": (
        {"parallel.tp": 8, "train.microbatch_size": 4},
        24,
        [
            "12 heads do not divide into 8 parts",
            "parallel.tp = 6 and parallel.dp_replicate = 4 and train.microbatch_size = 3, or ",
        ],
        [({"parallel.tp": 6, "train.microbatch_size": 3}, 24)],
    ),
    "heads, where the batch is given in tokens": (
        {"parallel.tp": 8, "train.global_batch_tokens": 48 * 8},
        64,
        [
            "12 heads do not divide",
            "parallel.tp = 4 and parallel.dp_replicate = 16 and train.global_batch_tokens = 768",
        ],
        [({"parallel.tp": 4, "train.global_batch_tokens": 768}, 64)],
    ),
    "batch over the ranks": (
        {"parallel.tp": 2},
        10,
        ["train.global_batch_size = 12 does not divide into 5", "train.global_batch_size = 10 or 15, or 8 or 12 ranks"],
        [({"train.global_batch_size": 10}, 10), ({"train.global_batch_size": 15}, 10), ({}, 8), ({}, 12)],
    ),
    "batch over the ranks, in micro-batches": (
        {"train.microbatch_size": 2},
        5,
        ["train.global_batch_size = 12 does not divide into 5", "train.global_batch_size = 10 or 20, or 3 or 6 ranks"],
        [({"train.global_batch_size": 10}, 5), ({"train.global_batch_size": 20}, 5), ({}, 3), ({}, 6)],
    ),
    "batch that no number of copies divides": (
        {"parallel.dp_shard": 5},
        5,
        ["12 does not divide into 5 data-parallel ranks; nearest that would do: train.global_batch_size = 10 or 15"],
        [({"train.global_batch_size": 10}, 5), ({"train.global_batch_size": 15}, 5)],
    ),
    "micro-batches": (
        {"train.global_batch_size": 24, "train.microbatch_size": 8},
        2,
        [
            "24 (global_batch_size) = 2 (data-parallel ranks) x 8 (microbatch_size) x 1.5",
            "nearest that would do: train.microbatch_size = 6 or 12",
        ],
        [({"train.microbatch_size": 6}, 2), ({"train.microbatch_size": 12}, 2)],
    ),
    "heads": (
        {"parallel.tp": 8},
        8,
        [
            "parallel.tp = 8: 12 heads do not divide into 8 parts",
            "parallel.tp = 4 and parallel.dp_replicate = 2, or parallel.tp = 12 on 12 ranks",
        ],
        [({"parallel.tp": 4, "parallel.dp_replicate": 2}, 8), ({"parallel.tp": 12}, 12)],
    ),
    "heads, where copies are given": (
        {"parallel.tp": 8, "parallel.dp_replicate": 2},
        16,
        ["parallel.tp = 8: 12 heads", "parallel.tp = 4 and parallel.dp_replicate = 4, or parallel.tp = 12 on 24 ranks"],
        [({"parallel.tp": 4, "parallel.dp_replicate": 4}, 16), ({"parallel.tp": 12}, 24)],
    ),
    "heads, where other copies would not share the batch": (
        {"parallel.tp": 9, "model.seq_len": 36},
        36,
        [
            "parallel.tp = 9: 12 heads",
            "parallel.tp = 6 and parallel.dp_replicate = 6, or parallel.tp = 12 and parallel.dp_replicate = 3",
        ],
        [({"parallel.tp": 6}, 36), ({"parallel.tp": 12}, 36)],
    ),
    "heads, a degree that the sequence does not bear": (
        {"parallel.tp": 5, "model.seq_len": 30},
        5,
        ["parallel.tp = 5: 12 heads", "parallel.tp = 3 on 3 ranks, or parallel.tp = 6 on 6 ranks"],
        [({"parallel.tp": 3}, 3), ({"parallel.tp": 6}, 6)],
    ),
    "positions over tp": (
        {"parallel.tp": 4, "model.seq_len": 46},
        4,
        [
            "parallel.tp = 4: 46 positions (data.seq_len) do not divide",
            "data.seq_len = 44, or data.seq_len = 48 and model.seq_len = 48",
        ],
        [({"data.seq_len": 44}, 4), ({"model.seq_len": 48}, 4), ({"parallel.sequence_parallel": False}, 4)],
    ),
    "positions over tp and cp": (
        {"parallel.tp": 3, "parallel.cp": 2, "model.seq_len": 40},
        6,
        [
            "parallel.tp = 3: 40 positions (data.seq_len) / 2 (cp)",
            "data.seq_len = 36, or data.seq_len = 48 and model.seq_len = 48, or parallel.sequence_parallel = false",
        ],
        [({"data.seq_len": 36}, 6), ({"model.seq_len": 48}, 6), ({"parallel.sequence_parallel": False}, 6)],
    ),
    "positions over cp": (
        {"parallel.cp": 4, "model.seq_len": 44},
        4,
        [
            "parallel.cp = 4: 44 positions (data.seq_len) are no multiple of 2 x 4 slices",
            "data.seq_len = 40, or data.seq_len = 48 and model.seq_len = 48, or parallel.cp = 2 and "
            "parallel.dp_replicate = 2, or parallel.cp = 11 on 11 ranks",
        ],
        [({"data.seq_len": 40}, 4), ({"model.seq_len": 48}, 4), ({"parallel.cp": 2}, 4), ({"parallel.cp": 11}, 11)],
    ),
    "fewer positions than slices": (
        {"parallel.cp": 4, "model.seq_len": 6},
        4,
        ["parallel.cp = 4: 6 positions", "data.seq_len = 8 and model.seq_len = 8, or parallel.cp = 3 on 3 ranks"],
        [({"model.seq_len": 8}, 4), ({"parallel.cp": 3}, 3)],
    ),
    "fewer layers than stages": (
        {"parallel.pp": 8},
        8,
        ["parallel.pp = 8: the model has 6 layers, fewer than stages", "parallel.pp = 4 and parallel.dp_replicate = 2"],
        [({"parallel.pp": 4}, 8), ({"model.num_layers": 8}, 8)],
    ),
    "fewer layers than virtual stages": (
        {
            "parallel.pp": 4,
            "parallel.schedule": "interleaved",
            "parallel.virtual_stages": 2,
            "train.microbatch_size": 1,
            "train.global_batch_size": 24,
        },
        4,
        [
            "parallel.pp = 4 x 2 (virtual_stages) = 8: the model has 6 layers",
            "parallel.pp = 2 and parallel.dp_replicate = 2, or model.num_layers = 8",
        ],
        [({"parallel.pp": 2}, 4), ({"model.num_layers": 8}, 4)],
    ),
    "micro-batches over stages": (
        {
            "parallel.pp": 4,
            "parallel.schedule": "interleaved",
            "parallel.virtual_stages": 2,
            "train.microbatch_size": 2,
            "model.num_layers": 8,
        },
        4,
        [
            "parallel.pp = 4: schedule interleaved: 6 micro-batches are no multiple of 4 pipeline stages",
            "(4 or 8 would be)",
            "train.global_batch_size = 8 or 16, or train.microbatch_size = 1 or 3",
        ],
        [({"train.global_batch_size": 8}, 4), ({"train.global_batch_size": 16}, 4)],
    ),
    "micro-batches over stages, where none are asked for": (
        {"parallel.pp": 3, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2},
        3,
        ["1 micro-batch is no multiple of 3", "(3 would be)", "do: train.microbatch_size = 4"],
        [({"train.microbatch_size": 4}, 3)],
    ),
    "micro-batches over stages, where the batch is no multiple": (
        {"parallel.pp": 3, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2, "parallel.dp_shard": 3},
        9,
        ["train.global_batch_size = 9 or 18 and train.microbatch_size = 1"],
        [
            ({"train.global_batch_size": 9, "train.microbatch_size": 1}, 9),
            ({"train.global_batch_size": 18, "train.microbatch_size": 1}, 9),
        ],
    ),
    "batch over the ranks, where copies are given": (
        {"parallel.tp": 2, "parallel.dp_replicate": 5},
        10,
        ["10 or 15, or parallel.dp_replicate = 4 on 8 ranks, or parallel.dp_replicate = 6 on 12 ranks"],
        [({"parallel.dp_replicate": 4}, 8), ({"parallel.dp_replicate": 6}, 12)],
    ),
    "virtual stages that a schedule has not": (
        {"parallel.pp": 3, "parallel.virtual_stages": 2, "train.microbatch_size": 4},
        3,
        [
            "parallel.pp = 3: schedule 1f1b: 2 virtual stages per rank",
            'parallel.virtual_stages = 1, or parallel.schedule = "interleaved"',
        ],
        [({"parallel.virtual_stages": 1}, 3), ({"parallel.schedule": "interleaved"}, 3)],
    ),
    "virtual stages that no schedule could have": (
        {"parallel.pp": 4, "parallel.virtual_stages": 2, "train.microbatch_size": 1},
        4,
        ["nearest that would do: parallel.virtual_stages = 1"],
        [({"parallel.virtual_stages": 1}, 4)],
    ),
    "one virtual stage, interleaved": (
        {"parallel.pp": 3, "parallel.schedule": "interleaved", "train.microbatch_size": 1},
        3,
        [
            "parallel.pp = 3: schedule interleaved: 1 virtual stage per rank",
            'do: parallel.virtual_stages = 2, or parallel.schedule = "1f1b"',
        ],
        [({"parallel.virtual_stages": 2}, 3), ({"parallel.schedule": "1f1b"}, 3)],
    ),
    "one virtual stage, and no layers for two": (
        {"parallel.pp": 4, "parallel.schedule": "interleaved", "train.microbatch_size": 1},
        4,
        ['schedule interleaved: 1 virtual stage per rank; nearest that would do: parallel.schedule = "1f1b"'],
        [({"parallel.schedule": "1f1b"}, 4)],
    ),
    "zero-bubble and shards": (
        {"parallel.pp": 2, "parallel.dp_shard": 2, "parallel.schedule": "zero-bubble"},
        4,
        ['parallel.schedule = "zero-bubble" with dp_shard = 2', "fully_shard reduces gradients in the input part"],
        [({"parallel.schedule": "1f1b"}, 4), ({"parallel.dp_shard": 1}, 4)],
    ),
    "sums in bf16": (
        {"parallel.dp_shard": 2, "parallel.zero_stage": 1, "parallel.reduce_dtype": "bf16", "train.microbatch_size": 3},
        2,
        ['parallel.reduce_dtype = "bf16": zero_stage = 1 adds micro-batches in the format in which it sends'],
        [
            ({"parallel.reduce_dtype": "auto"}, 2),
            ({"parallel.zero_stage": 2}, 2),
            ({"train.microbatch_size": 6}, 2),
        ],
    ),
    "batch in tokens over the ranks": (
        {"train.global_batch_tokens": 48 * 12, "train.microbatch_size": 2},
        5,
        [
            "2 samples of a micro-batch x 5 data-parallel ranks; nearest that would do: "
            "train.global_batch_tokens = 480 or 960, or 3 or 6 ranks"
        ],
        [({"train.global_batch_tokens": 480}, 5), ({"train.global_batch_tokens": 960}, 5), ({}, 3), ({}, 6)],
    ),
    "two: batch in tokens that are no whole samples, and copies": (
        {"train.global_batch_tokens": 384, "parallel.dp_replicate": 2, "model.seq_len": 17},
        1,
        ["but the run has 1; nearest that would do: parallel.dp_replicate = 1 and train.global_batch_tokens = 374"],
        [({"parallel.dp_replicate": 1, "train.global_batch_tokens": 374}, 1)],
    ),
    "positions over tp, with a batch in tokens": (
        {"parallel.tp": 4, "model.seq_len": 46, "train.global_batch_tokens": 46 * 4},
        4,
        [
            "data.seq_len = 44 and train.global_batch_tokens = 176 or 220, or data.seq_len = 48 and "
            "model.seq_len = 48 and "
        ],
        [
            ({"data.seq_len": 44, "train.global_batch_tokens": 176}, 4),
            ({"model.seq_len": 48, "train.global_batch_tokens": 192}, 4),
        ],
    ),
    "samples longer than the model, with a batch in tokens": (
        {"data.seq_len": 50, "train.global_batch_tokens": 50 * 4},
        1,
        ["do: data.seq_len = 48 and train.global_batch_tokens = 192 or 240, or model.seq_len = 50"],
        [({"data.seq_len": 48, "train.global_batch_tokens": 240}, 1), ({"model.seq_len": 50}, 1)],
    ),
    "two: a copy whose ranks do not share the batch": (
        {"parallel.pp": 5, "parallel.dp_shard": 8, "train.microbatch_size": 1},
        44,
        ["do not divide the run's 44 ranks; nearest that would do: train.global_batch_size = 8 or 16 on 40 ranks"],
        [({"train.global_batch_size": 16}, 40)],
    ),
    "two: given copies that do not share the batch": (
        {"parallel.dp_replicate": 5},
        10,
        ["but the run has 10", "train.global_batch_size = 10 or 20, or train.global_batch_size = 10 or 15 on 5 ranks"],
        [({"parallel.dp_replicate": 5, "train.global_batch_size": 15}, 5)],
    ),
    "devices of one process": (
        {"parallel.data_parallel": 5, "train.microbatch_size": 4},
        1,
        ["do not reach 5 devices; nearest that would do: parallel.data_parallel = 4, or train.microbatch_size = 6"],
        [({"parallel.data_parallel": 4}, 1), ({"train.microbatch_size": 6}, 1)],
    ),
    "samples longer than the model": (
        {"data.seq_len": 50},
        1,
        ["data.seq_len = 50: the model has 48 positions (model.seq_len); nearest that would do: data.seq_len = 48"],
        [({"data.seq_len": 48}, 1), ({"model.seq_len": 50}, 1)],
    ),
    "heads over channels": (
        {"model.num_heads": 5},
        1,
        [
            "model.num_heads: 5 heads do not divide model.hidden_dim = 24; ",
            "do: model.num_heads = 4 or 6, or model.hidden_dim = 20 or 25",
        ],
        [
            ({"model.num_heads": 4}, 1),
            ({"model.num_heads": 6}, 1),
            ({"model.hidden_dim": 20}, 1),
            ({"model.hidden_dim": 25}, 1),
        ],
    ),
}


@pytest.mark.parametrize(("keys", "ranks", "said", "advised"), CASES.values(), ids=CASES)
def test_a_refusal_says_why_and_what_would_do(
    keys: Keys, ranks: int, said: list[str], advised: list[tuple[dict[str, Any], int]]
) -> None:
    problems = refusals(keys, ranks)
    assert [all(words in problem for words in said) for problem in problems].count(True) == 1, problems
    for others, as_many in advised:
        assert planned({**keys, **others}, as_many).mesh.world_size == as_many


@pytest.mark.parametrize(
    "name", [name for name in CASES if not name.startswith(("two: ", "virtual stages", "one virtual"))]
)
def test_one_thing_that_is_wrong_is_one_refusal(name: str) -> None:
    keys, ranks, _, _ = CASES[name]
    assert len(refusals(keys, ranks)) == 1


def test_all_that_is_wrong_is_said_at_once() -> None:
    keys = {
        "parallel.tp": 5,
        "parallel.cp": 2,
        "parallel.pp": 7,
        "parallel.dp_shard": 5,
        "parallel.schedule": "zero-bubble",
        "data.seq_len": 50,
    }
    problems = refusals(keys, 8)
    for words in (
        "= 350 ranks for one copy of the model, which do not divide the run's 8",
        "train.global_batch_size = 12 does not divide into 5",
        "data.seq_len = 50: the model has 48 positions",
        "parallel.cp = 2: 50 positions",
        "parallel.tp = 5: 12 heads",
        "parallel.pp = 7: the model has 6 layers",
        'parallel.schedule = "zero-bubble" with dp_shard = 5',
    ):
        assert [words in problem for problem in problems].count(True) == 1, problems
    assert len(problems) == 7


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        ({"parallel.tp": 5}, 16),  # 12 heads
        ({"parallel.pp": 7}, 10),  # 6 layers
        ({"parallel.dp_replicate": 3, "data.seq_len": 50}, 2),
        ({"parallel.tp": 2, "model.num_heads": 5}, 3),
        ({"parallel.tp": 5, "parallel.dp_shard": 5, "train.microbatch_size": 1}, 25),
    ],
)
def test_no_number_of_ranks_is_advised_that_another_rule_refuses(keys: Keys, ranks: int) -> None:
    problems = refusals(keys, ranks)
    assert len(problems) > 1
    assert [change for problem in problems for change in advised(problem) if not change.values] == []


def test_positions_are_divided_only_among_ranks_that_divide_the_heads() -> None:
    """No other length would do while the heads do not."""
    (problem,) = refusals({"parallel.tp": 5}, 5)
    assert "12 heads" in problem
    assert "positions" not in problem


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dp_shard", "dp_replicate"])
@pytest.mark.parametrize("degree", [1_000_001, 10**15])
def test_a_degree_that_no_machine_has_is_refused_at_once(axis: str, degree: int) -> None:
    """Neither its ranks nor the degrees below it are gone through one by one, and no advice names such numbers."""
    (problem,) = refusals({f"parallel.{axis}": degree}, 1)
    assert problem.startswith("parallel: ")
    assert problem.endswith(f"= {degree} ranks: more than anybody has; give at most 1,000,000")


def test_ranks_that_no_machine_has_are_refused_at_once() -> None:
    assert refusals({}, 10**12) == (f"parallel.ranks = {10**12} ranks: more than anybody has; give at most 1,000,000",)


def test_degrees_far_above_those_that_would_do_are_refused_at_once() -> None:
    """Only divisors of the ranks are tried, no more heads than the model has, and none with advice of its own."""
    assert (
        "parallel.pp = 9360 and parallel.dp_replicate = 77"
        in refusals({"parallel.pp": 499_979, "model.num_layers": 10_000}, 720_720)[0]
    )
    assert "parallel.tp = 12 and parallel.dp_replicate = 60060" in refusals({"parallel.tp": 16384}, 720_720)[0]
    assert "parallel.pp = 6 and parallel.dp_replicate = 120120" in refusals({"parallel.pp": 99991}, 720_720)[0]
    assert (
        "parallel.dp_shard = 360360 and parallel.dp_replicate = 2"
        in refusals({"parallel.dp_shard": 499_979}, 720_720)[0]
    )


def test_virtual_stages_that_no_model_has_are_advised_down_at_once() -> None:
    keys = {"parallel.pp": 2, "parallel.schedule": "interleaved", "train.microbatch_size": 3}
    for number in (4, 10**9):
        (problem,) = refusals({**keys, "parallel.virtual_stages": number}, 2)
        assert "nearest that would do: parallel.virtual_stages = 3, or " in problem
    assert planned({**keys, "parallel.virtual_stages": 3}, 2).layout.virtual_stages == 3


def test_a_batch_that_does_not_divide_is_no_reason_to_refuse_a_schedule() -> None:
    keys = {"parallel.pp": 3, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2}
    assert len(refusals({**keys, "train.microbatch_size": 12}, 6)) == 1


SMALL = {"hidden_dim": [24, 32, 48, 60, 96, 100], "num_heads": [1, 2, 3, 4, 5, 6, 8, 12, 16, 25]}
SIZES: dict[str, dict[str, list[Any]]] = {
    "gpt2": {**SMALL, "num_layers": [1, 4, 6, 9], "seq_len": [5, 16, 17, 24, 30, 48]},
    "llama": {
        **SMALL,
        "num_layers": [1, 4, 6],
        "seq_len": [16, 17, 24, 30, 48],
        "num_kv_heads": [None, 1, 2, 3, 4, 5, 8],
    },
    "bert": {**SMALL, "num_layers": [1, 4, 6], "seq_len": [16, 17, 24, 30, 48]},
    "transformer": {
        **SMALL,
        "num_encoder_layers": [1, 2, 4],
        "num_decoder_layers": [1, 2, 3],
        "source_len": [6, 8, 9, 12, 17, 24],
        "target_len": [5, 7, 8, 12, 25, 30],
    },
}
PRESETS = {"gpt2": "gpt2-xl", "llama": "llama3-70b", "bert": "bert-base-uncased", "transformer": "transformer-base"}
LAYOUT: dict[str, list[Any]] = {
    **{f"parallel.{axis}": [1, 1, 1, 2, 3, 4, 5, 6, 8] for axis in ("tp", "pp", "cp", "dp_shard")},
    "parallel.dp_replicate": [None, None, 1, 2, 3],
    "parallel.schedule": ["1f1b", "1f1b", "naive", "gpipe", "interleaved", "zero-bubble"],
    "parallel.virtual_stages": [1, 1, 1, 2, 3],
    "parallel.cut": ["cost", "cost", "cost", "encoder-decoder"],
    "parallel.sequence_parallel": [True, True, False],
    "parallel.data_parallel": [1, 1, 1, 1, 1, 1, 2, 3, 5],
    "train.global_batch_size": [1, 4, 6, 12, 20, 24],
    "train.global_batch_tokens": [None, None, None, 96, 384, 400, 720, 1024],
    "train.microbatch_size": [None, None, 1, 2, 3],
    "data.seq_len": [None, None, None, 8, 17, 64],
}


@st.composite
def asked_for(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """(keys, ranks) of some model and layout, mostly on as many ranks as the layout needs."""
    kind = draw(st.sampled_from(sorted(SIZES)))
    values = {f"model.{size}": possible for size, possible in SIZES[kind].items()}
    if draw(st.booleans()):
        lengths = {"model.source_len": [8, 9, 255], "model.target_len": [7, 12, 250]} if kind == "transformer" else {}
        values = {"model.preset": [PRESETS[kind]], **lengths}
    keys = {key: draw(st.sampled_from(possible)) for key, possible in {**values, **LAYOUT}.items()}
    if kind == "transformer":
        keys["data.seq_len"] = None
    if keys["train.global_batch_tokens"] is not None:
        del keys["train.global_batch_size"]
    copy = math.prod(keys[f"parallel.{axis}"] for axis in ("tp", "pp", "cp", "dp_shard"))
    needed = copy * (keys["parallel.dp_replicate"] or draw(st.sampled_from([1, 1, 2, 3])))
    ranks = draw(st.sampled_from([needed, needed, needed, 1, 2, 6, 8, 36]))
    return {"model.kind": kind, "model.num_layers": None, "model.num_heads": None, "model.hidden_dim": None} | {
        "model.seq_len": None,
        **keys,
    }, ranks


def keys_of(problems: Sequence[str]) -> list[str]:
    """The key that each problem is of."""
    return [re.split(r"[ :]", problem)[0] for problem in problems]


def is_of_batch(key: str) -> bool:
    return key in ("train.global_batch_size", "train.global_batch_tokens", "train.microbatch_size")


@given(asked_for())
def test_what_is_said_to_do_does(asked: tuple[dict[str, Any], int]) -> None:
    """Each advice takes its problem away and adds none. If sizes are wrong, the layout is not looked at before."""
    keys, ranks = asked
    try:
        planned(keys, ranks)
    except UserError as error:
        problems = error.problems
    except ValueError:  # the config contradicts itself
        return
    else:
        return
    for problem in problems:
        before_it = [one for one in keys_of(problems) if one != keys_of([problem])[0]]
        if problem.startswith("parallel.tp") and "divide into" in problem and "heads" in problem:
            copy = math.prod(keys[f"parallel.{axis}"] for axis in ("pp", "cp", "dp_shard"))
            kept = [change for change in advised(problem) if change.ranks is None and "parallel.tp" in change.values]
            assert kept or ranks % copy, problem
        for change in advised(problem):
            try:
                planned({**keys, **change.values}, change.ranks or ranks)
            except UserError as error:
                left = list(error.problems)
            else:
                left = []
            # An advice that changes the mesh or the batch leaves no problem with the batch.
            solves_batch = problem.startswith("parallel: ") or any(map(is_of_batch, change.values))
            before = [one for one in before_it if not (one.startswith("train.") and solves_batch)]
            hidden = [one for one in left if problem.startswith("model.") and not re.search(r"^model\.|heads", one)]
            others_left = [one for one in left if one not in hidden and keys_of([one])[0] not in before]
            same = len(keys_of(problems)) - len(before_it) - 1  # other problems of the same key
            assert len(others_left) <= same, f"{problem}\n{change} leaves:\n{left}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan", "parallel.tp=3"], ["tp 3 = 3 ranks for one copy", "parallel.tp = 3: 2 heads do not divide"]),
        (
            ["plan", "parallel.pp=4", "--ranks", "4"],
            ["the model has 2 layers", "parallel.pp = 2 and parallel.dp_replicate = 2"],
        ),
        (["train", "parallel.cp=3", "--ranks", "3"], ["parallel.cp = 3: 16 positions", "data.seq_len = 12"]),
        (["train", "--ranks", "3"], ["train.global_batch_size = 8 does not divide into 3", "2 or 4 ranks"]),
    ],
)
def test_the_command_line_refuses_before_anything_is_written(
    project: Path, words: list[str], expected: list[str]
) -> None:
    before = {path for path in project.rglob("*") if "datasets" not in path.parts}
    done = called(project, words[0], "run.toml", *words[1:])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    told = " ".join(done.stderr.split())
    assert [part for part in expected if part not in told] == []
    assert {path for path in project.rglob("*") if "datasets" not in path.parts} == before


def on_a_resume(keys: Keys, ranks: int, began: Plan) -> tuple[str, ...]:
    """What a resume with `keys` says of a run that began with the plan `began`."""
    with pytest.raises(UserError) as caught:
        planned(keys, ranks)
    return on_resume(caught.value, config_of(keys), 11, ranks, Began.of(began)).problems


def decides(plan: Plan) -> dict[str, Any]:
    """What a resume must keep. Keys of the optimizer are checked elsewhere."""
    return {key: value for key, value in plan.trajectory().items() if not key.startswith("optimizer.")}


@given(asked_for(), st.sampled_from(["none", "none", "linear", "sqrt"]))
def test_a_resume_advises_what_continues_the_run(asked: tuple[dict[str, Any], int], scaling: str) -> None:
    """If the run began with the same model and batch on one rank, there is always an advice: its layout."""
    keys, ranks = {**asked[0], "optimizer.scale_learning_rate": scaling}, asked[1]
    same = {key: value for key, value in keys.items() if not re.match(r"parallel|train\.microbatch", key)}
    try:
        planned(keys, ranks)
    except UserError:
        pass
    except ValueError:
        return
    else:
        return
    try:
        began = planned(same, 1)
    except UserError:
        same, began = {}, planned({}, 1)
    *_, last = on_a_resume(keys, ranks, began)
    assert bool(advised(last)) or not same
    for change in advised(last):
        assert decides(planned({**keys, **change.values}, change.ranks or ranks)) == decides(began)
    assert (" on a resume: " in last) == bool(advised(last))


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        ({"parallel.cp": 4, "model.seq_len": 44}, 4, "slices; nearest that would do on a resume: parallel.cp = 2 and "),
        ({"train.global_batch_size": 10}, 3, "; nearest that would do on a resume: 2 or 5 ranks"),
        ({"model.num_heads": 5}, 1, "hidden_dim = 24; nearest that would do on a resume: model.num_heads = 12"),
        ({"train.global_batch_tokens": 48 * 12}, 5, "data-parallel ranks; nearest that would do on a resume: 4 or 6 "),
        (
            {"parallel.dp_shard": 5},
            5,
            "5 data-parallel ranks; nearest that would do on a resume: parallel.dp_shard = 1",
        ),
    ],
)
def test_a_resume_advises_what_it_may_change(keys: Keys, ranks: int, said: str) -> None:
    same = {key: value for key, value in keys.items() if key in ("model.seq_len", "train.global_batch_size")}
    (problem,) = on_a_resume(keys, ranks, planned(same, 1))
    assert said in problem


def test_a_resume_with_a_scaled_learning_rate_keeps_the_data_parallel_ranks() -> None:
    scaled = {"optimizer.scale_learning_rate": "linear"}
    began = planned({**scaled, "parallel.tp": 2}, 2)
    (problem,) = on_a_resume({**scaled, "parallel.tp": 5}, 10, began)
    assert problem.endswith("nearest that would do on a resume: parallel.tp = 2 on 2 ranks")


def test_a_run_that_is_resumed_is_advised_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    config = load("run.toml", []).config
    dataset = tasks.prepare_and_open(task_request(config), progress=False)
    config, plan = plan_with(config, dataset, 1)
    RunFolder.create(run_folder(config), to_toml(config), plan.to_json())
    with pytest.raises(UserError, match=r"nearest that would do: train.global_batch_size = 6 or 9, or 2 or 4 ranks$"):
        check(load("run.toml", ["run.name=other"]).config, 3, resume=False)
    with pytest.raises(UserError, match=r"nearest that would do on a resume: 2 or 4 ranks$"):
        check(load("run.toml", []).config, 3, resume=True)
