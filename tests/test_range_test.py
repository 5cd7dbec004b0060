"""In: losses over rising learning rates; real range tests. Out: suggested rates; each layout finds the same losses.
Does not say whether a suggested rate is good for a model: docs/learning_rate.md has measured one."""

from __future__ import annotations

import csv
import math
import random
import re
import signal
from pathlib import Path

import pytest
from forker import Forker
from hypothesis import given
from hypothesis import strategies as st
from runs import called, codescent, make_project, start

from codescent.config.load import load
from codescent.config.sections import Config
from codescent.preflight import plan_of
from codescent.record import RunFolder
from codescent.train import range_test
from codescent.train.range_test import HIGHEST, LOWEST, STEPS, RangeTest, rates
from codescent.train.result import StepResult
from codescent.verbs.learning_rate import report, rounded, suggest


def losses_of(middle: float, steps: int = STEPS, noise: float = 0.0) -> list[float]:
    """Losses that fall from 7 to 3 around a rate, are lowest 10 times above it, and rise from there."""
    draw = random.Random(5)
    places = [math.log10(rate / middle) for rate in list(rates())[:steps]]
    clean = [7 - 4 / (1 + math.exp(-6 * x)) + (10 * (x - 1) ** 2 if x > 1 else 0.0) for x in places]
    return [loss + draw.gauss(0, noise) for loss in clean]


@given(st.floats(1e-5, 0.1), st.floats(0.0, 0.05), st.floats(0.1, 100))
def test_the_steepest_fall_and_a_tenth_of_the_lowest_loss_are_found(middle: float, noise: float, unit: float) -> None:
    losses = [unit * loss for loss in losses_of(middle, noise=noise)]
    found = suggest(list(rates()), losses)
    assert found is not None
    assert middle / 2.5 < found.steepest < 2.5 * middle
    assert middle / 4 < found.tenth < 2 * middle


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [7.0] * 5,
        [7.0] * STEPS,
        losses_of(1e9, noise=0.1),
        [7.0 + step for step in range(STEPS)],
    ],
    ids=["none", "few", "equal", "noise", "rising"],
)
def test_nothing_is_suggested_where_the_loss_does_not_fall(losses: list[float], tmp_path: Path) -> None:
    tried = list(rates())[: len(losses)]
    assert suggest(tried, losses) is None
    with pytest.raises(Exception, match="no learning rate clearly lowered the loss, so none is suggested"):
        report(RangeTest(tried, losses), Config().optimizer, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-learning-rate.csv", "run-learning-rate.png"]


def test_rates_rise_by_one_factor_to_the_highest() -> None:
    found = list(rates())
    assert (len(found), found[0]) == (STEPS, LOWEST)
    assert found[-1] == pytest.approx(HIGHEST, rel=1e-12)
    factors = [after / before for before, after in zip(found, found[1:])]
    assert factors == pytest.approx([factors[0]] * (STEPS - 1), rel=1e-12)


class Steps:
    """An executor that records the learning rates of its steps and computes given losses."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.rates = losses, list[float]()

    def step(self, number: int, rate: float) -> StepResult:
        self.rates.append(rate)
        return StepResult(self.losses[number], 1.0, False, {})


def walked(losses: list[float], workers: int = 1, *words: str) -> tuple[RangeTest, list[float]]:
    steps = Steps(losses)
    config = load("default", ["optimizer.warmup_steps=50", *words]).config
    return range_test._walk(steps, config, workers, shown=False), steps.rates  # type: ignore[arg-type]


def test_a_loss_belongs_to_the_rate_of_the_step_before_and_warm_up_and_decay_are_off() -> None:
    losses = [7.0 - step / 100 for step in range(STEPS + 1)]
    for scale, workers, factor in (("none", 4, 1), ("linear", 4, 4), ("sqrt", 4, 2), ("linear", 1, 1)):
        found, used = walked(losses, workers, f"optimizer.scale_learning_rate={scale}")
        assert (found.rates, found.losses, found.ending) == (list(rates()), losses[1:], "")
        assert used == pytest.approx([factor * rate for rate in (*rates(), HIGHEST)], rel=1e-12)


def test_the_test_ends_when_the_loss_diverges() -> None:
    found, used = walked([7.0] * 30 + [40.0] * 100)
    assert found.ending == "the loss is more than 4 times its lowest value"
    assert len(used) == 34  # the mean of five losses has passed 28
    found, used = walked([7.0] * 30 + [math.nan] * 100)
    assert (found.ending, len(used), len(found.losses)) == ("the loss is nan", 31, 29)


def test_a_run_is_neither_made_nor_changed(tmp_path: Path) -> None:
    make_project(tmp_path)
    run = RunFolder.create(tmp_path / "runs" / "one", "", {})
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    words = ("run.name=one", "optimizer.min_learning_rate=9e-3")
    done = called(tmp_path, "train", "run.toml", "--find-learning-rate", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    names = ["one", "one-learning-rate.csv", "one-learning-rate.png"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    with (tmp_path / "runs" / names[1]).open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [row["learning_rate"] for row in rows] == list(rates())[: len(rows)]
    assert (tmp_path / "runs" / names[2]).read_bytes().startswith(b"\x89PNG")
    found = suggest([row["learning_rate"] for row in rows], [row["loss"] for row in rows])
    assert found is not None
    said = re.search(r"^to train with it: (.*)$", done.stdout, re.MULTILINE)
    assert said is not None
    assert said[1].split()[0] == f"optimizer.learning_rate={rounded(found.steepest)}"
    load(tmp_path / "run.toml", [*words, *said[1].split()])  # the lower end of the decay is not above it
    assert "the losses are in runs/one-learning-rate.csv and runs/one-learning-rate.png" in done.stdout


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ("optimizer.kind=sgd",)),
        (2, ("optimizer.kind=adam", "parallel.dp_shard=2")),
        pytest.param(2, ("optimizer.kind=adagrad", "parallel.pp=2", "train.microbatch_size=4"), marks=pytest.mark.slow),
        pytest.param(2, ("optimizer.kind=adadelta", "parallel.tp=2"), marks=pytest.mark.slow),
        pytest.param(2, ("optimizer.kind=rmsprop", "parallel.cp=2"), marks=pytest.mark.slow),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_every_layout_finds_the_same_losses(project: Path, forker: Forker, ranks: int, words: tuple[str, ...]) -> None:
    call, shared = "layout_ranks:losses_at_rates", ["train.precision=fp64", words[0]]
    (alone,) = forker.call(call, project, 1, words=shared, steps=12)
    for found in forker.call(call, project, ranks, words=[*shared, *words[1:]], steps=12):
        assert found[0] == alone[0]
        assert found[1] == pytest.approx(alone[1], rel=1e-9)
    assert not (project / "runs").exists()


def test_it_does_not_resume(tmp_path: Path) -> None:
    make_project(tmp_path)
    done = called(tmp_path, "train", "run.toml", "--find-learning-rate", "--resume")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --find-learning-rate: begins with the initial weights of a new run; leave out --resume\n",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("parallel.average_every=5",), "parallel.average_every; add parallel.average_every=0\n"),
        (
            ("parallel.gossip=ring", "parallel.servers=1", "parallel.ranks=3"),
            "parallel.gossip and parallel.servers; add parallel.gossip=none parallel.servers=0\n",
        ),
        (
            ("parallel.average_every=5", "parallel.outer_optimizer=sgd"),
            "parallel.average_every; add parallel.average_every=0 parallel.outer_optimizer=none\n",
        ),
        (
            ("parallel.servers=1", "parallel.updates=asynchronous", "parallel.restarts=2", "parallel.ranks=2"),
            "parallel.servers; add parallel.servers=0 parallel.restarts=0\n",
        ),
    ],
)
def test_replicas_that_train_apart_are_refused_before_any_rank_starts(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    make_project(tmp_path)
    done = called(tmp_path, "train", "run.toml", "--find-learning-rate", *words)
    why = "needs the loss of all ranks after each step, which they do not know with"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"error: --find-learning-rate: {why} {said}")
    added = said.partition("add ")[2].split()
    plan_of(load(tmp_path / "run.toml", [*words, *added]).config, 2)


@pytest.mark.slow
def test_our_launcher_starts_it(tmp_path: Path) -> None:
    make_project(tmp_path)
    done = codescent(tmp_path, "train", "run.toml", "--find-learning-rate", "--ranks", "2", "run.name=one")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("to train with it: optimizer.learning_rate=") == 1
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "one-learning-rate.csv",
        "one-learning-rate.png",
    ]


@pytest.mark.slow
def test_a_stopped_test_writes_nothing_and_says_so(tmp_path: Path) -> None:
    make_project(tmp_path)
    process = start(tmp_path, "train", "run.toml", "--find-learning-rate", "model.hidden_dim=256", "run.name=one")
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == ["6"]:
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert err.startswith("codescent: SIGTERM: stops after this step\n")
    assert "learning rates are too few to suggest one; nothing is written" in err
    assert not (tmp_path / "runs").exists()
