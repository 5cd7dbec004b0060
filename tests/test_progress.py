"""In: ranks of a run, as our launcher starts them. Out: what their pages of shared memory say.
Who is late by them: test_launch_local.py; who has died: test_launch_again.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from runs import environment, make_project

from codescent.base.progress import PAGE_BYTES, OwnPage, Page, Pages, shared_memory
from codescent.launch import watch
from codescent.launch.local import run_ranks
from codescent.plan.schedule import Verb
from codescent.train import beside

RANK = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from codescent.base.progress import Pages
from codescent.train.execute import Executor
from codescent.verbs.cli import run

rank, seen = int(os.environ["RANK"]), []
pages = Pages.of(os.environ, 2)

def see(owner, name):
    act = getattr(owner, name)
    def seeing(*words):
        seen.append(asdict(pages.read(rank)))
        return act(*words)
    setattr(owner, name, seeing)

see(Executor, "_reduce")
see(Executor, "sum_of_losses")
code = run(["train", "run.toml", "train.num_steps=2", "train.eval_every=1"])
seen.append(asdict(pages.read(rank)))
Path(f"seen-{rank}.json").write_text(json.dumps(seen))
sys.exit(code)
"""


def test_a_rank_writes_where_it_is_and_what_it_waits_in(tmp_path: Path) -> None:
    """A page that is not written, or of another rank, is seen; and one whose collectives are not counted."""
    make_project(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert run_ranks([sys.executable, "rank.py"], 2, environment()) == 0
    finally:
        os.chdir(before)
    of_ranks = [[Page(**one) for one in json.loads((tmp_path / f"seen-{rank}.json").read_text())] for rank in range(2)]
    for seen in of_ranks:
        reducing = [page for page in seen if page.instruction == "reduce"]
        assert [int(page.position) for page in reducing] == [0, 1]
        assert all(0 < page.position - step < 1 for step, page in enumerate(reducing))
        assert {page.section for page in seen} >= {"", "validation"}
        *_, last = seen
        assert (last.position, last.instruction, last.section, last.died_s) == (float("inf"), "", "", 0.0)
        assert last.collective.startswith("all_reduce over ")
        times = [page.time_s for page in seen]
        assert times == sorted(times)
    assert of_ranks[0][-1].collectives == of_ranks[1][-1].collectives > 2


def test_a_page_is_cut_at_its_end_and_is_not_its_neighbours() -> None:
    descriptor = shared_memory(3)
    pages = Pages(descriptor, 3)
    os.close(descriptor)
    own = OwnPage(pages, 1)
    own.at(2.5, 3, "x" * 200)
    own.enter("validation " * 20)
    own.collective(b"all_gather over " + b"y" * 200)
    own.meet(7)
    assert len(pages.memory) == 3 * PAGE_BYTES
    assert pages.read(0) == pages.read(2) == Page()
    page = pages.lose(1, 12.0)
    assert (page.position, page.stage, page.meets, page.died_s, page.collectives) == (2.5, 3, 7, 12.0, 1)
    assert (page.instruction, page.section) == ("x" * 24, "validation validation va")
    own.come_again()
    assert pages.read(1).died_s == 0.0


def test_what_a_rank_does_fits_its_page() -> None:
    sections = [value for name, value in vars(beside).items() if name.isupper()]
    assert "removal of checkpoints" in sections
    assert max(len(word.encode()) for word in [*sections, *Verb]) <= 24


def test_a_rank_that_has_died_is_neither_behind_nor_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is started again has the page of its predecessor until it joins. Others that live are still compared."""
    descriptor = shared_memory(4)
    pages = Pages(descriptor, 4)
    os.close(descriptor)
    for rank, position in enumerate((9.5, 5.5, 1.5, 5.5)):
        OwnPage(pages, rank).at(position)
    for rank in (0, 2):
        pages.lose(rank, time.monotonic())
    monkeypatch.setattr(watch, "BEHIND_S", 0.0)
    looks = watch.Watch(pages, 4)
    running = {rank: os.getpid() for rank in (1, 2, 3)}
    assert [looks.look(running) for _ in range(3)] == [[], [], []]
    OwnPage(pages, 3).at(4.5)
    (said,) = [line for _ in range(3) for line in looks.look(running)]
    assert said.startswith("rank 3 of 4 ")
