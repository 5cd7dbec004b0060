"""In: runs on one and several ranks. Out: ranks.csv has the parts of each rank's steps; they sum to the step.
Does not check how long anything takes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forker import Forker
from runs import make_project
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from codescent.base.errors import UserError
from codescent.base.stopwatch import Stopwatch, waiting
from codescent.record import ranks
from codescent.record.ranks import COLUMNS, PARTS
from codescent.strategies.collectives import count_fully_shard_waits
from codescent.strategies.fully_shard import units
from codescent.train.ranks import RankTimes

LAYOUTS = [
    (1, ()),
    (2, ("parallel.tp=2",)),
    (2, ("parallel.cp=2",)),
    (2, ("parallel.dp_shard=2",)),
    (2, ("parallel.pp=2", "train.microbatch_size=2")),
    (2, ("optimizer.kind=muon", "parallel.dp_shard=2")),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("times")
    make_project(folder)
    return folder


@pytest.mark.parametrize(("number", "words"), LAYOUTS, ids=[" ".join(words) or "one" for _, words in LAYOUTS])
def test_the_parts_of_a_step_sum_to_it_on_every_rank(
    project: Path, forker: Forker, number: int, words: tuple[str, ...]
) -> None:
    name = "-".join(("run", *words)).replace("parallel.", "").replace("=", "")
    run = forker.train(project, name, number, *words, "train.num_steps=5", "log.every=2", "train.eval_every=0")
    rows = list(run.iter_ranks())
    assert [(row["step"], row["rank"], row["steps"]) for row in rows] == [
        (step, rank, steps) for step, steps in ((2, 2), (4, 2), (5, 1)) for rank in range(number)
    ]
    for row in rows:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["step_s"], rel=0.01)
        assert min(row["forward_s"], row["backward_s"], row["optimizer_s"], row["peak_memory_bytes"]) > 0
        assert (row["exposed_comm_s"] > 0) == (number > 1)
    for row in run.iter_metrics():
        assert (row["exposed_comm_s"] is None) == (row["sent_bytes"] is None) == (number == 1)
        assert sum(row[part] or 0.0 for part in PARTS) == pytest.approx(row["step_s"], rel=0.01)
        assert row["compute_s"] == pytest.approx(row["forward_s"] + row["backward_s"])
    (last,) = [row for row in rows if row["step"] == 5 and row["rank"] == 0]
    assert last["step_s"] == run.read_metrics()[-1]["step_s"]
    assert [one["device"] for one in run.read_environment()["ranks"]] == ["cpu"] * number


def test_waits_of_fully_shard_are_waiting(tmp_path: Path) -> None:
    """On CUDA fully_shard waits on its own streams. Here its units are the same, with gloo and one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        fully_shard(module[0], mesh=DeviceMesh("cpu", [0]))
        fully_shard(module, mesh=DeviceMesh("cpu", [0]))
        for unit in units(module):
            count_fully_shard_waits(unit)
        watch = Stopwatch(torch.device("cpu"), "waits")
        watch.start("forward")
        loss = module(torch.ones(2, 4)).sum()
        waits = [part for part, _ in watch.laps].count("waits")
        assert waits == 2, "each unit waits for its weights"
        watch.lap("forward")
        watch.part = "backward"
        loss.backward()
        watch.lap("backward")
        # Both units wait for the reduction of their gradients, and at the end for all that is under way.
        assert [part for part, _ in watch.laps].count("waits") >= waits + 4
        assert set(watch.stop().read()) == {"forward", "backward", "waits"}
    finally:
        dist.destroy_process_group()


def test_waiting_inside_a_verb_is_waiting() -> None:
    times = iter([0.0, 1.0, 1.5, 4.5, 5.0, 7.0])

    class Clock(Stopwatch):
        def lap(self, part: str) -> None:
            self.laps.append((part, next(times)))

    watch = Clock(torch.device("cpu"), "waits")
    watch.start("a")
    watch.lap("a")
    watch.part = "b"
    with waiting(), waiting():  # from 1.5 to 4.5
        pass
    watch.lap("b")
    watch.part = "waits"
    with waiting():  # nothing new
        pass
    watch.lap("waits")
    assert watch.stop().read() == {"a": 1.0, "b": 1.0, "waits": 5.0}
    with waiting():  # outside of a step
        pass
    assert watch.laps == []


def row(step: int, rank: int = 0) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS, 0.5) | {"step": step, "rank": rank, "steps": 1, "peak_memory_bytes": 7}


def test_rows_after_a_step_are_deleted_and_damage_is_named(tmp_path: Path) -> None:
    ranks.rewind(tmp_path, 0)
    assert list(ranks.read(tmp_path)) == []
    for step in (2, 4, 6):
        ranks.write(tmp_path, [row(step), row(step, 1)])
    path = tmp_path / ranks.RANKS_CSV
    with path.open("a") as file:
        file.write("8,0,half")
    ranks.rewind(tmp_path, 4)
    assert [(one["step"], one["rank"]) for one in ranks.read(tmp_path)] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    ranks.write(tmp_path, [row(5)])
    with path.open(newline="") as file:
        assert [one["step"] for one in csv.DictReader(file)] == ["2", "2", "4", "4", "5"]
    ranks.rewind(tmp_path, 0)
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    path.write_text(path.read_text() + "1,2,3\n")
    with pytest.raises(UserError, match=r"ranks.csv line 2: not a row of 11 numbers \(3 fields\)"):
        list(ranks.read(tmp_path))


def test_means_are_over_the_steps_since_the_last() -> None:
    times = RankTimes()
    parts = dict.fromkeys(PARTS, 0.25)
    times.add(1.5, parts)
    times.add(2.5, {**parts, "forward_s": 0.75})
    (found,), others = times.gather(2, 9, [3.0, 4.0])
    assert others == [[3.0, 4.0]]
    assert found == {"step": 2, "rank": 0, "steps": 2, "step_s": 2.0, **parts, "forward_s": 0.5, "peak_memory_bytes": 9}
    times.add(4.0, parts)
    assert times.gather(3, 9)[0][0]["step_s"] == 4.0
