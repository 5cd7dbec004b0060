"""In: runs with parameter servers, on real ranks. Out: the trajectories of one process, where the algebra is exact; how
such runs stop, continue and skip. Does not test the service (test_servers) or its sockets (test_transport)."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker, Runs
from refused import planned
from runs import assert_same, called, losses

from codescent.base.errors import UserError
from codescent.checkpoint.checkpoints import read_tensors
from codescent.config.load import load
from codescent.plan import Collective, Plan
from codescent.plan.state import state_bytes, state_of_rank
from codescent.preflight import plan_of
from codescent.record import RunFolder, order
from codescent.train.alone import _refuse_another_run
from codescent.train.replay import _refuse_other_orders

FP64 = ("train.precision=fp64", "train.global_batch_size=12", "optimizer.max_grad_norm=0.5")
ASYNCHRONOUS = "parallel.updates=asynchronous"
RATES = {"adamw": 0.01, "adam": 0.01, "sgd": 0.5, "adagrad": 0.05, "adadelta": 1.0, "rmsprop": 0.002}
MODES = {"synchronous": (), "staleness 0": (ASYNCHRONOUS, "parallel.staleness=0")}
QUICK = {
    ("adamw", 1, "synchronous"),
    ("adamw", 3, "staleness 0"),
    ("sgd", 3, "synchronous"),
    ("rmsprop", 1, "staleness 0"),
}
EXACT = [(kind, servers, mode) for kind in RATES for servers in (1, 3) for mode in MODES]


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, FP64, ())


def of_kind(kind: str) -> tuple[str, ...]:
    return f"optimizer.kind={kind}", f"optimizer.learning_rate={RATES[kind]}"


def served(servers: int | str, *words: str) -> tuple[str, ...]:
    return f"parallel.servers={servers}", *words


def final_weights(run: RunFolder) -> dict[str, torch.Tensor]:
    newest = max((run.path / "checkpoints").iterdir(), key=lambda path: path.name)
    return read_tensors(newest)


@pytest.mark.parametrize(
    ("kind", "servers", "mode"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in EXACT],
)
def test_synchronous_servers_and_no_staleness_are_one_process(runs: Runs, kind: str, servers: int, mode: str) -> None:
    found = runs.run(2 + servers, *of_kind(kind), *served(servers, *MODES[mode]))
    assert_same(found, runs.of_one(*of_kind(kind)), 1e-9)
    assert {row["staleness_max"] for row in found.read_metrics()} == {0}
    clipped = [row["grad_norm"] > 0.5 for row in found.read_metrics()]
    assert any(clipped)


@pytest.mark.parametrize("servers", [1, 2])
def test_one_asynchronous_worker_is_one_process(runs: Runs, servers: int) -> None:
    found = runs.run(1 + servers, *of_kind("adamw"), *served(servers, ASYNCHRONOUS))
    assert_same(found, runs.of_one(*of_kind("adamw")), 1e-9)


def test_one_server_and_a_power_of_two_of_workers_are_ddp_bitwise(runs: Runs) -> None:
    """Two summands: addition commutes. Norms are added in another order."""
    expected = runs.run(2, "optimizer.max_grad_norm=0")
    found = runs.run(3, "optimizer.max_grad_norm=0", *served(1))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_workers_that_serve_are_one_process(runs: Runs, mode: str) -> None:
    found = runs.run(3, *of_kind("adamw"), *served("workers", *MODES[mode]))
    assert_same(found, runs.of_one(*of_kind("adamw")), 1e-9)


def test_asynchronous_workers_that_serve_train(runs: Runs) -> None:
    found = runs.run(3, *of_kind("adamw"), *served("workers", ASYNCHRONOUS))
    rows = found.read_metrics()
    assert sum(row["train_loss"] for row in rows[-5:]) < sum(row["train_loss"] for row in rows[:5])


@pytest.mark.parametrize("mode", MODES)
def test_bf16_weights_travel_and_masters_stay(runs: Runs, mode: str) -> None:
    """As DDP in bf16; sums are fp32 here, and DDP's are bf16."""
    words = ("train.precision=bf16", *of_kind("adamw"))
    expected, found = runs.run(2, *words), runs.run(4, *words, *served(2, *MODES[mode]))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-2)
    masters = final_weights(found)
    assert {name for name in masters if name.startswith("model.")} == {
        name for name in final_weights(expected) if name.startswith("model.")
    }
    assert all(value.dtype == torch.float32 for name, value in masters.items() if name.startswith("model."))


WIRES = ("bf16", "int8", "int4", "sign", "topk:0.1")


@pytest.mark.parametrize("wire", WIRES)
def test_narrow_pushes_train_and_continue_bitwise(runs: Runs, wire: str) -> None:
    """With one server and two workers the sums do not depend on the order. Residuals are in the checkpoint."""
    words = (*of_kind("adamw"), "train.precision=fp32", *served(1), f"parallel.wire={wire}", "checkpoint.every=10")
    whole = runs.run(3, *words)
    assert losses(whole)[-1] < losses(whole)[0]
    expected = final_weights(whole)
    assert [name for name in expected if name.endswith("residual")]
    runs.run(3, *words, "train.num_steps=10", "optimizer.decay_steps=20")
    found = runs.run(3, *words, "optimizer.decay_steps=20", resume=True)
    assert losses(found) == losses(whole)
    assert final_weights(found).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(found).items())


CHANGES = (served(1), served(3), (), served("workers"), served(1, ASYNCHRONOUS, "parallel.staleness=0"), ())


def test_a_run_continues_on_other_servers_and_without(runs: Runs) -> None:
    words = (*of_kind("adamw"), "optimizer.decay_steps=20", "train.eval_every=0")
    found = None
    for number, layout in enumerate(CHANGES, 1):
        steps = 20 * number // len(CHANGES)
        servers = [int(word[-1]) for word in layout if word[-1].isdecimal() and "servers" in word]
        ranks = 2 + sum(servers)
        found = runs.run(ranks, *words, *layout, f"train.num_steps={steps}", "parallel.ranks=auto", resume=number > 1)
    assert found is not None
    assert_same(found, runs.of_one(*words), 1e-9)


def with_fault(runs: Runs, name: str, ranks: int, fault: str, rank: int, *words: str) -> tuple[list[int | None], str]:
    options = {"words": [*FP64, *words, f"run.name={name}"], "fault": fault, "rank": rank}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, ranks, options)
    return codes, said


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("servers", ["2", "workers"])
def test_a_request_to_stop_ends_all_ranks_at_one_step(runs: Runs, servers: str, mode: str) -> None:
    """One worker is asked, in the middle of a segment of 20 steps."""
    words = (*of_kind("adamw"), *served(servers, f"parallel.updates={mode}"), "train.eval_every=0")
    ranks, name = (4 if servers == "2" else 2), f"stops-{servers}-{mode}"
    codes, said = with_fault(runs, name, ranks, "asked_to_stop 7", 1, *words)
    assert codes == [143] * ranks, said
    run = RunFolder.open(runs.project / "runs" / name)
    (checkpoint,) = (run.path / "checkpoints").iterdir()
    stopped = run.read_metrics()[-1]["step"]
    assert checkpoint.name.endswith(str(stopped))
    assert 7 <= stopped < 20
    whole = runs.forker.train(runs.project, name, ranks, *FP64, *words, resume=True)
    assert [row["step"] for row in whole.read_metrics()] == list(range(1, 21))
    if mode == "synchronous":
        assert losses(whole) == pytest.approx(losses(runs.of_one(*of_kind("adamw"), "train.eval_every=0")), rel=1e-9)


@pytest.mark.parametrize("bound", [1, 2])
def test_no_gradient_is_older_than_the_bound(runs: Runs, bound: int) -> None:
    found = runs.run(5, *of_kind("sgd"), *served(2, ASYNCHRONOUS, f"parallel.staleness={bound}"))
    rows = found.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(0 <= row["staleness_mean"] <= row["staleness_max"] <= bound for row in rows)


def test_a_step_that_is_not_finite_is_skipped_as_ddp_skips_it(runs: Runs) -> None:
    words = ("train.eval_every=0", "optimizer.max_grad_norm=0")
    assert runs.start(2, *words, fault="infinite_gradient").codes == [0, 0]
    expected = runs.last()
    for servers, ranks in (("1", 3), ("workers", 2)):
        codes, said = with_fault(runs, f"skips-{servers}", ranks, "infinite_gradient", 1, *words, *served(servers))
        assert codes == [0] * ranks, said
        found = RunFolder.open(runs.project / "runs" / f"skips-{servers}")
        assert losses(found) == pytest.approx(losses(expected), rel=1e-9)
        assert [row["grad_norm"] for row in found.read_metrics()][2] == math.inf
        assert [event["step"] for event in found.read_events() if event["kind"] == "skipped_step"] == [3]


def test_an_asynchronous_push_that_is_not_finite_is_skipped(runs: Runs) -> None:
    words = ("train.eval_every=0", *served(2, ASYNCHRONOUS))
    codes, said = with_fault(runs, "skips", 4, "infinite_gradient", 1, *words)
    assert codes == [0] * 4, said
    found = RunFolder.open(runs.project / "runs" / "skips")
    rows = found.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert sum(not math.isfinite(row["grad_norm"]) for row in rows) == 1
    assert math.isfinite(rows[-1]["train_loss"])


MANY = [(servers, wire) for servers in (3, "workers") for wire in ("none", "int8")]


@pytest.mark.parametrize(("servers", "wire"), [*MANY, *((1, wire) for wire in ("none", *WIRES))])
def test_each_worker_sends_and_receives_what_is_declared(runs: Runs, servers: int | str, wire: str) -> None:
    """In 20 steps, without the weights with which the run begins."""
    name = f"frames-{servers}-{wire}"
    ranks = 2 + (servers if isinstance(servers, int) else 0)
    words = [*FP64, *served(servers), f"parallel.wire={wire}", "train.eval_every=5", f"run.name={name}"]
    answers = runs.forker.call("parameter_server_ranks:frames", runs.project, ranks, words=words)
    plan = Plan.from_json(RunFolder.open(runs.project / "runs" / name).plan)
    pushes = sorted([record.payload_bytes] for record in plan.traffic if record.collective is Collective.PUSH)
    (pull,) = (record for record in plan.traffic if record.collective is Collective.PULL)
    assert pull.times == 2
    assert answers[2:] == [[]] * (ranks - 2)
    for frames in answers[:2]:
        names = sorted({name for _, name, _, _ in frames})
        assert len(names) == len(plan.servers)
        found = [[sent for kind, to, sent, _ in frames if kind == "PUSH" and to == name] for name in names]
        assert sorted(found) == [20 * sent for sent in pushes]
        received = [[got for kind, to, _, got in frames if kind == "PULL" and to == name] for name in names]
        assert [len(one) for one in received] == [21] * len(names)
        assert max(map(max, received)) == pull.payload_bytes
        assert sum(one[0] for one in received) == 8 * plan.num_parameters


FRAMES = {
    "two": (4, served(2, ASYNCHRONOUS)),
    "two, int8": (4, served(2, ASYNCHRONOUS, "parallel.wire=int8")),
    "one, no staleness": (3, served(1, ASYNCHRONOUS, "parallel.staleness=0")),
    "two, bound": (5, served(2, ASYNCHRONOUS, "parallel.staleness=1")),
    "workers": (3, served("workers", ASYNCHRONOUS)),
    "workers, bound": (3, served("workers", ASYNCHRONOUS, "parallel.staleness=2")),
}


@pytest.mark.parametrize("case", FRAMES)
def test_asynchronous_workers_together_send_what_is_declared(runs: Runs, case: str) -> None:
    """In 20 steps; who sends how much of it, their speeds decide."""
    (ranks, words), name = FRAMES[case], f"together-{case.replace(', ', '-').replace(' ', '-')}"
    words = (*FP64, *words, "train.eval_every=0", f"run.name={name}")
    answers = runs.forker.call("parameter_server_ranks:frames", runs.project, ranks, words=list(words))
    assert_sent_together(Plan.from_json(RunFolder.open(runs.project / "runs" / name).plan), answers, 20)


def assert_sent_together(plan: Plan, answers: list[list[list[Any]]], portions: int) -> None:
    """What workers sent and received in one segment. Weights that have not changed do not travel again."""
    pushes = [record.payload_bytes for record in plan.traffic if record.collective is Collective.PUSH]
    pulls = [8 * sum(piece.numel for piece in pieces) for pieces in plan.pieces]
    (pull,) = (record for record in plan.traffic if record.collective is Collective.PULL)
    workers = plan.mesh.world_size
    assert (pull.payload_bytes, pull.times) == (max(pulls), workers)
    names = sorted({server for frames in answers for _, server, _, _ in frames})
    for server, push, weights in zip(names, pushes, pulls, strict=True):
        sent = [[out for kind, to, out, _ in one if (kind, to) == ("PUSH", server)] for one in answers[:workers]]
        got = [[back for kind, to, _, back in one if (kind, to) == ("PULL", server)] for one in answers[:workers]]
        assert [size for mine in sent for size in mine] == [push] * (portions * workers)
        for mine, back in zip(sent, got, strict=True):
            assert set(back) == {weights}
            assert len(back) <= len(mine) + 2  # at the beginning and at the end
            assert len(back) > len(mine) or plan.layout.staleness is not None


@pytest.mark.parametrize(("servers", "ranks"), [("2", 4), ("workers", 3)])
def test_the_memory_of_each_role_is_that_of_the_plan(runs: Runs, servers: str, ranks: int) -> None:
    run = runs.run(ranks, *of_kind("adamw"), *served(servers))
    plan = Plan.from_json(run.plan)
    rows = [row for row in read_rows(run.path / "memory.csv") if row["step"] == "20"]
    assert [int(row["rank"]) for row in rows] == list(range(ranks))
    for row in rows:
        declared = state_of_rank(plan, int(row["rank"]))
        assert int(row["most_weights_bytes"]) + int(row["most_optimizer_bytes"]) == (
            declared.weights_bytes + declared.optimizer_bytes
        )
    assert {row["rank"] for row in read_rows(run.path / "ranks.csv")} == {str(rank) for rank in range(ranks)}


def test_other_commands_read_a_run_with_servers(runs: Runs) -> None:
    run = runs.run(4, *of_kind("adamw"), "train.precision=fp32", *served(2))
    said = called(runs.project, "evaluate", str(run.path))
    assert said.returncode == 0, said.stderr
    shown = float(re.search(r"loss ([0-9.]+)", said.stdout)[1])  # type: ignore[index]
    assert shown == pytest.approx(run.read_metrics()[-1]["val_loss"], rel=1e-2)
    assert called(runs.project, "sample", str(run.path), "--tokens", "4").returncode == 0
    exported = called(runs.project, "export", str(run.path), str(runs.project / "exported"))
    assert exported.returncode == 0, exported.stderr
    shown_plan = called(runs.project, "plan", "run.toml", *served(2), "parallel.ranks=4").stdout
    assert "ranks 2, 3; synchronous updates" in shown_plan
    assert "server: serve" in shown_plan


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, served(1)),
        (4, served(2, ASYNCHRONOUS, "parallel.average_every=5")),
        (2, served("workers", ASYNCHRONOUS)),
    ],
)
def test_runs_with_servers_are_compared_and_reported(runs: Runs, ranks: int, words: tuple[str, ...]) -> None:
    """Servers have an instruction list of their own, which is not that of a pipeline stage."""
    whole = runs.of_one(*of_kind("adamw"))
    run = runs.run(ranks, *of_kind("adamw"), *words, "log.every=5")
    compared = called(runs.project, "compare", str(run.path), str(whole.path))
    assert compared.returncode == 0, compared.stderr
    (layout,) = re.findall(r"parallel\.servers +(\S+) \| 0\n", compared.stdout)
    assert words[0] == f"parallel.servers={layout}"
    assert "parallel.outer_optimizer" not in compared.stdout  # none in both configs
    out = runs.project / "report.html"
    reported = called(runs.project, "report", str(run.path), "--out", str(out))
    assert reported.returncode == 0, reported.stderr
    assert "One step, rank by rank" in out.read_text(encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


REPLAYED = {
    "one": (3, served(1, ASYNCHRONOUS)),
    "two": (5, served(2, ASYNCHRONOUS)),
    "bound": (5, served(2, ASYNCHRONOUS, "parallel.staleness=1")),
    "workers": (3, served("workers", ASYNCHRONOUS)),
    "workers, int4": (3, served("workers", ASYNCHRONOUS, "parallel.wire=int4")),
    "two, topk": (5, served(2, ASYNCHRONOUS, "parallel.wire=topk:0.1")),
}


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * ("," in one)) for one in REPLAYED])
def test_one_process_replays_asynchronous_pushes(runs: Runs, case: str) -> None:
    """Also pushes of a run that was continued: what came after its checkpoint is not in the order twice."""
    ranks, words = REPLAYED[case]
    words = (*of_kind("adamw"), *words, "optimizer.decay_steps=20", "model.dropout=0.1", "train.eval_every=5")
    run = runs.run(ranks, *words, "train.num_steps=10")
    assert called(runs.project, "prove", "--replay", str(run.path)).returncode == 0
    run = runs.run(ranks, *words, "train.num_steps=20", resume=True)
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 0, done.stdout + done.stderr
    distance = re.search(r"distance of a tensor: (\S+)", done.stdout)
    assert distance is not None
    assert float(distance[1]) < 1e-9
    path = order.file_of(run.path, 0)
    rows = path.read_text().splitlines()
    assert len(rows) == 20 * (ranks - (0 if case.startswith("workers") else int(words[2][-1])))
    other = json.loads(rows[-1])
    path.write_text("\n".join([*rows[:-1], json.dumps({**other, "base": other["base"] - 8})]) + "\n")
    assert called(runs.project, "prove", "--replay", str(run.path)).returncode == 1
    wrong = {"version": other["version"] + 1, "base": other["version"] + 1, "worker": 9}
    wrong |= {"number": other["number"] + 1} if case in ("two", "bound", "two, topk") else {}
    for field, value in wrong.items():
        path.write_text("\n".join([*rows[:-1], json.dumps({**other, field: value})]) + "\n")
        done = called(runs.project, "prove", "--replay", str(run.path))
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), field
        assert f".jsonl line {len(rows)}: " in done.stderr


def test_a_run_folder_that_contradicts_itself_is_not_replayed(runs: Runs) -> None:
    run = runs.run(3, *of_kind("adamw"), *served(1, ASYNCHRONOUS), "train.num_steps=4", "train.eval_every=0")
    path, environment = run.path / "config.toml", run.path / "environment.json"
    given, recorded = path.read_text(), environment.read_text()
    path.write_text(given.replace("hidden_dim = ", "hidden_dim = 2"))
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        "error: config.toml: model.hidden_dim = 216, but plan.json has 16",
    )
    path.write_text(given)
    for wrong in ('"exact"', '"num_threads"', '"compile"'):
        environment.write_text(recorded.replace(wrong, '"wrong"'))
        done = called(runs.project, "prove", "--replay", str(run.path))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "environment.json: does not say which kernels and threads the run had" in done.stderr
    environment.write_text(recorded)
    assert called(runs.project, "prove", "--replay", str(run.path)).returncode == 0
    corpus = re.search(r'^corpus = "(.*)"$', given, re.MULTILINE)
    assert corpus is not None
    text = (runs.project / corpus[1]).read_text()
    (runs.project / corpus[1]).write_text(text[::-1])
    done = called(runs.project, "prove", "--replay", str(run.path))
    (runs.project / corpus[1]).write_text(text)
    assert (done.returncode, "not the tokens that the run in" in done.stderr) == (2, True), done.stderr


def test_files_of_the_run_may_have_moved_before_a_replay() -> None:
    plan = plan_of(load("default", []).config, 1)
    moved = replace(plan, task=replace(plan.task, identity={**plan.task.identity, "tokenizer": "moved/tokenizer.json"}))
    _refuse_another_run(plan, moved)
    with pytest.raises(UserError, match=r"config.toml: run.seed = 8, but plan.json has"):
        _refuse_another_run(plan, replace(plan, seed=8))


WHOLE = [order.Applied(0, 1, 0, 0, 0, 0, 0, 3), order.Applied(1, 1, 0, 1, 0, 1, 0, 3)]
OTHERS = {
    "a push of fewer steps": [WHOLE[0], replace(WHOLE[1], count=2)],
    "another portion": [WHOLE[0], replace(WHOLE[1], first=1, count=2)],
    "one push more": [*WHOLE, replace(WHOLE[1], version=2, number=2, step=3)],
    "one push less": WHOLE[:1],
}


@pytest.mark.parametrize("case", OTHERS)
def test_servers_have_the_same_pushes_or_are_not_replayed(tmp_path: Path, case: str) -> None:
    _refuse_other_orders([WHOLE, [replace(WHOLE[1], version=0), replace(WHOLE[0], version=1)]], tmp_path, 2, 1)
    with pytest.raises(UserError, match=r"server_1.jsonl.*server 0"):
        _refuse_other_orders([WHOLE, OTHERS[case]], tmp_path, 2, 1)


def test_an_order_with_a_push_twice_is_not_replayed(tmp_path: Path) -> None:
    twice = [*WHOLE, replace(WHOLE[1], version=2)]
    with pytest.raises(UserError, match=r"server_0.jsonl: has a push twice: 3 pushes, but 2 portions"):
        _refuse_other_orders([twice, WHOLE], tmp_path, 2, 1)


def test_a_run_without_an_order_is_not_replayed(runs: Runs) -> None:
    done = called(runs.project, "prove", "--replay", str(runs.of_one(*of_kind("adamw")).path))
    assert done.returncode == 2
    assert "only a run with asynchronous parameter servers or" in done.stderr


REFUSED = {
    "no worker": (
        ("parallel.servers=2", "parallel.ranks=2"),
        "parallel.servers = 2: leaves no worker of 2 ranks; nearest that would do: parallel.servers = 1, or 3 ranks",
    ),
    "staleness": (
        ("parallel.staleness=1",),
        'parallel.staleness = 1: parallel.updates = "synchronous" has none; nearest that would do: '
        'parallel.staleness = "auto", or parallel.updates = "asynchronous"',
    ),
    "negative": (
        ("parallel.staleness=-1", ASYNCHRONOUS),
        'parallel.staleness: given -1; must be a whole number >= 0 or "auto"',
    ),
    **{
        axis: (
            (f"parallel.{axis}=2",),
            f"parallel.servers = 1: a worker is one rank with the whole model, but parallel.{axis} = 2; nearest that "
            f'would do: parallel.{axis} = 1 and parallel.dp_replicate = "auto"',
        )
        for axis in ("tp", "pp", "cp", "dp_shard")
    },
    "tp, workers": (
        ("parallel.servers=workers", "parallel.tp=2", "parallel.ranks=4"),
        'parallel.servers = "workers": a worker is one rank with the whole model, but parallel.tp = 2; nearest that '
        'would do: parallel.tp = 1 and parallel.dp_replicate = "auto", or parallel.servers = 0',
    ),
    "muon": (
        ("optimizer.kind=muon",),
        'parallel.servers = 1: optimizer.kind = "muon" updates whole matrices, which are cut over the servers; nearest '
        'that would do: optimizer.kind = "adamw"',
    ),
    "powersgd": (
        ("parallel.wire=powersgd:2",),
        'parallel.servers = 1: parallel.wire = "powersgd:2" is of use in a sum over ranks only; nearest that would do: '
        'parallel.wire = "int4" or "none"',
    ),
    "wire_from": (
        ("parallel.wire=int8", "parallel.wire_from=3"),
        "parallel.servers = 1: parallel.wire_from = 3: pushes have one format in all steps; nearest that would do: "
        "parallel.wire_from = 0",
    ),
    "reduce_dtype": (
        ("parallel.reduce_dtype=bf16",),
        'parallel.servers = 1: parallel.reduce_dtype = "bf16": servers add in fp32, or in fp64, and parallel.wire is '
        'the format of pushes; nearest that would do: parallel.reduce_dtype = "auto"',
    ),
    "offload": (
        ("parallel.offload=optimizer", "train.device=auto"),
        'parallel.servers = 1: parallel.offload = "optimizer": the optimizer is on the servers; nearest that would do: '
        'parallel.offload = "none"',
    ),
    "data_parallel": (
        ("parallel.data_parallel=2", "train.device=auto"),
        "parallel.servers = 1: parallel.data_parallel = 2: a worker is one rank with one device; nearest that would "
        "do: parallel.data_parallel = 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_servers_cannot_do_is_refused_with_what_would_do(project: Path, case: str) -> None:
    words, expected = REFUSED[case]
    done = called(project, "plan", "run.toml", "parallel.ranks=3", "parallel.servers=1", *words)
    assert done.returncode == 2
    assert expected in done.stderr


def test_buckets_do_not_decide_the_losses_of_pushes() -> None:
    words = {"parallel.servers": 1, "parallel.wire": "int4"}
    one, other = (planned({**words, "parallel.bucket_bytes": size}, 3).trajectory() for size in (20_000, 40_000))
    assert one == other


def test_the_fullest_rank_may_be_a_server() -> None:
    plan = planned({"parallel.servers": 1}, 3)
    of_ranks = [state_of_rank(plan, rank).device_bytes for rank in range(plan.world_size)]
    assert state_bytes(plan, servers=True).device_bytes == max(of_ranks) == of_ranks[2]
    assert state_bytes(plan).device_bytes == of_ranks[0] < of_ranks[2]


def test_with_steps_by_speed_the_least_is_declared() -> None:
    words = {"parallel.servers": 1, "parallel.average_every": 5, "parallel.updates": "asynchronous"}
    plan = planned({**words, "parallel.local_steps": "by_speed"}, 3)
    assert all(
        "at least" in record.what for record in plan.traffic if record.collective in (Collective.PUSH, Collective.PULL)
    )
