"""Ranks of an own loop that make different calls are told where. Ranks that only wait are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from codescent.own.waits import told

SCRIPT = """
import sys, time, torch, codescent
how = sys.argv[1]
ranks = codescent.init(timeout_s=30, device="cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
codescent.distribute(model, optimizer, "zero3" if how == "evaluates" else "ddp")
x = torch.randn(8, 4)
for step in range(6):
    optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step()  # trains
    if step == 1 and ranks.rank == 0:
        if how == "evaluates":
            with torch.no_grad():
                model(x).sum().item()  # evaluates
        elif how == "gathers":
            ranks.gather(x)  # gathers
        else:
            time.sleep(15)
"""
LINES = {text: number for number, line in enumerate(SCRIPT.splitlines(), 1) for text in [line.partition("  # ")[2]]}


def call(**changed: Any) -> dict[str, Any]:
    found = {"line": ["a.py", 4], "kind": "forward", "collective": "all_gather", "steps": 2, "first": 0, "called": []}
    return {**found, "called": [["a.py", 4]] * 3, **changed}


def test_what_is_told_of_different_calls() -> None:
    assert told([call(), call()]) == []
    for changed in ({"line": ["a.py", 5]}, {"kind": "save"}, {"collective": "all_reduce"}, {"steps": 3}):
        first, *others = told([call(), call(), call(**changed)])
        assert first == "the ranks wait for each other in different calls: every rank must make the same calls"
        assert [line.split(" waits")[0] for line in others] == ["  rank 0, 1", "  rank 2"], changed
    alone = call(line=["a.py", 9], first=1, called=[["a.py", 4], ["a.py", 8], ["a.py", 4]])
    assert told([call(), alone])[3:] == [
        "  They differ since call 3 of the module:",
        "  rank 0 called it at a.py:4",
        "  rank 1 called it at a.py:8",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["evaluates", "gathers", "waits"])
def test_ranks_that_make_different_calls_are_told_where(tmp_path: Path, how: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), how]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    said = [
        line for line in done.stderr.splitlines() if line.startswith("codescent: ") and "training batch" not in line
    ]
    if how == "waits":
        assert (done.returncode, said) == (0, [])
        return
    assert sum("in different calls" in line for line in said) == 1, done.stderr
    at = {text: f"{script}:{number}" for text, number in LINES.items()}
    assert any("rank 1 waits in backward" in line and at["trains"] in line for line in said), said
    if how == "gathers":
        assert any(
            "rank 0 waits in gather (all_gather), after 2 steps" in line and at["gathers"] in line for line in said
        )
    else:
        assert any("rank 0 called it at" in line and at["evaluates"] in line for line in said), said
        assert any("rank 1 called it at" in line and at["trains"] in line for line in said), said
