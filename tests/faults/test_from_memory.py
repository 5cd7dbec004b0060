"""In: runs with survive.on_loss, whose ranks are killed. Out: they go on from the memory of those that live.
Which bits are loaded is tested in test_checkpoint_memory.py, and the meeting in test_restart.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults.test_restart import Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RESUMED = re.compile(r"resumed from (.*) at step (\d+)")


@pytest.mark.parametrize(("layout", "lost"), [("dp_replicate=3", 2), ("dp_replicate=3", 0), ("dp_shard=3", 1)])
def test_f2_no_step_is_lost_where_others_have_the_tensors(tmp_path: Path, layout: str, lost: int) -> None:
    """Fault: steps are done twice although ranks still have their weights; or weights of initial values, of another
    step or of a part are taken; or a row of metrics is missing."""
    run = Started(tmp_path, 3, f"parallel.{layout}")
    run.until(lambda: run.rows() > 12)
    rows = run.rows()
    run.kill(lost)
    run.is_like_a_run_alone()
    where, step = RESUMED.findall(run.end()[1])[-1]
    if layout == "dp_replicate=3":
        assert where == "the memory of the ranks"
        assert int(step) >= rows - 1
    else:
        assert "checkpoints" in where
