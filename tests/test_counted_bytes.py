"""In: ranks in a network namespace. Out: the kernel counts as many bytes on the loopback as the plan declares.
Does not run a step itself: counted_bytes does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from counted_bytes import LAYOUTS, NUMEL, layouts

TESTS = Path(__file__).parent
NAMESPACE = ["unshare", "--net"]
HEADERS = 0.03
"""Of the bytes: headers, and what the ranks of a test say beside."""


def has_namespaces() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="needs root, unshare and ip: a network namespace")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_sent_is_what_the_plan_says(tmp_path: Path, ranks: int) -> None:
    command = [*NAMESPACE, sys.executable, str(TESTS / "counted_bytes.py"), str(ranks), str(tmp_path)]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    size, others = 4 * NUMEL, ranks - 1
    expected = {
        "all_reduce": 2 * others * size,
        "reduce_scatter": others * size,
        "started reduce_scatter": others * size,
        "all_gather": others * size,
        "all_to_all": others * size,
        "uneven all_to_all": others * size * (ranks + 1) / ranks,
        "broadcast": others * size,
        "send": size,
    }
    for name, sent in expected.items():
        assert found[name] == pytest.approx(sent, rel=HEADERS), name
    for name in layouts(ranks):
        sent, declared = found[name]
        assert sent == pytest.approx(declared, rel=HEADERS), name


def test_every_layout_is_counted() -> None:
    assert {name for ranks in (2, 3, 4) for name in layouts(ranks)} == set(LAYOUTS)
