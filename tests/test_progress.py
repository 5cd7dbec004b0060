"""In: ranks of a run, as our launcher starts them. Out: what their pages of shared memory say.
Who is late by them: test_launch_hang.py; who has died: test_launch_again.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from runs import environment, make_project

from codescent.base.page import Page, Took
from codescent.base.progress import (
    CALL_BYTES,
    FOLDER_BYTES,
    HUB_BYTES,
    PAGE_BYTES,
    SLOWEST_BYTES,
    OwnPage,
    Pages,
    shared_memory,
)
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
pages = Pages.of(os.environ)

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
        lasts: list[Any] = [page.last for page in seen]  # as JSON has them
        assert ("all_reduce", "dp_replicate") in {(one["kind"], one["axis"]) for one in lasts}
        assert {name for name, *_ in last.spent} >= {"reading", "validation", "save"}
        assert last.took["steps"] == 2  # type: ignore[index]
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
    row = own.join("y" * 200, range(3))
    own.collective(row, b"all_gather" * 20, 12)
    own.meet(7)
    pages.folder = "z" * 2000  # too long: none is better than a part
    assert len(pages.memory) == 3 * PAGE_BYTES + FOLDER_BYTES + SLOWEST_BYTES + HUB_BYTES + CALL_BYTES
    pages.slowest = "rank 1 is slow, and this is longer than its place " * 2
    own.took(0.5, 1.5)
    own.took(0.5, 2.5)
    assert pages.read(1).took == Took(2, 1.0, 4.0)
    assert len(pages.slowest) == SLOWEST_BYTES
    assert pages.read(0) == pages.read(2) == Page()
    page = pages.lose(1, 12.0)
    assert (page.position, page.stage, page.meets, page.died_s, page.collectives) == (2.5, 3, 7, 12.0, 1)
    assert (page.instruction, page.section) == ("x" * 24, "validation validation va")
    assert (page.last, pages.folder) == (page.groups[0], "")
    assert page.last is not None
    assert (page.last.number, page.last.size_bytes, str(page.last)) == (
        1,
        12,
        f"{'all_gather' * 2}"[:16] + f" over {'y' * 24}",
    )
    own.come_again()
    assert pages.read(1).died_s == 0.0


def test_what_a_rank_does_fits_its_page() -> None:
    sections = [value for name, value in vars(beside).items() if name.isupper()]
    assert "removal of checkpoints" in sections
    assert max(len(word.encode()) for word in [*sections, *Verb]) <= 24
