"""In: examples/spawned.py. Out: its processes train as one does, whether two or one; a rank that fails ends them all.
Does not test launchers (test_launch_*.py do)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "spawned.py"
PAGE = ROOT / "docs" / "spawn.md"


def start(folder: Path, program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program), *words],
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT)),
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
    )


def test_two_processes_of_mp_spawn_train_as_one(tmp_path: Path) -> None:
    """Fault: processes that mp.spawn has started do not meet, or each trains alone, or one outlives the program."""
    losses = []
    for ranks in ("1", "2"):
        done = start(tmp_path, EXAMPLE, "--ranks", ranks, "--epochs", "2")
        assert done.returncode == 0, done.stderr
        losses.append([float(one) for one in re.findall(r"^epoch \d: loss (\S+)$", done.stdout, re.MULTILINE)])
        assert len(losses[-1]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # fp32


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    """Fault: rank 0 waits for the one that has failed until the timeout of its process group, ten minutes."""
    text = EXAMPLE.read_text(encoding="utf-8")
    fails = text.replace("        for epoch in", "        assert rank == 0, 'this rank fails'\n        for epoch in")
    assert fails != text
    (tmp_path / "fails.py").write_text(fails)
    done = start(tmp_path, tmp_path / "fails.py")
    assert done.returncode == 1
    assert "Process 1 terminated with the following error" in done.stderr
    assert done.stderr.rstrip().endswith("AssertionError: this rank fails")


def test_the_page_has_the_lines_of_the_example() -> None:
    """Fault: the page shows a program that is not the one that is tested."""
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = {line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()}
    missing = [line for line in shown.splitlines() if line.strip() not in lines and line.strip() != "..."]
    assert not missing
