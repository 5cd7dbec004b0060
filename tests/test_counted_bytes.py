"""In: ranks in a network namespace, or on two hosts. Out: the kernel counts as many bytes as the plan declares.
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
sys.path.insert(0, str(TESTS.parent / "benchmarks"))

from hosts import DEVICE, Hosts, missing  # noqa: E402 - found by the line above: a folder of scripts, no package

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


@pytest.mark.slow
@pytest.mark.skipif(bool(why := missing()), reason=why)
def test_what_leaves_a_host_of_two_ranks_is_what_is_simulated(tmp_path: Path) -> None:
    """Two hosts of two ranks."""
    ranks, path = 4, os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with Hosts(2) as hosts, (tmp_path / "log").open("w") as log:
        started = []
        for rank in range(ranks):
            words = [str(ranks), str(tmp_path), str(rank), DEVICE, "2"]
            argv = [sys.executable, str(TESTS / "counted_bytes.py"), *words]
            started.append(hosts.start(rank // 2, argv, env, tmp_path, log))
        codes = [process.wait(timeout=300) for process in started]
    assert codes == [0] * ranks, (tmp_path / "log").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    size = 4 * NUMEL
    expected = {"reduce_scatter": size, "all_to_all": size, "all_gather": 3 / 4 * size, "all_reduce": 3 / 2 * size}
    for name, sent in expected.items():
        assert found[name] == pytest.approx(sent, rel=HEADERS), name
    for name in layouts(ranks):
        sent, simulated = found[name]
        assert sent == pytest.approx(simulated, rel=HEADERS), name


def test_every_layout_is_counted() -> None:
    assert {name for ranks in (2, 3, 4) for name in layouts(ranks)} == set(LAYOUTS)
