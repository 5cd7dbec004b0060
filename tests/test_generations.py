"""In: runs whose process groups, trainer and memory are made anew while they train. Out: bitwise the run left alone.
Does not shrink or grow a run: the next generation has the same ranks and the same plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from forker import Forker
from runs import losses

from codescent.record import RunFolder

EIGHT = ("train.num_steps=8", "train.eval_every=4", "checkpoint.every=0", "model.dropout=0.1")
LAYOUTS = {
    "one process": (1, ()),
    "dp_replicate": (2, ("parallel.dp_replicate=2",)),
    "dp_shard": (2, ("parallel.dp_shard=2",)),
    "tp": (2, ("parallel.tp=2",)),
    "pp": (2, ("parallel.pp=2", "train.microbatch_size=2")),
    "four": (4, ("parallel.dp_shard=2", "parallel.pp=2", "train.microbatch_size=2")),
}


@pytest.mark.parametrize("name", [*list(LAYOUTS)[:-1], pytest.param("four", marks=pytest.mark.slow)])
def test_a_run_whose_generation_is_replaced_is_bitwise_the_run_left_alone(
    project: Path, forker: Forker, name: str
) -> None:
    ranks, words = LAYOUTS[name]
    alone = forker.train(project, f"alone-{name.replace(' ', '-')}", ranks, *EIGHT, *words)
    call = ["run.name=replaced-" + name.replace(" ", "-"), *EIGHT, *words]
    held = forker.call("generation_ranks:replaced", project, ranks, words=call, after=[4])
    assert [of_rank["alive"] for of_rank in held] == [[0, 0]] * ranks  # each is gone before the next one is made
    again = RunFolder.open(project / "runs" / call[0].partition("=")[2])
    assert losses(again) == losses(alone)
    rows = [(row["val_loss"], row["grad_norm"]) for row in again.read_metrics()]
    assert rows == [(row["val_loss"], row["grad_norm"]) for row in alone.read_metrics()]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, "dp_replicate"), *(pytest.param(2, name, marks=pytest.mark.slow) for name in ("dp_shard", "tp", "pp"))],
)
def test_twenty_generations_leave_no_thread_no_file_and_no_memory(
    project: Path, forker: Forker, ranks: int, name: str
) -> None:
    words = [f"run.name=twenty-{name}", "train.num_steps=22", "train.eval_every=0", *LAYOUTS[name][1]]
    for held in forker.call("generation_ranks:replaced", project, ranks, words=words, after=list(range(1, 21))):
        assert len(held["threads"]) == 20
        for what in ("threads", "descriptors"):  # a thread that reads ahead may have begun already; 15 more are a leak
            assert max(held[what][-3:]) <= max(held[what][2:5]) + 2, held
        growth = held["bytes"][-1] - held["bytes"][4]
        assert growth < 0.02 * held["bytes"][4], held["bytes"]
