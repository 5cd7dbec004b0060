"""In: layouts that cannot be. Out: refusals that name key, value, reason and the nearest layouts, which can be.
Does not start a rank: what is refused here is refused by `build`, before there are any."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from refused import Keys, advised, planned, refusals
from runs import called

CASES: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    # what it is: (keys, ranks, what is said in one problem)
    "copies that are not the world": (
        {"parallel.dp_replicate": 3},
        2,
        ["dp_replicate 3 x dp_shard 1 x cp 1 x tp 1 = 3 ranks, but the run has 2", "dp_replicate = 2, or 3 ranks"],
    ),
    "copies that no number of would be the world": (
        {"parallel.dp_replicate": 2, "parallel.tp": 4},
        6,
        [
            "= 8 ranks, but the run has 6; nearest that would do: parallel.tp = 3 and parallel.dp_replicate = 2, or ",
            ", or 8 ranks",
        ],
    ),
    "one copy that does not divide the world": (
        {"parallel.tp": 2, "parallel.pp": 2},
        6,
        ["pp 2 x dp_shard 1 x cp 1 x tp 2 = 4 ranks for one copy", "the run's 6", "4 or 8 ranks"],
    ),
    "the nearest worlds are those that the batch divides among": (
        {"parallel.tp": 2, "train.microbatch_size": 2},
        9,
        [
            "which do not divide the run's 9 ranks; nearest that would do: parallel.tp = 1 and "
            "parallel.dp_replicate = 9 and "
            "train.global_batch_size = 18, or parallel.tp = 3 and parallel.dp_replicate = 3, or 6 or 12 ranks"
        ],
    ),
    "heads that no degree above 1 divides on these ranks": (
        {"parallel.tp": 2, "model.num_heads": 5, "model.hidden_dim": 20, "train.global_batch_size": 16},
        8,
        ["5 heads do not divide into 2 parts; nearest that would do: parallel.tp = 1 and parallel.dp_replicate = 8"],
    ),
    "heads, where the batch of the other degree does not divide among the ranks": (
        {"parallel.tp": 2, "model.num_heads": 5, "model.hidden_dim": 20, "train.global_batch_size": 32},
        64,
        [
            "5 heads do not divide into 2 parts",
            "do: parallel.tp = 1 and parallel.dp_replicate = 64 and train.global_batch_size = 64, or "
            "parallel.tp = 1 on 32 ranks",
        ],
    ),
    "copies, where the batch does not divide among the ranks": (
        {"parallel.dp_replicate": 2, "parallel.tp": 2},
        64,
        ["= 4 ranks, but the run has 64", "parallel.dp_replicate = 32 and train.global_batch_size = 32, or 4 ranks"],
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
    ),
    "heads, where the micro-batch does not divide the share of a rank": (
        {"parallel.tp": 8, "train.microbatch_size": 4},
        24,
        [
            "12 heads do not divide into 8 parts",
            "parallel.tp = 6 and parallel.dp_replicate = 4 and train.microbatch_size = 3, or ",
        ],
    ),
    "heads, where the batch is given in tokens": (
        {"parallel.tp": 8, "train.global_batch_tokens": 48 * 8},
        64,
        [
            "12 heads do not divide",
            "parallel.tp = 4 and parallel.dp_replicate = 16 and train.global_batch_tokens = 768",
        ],
    ),
    "batch over the ranks": (
        {"parallel.tp": 2},
        10,
        ["train.global_batch_size = 12 does not divide into 5", "train.global_batch_size = 10 or 15, or 8 or 12 ranks"],
    ),
    "batch over the ranks, in micro-batches": (
        {"train.microbatch_size": 2},
        5,
        ["train.global_batch_size = 12 does not divide into 5", "train.global_batch_size = 10 or 20, or 3 or 6 ranks"],
    ),
    "batch that no number of copies divides": (
        {"parallel.dp_shard": 5},
        5,
        ["12 does not divide into 5 data-parallel ranks; nearest that would do: train.global_batch_size = 10 or 15"],
    ),
    "micro-batches": (
        {"train.global_batch_size": 24, "train.microbatch_size": 8},
        2,
        [
            "24 (global_batch_size) = 2 (data-parallel ranks) x 8 (microbatch_size) x 1.5",
            "nearest that would do: train.microbatch_size = 6 or 12",
        ],
    ),
    "heads": (
        {"parallel.tp": 8},
        8,
        [
            "parallel.tp = 8: 12 heads do not divide into 8 parts",
            "parallel.tp = 4 and parallel.dp_replicate = 2, or parallel.tp = 12 on 12 ranks",
        ],
    ),
    "heads, where copies are given": (
        {"parallel.tp": 8, "parallel.dp_replicate": 2},
        16,
        ["parallel.tp = 8: 12 heads", "parallel.tp = 4 and parallel.dp_replicate = 4, or parallel.tp = 12 on 24 ranks"],
    ),
    "heads, where other copies would not share the batch": (
        {"parallel.tp": 9, "model.seq_len": 36},
        36,
        [
            "parallel.tp = 9: 12 heads",
            "parallel.tp = 6 and parallel.dp_replicate = 6, or parallel.tp = 12 and parallel.dp_replicate = 3",
        ],
    ),
    "heads, a degree that the sequence does not bear": (
        {"parallel.tp": 5, "model.seq_len": 30},
        5,
        ["parallel.tp = 5: 12 heads", "parallel.tp = 3 on 3 ranks, or parallel.tp = 6 on 6 ranks"],
    ),
    "positions over tp": (
        {"parallel.tp": 4, "model.seq_len": 46},
        4,
        [
            "parallel.tp = 4: 46 positions (data.seq_len) do not divide",
            "data.seq_len = 44, or data.seq_len = 48 and model.seq_len = 48",
        ],
    ),
    "positions over tp and cp": (
        {"parallel.tp": 3, "parallel.cp": 2, "model.seq_len": 40},
        6,
        [
            "parallel.tp = 3: 40 positions (data.seq_len) / 2 (cp)",
            "data.seq_len = 36, or data.seq_len = 48 and model.seq_len = 48, or parallel.sequence_parallel = false",
        ],
    ),
    "positions over cp": (
        {"parallel.cp": 4, "model.seq_len": 44},
        4,
        [
            "parallel.cp = 4: 44 positions (data.seq_len) are no multiple of 2 x 4 slices",
            "data.seq_len = 40, or data.seq_len = 48 and model.seq_len = 48, or parallel.cp = 2 and "
            "parallel.dp_replicate = 2, or parallel.cp = 11 on 11 ranks",
        ],
    ),
    "fewer positions than slices": (
        {"parallel.cp": 4, "model.seq_len": 6},
        4,
        ["parallel.cp = 4: 6 positions", "data.seq_len = 8 and model.seq_len = 8, or parallel.cp = 3 on 3 ranks"],
    ),
    "fewer layers than stages": (
        {"parallel.pp": 8},
        8,
        ["parallel.pp = 8: the model has 6 layers, fewer than stages", "parallel.pp = 4 and parallel.dp_replicate = 2"],
    ),
    "numbers of layers that are not those of the stages": (
        {"parallel.pp": 3, "parallel.cut": "2,2"},
        3,
        [
            'parallel.cut = "2,2": 2 numbers for 3 stages (pp x virtual_stages); together 4 layers, and the model has 6'
            '; nearest that would do: parallel.cut = "cost"',
        ],
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
    ),
    "micro-batches over stages, where none are asked for": (
        {"parallel.pp": 3, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2},
        3,
        ["1 micro-batch is no multiple of 3", "(3 would be)", "do: train.microbatch_size = 4"],
    ),
    "micro-batches over stages, where the batch is no multiple": (
        {"parallel.pp": 3, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2, "parallel.dp_shard": 3},
        9,
        ["train.global_batch_size = 9 or 18 and train.microbatch_size = 1"],
    ),
    "batch over the ranks, where copies are given": (
        {"parallel.tp": 2, "parallel.dp_replicate": 5},
        10,
        ["10 or 15, or parallel.dp_replicate = 4 on 8 ranks, or parallel.dp_replicate = 6 on 12 ranks"],
    ),
    "virtual stages that a schedule has not": (
        {"parallel.pp": 3, "parallel.virtual_stages": 2, "train.microbatch_size": 4},
        3,
        [
            "parallel.pp = 3: schedule 1f1b: 2 virtual stages per rank",
            'parallel.virtual_stages = 1, or parallel.schedule = "interleaved"',
        ],
    ),
    "virtual stages that no schedule could have": (
        {"parallel.pp": 4, "parallel.virtual_stages": 2, "train.microbatch_size": 1},
        4,
        ["nearest that would do: parallel.virtual_stages = 1"],
    ),
    "one virtual stage, interleaved": (
        {"parallel.pp": 3, "parallel.schedule": "interleaved", "train.microbatch_size": 1},
        3,
        [
            "parallel.pp = 3: schedule interleaved: 1 virtual stage per rank",
            'do: parallel.virtual_stages = 2, or parallel.schedule = "1f1b"',
        ],
    ),
    "one virtual stage, and no layers for two": (
        {"parallel.pp": 4, "parallel.schedule": "interleaved", "train.microbatch_size": 1},
        4,
        ['schedule interleaved: 1 virtual stage per rank; nearest that would do: parallel.schedule = "1f1b"'],
    ),
    "zero-bubble and shards": (
        {"parallel.pp": 2, "parallel.dp_shard": 2, "parallel.schedule": "zero-bubble"},
        4,
        ['parallel.schedule = "zero-bubble" with dp_shard = 2', "fully_shard reduces gradients in the input part"],
    ),
    "sums in bf16": (
        {"parallel.dp_shard": 2, "parallel.zero_stage": 1, "parallel.reduce_dtype": "bf16", "train.microbatch_size": 3},
        2,
        ['parallel.reduce_dtype = "bf16": zero_stage = 1 adds micro-batches in the format in which it sends'],
    ),
    "batch in tokens over the ranks": (
        {"train.global_batch_tokens": 48 * 12, "train.microbatch_size": 2},
        5,
        [
            "2 samples of a micro-batch x 5 data-parallel ranks; nearest that would do: "
            "train.global_batch_tokens = 480 or 960, or 3 or 6 ranks"
        ],
    ),
    "two: batch in tokens that are no whole samples, and copies": (
        {"train.global_batch_tokens": 384, "parallel.dp_replicate": 2, "model.seq_len": 17},
        1,
        ["but the run has 1; nearest that would do: parallel.dp_replicate = 1 and train.global_batch_tokens = 374"],
    ),
    "positions over tp, with a batch in tokens": (
        {"parallel.tp": 4, "model.seq_len": 46, "train.global_batch_tokens": 46 * 4},
        4,
        [
            "data.seq_len = 44 and train.global_batch_tokens = 176 or 220, or data.seq_len = 48 and "
            "model.seq_len = 48 and "
        ],
    ),
    "samples longer than the model, with a batch in tokens": (
        {"data.seq_len": 50, "train.global_batch_tokens": 50 * 4},
        1,
        ["do: data.seq_len = 48 and train.global_batch_tokens = 192 or 240, or model.seq_len = 50"],
    ),
    "two: a copy whose ranks do not share the batch": (
        {"parallel.pp": 5, "parallel.dp_shard": 8, "train.microbatch_size": 1},
        44,
        ["do not divide the run's 44 ranks; nearest that would do: train.global_batch_size = 8 or 16 on 40 ranks"],
    ),
    "two: given copies that do not share the batch": (
        {"parallel.dp_replicate": 5},
        10,
        ["but the run has 10", "train.global_batch_size = 10 or 20, or train.global_batch_size = 10 or 15 on 5 ranks"],
    ),
    "a round that fits nothing by default": (
        {"parallel.average_every": 32, "train.eval_every": 0, "checkpoint.every": 0},
        2,
        [
            "train.num_steps = 1000: not a multiple of parallel.average_every = 32; replicas agree at the end of a "
            "round only; nearest that would do: train.num_steps = 992 or 1024, or parallel.average_every = 25 or 40"
        ],
    ),
    "validations within a round": (
        {"parallel.average_every": 100, "checkpoint.every": 200},
        2,
        [
            "train.eval_every = 250: not a multiple of parallel.average_every = 100; replicas agree at the end of a "
            "round only; nearest that would do: train.eval_every = 200 or 300, or parallel.average_every = 50"
        ],
    ),
    "synchronous steps within a round": (
        {"parallel.average_every": 50, "parallel.synchronous_steps": 120},
        2,
        [
            "parallel.synchronous_steps = 120: not a multiple of parallel.average_every = 50; replicas agree at the "
            "end of a round only; nearest that would do: parallel.synchronous_steps = 100 or 150, or "
            "parallel.average_every = 10"
        ],
    ),
    "more fragments than blocks": (
        {"parallel.average_every": 50, "parallel.fragments": 7},
        2,
        [
            "parallel.fragments = 7: the model has 6 blocks, and a round 50 steps (parallel.average_every); nearest "
            "that would do: parallel.fragments = 6"
        ],
    ),
    "more fragments than steps": (
        {"parallel.average_every": 2, "parallel.fragments": 3},
        2,
        ["the model has 6 blocks, and a round 2 steps (parallel.average_every); nearest that would do: parallel.f"],
    ),
    "an overlap as long as a round": (
        {"parallel.average_every": 10, "parallel.overlap_steps": 10},
        2,
        [
            "parallel.overlap_steps = 10: a round has 10 steps (parallel.average_every), and 1 of them send a "
            "fragment; nearest that would do: parallel.overlap_steps = 9"
        ],
    ),
    "one replica that trains apart": (
        {"parallel.average_every": 10, "parallel.dp_shard": 2},
        2,
        [
            "parallel.average_every = 10: needs replicas that can train apart, and parallel.dp_replicate is 1; ranks "
            "along dp_shard, tp, pp and cp share each step; nearest that would do: parallel.average_every = 0, or "
            "parallel.dp_replicate = 2 on 4 ranks"
        ],
    ),
    "Nesterov without a momentum": (
        {"parallel.average_every": 10, "parallel.outer_optimizer": "nesterov", "parallel.outer_momentum": 0},
        2,
        [
            'parallel.outer_optimizer = "nesterov": parallel.outer_momentum = 0 leaves plain SGD; nearest that would '
            'do: parallel.outer_optimizer = "sgd", or parallel.outer_momentum = 0.9'
        ],
    ),
    "an outer optimizer without rounds": (
        {"parallel.outer_optimizer": "sgd"},
        2,
        [
            'parallel.outer_optimizer = "sgd": needs parallel.average_every; nearest that would do: '
            'parallel.outer_optimizer = "none"'
        ],
    ),
    "a wire for gradients that fully_shard sums": (
        {"parallel.wire": "int8", "parallel.dp_shard": 2, "parallel.dp_replicate": 2},
        4,
        [
            'parallel.wire = "int8": with parallel.dp_shard = 2 torch\'s fully_shard sums the gradients; nearest that '
            'would do: parallel.wire = "none"'
        ],
    ),
    "a wire for activations": (
        {"parallel.wire": "int8", "parallel.tp": 2},
        2,
        [
            'parallel.wire = "int8": sends gradients along parallel.dp_replicate, which is 1; activations, and what '
            "travels along dp_shard, tp and pp, have the format of train.precision; nearest that would do: "
            'parallel.wire = "none"'
        ],
    ),
    "two formats of gradients": (
        {"parallel.wire": "int8", "parallel.reduce_dtype": "bf16"},
        2,
        [
            'parallel.wire = "int8": parallel.reduce_dtype = "bf16" is another format of the same messages; nearest '
            'that would do: parallel.reduce_dtype = "auto", or parallel.wire = "none"'
        ],
    ),
    "more servers than rows": (
        {"parallel.servers": 500, "parallel.updates": "asynchronous"},
        506,
        ["500 servers are more than the rows to share, by bytes; nearest that would do: parallel.servers = 471 on 477"],
    ),
    "an average of what is in the host's memory": (
        {"parallel.average_every": 10, "parallel.offload": "optimizer", "train.precision": "bf16"},
        2,
        [
            'parallel.average_every = 10: parallel.offload = "optimizer" has the weights in host memory, which are not '
            'averaged there; nearest that would do: parallel.offload = "none"'
        ],
    ),
    "devices of one process": (
        {"parallel.data_parallel": 5, "train.microbatch_size": 4},
        1,
        ["do not reach 5 devices; nearest that would do: parallel.data_parallel = 4, or train.microbatch_size = 6"],
    ),
    "samples longer than the model": (
        {"data.seq_len": 50},
        1,
        ["data.seq_len = 50: the model has 48 positions (model.seq_len); nearest that would do: data.seq_len = 48"],
    ),
    "heads over channels": (
        {"model.num_heads": 5},
        1,
        [
            "model.num_heads: 5 heads do not divide model.hidden_dim = 24; ",
            "do: model.num_heads = 4 or 6, or model.hidden_dim = 20 or 25",
        ],
    ),
}


@pytest.mark.parametrize(("keys", "ranks", "said"), CASES.values(), ids=CASES)
def test_a_refusal_says_why_and_what_would_do(keys: Keys, ranks: int, said: list[str]) -> None:
    """Each change that would do does."""
    problems = refusals(keys, ranks)
    assert [all(words in problem for words in said) for problem in problems].count(True) == 1, problems
    for change in itertools.chain(*map(advised, problems)):
        as_many = change.ranks or ranks
        assert planned({**keys, **change.values}, as_many).world_size == as_many


@pytest.mark.parametrize(
    "name", [name for name in CASES if not name.startswith(("two: ", "virtual stages", "one virtual"))]
)
def test_one_thing_that_is_wrong_is_one_refusal(name: str) -> None:
    keys, ranks, _ = CASES[name]
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
    ("keys", "said"),
    [
        (
            {"parallel.average_every": 10, "parallel.fragments": 8, "parallel.overlap_steps": 7},
            ["parallel.fragments = 8: the model has 6 blocks", "10 steps (parallel.average_every), and 6 of them send"],
        ),
        (
            {"parallel.gossip": "ring", "parallel.gossip_every": 7, "parallel.agree_every": 9, "train.num_steps": 100},
            [
                "parallel.agree_every = 9: not a multiple of",
                "train.num_steps = 100: not a multiple of parallel.gossip_",
            ],
        ),
    ],
)
def test_a_wrong_key_of_a_round_hides_no_other(keys: Keys, said: list[str]) -> None:
    problems = refusals(keys, 2)
    for words in said:
        assert [words in problem for problem in problems].count(True) == 1, problems


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
