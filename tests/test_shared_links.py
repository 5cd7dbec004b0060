"""In: plans whose messages of several kinds cross one link at a time. Out: each has its share of the link, none all.
Does not test what a collective takes by itself: test_price.py does."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
from test_price import CLUSTER, CURVED, DEVICE, IDEAL, plan_of

from codescent.clusters.by_links import of_links
from codescent.clusters.cluster import Cluster
from codescent.clusters.link import Link
from codescent.cost.collective_time import BETWEEN, INSIDE, seconds
from codescent.cost.device_time import Spent
from codescent.cost.events import Clock
from codescent.cost.network import Network
from codescent.cost.price import StageCosts, price
from codescent.cost.stage_time import DepthMessages, StageTime
from codescent.cost.transfers import transfers
from codescent.plan import SENDS, Collective, Instruction, Mesh, Plan, Traffic, Verb

AT_ONCE = dataclasses.replace(DEVICE, memory_bytes_per_s=1e30, peaks={"fp32": 1e30, "bf16": 1e30})
"""Computes in no time: messages take all of it."""


def on_link(plan: Plan, cluster: Cluster) -> dict[str, float]:
    """By link: seconds of all that the first rank sends in a step, message after message."""
    sent_s: dict[str, float] = defaultdict(float)
    for record in plan.traffic:
        if record.verb not in SENDS:
            link, each_s = seconds(record, plan.mesh, 0, cluster, IDEAL)
            sent_s[link] += record.times * each_s
    return sent_s


@pytest.mark.parametrize("layers", [{"tp": 2}, {"cp": 2}, {"cp": 2, "context": "all-gather"}, {"tp": 2, "cp": 2}])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_link_carries_no_more_than_its_rate(layers: dict[str, Any], zero_stage: int) -> None:
    """Weights, gradients and sums of layers that cross one link at a time, each as if it had the link alone."""
    cluster = dataclasses.replace(CLUSTER, device=AT_ONCE, devices=8, inside=Link(1e6))
    plan = plan_of(8 if len(layers) == 2 and "tp" in layers else 4, dp_shard=2, zero_stage=zero_stage, **layers)
    found, sent_s = price(plan, cluster, IDEAL), on_link(plan, cluster)[INSIDE]
    assert found.step_s == pytest.approx(sent_s, rel=1e-6)


def one_depth(cluster: Cluster, computes_s: float, gathered: dict[str, float], **layer: dict[str, float]) -> float:
    """Seconds of a forward pass in which one depth computes, while the weights of the next one are gathered."""
    time = StageTime(plan_of(), 0, cluster, IDEAL)
    depths = [depth for chunk in time.chunks for depth in chunk]
    time.spent = {depth: (Spent(0.0, 0.0, computes_s * (depth == 1)),) * 2 for depth in depths}
    time.always.clear()
    time.always[0, 1], time.always[0, 2] = DepthMessages(**layer), DepthMessages(before=gathered)
    return time.parts_of(Instruction(Verb.FORWARD, 1)).total_s


@pytest.mark.parametrize(
    ("gathered", "kind", "expected"),
    [
        ({INSIDE: 1.0}, "within", 2.5),  # they meet for half of the gather, in which the sum has half of the link
        ({BETWEEN: 1.0}, "within", 2.0),  # on another link
        ({INSIDE: 4.0}, "within", 5.0),  # the link is busy from the begin to the end
        ({INSIDE: 0.5}, "beside", 1.5),  # both have half of the link for a second
        ({INSIDE: 3.0}, "beside", 4.0),
        ({BETWEEN: 0.5}, "beside", 1.0),
    ],
)
def test_messages_of_a_layer_share_a_link_with_the_weights_that_follow(
    gathered: dict[str, float], kind: str, expected: float
) -> None:
    """A second of computing and a second of messages; a queue that others do not delay, or that delays all of them."""
    assert one_depth(CLUSTER, 1.0, gathered, **{kind: {INSIDE: 1.0}}) == pytest.approx(expected)


def test_messages_between_stages_share_a_link_with_the_collectives_of_their_stage() -> None:
    """Sums that cross nodes and leave all of the card to activations; activations that delay sums on another link."""
    crossed = dataclasses.replace(CLUSTER, device=AT_ONCE, devices=1, cards=1, between=Link(1e6))
    plan = plan_of(4, batch=8, pp=2, tp=2)
    alone = transfers(plan.traffic, plan.mesh, crossed, IDEAL)
    costs = StageCosts(plan, crossed, IDEAL)
    assert costs.messages_s == pytest.approx([2.0 * one.seconds for one in alone]), "sums are there all the time"
    stage, at = costs.stages[0], Instruction(Verb.FORWARD, 1)
    shared_s = costs.parts_of((0, Verb.FORWARD, 0, False), at).between_s - stage.parts_of(at).between_s
    assert shared_s == pytest.approx(alone[0].seconds)
    inside = dataclasses.replace(crossed, devices=2, inside=Link(1e6))  # sums stay inside of nodes
    apart = transfers(plan.traffic, plan.mesh, inside, IDEAL)
    costs = StageCosts(plan, inside, IDEAL)
    assert costs.messages_s == pytest.approx([one.seconds for one in apart])
    assert costs.parts_of((0, Verb.FORWARD, 0, False), at) == costs.stages[0].parts_of(at)
    found = price(plan, crossed, IDEAL)
    assert found.simulate().makespan_s == pytest.approx(found.step_s)


def network_of(ranks: int, cluster: Cluster) -> tuple[Clock, Network]:
    clock = Clock()
    return clock, Network(clock, cluster, [rank // cluster.devices for rank in range(ranks)])


@pytest.mark.parametrize("size", [500.0, 1e4, 1e6, 2e7])
def test_messages_of_simulated_ranks_take_what_the_curve_of_their_link_says(size: float) -> None:
    """A simulation with the bandwidth alone; pieces that are as slow as small messages."""
    clock, network = network_of(3, of_links(CURVED))
    alone = network.send(0, 1, size)
    clock.run()
    assert alone.at_s == pytest.approx(CURVED.seconds(size))
    clock, network = network_of(3, of_links(CURVED))
    small = size / 4
    together = [network.share(0, 1, size), network.share(0, 2, small, size)]
    clock.run()
    ends = [one.at_s or 0.0 for one in together]
    both_s = CURVED.moved_s(size) + CURVED.moved_s(small)
    assert max(ends) == pytest.approx(both_s + CURVED.latency_s, rel=1e-3)
    assert network.cards[0].sending_s == pytest.approx(both_s)


def test_copies_of_simulated_ranks_take_the_curve_of_their_bus() -> None:
    """Offloaded state that is copied as if each copy were large."""
    clock, network = network_of(1, dataclasses.replace(of_links(CURVED), bus=CURVED))
    copied = network.copy(0, 1e5)
    clock.run()
    assert copied.at_s == pytest.approx(CURVED.seconds(1e5))


@pytest.mark.parametrize(
    ("mesh", "axis", "collective"),
    [
        (Mesh(tp=4), "tp", Collective.ALL_REDUCE),
        (Mesh(tp=4), "tp", Collective.ALL_TO_ALL),
        (Mesh(dp_shard=8), "dp_shard", Collective.ALL_GATHER),  # two nodes: a ring over both cards
    ],
)
def test_a_collective_of_simulated_ranks_takes_the_curve_that_its_price_takes(
    mesh: Mesh, axis: str, collective: Collective
) -> None:
    """A curve that is read at another size of message; a reached link whose curve is still that of the data sheet."""
    reached = dataclasses.replace(IDEAL, inside_efficiency=0.5, between_efficiency=0.5, hop_s=2e-5)
    cluster = dataclasses.replace(CLUSTER, inside=CURVED, between=CURVED)
    size = mesh.degree(axis) * 5 * 10**6  # at half of the rate a message of 5e6 is one of 1e7
    record = Traffic(collective, axis, size, "fp32", Verb.REDUCE, None, "gradients")
    clock, network = network_of(mesh.world_size, cluster.reached(reached))
    done = [network.join(rank, mesh.group(axis, rank), record) for rank in range(mesh.world_size)]
    clock.run()
    expected_s = seconds(record, mesh, 0, cluster, reached)[1]
    at_once = 1 if collective is Collective.ALL_TO_ALL else 0  # its messages leave at once: they have one latency
    expected_s -= at_once * (mesh.degree(axis) - 2) * (CURVED.latency_s + reached.hop_s)
    assert max(one.at_s or 0.0 for one in done) == pytest.approx(expected_s)


def test_each_message_to_each_other_rank_has_its_own_size() -> None:
    """gloo scatters sums by messages: their bytes together are as fast as one large message."""
    clock, network = network_of(4, of_links(CURVED))
    record = Traffic(Collective.REDUCE_SCATTER, "dp_shard", 4 * 10**5, "fp32", Verb.REDUCE, None, "gradients")
    done = [network.join(rank, (0, 1, 2, 3), record, times=2.0) for rank in range(4)]
    clock.run()
    assert done[0].at_s == pytest.approx(2 * (3 * CURVED.moved_s(1e5) + CURVED.latency_s))
