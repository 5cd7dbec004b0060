"""In: gossip on graphs, on real ranks. Out: it is exact where the algebra is, keeps the mean, and is what is declared.
Does not measure speeds and does not train to a low loss: benchmarks do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from declared_cases import case
from declared_ranks import plan_of
from declared_traffic import DTYPE, check_issued
from forker import Forker
from gossip_ranks import flat, initial
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import planned, refusals
from runs import losses, make_project

from codescent.clusters.by_links import of_links
from codescent.clusters.link import Link
from codescent.cost.ranks_walk import walk
from codescent.coupling.differences import Differences
from codescent.plan import Plan, Verb
from codescent.plan.wire import Wire
from codescent.strategies import active
from codescent.strategies.gossip_graphs import Graph

GRAPHS = ("ring", "pairs", "complete", "exponential", "push-sum")
SGD = {"kind": "sgd", "max_grad_norm": 0.0, "weight_decay": 0.0}
MODEL = {"num_layers": 1, "hidden_dim": 8, "num_heads": 2, "seq_len": 8}


def gossip(graph: str, ranks: int, precision: str = "fp64", momentum: float = 0.9, **parallel: Any) -> dict[str, Any]:
    optimizer = {**SGD, "momentum": momentum}
    one = case(precision, model=MODEL, optimizer=optimizer, dp_replicate=ranks, gossip=graph, **parallel)
    one["config"]["train"]["eval_every"], one["config"]["checkpoint"] = 0, {"every": 0}
    return one


def started(ranks: int) -> np.ndarray:
    """By rank the weights before the first exchange."""
    plan = plan_of(gossip("ring", 2))
    return np.stack([flat(initial(plan, rank)).numpy() for rank in range(ranks)])


def matrix(graph: Graph, round_number: int) -> np.ndarray:
    found = np.zeros((graph.replicas, graph.replicas))
    for index, row in enumerate(graph.matrix(round_number)):
        for source, weight in row.items():
            found[index, source] = weight
    return found


# graphs


@settings(deadline=None)
@given(st.sampled_from(GRAPHS), st.integers(2, 17), st.integers(0, 2**40), st.integers(0, 10**6), st.floats(0.01, 1.0))
def test_a_matrix_keeps_the_sum(kind: str, replicas: int, seed: int, round_number: int, rate: float) -> None:
    graph = Graph(kind, replicas, seed, rate)
    found = matrix(graph, round_number)
    assert (found >= 0).all()
    assert np.allclose(found.sum(0), 1)
    assert np.allclose(found.sum(1), 1) or kind == "push-sum"
    assert np.array_equal(found, found.T) or kind in ("exponential", "push-sum")
    assert all(list(row) == sorted(row) for row in graph.matrix(round_number))
    sent = [graph.targets(round_number, replica) for replica in range(replicas)]
    for replica, targets in enumerate(sent):
        assert targets == [row for row in range(replicas) if row != replica and found[row, replica]]
        assert len(targets) <= graph.messages
    assert [len(targets) for targets in sent].count(graph.messages) == replicas - graph.resting


def test_pairs_are_drawn_anew_and_every_pair_comes() -> None:
    graph = Graph("pairs", 5, seed=3)
    drawn = [tuple(tuple(row) for row in graph.matrix(number)) for number in range(60)]
    assert len(set(drawn)) == 15  # matchings of two pairs among five
    assert drawn != [tuple(tuple(row) for row in Graph("pairs", 5, seed=4).matrix(number)) for number in range(60)]
    rests = [index for rows in drawn for index, row in enumerate(rows) if len(row) == 1]
    assert len(rests) == 60
    assert set(rests) == set(range(5))


@pytest.mark.parametrize("replicas", [2, 4, 8, 16])
def test_an_exponential_graph_has_the_mean_after_log2_rounds(replicas: int) -> None:
    graph = Graph("exponential", replicas)
    product = np.eye(replicas)
    for number in range(replicas.bit_length() - 1):
        product = matrix(graph, number) @ product
    assert np.array_equal(product, np.full((replicas, replicas), 1 / replicas))


# exact


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_complete_graph_of_sgd_is_ddp(tmp_path: Path, forker: Forker, ranks: int) -> None:
    cases = {}
    for momentum in (0.0, 0.9):
        cases[f"ddp {momentum}"] = gossip("none", ranks, momentum=momentum)
        cases[f"gossip {momentum}"] = gossip("complete", ranks, momentum=momentum, agree_every=1)
    cases["ring"] = gossip("ring", ranks, agree_every=1)
    found = forker.call("gossip_ranks:trained", tmp_path, ranks, cases=cases, steps=20)
    for one in found:
        for momentum in (0.0, 0.9):
            ddp, other = one[f"ddp {momentum}"], one[f"gossip {momentum}"]
            np.testing.assert_allclose(other["losses"], ddp["losses"], rtol=1e-9)
            np.testing.assert_allclose(other["weights"], ddp["weights"], rtol=0, atol=1e-9)
            assert other["weights"] == found[0][f"gossip {momentum}"]["weights"]  # bitwise the same on all ranks
            assert other["consensus"] < 1e-12
        # A ring of at most three replicas is complete.
        assert one["ring"] == one["gossip 0.9"]
    assert found[0]["ddp 0.0"]["losses"] != found[0]["ddp 0.9"]["losses"]


def test_a_replica_may_be_of_two_ranks(tmp_path: Path, forker: Forker) -> None:
    keys = {"agree_every": 4, "gossip_every": 2}
    one = forker.call("gossip_ranks:trained", tmp_path, 2, cases={"": gossip("ring", 2, **keys)}, steps=8)
    two = forker.call("gossip_ranks:trained", tmp_path, 4, cases={"": gossip("ring", 2, tp=2, **keys)}, steps=8)
    for rank, found in enumerate(two):
        expected = one[rank // 2][""]["losses"]
        np.testing.assert_allclose(found[""]["losses"], expected, rtol=1e-9)
    assert one[0][""]["losses"][3] == one[1][""]["losses"][3]  # all ranks agree
    assert one[0][""]["losses"][4] != one[1][""]["losses"][4]  # a replica's own
    assert two[0][""]["consensus"] == pytest.approx(one[0][""]["consensus"], rel=0.2)


# constant weights


@pytest.mark.parametrize("ranks", [3, 4])
def test_exchanges_are_the_products_of_the_matrices(tmp_path: Path, forker: Forker, ranks: int) -> None:
    rounds = 6
    cases = {graph: gossip(graph, ranks) for graph in GRAPHS}
    cases["lazy ring"] = gossip("ring", ranks, gossip_rate=0.5)
    found = forker.call("gossip_ranks:mixed", tmp_path, ranks, cases=cases, rounds=rounds)
    start = started(ranks)
    for name in cases:
        graph = Graph(name.split()[-1], ranks, plan_of(cases[name]).seed, 0.5 if name == "lazy ring" else 1.0)
        numerators, weights = start, np.ones((ranks, 1))
        for number in range(rounds):
            numerators, weights = matrix(graph, number) @ numerators, matrix(graph, number) @ weights
            seen = np.stack([one[name]["weights"][number + 1] for one in found])
            np.testing.assert_allclose(seen, numerators / weights, rtol=0, atol=1e-13)
            if name != "push-sum":
                np.testing.assert_allclose(seen.mean(0), start.mean(0), rtol=0, atol=1e-13)
        for one in found:
            np.testing.assert_allclose(one[name]["means"], start.mean(0), rtol=0, atol=1e-13)
        if name == "push-sum":
            assert np.ptp(weights) > 0.1  # the matrices were not doubly stochastic
        apart = np.stack([one[name]["weights"][-1] for one in found])
        mean = (weights * apart).mean(0)
        expected = ((apart - mean) ** 2).sum(), ranks * (mean**2).sum()
        estimated = sum(np.array(one[name]["distance"]) for one in found)
        if expected[0] > 1e-20:
            np.testing.assert_allclose(estimated, expected, rtol=0.2)


def test_a_ring_of_four_shrinks_by_a_third_in_each_round(tmp_path: Path, forker: Forker) -> None:
    """The second largest eigenvalue of its matrix: (1 + 2 cos(2 pi k / 4)) / 3 is 1/3 or -1/3."""
    (*found,) = forker.call("gossip_ranks:mixed", tmp_path, 4, cases={"": gossip("ring", 4)}, rounds=5)
    seen = np.stack([one[""]["weights"] for one in found])
    apart = np.linalg.norm(seen - seen.mean(0), axis=(0, 2))
    np.testing.assert_allclose(apart[1:] / apart[:-1], 1 / 3, rtol=1e-9)


def test_push_sum_counts_what_training_adds_by_the_weight_of_a_replica(tmp_path: Path, forker: Forker) -> None:
    cases, rounds, drift = {"": gossip("push-sum", 4)}, 5, 0.25
    found = forker.call("gossip_ranks:mixed", tmp_path, 4, cases=cases, rounds=rounds, drift=drift)
    graph = Graph("push-sum", 4, plan_of(cases[""]).seed)
    trained, weights = started(4), np.ones((4, 1))
    for number in range(rounds):
        products = matrix(graph, number) @ (weights * (trained + drift * np.arange(4)[:, None]))
        weights = matrix(graph, number) @ weights
        trained = products / weights
        seen = np.stack([one[""]["weights"][number + 1] for one in found])
        np.testing.assert_allclose(seen, trained, rtol=0, atol=1e-12)
    for one in found:
        np.testing.assert_allclose(one[""]["means"], (weights * trained).mean(0), rtol=0, atol=1e-12)
    mean, plain = (weights * trained).mean(0), trained.mean(0)
    estimated = sum(np.array(one[""]["distance"]) for one in found)
    np.testing.assert_allclose(estimated, [((trained - mean) ** 2).sum(), 4 * (mean**2).sum()], rtol=0.2)
    assert ((trained - plain) ** 2).sum() < 0.7 * ((trained - mean) ** 2).sum()  # replicas that count alike
    (one, *_) = forker.call("gossip_ranks:mixed", tmp_path, 4, cases=cases, rounds=80)
    np.testing.assert_allclose(one[""]["weights"][-1], one[""]["means"], rtol=0, atol=1e-6)


def test_weights_of_push_sum_stay_within_what_replicas_have_trained(tmp_path: Path, forker: Forker) -> None:
    """As in training, a replica comes near its own optimum between exchanges. SGP's algorithm 1 goes beyond."""
    cases = {"": gossip("push-sum", 4)}
    found = forker.call("gossip_ranks:mixed", tmp_path, 4, cases=cases, rounds=60, share=0.9)
    largest = max(np.abs(started(4)).max(), 3.0)
    assert all(np.abs(one[""]["weights"]).max() <= largest for one in found)


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_differences_bring_the_mean(tmp_path: Path, forker: Forker, graph: str) -> None:
    rates = {"bf16": 1.0, "int8": 1.0, "int4": 0.8, "sign": 0.3, "topk:0.2": 0.3}
    cases = {wire: gossip(graph, 4, wire=wire, gossip_rate=rate) for wire, rate in rates.items()}
    cases["late"] = gossip(graph, 4, wire="int8", wire_from=3)
    cases["whole"] = gossip(graph, 4)
    found = forker.call("gossip_ranks:mixed", tmp_path, 4, cases=cases, rounds=30)
    start = started(4)
    for name in cases:
        seen = np.stack([one[name]["weights"] for one in found])
        np.testing.assert_allclose(seen.mean(0), np.broadcast_to(start.mean(0), seen.shape[1:]), rtol=0, atol=1e-12)
        apart = np.linalg.norm(seen - seen.mean(0), axis=(0, 2))
        assert apart[-1] < (0.2 if name in ("sign", "topk:0.2") else 1e-2) * apart[0], name
    late, whole = (np.stack([one[name]["weights"] for one in found]) for name in ("late", "whole"))
    assert np.array_equal(late[:, :4], whole[:, :4])
    assert not np.array_equal(late[:, 4], whole[:, 4]) or graph == "complete"  # there the differences are zero


@pytest.mark.parametrize("wire", ["bf16", "int4", "sign", "topk:0.1"])
def test_two_copies_do_what_a_copy_of_each_neighbour_does(wire: str) -> None:
    """The reference is algorithm 2 of Koloskova et al. (2019), with the public copies y of all replicas."""
    graph = Graph("ring", 5, rate=0.4)
    ring, start = matrix(Graph("ring", 5), 0), torch.randn(700, dtype=torch.float64)
    ours = [Differences(Wire.parse(wire), start) for _ in range(5)]
    x = torch.from_numpy(started(5)[:, :700])
    reference, y = x.clone(), start.repeat(5, 1)
    for _ in range(6):
        messages = {index: one.encode(x[index]) for index, one in enumerate(ours)}
        rows = enumerate(graph.matrix(0))
        x = torch.stack([ours[index].mix(x[index], index, row, messages) for index, row in rows])
        for index in range(5):
            one = Differences(Wire.parse(wire), y[index])
            message = one.encode(reference[index])
            one.mix(reference[index], 0, {}, {0: message})
            y[index] = one.public
        for index in range(5):
            pull = sum(ring[index, other] * (y[other] - y[index]) for other in range(5))
            reference[index] += 0.4 * pull
        torch.testing.assert_close(x, reference, rtol=0, atol=1e-9 if wire != "sign" else 1e-6)


# declared


def declared(plan: Plan, rank: int, number: int) -> Counter[Any]:
    """What a rank issues in step `number` in the verbs of gossip."""
    counted: Counter[Any] = Counter()
    graph = Graph(plan.layout.gossip, plan.mesh.dp_replicate, plan.seed)
    rests = not graph.targets(number // plan.layout.gossip_every, plan.mesh.coordinates(rank)["dp_replicate"])
    for record in plan.traffic:
        if record.verb in (Verb.EXCHANGE, Verb.STEP) and record.runs_in(number):
            if rests and record.collective == "send":
                assert "without a partner" in record.what
                continue
            ranks, dtype = tuple(plan.mesh.group(record.axis, rank)), DTYPE.get(record.dtype, record.dtype)
            counted[str(record.collective), ranks, record.payload_bytes, dtype, str(record.verb)] += record.times
    return counted


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_round_issues_and_keeps_what_is_declared(tmp_path: Path, forker: Forker, ranks: int) -> None:
    keys = {"gossip_every": 2, "agree_every": 4}
    cases = {graph: gossip(graph, ranks, "fp32", **keys) for graph in GRAPHS}
    for wire in ("bf16", "int8", "int4", "sign", "topk:0.05"):
        cases[wire] = gossip("ring", ranks, "bf16", wire=wire, wire_from=2, **keys)
        cases[f"complete {wire}"] = gossip("complete", ranks, "bf16", wire=wire, wire_from=2, **keys)
    if ranks == 4:
        cases["tp"] = gossip("pairs", 2, "fp32", tp=2, **keys)
    found = forker.call("gossip_ranks:issued", tmp_path, ranks, cases=cases, steps=4)
    for rank, of_cases in enumerate(found):
        for name, one in of_cases.items():
            plan = plan_of(cases[name])
            if plan.mesh.coordinates(rank)["tp"]:  # a smaller part: the plan says how much for the largest
                continue
            for number, records in enumerate(one["steps"]):
                seen = Counter((kind, tuple(group), *others) for kind, group, *others in records)
                assert seen == declared(plan, rank, number), (name, rank, number)
            assert any(kind == "send" for records in one["steps"] for kind, *_ in records) or ranks == 3
            assert one["held"] == one["declared"], name
            kept = {kept.name: [list(kept.shape), f"torch.{DTYPE[kept.dtype]}"] for kept in plan.kept}
            assert one["kept"] == kept


@pytest.mark.parametrize("graph", GRAPHS)
def test_sent_bytes_are_those_of_the_messages(graph: str) -> None:
    plan = plan_of(gossip(graph, 8, "fp32", gossip_every=2, agree_every=4))
    weights = 4 * plan.num_parameters
    messages = {"ring": 2, "complete": 7}.get(graph, 1)
    exchanged = messages * weights + (8 if graph == "push-sum" else 0)
    assert plan.sent_bytes(0, 0) == 0
    assert plan.sent_bytes(0, 1) == exchanged
    assert exchanged < plan.sent_bytes(0, 3) < exchanged + 20_000  # projections and scalars


# where all ranks agree


@pytest.mark.parametrize(
    ("every", "due", "expected"),
    [
        (1, (250, 250, 1000), 25),
        (4, (100, 40, 200), 20),
        (4, (0, 0, 256), 128),
        (1, (0, 0, 97), 1),
        (7, (0, 0, 7), 7),
        (3, (30, 0, 60), 30),
    ],
)
def test_ranks_agree_where_keys_need_it(every: int, due: tuple[int, int, int], expected: int) -> None:
    keys = dict(zip(("train.eval_every", "checkpoint.every", "train.num_steps"), due, strict=True))
    layout = {"parallel.dp_replicate": 2, "parallel.gossip": "ring", "parallel.gossip_every": every}
    schedule = planned({**layout, **keys}, 2).schedule
    assert schedule.agrees_every == expected
    assert [steps for steps in range(1, 2 * expected + 1) if schedule.agrees_after(steps)] == [expected, 2 * expected]


@pytest.mark.parametrize(
    ("keys", "ranks", "said", "advice"),
    [
        ({}, 1, "there is one replica", 'parallel.gossip = "none", or parallel.dp_replicate = 2 on 2 ranks'),
        ({"average_every": 2}, 2, "averages the same replicas", "parallel.average_every = 0, or"),
        ({"servers": 1}, 3, "has the weights", 'parallel.gossip = "none"'),
        ({"wire": "powersgd:2"}, 2, "summed over all replicas", 'parallel.wire = "int4" or "none"'),
        (
            {"wire": "int8", "gossip": "pairs"},
            2,
            "changes them",
            'parallel.gossip = "ring", or parallel.wire = "none"',
        ),
        (
            {"gossip_every": 3},
            2,
            "train.num_steps = 1000: not a multiple",
            "999 or 1002, or parallel.gossip_every = 2 or 5",
        ),
        ({"agree_every": 15, "gossip_every": 10}, 2, "ranks agree after", "parallel.agree_every = 10"),
        (
            {"agree_every": 20},
            2,
            "checkpoint.every = 250: not a multiple",
            "240 or 260, or parallel.agree_every = 10 or 25",
        ),
        ({"agree_every": 20, "gossip_every": 5}, 2, "checkpoint.every = 250", "or parallel.agree_every = 10 or 25"),
        ({"offload": "optimizer"}, 2, "not exchanged there", 'parallel.offload = "none"'),
        ({"reduce_dtype": "bf16"}, 2, "send no gradients in rounds", 'parallel.reduce_dtype = "auto"'),
        (
            {"gossip": "none", "average_every": 2, "reduce_dtype": "bf16"},
            2,
            "send no gradients in rounds",
            'parallel.reduce_dtype = "auto"',
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(keys: dict[str, Any], ranks: int, said: str, advice: str) -> None:
    layout = {"dp_replicate": min(ranks, 2), "gossip": "ring", **keys}
    problems = refusals({f"parallel.{key}": value for key, value in layout.items()}, ranks)
    assert any(said in problem and advice in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("keys", "alike", "momentum"),
    [
        ({"gossip": "complete"}, False, False),
        ({"average_every": 1}, True, False),
        ({"average_every": 1, "servers": 1}, True, False),
    ],
)
def test_replicas_with_other_numbers_of_losses_are_exact_only_where_they_are_weighted(
    keys: dict[str, Any], alike: bool, momentum: bool
) -> None:
    """Gossip weights no replica; an average weights it by its losses of the round, its momentum has those of others."""
    for rate, expected in ((0.0, alike), (0.9, momentum)):
        words = {"optimizer.kind": "sgd", "optimizer.max_grad_norm": 0.0, "optimizer.momentum": rate}
        layout = {"parallel.dp_replicate": 2, **{f"parallel.{key}": keys[key] for key in keys}}
        plan = planned({**words, **layout}, 2 + keys.get("servers", 0))
        other = replace(plan, task=replace(plan.task, equal_losses=False))
        exact, others = (all(strategy.exact(one) for strategy in active(one)) for one in (plan, other))
        assert (exact, others) == (True, expected)


# runs


@pytest.fixture
def project(tmp_path: Path) -> Path:
    make_project(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.gossip=push-sum", "train.global_batch_size=9"),
        ("parallel.gossip=ring", "parallel.wire=int8", "parallel.wire_from=3", "train.global_batch_size=9"),
    ],
)
def test_stop_and_resume_is_bitwise(project: Path, forker: Forker, words: tuple[str, ...]) -> None:
    """A stop that one rank is asked for at step 3 reaches all where they agree: after step 5."""
    words = (*words, "train.num_steps=15", "train.eval_every=5", "model.dropout=0.1", "parallel.agree_every=5")
    whole = forker.train(project, "whole", 3, *words)
    done = forker.run(project, 3, [*words, "run.name=stopped"], fault="asked_to_stop 3")
    assert set(done.codes) == {128 + 15}, done.said
    stopped = forker.train(project, "stopped", 3, *words, resume=True)
    assert [event["step"] for event in stopped.read_events() if event["kind"] == "stop"] == [5]
    assert losses(stopped) == losses(whole)
    for column in ("val_loss", "grad_norm", "consensus"):
        assert [row[column] for row in stopped.read_metrics()] == [row[column] for row in whole.read_metrics()]
    agreed = [row["step"] for row in whole.read_metrics() if row["consensus"] is not None]
    assert agreed == [5, 10, 15]
    assert all(row["consensus"] > 0 for row in whole.read_metrics() if row["consensus"] is not None)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_walk_of_ranks_sends_the_bytes_of_the_plan(graph: str) -> None:
    plan = plan_of(gossip(graph, 4, "fp32", gossip_every=2, agree_every=4))
    found = walk(plan, lambda rank, at: 0.01 * (at.verb is Verb.FORWARD), of_links(Link(1e6, 1e-3)))
    mean = sum(plan.sent_bytes(0, number) for number in range(4)) / 4
    for rank in found.ranks:
        assert rank.busy_s == pytest.approx(0.01)
        # The weight of push-sum travels with the weights.
        assert rank.sent_bytes == pytest.approx(mean, abs=8)
    assert found.step_s > 0.01 + plan.sent_bytes(0, 1) / 2 / 1e6


@pytest.mark.parametrize("ranks", [8, 64])
def test_many_ranks_issue_what_is_declared(tmp_path: Path, forker: Forker, ranks: int) -> None:
    cases = {graph: gossip(graph, ranks, "fp32", agree_every=1) for graph in GRAPHS}
    for wire in ("int8", "topk:0.05"):
        cases[f"complete {wire}"] = gossip("complete", ranks, "fp32", wire=wire, agree_every=1)
    (found,) = forker.call("declared_ranks:on_fake_ranks", tmp_path, cases=cases)
    for name, answers in found.items():
        plan = plan_of(cases[name])
        for rank, answer in answers.items():
            assert "failed" not in answer, answer["failed"]
            check_issued(plan, int(rank), answer["issued"])
