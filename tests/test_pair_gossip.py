"""In: asynchronous gossip, on real ranks. Out: averages keep the sum, one process replays a run, bytes are as declared.
Does not test the synchronous form (test_gossip) and measures no speeds: benchmarks do."""

from __future__ import annotations

import csv
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from declared_ranks import plan_of as plan_of_case
from forker import Forker, Runs
from hypothesis import given
from hypothesis import strategies as st
from refused import refusals
from runs import called, losses
from test_gossip import gossip

from codescent.build import build
from codescent.checkpoint.checkpoints import read_tensors
from codescent.clusters.by_links import of_links
from codescent.clusters.link import Link
from codescent.config.load import load
from codescent.cost.arithmetic import arithmetic
from codescent.cost.ranks_walk import walk
from codescent.coupling.pair_exchange import PairExchange
from codescent.coupling.pairs import Neighbour
from codescent.plan import Collective, Plan, Verb
from codescent.record import RunFolder, gossip_order, order
from codescent.servers.changes import AVERAGED, MERGED, SENT, STEPPED, Changed
from codescent.strategies import ThisRank
from codescent.strategies.gossip_graphs import GossipPairs
from codescent.train.optimize import Weight
from codescent.transport import Client, Kind, Server, listen
from codescent.transport import server as transport_server
from codescent.transport.tensors import bytes_of

FP64 = ("train.precision=fp64", "parallel.gossip_mode=asynchronous")
RING, PAIRS = "parallel.gossip=ring", "parallel.gossip=pairs"
KEY = b"the key of a test"


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, FP64, ())


def rows_of(run: RunFolder, ranks: int, steps: int = 20) -> list[list[Changed]]:
    return [gossip_order.read(run.path, rank, steps) for rank in range(ranks)]


def kinds(rows: list[Changed], kind: str) -> list[Changed]:
    return [row for row in rows if row.kind == kind]


# pairs


@given(st.sampled_from(["ring", "pairs"]), st.integers(1, 20), st.integers(0, 2**40), st.integers(0, 10**6))
def test_an_average_is_of_an_active_and_a_passive_replica(kind: str, half: int, seed: int, number: int) -> None:
    """Waiting in a circle is impossible: active replicas wait for passive ones, and those for nobody."""
    for replicas in (2 * half, 2 * half + 1) if kind == "pairs" else (2 * half,):
        pairs = GossipPairs(kind, replicas, seed)
        for replica in range(replicas):
            others = pairs.partners(replica)
            assert others
            assert all(replica in pairs.partners(other) for other in others)
            assert {pairs.is_active(other) for other in others} == {not pairs.is_active(replica)}
            if pairs.is_active(replica):
                assert pairs.partner(replica, 10, number) in others
            if kind == "ring":
                assert set(others) == {(replica - 1) % replicas, (replica + 1) % replicas}


def test_partners_are_drawn_anew_and_all_of_them_come() -> None:
    pairs = GossipPairs("pairs", 8, seed=3)
    drawn = [pairs.partner(2, 0, number) for number in range(100)]
    assert set(drawn) == {1, 3, 5, 7}
    assert drawn != [pairs.partner(4, 0, number) for number in range(100)]
    assert drawn != [pairs.partner(2, 10, number) for number in range(100)]


# averages, in one process


@pytest.fixture
def pair() -> Iterator[tuple[PairExchange, PairExchange, Client]]:
    """An active and a passive replica with random weights, connected by sockets."""
    plan = plan_of_case(gossip("ring", 2, gossip_mode="asynchronous", gossip_every=1))
    found = []
    for rank in range(2):
        seeded = torch.Generator().manual_seed(rank)
        shapes = [tensor.parameter.shape for tensor in plan.trained]
        weights = [torch.randn(shape, generator=seeded, dtype=torch.float64) for shape in shapes]
        this_rank = ThisRank(plan, rank, {"dp_replicate": None})  # type: ignore[dict-item]
        found.append(PairExchange([Weight("", one, one, decay=False) for one in weights], this_rank))
    active, passive = found
    listener = listen("127.0.0.1")
    server = Server(listener, KEY, Neighbour(passive, None), 1, range(2))
    client = Client(listener.getsockname()[:2], KEY, 0, "rank 1", {"host": "here"}, timeout_s=20)
    active.clients = {1: client}
    with closing(server), closing(client), closing(active), closing(passive):
        yield active, passive, client


def flat(exchange: PairExchange) -> torch.Tensor:
    return torch.cat([copy.master.reshape(-1) for copy in exchange.copies])


def stepped(exchange: PairExchange, change: float = 0.0) -> None:
    """An update, as the executor makes it."""
    exchange.merge(0)
    for copy in exchange.copies:
        copy.master.add_(change)
    exchange.stepped(0, 1, 2)
    exchange.average(0)


def test_both_replicas_have_the_mean_after_an_average(pair: tuple[PairExchange, PairExchange, Client]) -> None:
    active, passive, _ = pair
    before = [flat(one) for one in (active, passive)]
    for one in (active, passive):
        one.begin(0)
    stepped(active)
    active._land()
    for one in (active, passive):
        torch.testing.assert_close(one.x, (before[0] + before[1]) / 2, rtol=0, atol=1e-15)
        assert one.changes == 1
    # Forward reads the weights of the last update, until the next one.
    assert torch.equal(flat(active), before[0])
    assert torch.equal(flat(passive), before[1])
    for one in (passive, active):  # the active one begins another average
        stepped(one)
        assert one.staleness == 1
        torch.testing.assert_close(flat(one), (before[0] + before[1]) / 2, rtol=0, atol=1e-15)
    active._land()


def test_an_update_during_an_average_stays(pair: tuple[PairExchange, PairExchange, Client]) -> None:
    """The passive replica answers when it has gone on: until then the active one has taken three steps."""
    active, passive, _ = pair
    total = flat(active) + flat(passive)
    active.every = 4
    active.begin(0)
    for _ in range(7):
        stepped(active, 0.25)
    passive.begin(0)
    active._land()
    torch.testing.assert_close(active.x + passive.x, total + 7 * 0.25, rtol=0, atol=1e-13)
    assert [row.kind for row in active.order] == [*[STEPPED] * 4, SENT, *[STEPPED] * 3, MERGED]
    assert [row.kind for row in passive.order] == [AVERAGED]


def test_a_replica_whose_update_fails_lets_its_neighbours_go(pair: tuple[PairExchange, PairExchange, Client]) -> None:
    active, passive, _ = pair
    for one in (active, passive):
        one.begin(0)
    passive.merge(0)  # its optimizer raises: `stepped` is not called
    stepped(active)
    passive.close()
    active._land()
    assert passive.changes == active.changes == 1


def test_a_request_is_not_answered_twice_at_once(
    pair: tuple[PairExchange, PairExchange, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost while the passive replica is in a long update."""
    monkeypatch.setattr(transport_server, "HANDSHAKE_S", 0.2)
    active, passive, client = pair
    for one in (active, passive):
        one.begin(0)
    passive.merge(0)
    stepped(active)
    time.sleep(0.5)  # its server has the weights, and waits for the end of the update
    assert client._peer is not None
    client._peer.shutdown(socket.SHUT_RDWR)
    time.sleep(1)
    passive.stepped(0, 1, 1)
    active._land()
    assert passive.changes == 1
    assert [row.kind for row in passive.order] == [STEPPED, AVERAGED]


def test_a_repeated_request_is_answered_and_not_averaged_again(pair: tuple[PairExchange, PairExchange, Client]) -> None:
    active, passive, client = pair
    passive.begin(0)
    weights, changes = flat(active), [torch.empty_like(passive.x) for _ in range(2)]
    for change in changes:
        facts, payloads, into = {"segment": 0, "average": 0}, [bytes_of(weights)], [bytes_of(change)]
        client.request(Kind.EXCHANGE, metadata=facts, payloads=payloads, into=into, number=7)
        assert client._peer is not None
        client._peer.shutdown(socket.SHUT_RDWR)
    assert torch.equal(*changes)
    assert passive.changes == 1
    torch.testing.assert_close(passive.x, (weights + flat(passive)) / 2, rtol=0, atol=1e-15)


# runs


REPLAYED = {"ring of 2": (2, RING), "ring of 4": (4, RING), "pairs of 3": (3, PAIRS), "pairs of 4": (4, PAIRS)}


@pytest.mark.parametrize("case", REPLAYED)
def test_one_process_replays_updates_and_averages(runs: Runs, case: str) -> None:
    """Also those of a run that was continued: what came after its checkpoint is not in the order twice."""
    ranks, graph = REPLAYED[case]
    words = (graph, "optimizer.decay_steps=20", "model.dropout=0.1", "train.eval_every=5")
    words = (*words, "parallel.gossip_rate=0.8", "train.global_batch_size=12")
    run = runs.run(ranks, *words, "train.num_steps=10")
    assert called(runs.project, "prove", "--replay", str(run.path)).returncode == 0
    run = runs.run(ranks, *words, "train.num_steps=20", resume=True)
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 0, done.stdout + done.stderr
    distance = re.search(r"distance of a tensor: (\S+)", done.stdout)
    assert distance is not None
    assert float(distance[1]) < 1e-9
    rows = rows_of(run, ranks)
    portions = sorted((row.step, row.part) for mine in rows for row in kinds(mine, STEPPED))
    assert portions == [(step, part) for step in range(20) for part in range(ranks)]  # each sample once
    counted = [sum(len(kinds(mine, kind)) for mine in rows) for kind in (SENT, AVERAGED, MERGED)]
    assert counted[0] == counted[1] == counted[2] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_replay_rounds_as_the_run_did(runs: Runs, precision: str) -> None:
    words = (f"train.precision={precision}", FP64[1], RING, "train.num_steps=10", "train.eval_every=5")
    run = runs.forker.train(runs.project, f"rounds-{precision}", 2, *words, f"run.name=rounds-{precision}")
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "distance of a tensor: 0.00e+00" in done.stdout


def test_a_run_of_another_machine_is_replayed_and_named(runs: Runs) -> None:
    run = runs.run(2, RING, "train.eval_every=0")
    path = run.path / "environment.json"
    recorded = json.loads(path.read_text())
    path.write_text(json.dumps({**recorded, "machines": [{**recorded["machines"][0], "processor": "Z80"}]}))
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 0
    assert re.search("^this machine rounds otherwise: processor .*, of the run Z80$", done.stdout, re.MULTILINE)
    path.unlink()
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 2
    assert "has no environment.json" in done.stderr


def test_another_order_gives_other_weights_or_does_not_fit(runs: Runs) -> None:
    run = runs.run(2, RING, "train.eval_every=0")
    path = gossip_order.file_of(run.path, 1)
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if STEPPED in line and AVERAGED in lines[i + 1])
    path.write_text("\n".join([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]) + "\n")
    assert called(runs.project, "prove", "--replay", str(run.path)).returncode == 1
    path.write_text("\n".join(line for line in lines if AVERAGED not in line) + "\n")
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 2
    assert "do not fit together" in done.stderr
    partner = next(line for line in lines if AVERAGED in line)
    other = partner.replace('"partner": 0', '"partner": 1')
    path.write_text("\n".join(other if line == partner else line for line in lines) + "\n")
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 2
    assert "do not fit together" in done.stderr
    path.write_text("\n".join(lines[:-1]) + "\n")
    done = called(runs.project, "prove", "--replay", str(run.path))
    assert done.returncode == 2
    assert "no meeting of all ranks after 20 steps" in done.stderr


@pytest.mark.parametrize(("ranks", "graph", "every"), [(2, RING, 1), (3, PAIRS, 2), (4, RING, 3)])
def test_each_replica_sends_what_is_declared(runs: Runs, ranks: int, graph: str, every: int) -> None:
    name = f"frames-{ranks}-{every}"
    words = [*FP64, graph, f"parallel.gossip_every={every}", "train.global_batch_size=12", f"run.name={name}"]
    answers = runs.forker.call("parameter_server_ranks:frames", runs.project, ranks, words=words)
    run = RunFolder.open(runs.project / "runs" / name)
    plan = Plan.from_json(run.plan)
    (sent,) = (record for record in plan.traffic if record.collective is Collective.SEND)
    assert (sent.payload_bytes, sent.every) == (8 * plan.num_parameters, every)
    assert plan.sent_bytes(0, every - 1) == sent.payload_bytes
    for rank, (frames, rows) in enumerate(zip(answers, rows_of(run, ranks), strict=True)):
        updates = [0]
        for row in rows:  # averages are counted anew where all ranks have met
            updates[-1] += row.kind == STEPPED
            updates += [0] if row.kind == "agreed" else []
        is_active = GossipPairs(plan.layout.gossip, ranks).is_active(rank)
        due = sum(number // every for number in updates) if is_active else 0
        assert len(kinds(rows, SENT)) == due
        assert [one[:1] + one[2:] for one in frames] == due * [["EXCHANGE", sent.payload_bytes, sent.payload_bytes]]


def test_a_slow_replica_computes_less_and_all_agree_where_something_is_due(runs: Runs) -> None:
    run = runs.run(4, RING, fault="paced 0.02 4")
    rows = rows_of(run, 4)
    updates = [len(kinds(mine, STEPPED)) for mine in rows]
    assert sum(updates) == 80
    assert updates[3] < min(updates[:3])
    metrics = run.read_metrics()
    assert metrics[-1]["step"] == 20
    assert losses(run)[-1] < losses(run)[0]
    assert [row["step"] for row in metrics if row["consensus"] is not None] == [10, 20]
    assert all(row["consensus"] > 0 for row in metrics if row["consensus"] is not None)
    found = [row.number for mine in rows for row in kinds(mine, STEPPED)]
    assert sum(found) <= sum(len(kinds(mine, AVERAGED)) + len(kinds(mine, MERGED)) for mine in rows)
    assert max(found) == max(row["staleness_max"] for row in metrics)
    saved = read_tensors(max((run.path / "checkpoints").iterdir(), key=lambda path: path.name))
    weight = "tok.weight"
    mean = sum(saved[f"replica{rank}.model.{weight}"] for rank in range(4)) / 4
    torch.testing.assert_close(saved[f"model.{weight}"], mean, rtol=0, atol=1e-12)
    assert called(runs.project, "evaluate", str(run.path)).returncode == 0


def test_a_request_to_stop_ends_the_segment_and_the_run_goes_on(runs: Runs) -> None:
    words = [*FP64, RING, "train.num_steps=40", "train.eval_every=0", "run.name=stops"]
    codes, _, said = runs.forker._ask(
        "pair_gossip_ranks:asked_to_stop", runs.project, 2, {"words": words, "updates": 3}
    )
    assert codes == [128 + 15] * 2, said
    stopped = RunFolder.open(runs.project / "runs" / "stops")
    (step,) = (event["step"] for event in stopped.read_events() if event["kind"] == "stop")
    assert 1 <= step < 40
    run = runs.forker.train(runs.project, "stops", 2, *words, resume=True)
    assert run.read_metrics()[-1]["step"] == 40
    assert called(runs.project, "prove", "--replay", str(run.path)).returncode == 0


# the simulator


def plan_of(ranks: int, *words: str) -> Plan:
    overrides = ["train.global_batch_size=12", "data.seq_len=16", "train.microbatch_size=1", *words]
    return build(load("gpt2_124m", overrides).config, None, ranks)


def test_a_walk_keeps_the_speed_beside_a_slow_replica() -> None:
    """On a fast link: with a rank four times slower, three and a quarter replicas are left."""
    plan = plan_of(4, RING, "parallel.gossip_mode=asynchronous")
    equal, slow = (walk(plan, arithmetic(plan, 0.5, {3: slow}), of_links(Link(1e15))) for slow in (1.0, 4.0))
    assert slow.tokens_per_s == pytest.approx(equal.tokens_per_s * 3.25 / 4, rel=0.05)


@pytest.mark.parametrize(("ranks", "graph", "every"), [(2, RING, 1), (6, RING, 2), (4, PAIRS, 1)])
def test_a_walk_averages_as_often_as_the_plan_says(ranks: int, graph: str, every: int) -> None:
    """Each average changes two replicas, and one of two replicas begins one."""
    plan = plan_of(ranks, graph, "parallel.gossip_mode=asynchronous", f"parallel.gossip_every={every}")
    found = walk(plan, arithmetic(plan, 0.5), of_links(Link(1e15)))
    assert sum(found.staleness) / len(found.staleness) == pytest.approx(1 / every, rel=0.06)
    sent = sum(rank.sent_bytes for rank in found.ranks) / ranks
    mean = sum(plan.sent_bytes(0, number) for number in range(every)) / every
    assert sent == pytest.approx(mean, rel=0.1)


def test_a_slow_link_makes_active_replicas_wait_for_their_last_average() -> None:
    plan = plan_of(2, RING, "parallel.gossip_mode=asynchronous", "parallel.gossip_every=4")
    weights = plan.sent_bytes(0, 3)
    hidden = walk(plan, arithmetic(plan, 1.0), of_links(Link(weights)))  # there and back again: 2 s of 4 s
    assert hidden.step_s == pytest.approx(1.0, rel=0.01)
    bound = walk(plan, arithmetic(plan, 1.0), of_links(Link(weights / 4)))  # 8 s; the passive one does not wait
    assert [rank.step_s for rank in bound.ranks] == pytest.approx([2.0, 1.0], rel=0.1)


SPEEDS = {
    "ring": (4, [0.03, 0.03, 0.03, 0.12], (RING,)),
    "pairs, every second step": (4, [0.03, 0.06, 0.03, 0.12], (PAIRS, "parallel.gossip_every=2")),
    "server": (3, [0.03, 0.12], ("parallel.servers=1",)),
    "server, bound": (4, [0.03, 0.03, 0.12], ("parallel.servers=1", "parallel.staleness=2")),
}


@pytest.mark.parametrize("case", SPEEDS)
def test_the_simulator_predicts_the_mean_staleness(runs: Runs, case: str) -> None:
    """Sleeps decide the speeds: a portion of the slowest rank takes 0.24 s. On measured speeds within 20 %."""
    ranks, sleeps, words = SPEEDS[case]
    gossips = "servers" not in words[0]
    name, mode = f"speeds-{case.replace(', ', '-').replace(' ', '-')}", "gossip_mode" if gossips else "updates"
    chosen = [*words, "train.precision=fp64", f"parallel.{mode}=asynchronous", "train.num_steps=24"]
    chosen += ["train.eval_every=0", "train.global_batch_size=12", f"run.name={name}"]
    runs.forker.call("pair_gossip_ranks:paced", runs.project, ranks, words=chosen, seconds=sleeps)
    run = RunFolder.open(runs.project / "runs" / name)
    plan = Plan.from_json(run.plan)
    if gossips:
        stepped_rows = [kinds(mine, STEPPED) for mine in rows_of(run, ranks, 24)]
        done = {rank: len(mine) for rank, mine in enumerate(stepped_rows)}
        seen = [row.number for mine in stepped_rows for row in mine[1:]]
    else:
        pushes = order.read(run.path, 0, 24, plan.mesh.world_size)
        done = dict(Counter(push.worker for push in pushes))
        seen = [push.version - push.base for push in pushes[len(pushes) // 5 :]]
    busy = busy_s(run, done)
    found = walk(plan, lambda rank, at: busy[rank] * (at.verb is Verb.FORWARD), of_links(Link(1e12), devices=ranks))
    late = found.staleness[len(found.staleness) // 5 :]
    print(f"mean staleness, {case}: {sum(seen) / len(seen):.2f}, predicted {sum(late) / len(late):.2f}")
    slowest = max(busy.values()) / min(busy.values())
    assert slowest > 2  # the sleeps decide the speeds
    assert sum(seen) / len(seen) == pytest.approx(sum(late) / len(late), rel=0.2)
    assert sum(seen) > 0


def busy_s(run: RunFolder, portions: dict[int, int]) -> dict[int, float]:
    """Measured seconds of a portion of each rank, without waiting."""
    parts = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s")
    with (run.path / "ranks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        rank: sum(
            float(row["steps"]) * sum(float(row[part]) for part in parts) for row in rows if int(row["rank"]) == rank
        )
        / number
        for rank, number in portions.items()
    }


# refused


@pytest.mark.parametrize(
    ("keys", "ranks", "said", "advice"),
    [
        ({"dp_replicate": 1}, 1, "there is one replica", "parallel.dp_replicate = 2 on 2 ranks"),
        ({"dp_replicate": 3}, 3, "3 replicas, an odd number", 'parallel.gossip = "pairs"'),
        ({"gossip": "complete"}, 2, "averages pairs of an active and a passive", 'parallel.gossip = "pairs"'),
        ({"wire": "int8"}, 2, "would round whole weights", 'parallel.wire = "none"'),
        ({"tp": 2}, 4, "a replica is one rank", "parallel.tp = 1"),
        ({"average_every": 2}, 2, "averages the same replicas", "parallel.average_every = 0, or"),
        ({"servers": 1}, 3, "has the weights", 'parallel.gossip = "none"'),
        ({"reduce_dtype": "bf16"}, 2, "send no gradients in rounds", 'parallel.reduce_dtype = "auto"'),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(keys: dict[str, Any], ranks: int, said: str, advice: str) -> None:
    layout = {"dp_replicate": 2, "gossip": "ring", "gossip_mode": "asynchronous", **keys}
    problems = refusals({f"parallel.{key}": value for key, value in layout.items()}, ranks)
    assert any(said in problem and advice in problem for problem in problems), problems


def test_a_profile_has_no_common_window(project: Path) -> None:
    words = ("parallel.ranks=2", RING, "parallel.gossip_mode=asynchronous", "profile.active=2")
    done = called(project, "plan", "run.toml", *words)
    assert done.returncode == 2
    assert 'parallel.gossip_mode = "synchronous"' in done.stderr


def test_the_plan_says_what_it_is(project: Path) -> None:
    shown = called(project, "plan", "run.toml", "parallel.ranks=4", PAIRS, "parallel.gossip_mode=asynchronous").stdout
    assert "reduce, merge fragment 0, step, average fragment 0" in shown
    assert "all ranks validate, save and stop together after each 10 or 20 steps" in shown
