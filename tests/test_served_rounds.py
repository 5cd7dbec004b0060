"""In: rounds of steps whose changes go to parameter servers, on real ranks. Out: the weights that the formulas give.
Does not test servers of gradients (test_parameter_server) or rounds with collectives (test_local_sgd)."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from statistics import median

import pytest
import torch
from forker import Forker, Runs
from runs import called, losses
from test_local_sgd import SFT
from test_local_sgd import SGD as PLAIN_SGD
from test_parameter_server import WIRES, assert_sent_together
from trajectories import write_corpora

from codescent.checkpoint.checkpoints import read_tensors
from codescent.plan import Collective, Plan
from codescent.plan.state import state_of_rank
from codescent.record import RunFolder, order
from codescent.train.replay_rounds import was_refused

FP64 = ("train.precision=fp64", "train.global_batch_size=12", "optimizer.learning_rate=0.01", "train.eval_every=10")
ROUNDS = ("parallel.average_every=5",)
NESTEROV = (*ROUNDS, "parallel.outer_optimizer=nesterov")
SGD = (*ROUNDS, "parallel.outer_optimizer=sgd", "parallel.outer_momentum=0.5")
ASYNCHRONOUS = "parallel.updates=asynchronous"
OUTERS = {"mean": ROUNDS, "sgd": SGD, "nesterov": NESTEROV}


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, FP64, ())


def served(servers: int | str, *words: str) -> tuple[str, ...]:
    return f"parallel.servers={servers}", *words


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def final_weights(run: RunFolder) -> dict[str, torch.Tensor]:
    newest = max((run.path / "checkpoints").iterdir(), key=lambda path: path.name)
    return {name: value for name, value in read_tensors(newest).items() if name.startswith("model.")}


def assert_equal(found: RunFolder, expected: RunFolder) -> None:
    weights, others = final_weights(found), final_weights(expected)
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert float((value - others[name]).norm() / others[name].norm()) < 1e-9, name
    seen = [[row["val_loss"] for row in run.read_metrics() if row["val_loss"]] for run in (found, expected)]
    assert seen[0] == pytest.approx(seen[1], rel=1e-9)


@pytest.mark.parametrize(("servers", "ranks"), [(1, 3), (3, 5), ("workers", 2)])
@pytest.mark.parametrize("outer", OUTERS)
def test_synchronous_rounds_are_local_sgd(runs: Runs, outer: str, servers: int | str, ranks: int) -> None:
    expected = runs.run(2, *OUTERS[outer])
    found = runs.run(ranks, *OUTERS[outer], *served(servers))
    assert_equal(found, expected)
    assert [row["step"] for row in found.read_metrics()] == list(range(1, 21))


@pytest.mark.parametrize("outer", OUTERS)
def test_one_asynchronous_worker_is_local_sgd_on_one_replica(runs: Runs, outer: str) -> None:
    expected = runs.run(1, *OUTERS[outer])
    assert_equal(runs.run(2, *OUTERS[outer], *served(1, ASYNCHRONOUS)), expected)


def test_a_round_of_one_step_is_ddp(runs: Runs) -> None:
    words = ("optimizer.kind=sgd", "optimizer.max_grad_norm=0", "optimizer.momentum=0.9")
    found = runs.run(3, *words, "parallel.average_every=1", *served(1))
    assert_equal(found, runs.run(2, *words))
    assert losses(found) == pytest.approx(losses(runs.last()), rel=1e-9)


@pytest.mark.parametrize(("servers", "ranks"), [(1, 3), ("workers", 2)])
def test_workers_are_weighted_by_their_tokens(tmp_path: Path, forker: Forker, servers: int | str, ranks: int) -> None:
    """Responses differ in length, so the gradient of DDP is no plain mean of the workers' means."""
    write_corpora(tmp_path)
    words = (*SFT, *PLAIN_SGD, "optimizer.momentum=0", "train.eval_every=0")
    expected = forker.train(tmp_path, "ddp", 2, *words)
    found = forker.train(tmp_path, "served", ranks, *words, "parallel.average_every=1", *served(servers))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-9)
    assert_equal(found, expected)


REPLAYED = {
    "one": (3, served(1, ASYNCHRONOUS, *NESTEROV)),
    "two": (5, served(2, ASYNCHRONOUS, *SGD)),
    "bound": (4, served(1, ASYNCHRONOUS, "parallel.staleness=1", *NESTEROV)),
    "speed": (4, served(1, ASYNCHRONOUS, "parallel.local_steps=by_speed", "parallel.momentum_every=2", *NESTEROV)),
    "speed, two": (4, served(2, ASYNCHRONOUS, "parallel.local_steps=by_speed", *NESTEROV)),
    "workers": (2, served("workers", ASYNCHRONOUS, *ROUNDS)),
    "workers, int4": (2, served("workers", ASYNCHRONOUS, "parallel.wire=int4", *NESTEROV)),
    "two, sign": (5, served(2, ASYNCHRONOUS, "parallel.wire=sign", *NESTEROV)),
}


@pytest.mark.parametrize("case", REPLAYED)
def test_one_process_replays_asynchronous_rounds(runs: Runs, case: str) -> None:
    """Also of a run that was continued."""
    ranks, words = REPLAYED[case]
    words = (*words, "optimizer.decay_steps=40", "model.dropout=0.1")
    run = runs.run(ranks, *words, "train.num_steps=20")
    run = runs.run(ranks, *words, "train.num_steps=40", resume=True)
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 0, done.stdout + done.stderr
    distance = re.search(r"distance of a tensor: (\S+)", done.stdout)
    assert distance is not None
    assert float(distance[1]) < 1e-9
    workers = ranks if case.startswith("workers") else ranks - int(words[0][-1])
    rows = order.read(run.path, 0, 40, workers, 5)
    assert sum(row.count for row in rows) == 40 * workers
    assert rows[-1].version > 0


def test_a_run_with_a_refused_round_is_not_replayed(runs: Runs) -> None:
    """The steps of a refused push are in the state of the worker's optimizer, and nowhere else."""
    run = runs.run(3, *served(1, ASYNCHRONOUS, *NESTEROV), "train.num_steps=20")
    path = order.file_of(run.path, 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    own = max(([row for row in rows if row["worker"] == worker] for worker in (0, 1)), key=len)  # one may take more
    assert [row["number"] for row in own] == list(range(1, len(own) + 1))
    for row in own[1:]:
        row["number"] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 2
    assert "a push was refused" in done.stderr


def test_a_push_that_was_refused_before_a_resume_is_known_by_its_event() -> None:
    rows = [order.Applied(0, number, 0, 0, step, 0, 0, 5) for number, step in ((1, 0), (2, 5), (1, 10))]
    late, rewound = {"kind": "late", "step": 10}, {"kind": "rewind", "step": 5}
    assert not was_refused(rows, [], 15)
    assert was_refused(rows, [late], 15)
    assert not was_refused(rows, [late], 5)
    assert not was_refused(rows, [late, rewound], 15)
    assert was_refused([rows[0], order.Applied(0, 3, 0, 0, 5, 0, 0, 5)], [], 15)


def test_the_norm_of_a_step_is_the_mean_of_the_workers(runs: Runs) -> None:
    """As that of local SGD, whatever the number of workers and of pushes."""
    words = [*FP64, *ROUNDS, "train.num_steps=5", "optimizer.kind=sgd", "optimizer.max_grad_norm=0.0"]
    alone = runs.run(2, *words)
    of_rounds = [row["grad_norm"] for row in alone.read_metrics()]
    for more in ((), (ASYNCHRONOUS,)):
        run = runs.run(3, *words, *served(1, *more))
        assert run.read_metrics()[-1]["grad_norm"] == pytest.approx(of_rounds[-1], rel=0.3)


FRAMES = [*((2, 4, wire) for wire in ("none", *WIRES)), ("workers", 2, "none"), ("workers", 2, "int4")]


@pytest.mark.parametrize(("servers", "ranks", "wire"), FRAMES)
def test_each_worker_sends_what_is_declared(runs: Runs, servers: int | str, ranks: int, wire: str) -> None:
    name = f"rounds-{servers}-{wire}"
    words = [*FP64, *NESTEROV, *served(servers), f"parallel.wire={wire}", f"run.name={name}"]
    answers = runs.forker.call("parameter_server_ranks:frames", runs.project, ranks, words=words)
    plan = Plan.from_json(RunFolder.open(runs.project / "runs" / name).plan)
    pushes = [record for record in plan.traffic if record.collective is Collective.PUSH]
    assert [(record.every, record.at) for record in pushes] == [(5, 4)] * 2
    for frames in answers[:2]:
        found = sorted(sent for kind, _, sent, _ in frames if kind == "PUSH")
        assert found == sorted([record.payload_bytes for record in pushes] * 4)
        assert len([one for one in frames if one[0] == "PULL"]) == 2 * 5  # the weights of the beginning, and of rounds


@pytest.mark.parametrize("more", [(), ("parallel.staleness=1",)], ids=["no bound", "bound"])
@pytest.mark.parametrize(("servers", "ranks"), [(2, 5), ("workers", 3)])
def test_asynchronous_rounds_together_send_what_is_declared(
    runs: Runs, servers: int | str, ranks: int, more: tuple[str, ...]
) -> None:
    """In 40 steps, which are eight rounds."""
    name = f"together-{servers}-{len(more)}"
    words = [*FP64, *NESTEROV, *served(servers, ASYNCHRONOUS, *more), "train.num_steps=40", "train.eval_every=40"]
    answers = runs.forker.call("parameter_server_ranks:frames", runs.project, ranks, words=[*words, f"run.name={name}"])
    assert_sent_together(Plan.from_json(RunFolder.open(runs.project / "runs" / name).plan), answers, 8)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(("servers", "ranks"), [("2", 4), ("workers", 2)])
def test_the_memory_of_each_role_is_that_of_the_plan(runs: Runs, servers: str, ranks: int, mode: str) -> None:
    run = runs.run(ranks, *NESTEROV, *served(servers), f"parallel.updates={mode}")
    plan = Plan.from_json(run.plan)
    rows = [row for row in read_rows(run.path / "memory.csv") if row["step"] == "20"]
    assert [int(row["rank"]) for row in rows] == list(range(ranks))
    took_turns = [row for row in rows if mode == "synchronous" or row["most_weights_bytes"] != "0"]
    assert took_turns  # asynchronously, one worker may compute all the rounds
    for row in took_turns:
        declared = state_of_rank(plan, int(row["rank"]))
        assert int(row["most_weights_bytes"]) + int(row["most_optimizer_bytes"]) == (
            declared.weights_bytes + declared.optimizer_bytes
        )


@pytest.mark.parametrize("wire", ["none", "int4"])
def test_a_resumed_synchronous_run_is_bitwise_the_same(runs: Runs, wire: str) -> None:
    words = (*NESTEROV, *served(1), f"parallel.wire={wire}", "checkpoint.every=10", "optimizer.decay_steps=20")
    whole = runs.run(3, *words)
    runs.run(3, *words, "train.num_steps=10")
    found = runs.run(3, *words, resume=True)
    assert losses(found) == losses(whole)
    expected = final_weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(found).items())


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_request_to_stop_between_two_rounds_ends_the_run_after_one_more(runs: Runs, mode: str) -> None:
    """The server knows of it before a worker has a portion."""
    name = f"stops-between-{mode}"
    words = [*FP64, *NESTEROV, *served(1, f"parallel.updates={mode}"), f"run.name={name}", "train.num_steps=100"]
    options = {"words": words, "fault": "asked_to_stop_in_validation", "rank": 2}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, 3, options)
    assert codes == [143] * 3, said
    assert len(RunFolder.open(runs.project / "runs" / name).read_metrics()) == 15


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_request_to_stop_ends_all_ranks_at_the_end_of_a_round(runs: Runs, mode: str) -> None:
    words = [
        *FP64,
        *NESTEROV,
        *served(1, f"parallel.updates={mode}"),
        "train.eval_every=0",
        f"run.name=stops-{mode}",
        "train.num_steps=100",
    ]
    options = {"words": words, "fault": "asked_to_stop 7", "rank": 1}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, 3, options)
    assert codes == [143] * 3, said
    run = RunFolder.open(runs.project / "runs" / f"stops-{mode}")
    steps = len(run.read_metrics())
    assert steps % 5 == 0
    assert steps in (10, 15) or (mode == "asynchronous" and steps > 15)  # another worker may have computed more


@pytest.mark.parametrize("closes", [True, False])
def test_a_slow_replica_does_not_hold_the_others(runs: Runs, closes: bool) -> None:
    """One of three workers takes four times as long. With a quorum most rounds end without it, and all else goes on."""
    quorum = ("parallel.quorum=2",) if closes else ()
    words = [
        *FP64,
        *NESTEROV,
        *served(1, *quorum),
        "train.num_steps=60",
        "train.eval_every=60",
        f"run.name=slow{closes}",
    ]
    answers = runs.forker.call("parameter_server_ranks:portions", runs.project, 4, words=words, rank=1, seconds=0.1)
    run = RunFolder.open(runs.project / "runs" / f"slow{closes}")
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    applied, refused = ([answer[what] for answer in answers[:3]] for what in ("applied", "refused"))
    assert applied[0] == applied[2] == 12  # each of their rounds counts
    assert refused[0] == refused[2] == 0
    late = [event for event in run.read_events() if event["kind"] == "late"]
    if closes:
        assert applied[1] < 12 and refused[1] > 0  # noqa: PT018
        assert sum(event["portions"] for event in late) == 12 - applied[1]
    else:
        assert (applied[1], refused[1], late) == (12, 0, [])


@pytest.mark.parametrize("servers", [1, 2])
def test_with_steps_by_speed_a_slow_worker_takes_fewer_before_a_push(runs: Runs, servers: int) -> None:
    """It is four times slower: floor(1.05 x 5 / 4) is one step. Nothing is known of a worker that has not pushed."""
    name = f"speeds-{servers}"
    speeds = served(servers, ASYNCHRONOUS, "parallel.local_steps=by_speed", *NESTEROV)
    words = [*FP64, *speeds, "train.num_steps=40", f"run.name={name}"]
    runs.forker.call("parameter_server_ranks:portions", runs.project, 2 + servers, words=words, rank=1, seconds=0.1)
    rows = order.read(runs.project / "runs" / name, 0, 40, 2, 5)
    fast, slow = ([row.count for row in rows if row.worker == worker] for worker in (0, 1))
    assert (fast[0], slow[0]) == (5, 5)
    assert median(slow[1:]) <= 2 < median(fast) == 5  # most of them: a busy machine may hold up either worker
    steps = sorted((row.part, row.step + row.first + i) for row in rows for i in range(row.count))
    assert steps == [(part, step) for part in range(2) for step in range(40)]  # each sample once


REFUSED = {
    "quorum without servers": (
        (*ROUNDS, "parallel.quorum=1"),
        "parallel.quorum = 1: a collective waits for all ranks, a server need not; nearest that would do: "
        'parallel.servers = 1 and parallel.dp_replicate = "auto", or parallel.quorum = "auto"',
    ),
    "quorum of two servers": (
        (*ROUNDS, "parallel.quorum=1", "parallel.servers=workers"),
        'parallel.quorum = 1: parallel.servers = "workers" would close their rounds at different moments; nearest that '
        "would do: parallel.servers = 1",
    ),
    "large quorum": ((*ROUNDS, "parallel.quorum=3", "parallel.servers=1"), "parallel.quorum = 3: there are 2 workers"),
    "asynchronous quorum": (
        (*ROUNDS, "parallel.quorum=1", "parallel.servers=1", ASYNCHRONOUS),
        'parallel.quorum = 1: parallel.updates = "asynchronous" waits for nobody; nearest that would do: '
        'parallel.quorum = "auto"',
    ),
    "fragments": (
        (*ROUNDS, "parallel.fragments=2", "parallel.servers=1"),
        "parallel.servers = 1: parallel.fragments = 2: a worker sends the change of all weights, and waits for the "
        "answer; nearest that would do: parallel.fragments = 1",
    ),
    "speed": (
        (*ROUNDS, "parallel.servers=1", ASYNCHRONOUS, "parallel.staleness=1", "parallel.local_steps=by_speed"),
        'parallel.local_steps = "by_speed": an update adds the rounds of all parts, which have equally many steps; '
        'nearest that would do: parallel.local_steps = "equal"',
    ),
    "momentum": (
        ("parallel.servers=1", ASYNCHRONOUS, "parallel.momentum_every=2"),
        "parallel.momentum_every = 2: needs rounds of steps, parallel.average_every; nearest that would do: "
        'parallel.momentum_every = "auto"',
    ),
    "period": (
        ("parallel.average_every=3", "parallel.servers=1", "train.eval_every=10"),
        "train.eval_every = 10: not a multiple of parallel.average_every = 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_rounds_cannot_do_is_refused_with_what_would_do(project: Path, case: str) -> None:
    words, expected = REFUSED[case]
    done = called(project, "plan", "run.toml", "parallel.ranks=3", "train.global_batch_size=12", *words)
    assert done.returncode == 2
    assert expected in " ".join(done.stderr.split())
