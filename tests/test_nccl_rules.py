"""In: layouts and planted faults. Out: two steps of each keep NCCL's rules, over gloo; each rule finds its fault.
Does not need a device: what NCCL's kernels compute is not checked here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from nccl_graph import Entry, Made, Node, broken, unlike

from codescent.build import build
from codescent.config.sections import Config

QUICK: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "zero3 as CUDA": {"dp_shard": 2, "zero_stage": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 2},
    "cp ring": {"cp": 3},
    "cp all-gather": {"cp": 2, "context": "all-gather"},
    "pp 1f1b": {"pp": 2},
    "pp interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "pp zero-bubble": {"pp": 2, "schedule": "zero-bubble"},
    "pp tp": {"pp": 2, "tp": 2, "schedule": "zero-bubble"},
    "dp_shard cp as CUDA": {"dp_shard": 2, "cp": 2},
}
SLOW: dict[str, dict[str, Any]] = {
    "hsdp as CUDA": {"dp_replicate": 2, "dp_shard": 2},
    "zero2 as CUDA": {"dp_shard": 2, "zero_stage": 2},
    "tp without sequence parallelism": {"tp": 2, "sequence_parallel": False},
    "ddp tp": {"dp_replicate": 2, "tp": 2},
    "cp ring of 4, recomputed": {"cp": 4, "recompute": "full"},
    "pp 1f1b of 4": {"pp": 4},
    "pp interleaved of 4": {"pp": 4, "schedule": "interleaved", "virtual_stages": 2},
    "pp zero-bubble of 4": {"pp": 4, "schedule": "zero-bubble"},
    "pp gpipe": {"pp": 4, "schedule": "gpipe"},
    "pp cp ring": {"pp": 2, "cp": 2},
    "pp dp_shard as CUDA": {"pp": 2, "dp_shard": 2, "zero_stage": 2},
    "pp ddp": {"pp": 2, "dp_replicate": 2},
    "dp_shard tp, muon": {"dp_shard": 2, "tp": 2},
    "eight ranks": {"pp": 2, "dp_shard": 2, "tp": 2, "schedule": "interleaved", "virtual_stages": 2},
}
LAYOUTS = QUICK | SLOW
Answer = dict[str, Any]
VOCAB = 97
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def case(name: str) -> dict[str, Any]:
    """Several micro-batches, buckets and chunks, of a model as small as may be."""
    deep, layers = name in SLOW, 4 if "interleaved" in name else 2
    return {
        "config": {
            "model": {"num_layers": 8 if deep else layers, "num_heads": 4, "hidden_dim": 16, "seq_len": 24},
            "train": {
                "precision": "bf16" if name == "hsdp" else "fp32",
                "global_batch_size": 8 if deep else 4,
                "microbatch_size": 1,
            },
            "parallel": {**LAYOUTS[name], "bucket_bytes": 20_000},
            "optimizer": {"kind": "muon"} if "muon" in name else {},
        },
        "world_size": math.prod(LAYOUTS[name].get(axis, 1) for axis in AXES),
    }


def answers(forker: Forker, folder: Path, name: str, fault: str = "", as_cuda: bool | None = None) -> list[Answer]:
    """What each rank found. A CPU posts receives early and CUDA does not, so a pipeline is run as on CUDA."""
    one = case(name)
    as_cuda = "as CUDA" in name or "pp" in LAYOUTS[name] if as_cuda is None else as_cuda
    return forker.call("nccl_ranks:steps", folder, one["world_size"], case=one, as_cuda=as_cuda, fault=fault)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_two_steps_keep_the_rules(forker: Forker, tmp_path: Path, name: str) -> None:
    found = answers(forker, tmp_path, name)
    for rank, answer in enumerate(found):
        assert answer["problems"] == [], rank
        assert answer["ruled"] == answer["plain"], rank
        assert answer["ruled"][0] != answer["ruled"][1], rank  # it trains
    ends = [end for answer in found for entry in answer["log"] for end in entry]
    one = case(name)
    plan = build(Config.model_validate(one["config"]), VOCAB, one["world_size"])
    assert {what.split()[0] for _, _, _, what in ends} == {str(traffic.collective) for traffic in plan.traffic}
    assert broken([answer["log"] for answer in found]) == []
    assert unlike([answer["made"] for answer in found]) == []


@pytest.mark.parametrize("name", ["zero2", "tp", pytest.param("cp all-gather", marks=pytest.mark.slow)])
def test_collectives_of_messages_wait_for_each_of_them(forker: Forker, tmp_path: Path, name: str) -> None:
    """Those of strategies/by_messages.py: nothing is read before it has arrived, or overwritten before it has gone."""
    one = case(name)
    found = forker.call("nccl_ranks:steps", tmp_path, one["world_size"], case=one, as_cuda=False, by_messages=True)
    for rank, answer in enumerate(found):
        assert answer["problems"] == [], rank
        assert answer["ruled"] == answer["plain"], rank
        kinds = {what.split()[0] for entry in answer["log"] for _, _, _, what in entry}
        assert "send" in kinds
        assert "reduce_scatter" not in kinds


def test_an_early_read_of_a_collective_shows(forker: Forker, tmp_path: Path) -> None:
    """Rule (a): nobody waits, so the gradients are NaN. In ddp the first replica alone counts the norm of them."""
    for name in ("ddp", "zero3"):
        found = answers(forker, tmp_path, name, "no_wait")
        assert math.isfinite(found[0]["plain"][0][1]), name
        assert found[-1]["ruled"][-1] != found[-1]["plain"][-1], name
        assert math.isnan(found[-1]["ruled"][0][1]) == (name == "zero3"), name
        assert any("nobody waited for it" in problem for problem in found[-1]["problems"]), name


def test_an_early_read_of_a_message_shows(forker: Forker, tmp_path: Path) -> None:
    """Rule (a): every handle is waited for, after the read."""
    found = answers(forker, tmp_path, "pp 1f1b", "read_early")
    assert [answer["problems"] for answer in found] == [[], []]
    assert all(math.isfinite(loss) for loss, _ in found[0]["plain"][:2])
    assert math.isnan(found[0]["ruled"][0][0])


@pytest.mark.parametrize(
    ("name", "fault", "call"),
    [
        ("ddp", "bucket_overwritten", "all_reduce SUM of "),
        ("zero2", "gradients_overwritten", "reduce_scatter SUM of "),
        ("pp 1f1b", "message_overwritten", "send of "),
    ],
)
def test_a_buffer_overwritten_before_the_wait_is_named(
    forker: Forker, tmp_path: Path, name: str, fault: str, call: str
) -> None:
    *others, last = answers(forker, tmp_path, name, fault)
    assert all(answer["problems"] == [] for answer in others)
    assert last["problems"]
    for problem in last["problems"]:
        assert problem.startswith(call)
        assert problem.endswith("a buffer was overwritten before the wait")


@pytest.mark.parametrize("cross", [False, True])
def test_groups_used_in_different_orders_are_found(forker: Forker, tmp_path: Path, cross: bool) -> None:
    found = forker.call("nccl_ranks:crossed", tmp_path, 2, cross=cross)
    problems = broken([answer["log"] for answer in found])
    assert ["wait for each other" in problem for problem in problems] == [True] * cross
    assert unlike([answer["made"] for answer in found]) == []
    assert [answer["problems"] for answer in found] == [[], []]


def test_receives_posted_early_are_found(forker: Forker, tmp_path: Path) -> None:
    """As the CPU posts them: on CUDA such a receive blocks the stream of work that its sender waits for."""
    found = answers(forker, tmp_path, "pp interleaved", as_cuda=False)
    assert all(answer["problems"] == [] and answer["ruled"] == answer["plain"] for answer in found)
    (problem,) = broken([answer["log"] for answer in found])
    assert "these wait for each other" in problem


@pytest.mark.parametrize("cross", [False, True])
def test_messages_have_no_tags(forker: Forker, tmp_path: Path, cross: bool) -> None:
    """Who relies on tags gets the other message, as with NCCL."""
    _, found = forker.call("nccl_ranks:tagged", tmp_path, 2, cross=cross)
    assert found == ([2.0, 1.0] if cross else [1.0, 2.0])


def node(number: int, what: str = "all_reduce SUM of 4 bytes", channel: str = "a") -> list[Node]:
    return [(channel, number, [0, 1], what)]


@pytest.mark.parametrize(
    ("logs", "words"),
    [
        ([[node(0)], [node(0)]], None),
        ([[node(0), node(1)], [node(0)]], "ranks [1] take no part"),
        ([[node(0)], [node(0, "all_reduce SUM of 8 bytes")]], "the ranks differ"),
        ([[node(0)], [node(0, "all_reduce MAX of 4 bytes")]], "the ranks differ"),
        ([[node(0), node(0, channel="b")], [node(0, channel="b"), node(0)]], "these wait for each other"),
        ([[node(0) + node(0, channel="b")], [node(0, channel="b") + node(0)]], None),  # each of them one batch
    ],
)
def test_the_graph_of_all_ranks(logs: list[list[Entry]], words: str | None) -> None:
    problems = broken(logs)
    assert len(problems) == (words is not None)
    assert all(words is not None and words in problem for problem in problems)


@pytest.mark.parametrize(
    ("by_rank", "right"),
    [
        ([[([0, 1], "x"), ([0], "y")], [([0, 1], "x"), ([1], "z")]], True),
        ([[([0, 1], "x")], [([0, 1], "x"), ([1], "z")]], False),  # a rank makes one more
        ([[([0, 1], "x"), ([0], "y")], [([1], "z"), ([0, 1], "x")]], False),  # in another order
        ([[([0, 1], "x")], [([0, 1], "y")]], False),  # under another name
        ([[([0, 1], "x"), ([0, 1], "x")], [([0, 1], "x"), ([0, 1], "x")]], False),  # a name twice
    ],
)
def test_groups_of_all_ranks(by_rank: list[Made], right: bool) -> None:
    assert (unlike(by_rank) == []) == right
