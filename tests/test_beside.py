"""In: runs that do much between two steps. Out: this is time of its own on all ranks, and no communication.
Does not check how long a step takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forker import Forker
from runs import make_project

from codescent.train.beside import Beside

SLEEP_S, STEPS = 0.4, 6
SLOW = f"""
import time
def log(kind, data):
    if kind == "metrics":
        time.sleep({SLEEP_S})
"""


def test_a_slow_function_of_log_to_is_no_communication_of_the_other_rank(tmp_path: Path, forker: Forker) -> None:
    """Rank 0 alone calls it. Until the ranks met, rank 1 waited in its next step: 0.4 s of communication in each."""
    make_project(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    words = (f"train.num_steps={STEPS}", "train.eval_every=3", "log.every=2", "checkpoint.every=4", "log.to=slow:log")
    run = forker.train(tmp_path, "run", 2, *words)
    waits_s = sum(row["exposed_comm_s"] * row["steps"] for row in run.iter_ranks() if row["rank"] == 1)
    assert waits_s < SLEEP_S * STEPS / 2
    found = [event for event in run.read_events() if event["kind"] == "beside"]
    assert [event["step"] for event in found] == [2, 4, 6, 6]
    spent: dict[str, float] = {}
    for event in found:
        for what, seconds in event["seconds"].items():
            spent[what] = spent.get(what, 0.0) + seconds
    assert spent.keys() == {"loggers", "validation", "save", "removal of checkpoints"}
    assert spent["loggers"] > SLEEP_S * STEPS
    assert min(spent.values()) > 0


def test_ranks_meet_only_if_something_was_done_and_the_waiting_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, votes = [0.0], list[bool]()
    monkeypatch.setattr("codescent.train.beside.time.perf_counter", lambda: clock[0])

    def all_agree(mine: bool) -> bool:
        clock[0] += 5.0
        votes.append(mine)
        return mine

    world: Any = SimpleNamespace(all_agree=all_agree)
    beside = Beside(world)
    beside.meet()
    assert (votes, beside.take()) == ([], {})
    with beside.doing("validation"):
        clock[0] += 1.0
    beside.add("save", 2.0)
    beside.meet()
    beside.meet()
    assert (votes, beside.take()) == ([True], {"validation": 1.0, "save": 7.0})
    beside.add("save", 1.0)
    assert beside.take() == {"save": 1.0}
    beside.meet()  # after the line of the log: its waiting comes in the next one
    assert beside.take() == {"save": 5.0}
