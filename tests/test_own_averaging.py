"""In: own loops with average_every and wire, on real ranks. Out: that they compute what the formulas say, and resume.
Does not test the formats of wire (test_wire does) or the plan's local SGD (test_local_sgd does)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forker import Forker

Run = Callable[..., list[Any]]
DILOCO = {"outer_optimizer": "nesterov"}


@pytest.fixture
def run(forker: Forker, tmp_path: Path) -> Run:
    """`run(ranks, job, **options)`: what each rank returned; all must end well."""

    def ask(ranks: int, job: str, **options: Any) -> list[Any]:
        return forker.call("own_averaging_ranks:act", tmp_path, ranks, job=job, options=options)

    return ask


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    assert set(found) == set(wanted)
    for name, numbers in wanted.items():
        assert found[name] == pytest.approx(numbers, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_after_each_step_of_sgd_are_data_parallelism(run: Run, ranks: int) -> None:
    wanted = run(ranks, "walked")
    for found in run(ranks, "walked", average_every=1):
        for mine, other in zip(found, wanted[0], strict=True):
            assert_close(mine, other)


@pytest.mark.parametrize(
    ("ranks", "kind", "optimizer", "outer", "options"),
    [
        (2, "odd", "adamw", None, {}),
        (3, "norm", "adamw", None, {}),
        (2, "odd", "sgd", [1.0, 0.0, False], {"wire": "topk:1"}),
        (3, "odd", "adamw", [0.7, 0.9, True], DILOCO),
        (
            2,
            "odd",
            "sgd",
            [0.5, 0.8, False],
            {"outer_optimizer": "sgd", "outer_learning_rate": 0.5, "outer_momentum": 0.8},
        ),
        (2, "mixed", "adamw", [0.7, 0.9, True], DILOCO),
    ],
)
def test_rounds_are_those_of_one_process_with_copies(
    run: Run, ranks: int, kind: str, optimizer: str, outer: Any, options: dict[str, Any]
) -> None:
    known = {"kind": kind, "optimizer": optimizer, "steps": 9}
    (wanted,) = run(1, "simulated", replicas=ranks, period=4, outer=outer, **known)
    tolerance = 1e-5 if kind == "mixed" else 1e-9
    everyone = run(ranks, "walked", average_every=4, **known, **options)
    for found, alone in zip(everyone, wanted, strict=True):
        for mine, other in zip(found, alone, strict=True):
            assert_close(mine, other, tolerance)
    trained = next(iter(everyone[0][0]))
    assert everyone[0][3] == everyone[-1][3], "the ranks agree at the end of a round"
    assert everyone[0][4][trained] != everyone[-1][4][trained], "they train apart within it"


@pytest.mark.parametrize("options", [{}, DILOCO, {"wire": "int8"}, {**DILOCO, "wire": "powersgd:2"}])
def test_weights_in_bf16_agree_after_each_round(run: Run, options: dict[str, Any]) -> None:
    one, two, three = run(3, "walked", kind="bf16", average_every=2, steps=6, **options)
    for step in (1, 3, 5):
        assert one[step] == two[step] == three[step]
    assert one[4] != two[4]
    assert one[5] != one[3]


def test_within_a_round_no_rank_waits_for_another(run: Run) -> None:
    for options in ({}, {**DILOCO, "wire": "int4"}):
        for steps in run(2, "met", steps=8, average_every=3, **options):
            assert set(steps) == {2, 5}
    for steps in run(2, "met", steps=2):
        assert set(steps) == {0, 1}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{"wire": "int8"}, {"wire": "int4", "average_every": 2}, {"wire": "topk:0.05"}])
def test_what_the_wire_cuts_off_is_sent_later(run: Run, ranks: int, options: dict[str, Any]) -> None:
    everyone = run(ranks, "delivered", steps=6, numel=300, **options)
    for number in range(300):
        true = sum(one["true"][number] for one in everyone)
        unsent = sum(one["unsent"]["residual"][number] for one in everyone)
        if "owner_residual" in everyone[0]["unsent"]:
            part = len(everyone[0]["unsent"]["owner_residual"])
            unsent += everyone[number // part]["unsent"]["owner_residual"][number % part]
        for one in everyone:
            assert one["moved"][number] + unsent == pytest.approx(true, rel=1e-9, abs=1e-9)
    assert any(abs(value) > 1e-4 for value in everyone[0]["unsent"]["residual"])


@pytest.mark.parametrize(
    ("ranks", "kind", "optimizer", "before", "options"),
    [
        (2, "odd", "adamw", 4, {"average_every": 4}),
        (3, "norm", "adamw", 3, {"average_every": 2}),
        (2, "odd", "adamw", 6, {**DILOCO, "average_every": 4, "wire": "int8"}),
        (3, "odd", "sgd", 4, {**DILOCO, "average_every": 2, "wire": "int4"}),
        (2, "norm", "sgd", 0, {**DILOCO, "average_every": 2}),
        (3, "norm", "adamw", 3, {"wire": "int8"}),
        (2, "odd", "adamw", 3, {"wire": "powersgd:2"}),
        (1, "norm", "adamw", 3, {**DILOCO, "average_every": 2, "wire": "int8"}),
    ],
)
def test_a_run_goes_on_bitwise_from_a_save(
    run: Run, ranks: int, kind: str, optimizer: str, before: int, options: dict[str, Any]
) -> None:
    everyone = run(ranks, "resumed", kind=kind, optimizer=optimizer, before=before, after=5, **options)
    for one in everyone:
        assert one["runs"][0] == one["runs"][1]
        for name, stored in one["file"].items():
            mean = [sum(numbers) / ranks for numbers in zip(*(other["now"][name] for other in everyone), strict=True)]
            assert stored == pytest.approx(mean, rel=1e-12, abs=1e-12), name


def test_a_checkpoint_goes_on_elsewhere(run: Run) -> None:
    saves = {**DILOCO, "average_every": 2, "wire": "int8"}
    wanted = run(2, "moved", saves=saves, loads={})[0]
    for ranks, loads in ((3, saves), (1, saves), (2, {}), (2, {"strategy": "zero3"}), (2, saves)):
        for mean, end, _ in run(ranks, "moved", saves=None, loads=loads):
            assert_close(mean, wanted, 1e-12)
            assert end != mean
    for mean, *_ in run(2, "moved", saves=None, loads={"average_every": 5}, alone=True):
        assert_close(mean, wanted, 1e-12)
    (said, other) = run(2, "moved", saves=None, loads={**saves, "average_every": 3, "wire": "int4"})
    assert said == other
    assert said[0].startswith("codescent.load: average_every = 3, but 2 in the checkpoint")
    assert said[1].startswith("codescent.load: wire = int4, but int8 in the checkpoint")


def test_a_checkpoint_of_data_parallelism_goes_on_in_rounds(run: Run) -> None:
    wanted = run(2, "moved", saves={}, loads={})[0]
    for mean, end, _ in run(2, "moved", saves=None, loads={**DILOCO, "average_every": 2}):
        assert_close(mean, wanted, 1e-12)
        assert end != mean


def test_state_that_a_rank_lacks_is_the_mean_of_the_others(run: Run) -> None:
    one, two, three = run(3, "lacking")
    assert (one["own"], three["own"]) == (two["own"], None)
    assert one["saved"] == one["own"] is not None


def test_averaged_lends_the_means_within_a_round(run: Run) -> None:
    one, two = run(2, "lent")
    for name, mean in one["mean"].items():
        assert mean == two["mean"][name]
        both = zip(one["own"][name], two["own"][name], strict=True)
        assert mean == pytest.approx([(a + b) / 2 for a, b in both], rel=1e-12)
    for rank in (one, two):
        assert rank["own"] == rank["after"] != rank["mean"]
        assert rank["end"] == rank["end mean"] == one["end"]
        assert rank["said"][0].startswith("codescent.averaged: an optimizer step inside it would be lost")
        for said, function in zip(rank["said"][1:], ("save", "load"), strict=True):
            assert said.startswith(f"codescent.{function}: inside of codescent.averaged the weights are means")


def test_the_steps_of_the_given_optimizer_make_a_round(run: Run) -> None:
    for agreed, largest in run(2, "two_optimizers"):
        assert agreed == [False, False, False, True, False, False]
        assert 0 < largest < 100


def test_one_rank_computes_as_torch_does(run: Run) -> None:
    (wanted,) = run(1, "simulated", replicas=1, period=99, outer=None, kind="norm", optimizer="adamw", steps=5)
    for options in ({**DILOCO, "average_every": 2, "wire": "int8"}, {"wire": "sign"}):
        (found,) = run(1, "walked", kind="norm", optimizer="adamw", steps=5, **options)
        assert found == wanted[0]


@pytest.mark.parametrize(("wire", "tolerance"), [("topk:1", 1e-6), ("bf16", 0.02), ("int8", 0.03)])
def test_gradients_that_add_up_travel_once_in_each_dtype(run: Run, wire: str, tolerance: float) -> None:
    wanted = run(2, "accumulated", wire="none")[0]
    one, two = run(2, "accumulated", wire=wire)
    assert one == two
    for name, numbers in wanted.items():
        rounding = 0.01 if name.startswith("2.") else 0.0  # bf16
        assert one[name] == pytest.approx(numbers, rel=tolerance + rounding), name


def test_a_module_that_is_let_go_leaves_nothing(run: Run) -> None:
    assert run(2, "let_go") == [[True, True]] * 2


REFUSALS = {
    "zero": "average_every: must be a whole number above 0, or None, not 0",
    "fraction": "average_every: must be a whole number above 0, or None, not 1.5",
    "wire": "wire: 'int3' is no form of wire: it is none, bf16, int8, int4, sign, powersgd:r",
    "sharded": 'average_every = 4: strategy "zero3" shards what ranks would exchange whole: take "ddp", or leave',
    "wire sharded": "wire = 'int8': strategy \"zero1\" shards what ranks would exchange whole",
    "outer alone": 'outer_optimizer = "nesterov": acts after a round: give average_every, too',
    "unknown outer": 'outer_optimizer "adam": must be one of none, sgd, nesterov',
    "rate alone": 'outer_learning_rate = 0.5: give outer_optimizer = "sgd" or "nesterov", or leave it out',
    "rate": "outer_learning_rate: must be a finite number above 0, or None, not 0.0",
    "no rate": "outer_learning_rate: must be a finite number above 0, or None, not inf",
    "momentum": "outer_momentum: must be a number of at least 0 and below 1, or None, not 1.0",
    "no momentum": 'outer_optimizer = "nesterov": outer_momentum = 0 leaves plain SGD',
    "differs": "rank 0 asks for average_every 2, rank 1 for 3: every rank must make the same call",
    "again": "Sequential, or a part of it, is distributed already, by ddp",
}


def test_wrong_options_are_refused(run: Run) -> None:
    for said in run(2, "refused"):
        assert list(said) == [*REFUSALS, "part"]
        for name, words in REFUSALS.items():
            assert said[name][0].startswith(f"codescent.distribute: {words}"), said[name]
            assert len(said[name]) == 1
        assert "shares parameters with a module that was distributed with average_every or wire" in said["part"][0]
