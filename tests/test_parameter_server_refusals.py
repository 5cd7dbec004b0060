"""In: runs with parameter servers whose workers send what is not finite, or nonsense. Out: runs that name the rank.
Does not test lost connections (test_parameter_server_faults) or single frames (test_transport_faults)."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from forker import TESTS, Forker, Runs
from runs import called, environment, make_project
from test_parameter_server_faults import FP64, GOSSIP, MODES, with_fault

from codescent.coupling.pushes import Push, untrue
from codescent.record import order
from codescent.servers import Portion


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, FP64, ())


DAMAGED = {
    "synchronous": (1, "0", ()),
    "synchronous, the second server": (2, "1", ()),
    "within a bound": (2, "1", (*MODES["asynchronous"], "parallel.staleness=1")),
    "asynchronous": (1, "0", MODES["asynchronous"]),
    "workers": ("workers", "1", ()),
    "rounds": (1, "0", ("parallel.average_every=2",)),
}
"""Servers, the one to which the damaged gradients go, and further keys."""


@pytest.mark.parametrize("case", DAMAGED)
def test_a_push_that_is_not_finite_although_its_norm_is_names_its_rank(runs: Runs, case: str) -> None:
    """The memory of a worker is damaged after it has computed the norm. Nobody blames the optimizer."""
    servers, server, more = DAMAGED[case]
    words = [*FP64, f"parallel.servers={servers}", *more, f"run.name=damaged-{zlib.crc32(case.encode())}"]
    ranks = 2 if servers == "workers" else 2 + int(servers)
    options = {"words": words, "fault": f"damages 3 {server}", "rank": 1}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, ranks, options)
    assert set(codes) - {None} == {1}, said
    what = "a change that is not finite, and" if case == "rounds" else "gradients that are not finite and a norm"
    assert f"rank 1 (on {socket.gethostname()}) sent a push with {what}" in said
    assert "optimizer.learning_rate" not in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_worker_that_is_a_server_ends_at_once_by_what_it_refuses(tmp_path: Path) -> None:
    """The whole command. The worker in the server's process waits for its own server, which answers nobody any more."""
    make_project(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n"
        "    import parameter_server_ranks\n    parameter_server_ranks.lies('PUSH', 'portion', '[null, 1]')\n"
    )
    env = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(TESTS), str(TESTS.parent)]))
    command = [sys.executable, "-m", "codescent", "train", "run.toml", *FP64, "parallel.servers=workers"]
    command += ["--ranks", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1, done.stderr
    assert f"error: rank 1 (on {socket.gethostname()}) sent a push with portion" in done.stderr
    assert "still runs" not in done.stderr


DIVERGES = {
    "synchronous": (3, ("parallel.servers=1",)),
    "asynchronous": (3, ("parallel.servers=1", *MODES["asynchronous"])),
    "workers": (2, ("parallel.servers=workers",)),
    "gossip": (2, GOSSIP),
}
"""Ranks and keys."""


@pytest.mark.parametrize("case", DIVERGES)
def test_a_run_ends_after_ten_skipped_steps_wherever_its_ranks_meet(runs: Runs, case: str) -> None:
    ranks, words = DIVERGES[case]
    steps = ("train.num_steps=200", "log.every=200", "optimizer.learning_rate=1e200", "optimizer.warmup_steps=0")
    done = runs.start(ranks, *words, *steps)
    assert done.codes == [1] * ranks, done.said
    (ended,) = set(re.findall("ended at step ([0-9]+), which is not saved", done.said))
    assert int(ended) < 100, done.said
    assert re.search(r"skipped steps in a row: [1-9][0-9]\n", done.said)
    assert runs.last().read_metrics()[-1]["step"] == int(ended)


REFUSED = {
    "within a bound": ("loses_losses 3 1", ("parallel.staleness=1",), 2),
    "rounds": ("forfeits 1", ("parallel.average_every=5",), 1),
    "rounds within a bound": ("forfeits 1", ("parallel.average_every=5", "parallel.staleness=1"), 1),
}
"""The fault of a rank, further keys, and the pushes that change nothing. In rounds it is the first push: on a busy
machine the other worker may take most of them."""


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one == "rounds")) for one in REFUSED])
def test_a_replay_applies_no_push_that_the_run_has_refused(runs: Runs, case: str) -> None:
    fault, more, number = REFUSED[case]
    words = ("parallel.servers=2", *MODES["asynchronous"], *more)
    found = with_fault(runs, f"refused-{case.replace(' ', '-')}", 4, fault, *words)
    for server in (0, 1):
        rows = order.read(found.path, server, 20, 2, 5 if "rounds" in case else 1)
        assert sum(row.refused for row in rows) == number
    replayed = called(runs.project, "prove", "--replay", str(found.path))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_gradients_whose_sum_alone_is_infinite_are_no_nonsense() -> None:
    def push(worker: int, value: float, square: float) -> Push:
        return Push(worker, 1, 0, Portion(0, worker), torch.full((2,), value), 1.0, 1, square, False, {})

    large = [push(0, math.inf, 1.8e77), push(1, 3e38, 1.8e77)]  # the first one's memory has the sum
    assert untrue(large, large[0].gradients) == set()
    assert untrue([push(0, math.nan, 1.0), push(1, 1.0, 2.0)], torch.tensor([math.nan, 1.0])) == {0}
    assert untrue([push(0, math.nan, 1.0), push(1, math.nan, 2.0)], torch.full((2,), math.nan)) == {1}
    assert untrue([push(0, math.nan, math.nan)], torch.full((2,), math.nan)) == set()


def test_an_asynchronous_push_without_a_loss_is_refused_alone(runs: Runs) -> None:
    """The row of its step has the mean loss of the others, and the order says that it was refused."""
    words = ("parallel.servers=1", *MODES["asynchronous"])  # of 20 steps the other worker never takes 18
    found = with_fault(runs, "lost-loss", 3, "loses_losses 3 1", *words)
    bad = [event for event in found.read_events() if event["kind"] == "skipped_step"]
    assert len(bad) == 1
    row = found.read_metrics()[bad[0]["step"] - 1]
    assert math.isfinite(row["train_loss"])
    assert not math.isfinite(row["grad_norm"])
    rows = order.read(found.path, 0, 20, 2)
    assert [(row.worker, row.number) for row in rows if row.refused] == [(1, 3)]
    replayed = called(runs.project, "prove", "--replay", str(found.path))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
