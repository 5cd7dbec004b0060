"""In: runs with parameter servers whose workers lose a connection or stand still. Out: runs that go on.
Does not test the service's decisions (test_servers) or broken frames (test_transport_faults)."""

from __future__ import annotations

import functools
import json
import re
import signal
import socket
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from forker import Forker, Runs
from runs import assert_same, called, losses, start
from test_parameter_server import final_weights
from test_train_resume import wait_for_step

from codescent.record import RunFolder, order
from codescent.train import report

FP64 = ("train.precision=fp64", "train.global_batch_size=12", "train.eval_every=0")
MODES = {"synchronous": (), "asynchronous": ("parallel.updates=asynchronous",)}


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, FP64, ())


def with_fault(runs: Runs, name: str, ranks: int, fault: str, *words: str, rank: int = 1) -> RunFolder:
    options = {"words": [*FP64, *words, f"run.name={name}"], "fault": fault, "rank": rank}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, ranks, options)
    assert codes == [0] * ranks, said
    return RunFolder.open(runs.project / "runs" / name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("servers", "lost"), [(1, "0"), (2, "0"), (2, "1"), (2, "0 1")])
def test_a_lost_connection_is_made_again(runs: Runs, servers: int, lost: str, mode: str) -> None:
    """No server applies a push that another one refuses."""
    name = f"lost-{servers}-{lost.replace(' ', '')}-{mode}"
    found = with_fault(runs, name, 2 + servers, f"disconnected 7 {lost}", f"parallel.servers={servers}", *MODES[mode])
    if mode == "synchronous":  # the portion is computed again, by whoever comes first
        assert_same(found, runs.of_one(), 1e-9)
    assert [row["step"] for row in found.read_metrics()][-1] == 20


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_asks_what_the_first_one_decided_loses_its_connection(runs: Runs, mode: str) -> None:
    """It asks again. What was told and did not arrive is told again, once, and in the same order."""
    name = f"deaf-{mode}"
    words = [*FP64, "parallel.servers=2", *MODES[mode], f"run.name={name}"]
    options = {"words": words, "fault": "deaf 2", "rank": 3}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, 4, options)
    assert codes == [0] * 4, said
    assert said.count("is lost: [[") >= 3
    found = RunFolder.open(runs.project / "runs" / name)
    assert [row["step"] for row in found.read_metrics()][-1] == 20
    if mode == "synchronous":
        assert_same(found, runs.of_one(), 1e-9)
        return
    first, other = ([(row.worker, row.number) for row in order.read(found.path, k, 20, 2)] for k in (0, 1))
    assert first == other
    assert called(runs.project, "prove", "--replay", str(found.path)).returncode == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_may_stand_still(runs: Runs, mode: str) -> None:
    found = with_fault(runs, f"still-{mode}", 4, "stopped 7 3", "parallel.servers=2", *MODES[mode])
    if mode == "synchronous":
        assert_same(found, runs.of_one(), 1e-9)
    assert [row["step"] for row in found.read_metrics()] == list(range(1, 21))


LATE = {
    "10 times slower": (10.0, 0.02, ""),
    "stopped": (1.0, 0.02, "stopped_in_push 3 2"),
    "away": (1.0, 0.1, "away 3 1"),
}
"""By how much a worker is slower, seconds of sleep in a portion of the others, and what happens to it in its third
portion: it stands still, and its connection may be lost."""
SLOW_BOUNDS = [pytest.param(bound, marks=pytest.mark.slow) for bound in (0, 2)]


@pytest.mark.parametrize("bound", [1, *SLOW_BOUNDS])
@pytest.mark.parametrize("case", LATE)
def test_a_late_push_is_within_the_bound_or_refused_and_counted(runs: Runs, case: str, bound: int) -> None:
    """F23. The others wait for a worker that is there. What one held that was away is computed by another one."""
    ratio, seconds, fault = LATE[case]
    name = f"late-{case.replace(' ', '-')}-{bound}"
    words = [*FP64, "parallel.servers=2", *MODES["asynchronous"], f"parallel.staleness={bound}", f"run.name={name}"]
    options = {"words": words, "rank": 1, "seconds": seconds, "ratio": ratio, "fault": fault}
    answers = runs.forker.call("parameter_server_ranks:portions", runs.project, 5, **options)
    found, refused = RunFolder.open(runs.project / "runs" / name), int(case == "away")
    for server in (0, 1):
        rows = order.read(found.path, server, 20, 3)
        assert Counter((row.step, row.part) for row in rows) == Counter(
            (step, part) for step in range(20) for part in range(3)
        )
        stale = {row.version - row.base for row in rows}
        assert stale <= set(range(bound + 1))
        assert refused or max(stale) == bound  # the others went on as far as they may
    assert all(row["staleness_max"] <= bound for row in found.read_metrics())
    assert [answer["refused"] for answer in answers] == [0, refused, 0, 0, 0]
    assert sum(event["portions"] for event in found.read_events() if event["kind"] == "late") == refused


@pytest.mark.parametrize(
    ("words", "servers"), [((), 1), ((), 2), (("parallel.updates=asynchronous", "parallel.staleness=0"), 1)]
)
def test_a_worker_that_hangs_is_named(runs: Runs, words: tuple[str, ...], servers: int) -> None:
    """The others wait at the server. It says for whom, before they give up and blame the server."""
    name = f"hangs-{servers}-{len(words)}"
    said = [*FP64, f"parallel.servers={servers}", *words, f"run.name={name}", "parallel.timeout_s=3"]
    options = {"words": said, "fault": "hung 7 4", "rank": 1}
    codes, _, output = runs.forker._ask("parameter_server_ranks:run", runs.project, 3 + servers, options)
    assert codes[3] == 1, output
    assert re.search(r"rank 1 \(in step 7\) pushed nothing for 2\.[7-9] s .*, and rank 0, rank 2 waited for it", output)
    assert "has not answered rank 0" not in output.split("pushed nothing")[0]


LONG = ("train.num_steps=40", "checkpoint.every=10", "optimizer.decay_steps=40")


ROUNDS = ("parallel.average_every=2",)
GOSSIP = ("parallel.gossip=pairs", "parallel.gossip_mode=asynchronous")
LIES = [
    ("PUSH portion [null,1]", MODES["synchronous"]),
    ('PUSH portion "none"', MODES["asynchronous"]),
    ('PUSH loss "NaN"', MODES["synchronous"]),
    ("PUSH losses -1", MODES["synchronous"]),
    ("PUSH square -1", MODES["asynchronous"]),
    ("PUSH ticket", MODES["asynchronous"]),
    ("PUSH stop 0.5", MODES["synchronous"]),
    ("PUSH count 1e999", ROUNDS),
    ("PUSH first 7", ROUNDS),
    ("PULL have [1]", MODES["synchronous"]),
    ("PULL after NaN", MODES["asynchronous"]),
    ("ASK known 1000000", MODES["synchronous"]),
    ("ASK known {}", GOSSIP),
    ("ASK report.portion [1,2,3]", GOSSIP),
    ("EXCHANGE average null", GOSSIP),
]


@pytest.mark.parametrize(("lie", "words"), LIES)
def test_a_rank_that_sends_nonsense_is_named_and_all_ranks_end(runs: Runs, lie: str, words: tuple[str, ...]) -> None:
    """No launcher ends the ranks here: each hears why the run is over, long before it has waited for its timeout."""
    name = lie.split()[1]
    codes, said = with_nonsense(runs, f"lies {lie}", words)
    assert set(codes) - {None} == {1}, said
    assert f"rank {int(not lie.startswith('EXCHANGE'))} (on {socket.gethostname()}) sent " in said
    assert ("with steps 7 to" if name == "first" else name.rpartition(".")[2]) in said
    assert "Traceback" not in said


def test_gradients_that_do_not_decode_are_nonsense(runs: Runs) -> None:
    codes, said = with_nonsense(runs, "sends_outside 3", ("parallel.wire=topk:0.1",))
    assert set(codes) - {None} == {1}, said
    assert "sent a push with gradients that are none" in said
    assert "Traceback" not in said


def test_a_push_without_weights_is_nonsense(runs: Runs) -> None:
    codes, said = with_nonsense(runs, "forgets_pulls", MODES["synchronous"], rank=2)
    assert set(codes) - {None} == {1}, said
    assert re.search(r"rank [01] \(on .*\) sent a push before it has pulled weights", said)
    assert "Traceback" not in said


@pytest.mark.parametrize("words", [MODES["synchronous"], MODES["asynchronous"], ROUNDS])
def test_a_rank_that_alone_pushes_nan_is_named_not_the_optimizer(runs: Runs, words: tuple[str, ...]) -> None:
    codes, said = with_nonsense(runs, "poisons 3", words)
    assert set(codes) - {None} == {1}, said
    assert f"rank 1 (on {socket.gethostname()})" in said
    assert "look at" in said
    assert "optimizer.learning_rate" not in said


def with_nonsense(runs: Runs, fault: str, words: Sequence[str], rank: int = 1) -> tuple[list[int], str]:
    """A run of two workers, and a server where it has one. `rank` has a fault; rank 0, if it begins averages alone.

    Returns exit codes, and what was said. None: a rank was slow, and the forker has ended it soon after the others.
    """
    servers = () if "parallel.gossip=pairs" in words else ("parallel.servers=1",)
    name = f"run.name=nonsense-{zlib.crc32(repr((fault, words)).encode())}"
    options = {"words": [*FP64, *servers, *words, name], "fault": fault, "rank": 0 if "EXCHANGE" in fault else rank}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, 2 + len(servers), options)
    return codes, said


def rank_of(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of a rank that `process` has started."""
    (found,) = (one for one in psutil.Process(process.pid).children() if one.environ().get("RANK") == str(rank))
    return found


ROUNDS = ("parallel.average_every=5",)
KILLED = {"server 1": (2, 1, ()), "server 0": (2, 0, ()), "one, rounds": (1, 0, ROUNDS), "two, rounds": (2, 0, ROUNDS)}
"""Servers, the one that dies, and further keys. The first one gives out the work."""


def orders(run: Path, servers: int, steps: int) -> list[list[str]]:
    """By server, the rows of what was applied of the first steps; none where updates are synchronous."""
    files = [order.file_of(run, server) for server in range(servers)]
    lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
    return [[line for line in rows if json.loads(line)["step"] < steps] for rows in lines]


def assert_goes_on(runs: Runs, run: Path, servers: int, words: Sequence[str], resume: Callable[[], object]) -> None:
    """From its last save: what was applied before is not applied again, and what came after it is."""
    saved = max(int(path.name.rpartition("_")[2]) for path in (run / "checkpoints").glob("step_*"))
    before, period = orders(run, servers, saved), 5 if "parallel.average_every=5" in words else 1
    resume()
    found = RunFolder.open(run)
    assert [event["step"] for event in found.read_events() if event["kind"] == "resume"] == [saved]
    steps = found.read_metrics()[-1]["step"]
    assert [row["step"] for row in found.read_metrics()] == list(range(1, steps + 1))
    if "parallel.updates=asynchronous" not in words:
        whole = runs.forker.train(runs.project, f"{run.name}-whole", 2 + servers, *words)
        assert losses(found) == losses(whole)
        expected = final_weights(whole)
        assert all(torch.equal(value, expected[key]) for key, value in final_weights(found).items())
        return
    assert len(before[0]) == 2 * saved // period
    assert orders(run, servers, saved) == before
    for server in range(servers):
        rows = order.read(run, server, steps, 2, period)
        assert [row.version for row in rows] == list(range(2 * steps // period))
    assert called(runs.project, "prove", "--replay", str(run)).returncode == 0


@pytest.mark.parametrize(
    ("case", "mode"), [(case, mode) for case in KILLED for mode in MODES if (case, mode) != ("server 1", "synchronous")]
)
def test_without_a_launcher_a_dead_server_is_named_and_the_run_goes_on(runs: Runs, case: str, mode: str) -> None:
    """It dies between two pushes of a step, or of a round. The others wait for it as long as parallel.timeout_s."""
    servers, server, more = KILLED[case]
    words = (*FP64, *more, f"parallel.servers={servers}", *MODES[mode], "checkpoint.every=10")
    words += ("optimizer.decay_steps=20", "parallel.timeout_s=3")
    name, pushes = f"dies-{case.replace(', ', '-').replace(' ', '-')}-{mode}", 5 if more else 25
    options = {"words": [*words, f"run.name={name}"], "fault": f"killed_after_push {pushes}", "rank": 2 + server}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, 2 + servers, options)
    assert codes == [-9 if rank == 2 + server else 1 for rank in range(2 + servers)], said
    assert f"error: server {server} (rank {2 + server}) at 127.0.0.1:" in said
    assert "has not answered rank 0 for 3 s" in said
    resume = functools.partial(runs.forker.train, runs.project, name, 2 + servers, *words, resume=True)
    assert_goes_on(runs, runs.project / "runs" / name, servers, words, resume)


def test_a_server_that_dies_before_an_update_of_all_servers_is_named(runs: Runs) -> None:
    """The other one waits for its part of the gradients' norm then, and workers wait for the other one."""
    words = (*FP64, "parallel.servers=2", "checkpoint.every=10", "parallel.timeout_s=5")
    options = {"words": [*words, "run.name=dies-in-update"], "fault": "killed_in_update 12", "rank": 3}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, 4, options)
    assert codes == [1, 1, 1, -9], said
    assert "error: server 1 (rank 3) did not take part in an update of all servers: it has died, or" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", KILLED)
def test_a_run_goes_on_from_its_last_save_after_kill_9_of_a_server(runs: Runs, case: str, mode: str) -> None:
    """The launcher names the server."""
    servers, server, more = KILLED[case]
    words = (*FP64, *LONG, *more, f"parallel.servers={servers}", *MODES[mode])
    name, ranks = f"killed-{case.replace(', ', '-').replace(' ', '-')}-{mode}", str(2 + servers)
    process = start(runs.project, "train", "run.toml", f"run.name={name}", *words, "--ranks", ranks)
    run = runs.project / "runs" / name
    wait_for_step(process, run, 15)
    rank_of(process, 2 + server).send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 137, said
    assert f"rank {2 + server} of {ranks} (server {server}, pid" in said

    def resume() -> None:
        done = called(runs.project, "train", "--resume", str(run))
        assert done.returncode == 0, done.stderr

    assert_goes_on(runs, run, servers, words, resume)


BOUNDS = {"no bound": (), "bound": ("parallel.staleness=1",)}


@pytest.mark.slow
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_run_goes_on_after_kill_9_of_a_worker(runs: Runs, bound: str) -> None:
    """Each portion is applied once by every server, the living validate and save, and the death is recorded."""
    words = (*FP64, *LONG, "train.eval_every=10", "parallel.servers=2", "parallel.updates=asynchronous", *BOUNDS[bound])
    name = f"dead-{'-'.join(bound.split())}"
    process = start(runs.project, "train", "run.toml", f"run.name={name}", *words, "--ranks", "5")
    run = runs.project / "runs" / name
    wait_for_step(process, run, 12)
    rank_of(process, 1).send_signal(signal.SIGKILL)
    summary, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert re.search("rank 1 on .* died in step [0-9]+; the others went on without it", summary)
    assert said.count("rank 1 of 5 (a worker, pid") == 1
    assert "the others go on without it" in said
    found = RunFolder.open(run)
    rows = found.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert len([row for row in rows if row["val_loss"] is not None]) == 4
    (lost,) = (event for event in found.read_events() if event["kind"] == "worker_lost")
    assert (lost["rank"], lost["step"] >= 12, lost["noticed_s"] <= 5) == (1, True, True)
    for server in (0, 1):
        applied = Counter((row.step, row.part) for row in order.read(run, server, 40, 3))
        assert applied == Counter((step, part) for step in range(40) for part in range(3))
    assert [(row["rank"]) for row in found.iter_ranks() if row["step"] == 40] == [0, 2, 3, 4]
    replayed = called(runs.project, "prove", "--replay", str(run))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.slow
def test_a_synchronous_run_ends_with_its_worker(runs: Runs) -> None:
    words = (*FP64, *LONG, "parallel.servers=1")
    process = start(runs.project, "train", "run.toml", "run.name=dead-synchronous", *words, "--ranks", "3")
    wait_for_step(process, runs.project / "runs" / "dead-synchronous", 12)
    rank_of(process, 1).send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 137, said
    assert "rank 1 of 3 (pid" in said


LISTENING = {
    "servers": ("parallel.servers=2", *MODES["asynchronous"]),
    "workers": ("parallel.servers=workers",),
    "gossip": ("parallel.gossip=pairs", "parallel.gossip_mode=asynchronous"),
}


@pytest.mark.parametrize("case", LISTENING)
def test_ranks_listen_on_loopback_alone(runs: Runs, case: str) -> None:
    """S1, on one machine: each socket of each rank. On several ones test_slow_hosts looks."""
    words = [*FP64, *LISTENING[case], f"run.name=listens-{case}"]
    found = runs.forker.call("parameter_server_ranks:listeners", runs.project, 4, words=words)
    assert found == [["127.0.0.1"]] * 4


def test_servers_listen_on_loopback_alone(runs: Runs) -> None:
    """S1, on one machine: each socket of each rank, while they train."""
    words = (*FP64, "train.num_steps=400", "parallel.servers=2", "checkpoint.last=false")
    process = start(runs.project, "train", "run.toml", "run.name=listens", *words, "--ranks", "3")
    wait_for_step(process, runs.project / "runs" / "listens", 5)
    found = {
        rank: {one.laddr.ip for one in rank_of(process, rank).net_connections("inet") if one.status == "LISTEN"}
        for rank in range(3)
    }
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert set().union(*found.values()) == {"127.0.0.1"}
    assert found[1]
    assert found[2]


def test_a_rank_that_asked_to_stop_and_died_ends_the_run_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have saved by then: the run ends as after a signal, not with a traceback."""
    said, events = list[str](), list[dict[str, Any]]()
    monkeypatch.setattr(report, "how_to_continue", lambda run: "go on")
    folder = SimpleNamespace(event=lambda kind, **facts: events.append({"kind": kind, **facts}))
    world = SimpleNamespace(living=(0, 1))
    run = SimpleNamespace(world=world, folder=folder, checkpoints=SimpleNamespace(folder="run/checkpoints"))
    one: Any = report.Report.__new__(report.Report)
    one.run, one.display = run, SimpleNamespace(say=said.append, last=lambda: None)
    assert one.stopped(20, [None, None]) == 143
    assert said == ["stopped at step 20 by the wish of a rank that has died since; saved in run/checkpoints; go on"]
    assert events == [{"kind": "stop", "step": 20, "rank": None, "signal": None, "exit_code": 143}]
