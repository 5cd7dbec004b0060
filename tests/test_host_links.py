"""In: plans, hosts with links of their own. Out: the ranks' walk has the times of closed forms.
Does not test the options of the command line: test_plan_link does."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codescent.build import build
from codescent.clusters.by_links import of_links
from codescent.clusters.cluster import Cluster, ClusterDevice, Software
from codescent.clusters.link import Link
from codescent.config.load import load
from codescent.cost.arithmetic import arithmetic
from codescent.cost.collective_time import seconds
from codescent.cost.events import Clock, Event, Process
from codescent.cost.network import OVER_GLOO, OVER_NCCL, Network, around_s
from codescent.cost.ranks_walk import walk
from codescent.cost.walked import Walk
from codescent.plan import Collective, Mesh, Plan, Traffic, Verb
from codescent.planner.period import KEEP, least_period

RATE, COMPUTE_S = 6.12e6, 0.3
GRADIENTS = 497_759_232
"""Bytes of GPT-2 124M in fp32."""
SCALARS = 40
"""Bytes of what all ranks sum after an average."""
AVERAGE = "parallel.average_every=1"
COMMON = Link(RATE)


@cache
def plan(ranks: int, *words: str) -> Plan:
    """A plan with 12 samples, if nothing else is said."""
    fixed = ("train.precision=fp32", "train.microbatch_size=1", "train.eval_every=0", "checkpoint.every=0")
    sizes = ("train.global_batch_size=12", "data.seq_len=16", "train.num_steps=840000")
    return build(load("gpt2_124m", [*fixed, *sizes, *words]).config, None, ranks)


def walked(of: Plan, links: Link | Cluster, devices: int = 1) -> Walk:
    cluster = links if isinstance(links, Cluster) else of_links(links)
    return walk(of, arithmetic(of, COMPUTE_S), replace(cluster, devices=devices))


def test_two_hosts_exchange_at_the_rate_of_the_slower_and_the_mean_latency() -> None:
    links = of_links(Link(RATE, 0.01), {1: Link(RATE / 4, 0.05)})
    sent_s = (GRADIENTS + SCALARS) / (RATE / 4)
    latency_s = 2 * 2 * 0.03  # of two sums, two messages each
    found = walked(plan(2, AVERAGE), links)
    assert found.step_s == pytest.approx(COMPUTE_S + sent_s + latency_s)
    assert walked(plan(2, AVERAGE), of_links(links.hosts[1], {1: links.between})).step_s == pytest.approx(found.step_s)


@pytest.mark.parametrize(("ranks", "slow"), [(3, 0), (4, 2), (4, 3)])
def test_all_ranks_of_a_ring_wait_for_one_slow_link(ranks: int, slow: int) -> None:
    links = of_links(COMMON, {slow: Link(RATE / 5)})
    found = walked(plan(ranks, AVERAGE), links)
    sent_s = 2 * (ranks - 1) / ranks * (GRADIENTS + SCALARS) / (RATE / 5)
    assert [rank.step_s for rank in found.ranks] == pytest.approx([COMPUTE_S + sent_s] * ranks)


def test_a_gather_waits_for_one_slow_link() -> None:
    """Pieces of coded messages, too: at the slow rate, with the latencies on the way of a message."""
    of = plan(4, AVERAGE, "parallel.wire=int8")
    slow = Link(RATE / 5)
    one, all_slow = walked(of, of_links(COMMON, {1: slow})), walked(of, slow)
    assert one.step_s == pytest.approx(all_slow.step_s)
    assert one.step_s > 3 * walked(of, COMMON).step_s


def test_the_latency_of_a_ring_is_that_of_its_messages_one_after_the_other() -> None:
    assert around_s([1.0, 1.0, 1.0, 1.0], 6) == 6.0
    assert around_s([1.0, 10.0, 10.0, 1.0], 6) == 22.0 + 20.0
    assert around_s([10.0, 1.0, 1.0, 10.0], 3) == 21.0
    assert around_s([1.0, 5.0], 1) == 5.0
    links = of_links(Link(math.inf, 0.002), {2: Link(math.inf, 0.038)})  # 2 ms, or 20 ms to and from host 2
    found = walked(plan(4, AVERAGE), links)
    assert found.step_s == pytest.approx(COMPUTE_S + 2 * (0.044 + 0.040))  # two sums, six messages


def test_ranks_of_a_host_share_the_link_of_their_host() -> None:
    links = of_links(COMMON, {1: Link(RATE / 5)})
    found = walked(plan(4, AVERAGE), links, devices=2)
    assert found.step_s == pytest.approx(COMPUTE_S + 1.5 * (GRADIENTS + SCALARS) / (RATE / 5))


def test_the_least_period_is_that_of_the_slowest_link() -> None:
    of = plan(4, AVERAGE)
    links = of_links(COMMON, {2: Link(RATE / 5)})
    exchange_s = 1.5 * (GRADIENTS + SCALARS) / (RATE / 5)
    least = least_period(of, arithmetic(of, COMPUTE_S), links)
    assert least == math.ceil(KEEP * exchange_s / ((1 - KEEP) * COMPUTE_S))


def served(*words: str) -> tuple[Plan, float]:
    """A plan with three workers and a server, and the bytes of a push and a pull."""
    of = plan(4, "parallel.servers=1", *words)
    return of, float(sum(t.payload_bytes for t in of.traffic if t.collective in (Collective.PUSH, Collective.PULL)))


def test_a_server_with_a_fast_link_serves_all_workers_at_the_same_time() -> None:
    of, size = served()
    found = walked(of, of_links(COMMON, {3: Link(100 * RATE)}))
    assert found.step_s == pytest.approx(COMPUTE_S + size / RATE, rel=0.03)
    assert found.servers[0] < 0.03
    slow = walked(of, of_links(COMMON, {3: Link(100 * RATE), 1: Link(RATE / 10)}))
    assert slow.step_s == pytest.approx(COMPUTE_S + size / (RATE / 10), rel=0.03)


def test_a_worker_with_a_slow_link_does_not_hold_the_servers_card() -> None:
    of, size = served("parallel.updates=asynchronous")
    found = walked(of, of_links(COMMON, {3: Link(100 * RATE), 1: Link(RATE / 10)}))
    fast_s, slow_s = COMPUTE_S + size / RATE, COMPUTE_S + size / (RATE / 10)
    assert [found.ranks[rank].step_s for rank in (0, 2)] == pytest.approx([fast_s] * 2, rel=0.03)
    assert found.ranks[1].step_s == pytest.approx(slow_s, rel=0.03)


def test_a_server_with_a_slow_link_is_the_bound() -> None:
    of, size = served()
    found = walked(of, of_links(COMMON, {3: Link(RATE / 10)}))
    assert found.step_s == pytest.approx(COMPUTE_S + 3 * size / (RATE / 10), rel=0.03)
    assert found.servers[0] == pytest.approx(0.5, rel=0.05)  # it receives, then it sends


def test_a_fast_card_has_time_for_others_while_a_slow_one_is_busy() -> None:
    clock = Clock()
    links = of_links(Link(100.0, 1.0), {0: Link(10.0, 3.0)})
    network = Network(clock, links, hosts=range(3))
    slow, fast = network.send(0, 2, 100.0), network.send(1, 2, 100.0)
    clock.run()
    assert (slow.at_s, fast.at_s) == (10.0 + 2.0, 1.0 + 1.0 + 1.0)
    assert (network.cards[0].sending_s, network.cards[2].receiving_s) == (10.0, 2.0)
    assert (network.latency_s(0, 2), network.latency_s(1, 2)) == (2.0, 1.0)


def test_a_message_in_pieces_goes_on_when_a_whole_message_has_left() -> None:
    clock = Clock()
    network = Network(clock, of_links(Link(100.0)), hosts=range(3))
    whole, pieces = network.send(0, 2, 1000.0), network.share(1, 2, 100.0)
    clock.run()
    assert whole.at_s == 10.0
    assert pieces.at_s == pytest.approx(11.0)


@pytest.mark.parametrize("hosts", [2, 3, 9, 30])
def test_a_card_is_shared_fairly_and_never_idle_while_messages_wait(hosts: int) -> None:
    clock = Clock()
    network = Network(clock, of_links(Link(100.0)), range(hosts))
    arrivals = [network.share(one, 0, 100.0) for one in range(1, hosts)]
    arrivals += [network.share(0, one, 100.0) for one in range(1, hosts)]
    clock.run()
    assert clock.now_s == pytest.approx(hosts - 1)
    ends_s = [arrived.at_s for arrived in arrivals if arrived.at_s is not None]
    assert len(ends_s) == 2 * (hosts - 1)
    assert min(ends_s) > 0.75 * (hosts - 1)  # all share the card to the end; the last piece alone is in turns


def test_a_small_message_gets_its_share_of_the_bytes_beside_large_ones() -> None:
    """Three connections into a card: the small message is there when each has brought so many bytes."""
    clock = Clock()
    network = Network(clock, of_links(Link(100.0)), range(4))
    *large, small = (network.share(one, 0, size, 1600.0) for one, size in ((2, 1600.0), (3, 1600.0), (1, 200.0)))
    clock.run()
    assert small.at_s == pytest.approx(3 * 200.0 / 100.0, abs=0.01)
    assert [arrived.at_s for arrived in large] == pytest.approx([34.0, 34.0], abs=1.01)


@pytest.mark.parametrize(("rate", "payload_bytes"), [(100.0, 0.0), (1e18, 1e5)])
def test_pieces_that_take_no_time_all_arrive(rate: float, payload_bytes: float) -> None:
    clock = Clock()
    network = Network(clock, of_links(Link(rate), {1: Link(100.0)}), range(5))
    clock.now_s = 100.0
    arrivals = [network.share(1, 0, 100.0), *(network.share(one, 0, payload_bytes) for one in (2, 3, 4))]
    clock.run()
    assert all(arrived.at_s is not None for arrived in arrivals)


@pytest.mark.parametrize("hosts", [3, 8, 24])
def test_where_all_send_to_all_each_card_is_nearly_always_busy(hosts: int) -> None:
    clock = Clock()
    network = Network(clock, of_links(Link(100.0)), range(hosts))
    for one in range(hosts):
        for further in range(1, hosts):
            network.share(one, (one + further) % hosts, 100.0)
    clock.run()
    assert hosts - 1 <= clock.now_s < 1.15 * (hosts - 1)


@pytest.mark.parametrize("slower", [2, 3, 10])
def test_neighbours_of_gossip_wait_for_a_slow_link(slower: int) -> None:
    """Each host sends to two neighbours, and receives from both; the messages share the cards."""
    of = plan(4, "parallel.gossip=ring")
    one, all_slow = walked(of, of_links(COMMON, {0: Link(RATE / slower)})), walked(of, Link(RATE / slower))
    assert one.step_s == pytest.approx(all_slow.step_s, rel=0.03)


def test_exchanges_of_gossip_go_on_behind_collectives_of_the_same_card() -> None:
    """Sums of tensor parallelism over hosts are whole messages, exchanges are in pieces."""
    of = plan(6, "parallel.tp=2", "parallel.gossip=pairs")
    found = walk(of, arithmetic(of, COMPUTE_S), of_links(COMMON), rounds=2)
    assert found.step_s > COMPUTE_S + min(rank.sent_bytes for rank in found.ranks) / RATE


RATES = st.floats(1, 1000)


@settings(deadline=None)
@given(
    rates=st.lists(RATES, min_size=4, max_size=4),
    messages=st.lists(
        st.tuples(st.floats(0, 3), st.permutations(range(4)), st.floats(1, 1e3), st.booleans()), min_size=1, max_size=6
    ),
)
def test_every_message_arrives_and_no_card_carries_more_than_its_rate(rates: list[float], messages: list) -> None:
    clock = Clock()
    network = Network(clock, of_links(COMMON, {host: Link(rate) for host, rate in enumerate(rates)}), hosts=range(4))
    arrivals: list[Event] = []

    def sent(after_s: float, ranks: list[int], size: float, *, whole: bool) -> Process:
        yield after_s
        arrivals.append((network.send if whole else network.share)(ranks[0], ranks[1], size))

    for after_s, ranks, size, whole in messages:
        clock.start(sent(after_s, ranks, size, whole=whole))
    clock.run()
    assert all(arrived.at_s is not None for arrived in arrivals)
    assert len(arrivals) == len(messages)
    for host, rate in enumerate(rates):
        out = sum(size for _, ranks, size, _ in messages if ranks[0] == host)
        assert network.cards[host].sending_s == pytest.approx(out / rate)
        assert network.cards[host].sending_s <= clock.now_s * (1 + 1e-9)


CASES = st.fixed_dictionaries(
    {
        "words": st.sampled_from(
            (
                (),
                (AVERAGE, "parallel.wire=int8"),
                ("parallel.average_every=6", "parallel.fragments=3", "parallel.overlap_steps=3", "parallel.wire=int4"),
            )
        ),
        "rate": st.floats(1e5, 1e9),
        "latency_s": st.floats(0, 0.1),
        "slower": st.floats(1, 20),
        "host": st.integers(0, 3),
    }
)


@settings(deadline=None, max_examples=30)
@given(CASES)
def test_one_slow_link_costs_at_most_what_slow_links_of_all_cost(case: dict) -> None:
    of, host = plan(4, *case["words"]), case["host"]
    fast = Link(case["rate"], case["latency_s"])
    slow = Link(case["rate"] / case["slower"], case["latency_s"] * case["slower"])
    equal = walked(of, fast)
    assert walked(of, of_links(fast, {host: fast})) == equal
    one, all_slow = walked(of, of_links(fast, {host: slow})), walked(of, slow)
    assert equal.step_s * (1 - 1e-6) <= one.step_s <= all_slow.step_s * (1 + 1e-6)


def test_a_collective_leaves_time_of_the_fast_cards() -> None:
    """While a ring waits for its slow link, two other hosts exchange at full speed."""
    clock = Clock()
    network = Network(clock, of_links(Link(100.0), {0: Link(10.0)}), hosts=range(3))
    record = Traffic(Collective.ALL_REDUCE, "dp_replicate", 90, "fp32", Verb.AVERAGE, None, "weights")
    done = [network.join(rank, (0, 1, 2), record) for rank in range(3)]
    beside: list[Event] = []

    def later() -> Process:
        yield 0.5
        beside.append(network.send(1, 2, 100.0))

    clock.start(later())
    clock.run()
    assert done[0].at_s == pytest.approx(120 / 10.0)
    assert beside[0].at_s == pytest.approx(120 / 100.0 + 1.0)


@pytest.mark.parametrize(
    ("collective", "kind", "leaves"),
    [
        (Collective.REDUCE_SCATTER, "cpu", 400),  # 2 ranks send a quarter of it to each of 2 others
        (Collective.REDUCE_SCATTER, "cuda", 300),  # one rank sends 3/4 of it to the next host
        (Collective.ALL_TO_ALL, "cpu", 400),
        (Collective.ALL_TO_ALL, "cuda", 400),
        (Collective.ALL_GATHER, "cpu", 300),
        (Collective.ALL_REDUCE, "cpu", 600),
    ],
)
def test_what_leaves_a_host_of_two_ranks_is_what_the_backend_sends(
    collective: Collective, kind: str, leaves: int
) -> None:
    """2 hosts of 2 ranks, a payload of 400 bytes. CUDA has NCCL, a CPU gloo."""
    to_each = OVER_NCCL if kind == "cuda" else OVER_GLOO
    clock, group = Clock(), (0, 1, 2, 3)
    network = Network(clock, of_links(Link(100.0, 1.0), kind=kind), hosts=[0, 0, 1, 1])
    record = Traffic(collective, "dp_shard", 400, "fp32", Verb.REDUCE, None, "gradients")
    done = [network.join(rank, group, record) for rank in group]
    clock.run()
    assert [card.sending_s * 100.0 for card in network.cards.values()] == [leaves, leaves]
    rounds = {Collective.ALL_REDUCE: 6}.get(collective, 1 if collective in to_each else 3)
    assert done[0].at_s == pytest.approx(leaves / 100.0 + (rounds + 1) // 2)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("mesh", "axis", "collective"),
    [
        (Mesh(tp=4), "tp", Collective.ALL_REDUCE),
        (Mesh(dp_replicate=8), "dp_replicate", Collective.ALL_REDUCE),  # two nodes: a ring over both cards
        (Mesh(dp_replicate=8), "dp_replicate", Collective.ALL_GATHER),
        (Mesh(dp_replicate=2, tp=4), "dp_replicate", Collective.ALL_REDUCE),  # each of four rings has half of a card
    ],
)
def test_a_walk_and_a_price_say_the_same_of_a_collective(
    mesh: Mesh, axis: str, collective: Collective, shares: bool
) -> None:
    """Cards, or links inside of a node, that one of both gives to each group, and the other divides."""
    device = ClusterDevice("gpu", "cuda", 1, 1.0, {})
    cluster = Cluster("lab", "", device, 4, 2, Link(1e11), Link(1e9), Link(1e10), shares_inside=shares)
    record = Traffic(collective, axis, 8 * 10**9, "fp32", Verb.REDUCE, None, "gradients")
    clock = Clock()
    network = Network(clock, cluster, [rank // cluster.devices for rank in range(mesh.world_size)])
    done = [network.join(rank, mesh.group(axis, rank), record) for rank in range(mesh.world_size)]
    clock.run()
    nothing = Software(inside_efficiency=1.0, between_efficiency=1.0, collective_s=0.0, hop_s=0.0)
    _, expected_s = seconds(record, mesh, 0, cluster, nothing)
    assert max(one.at_s or math.nan for one in done) == pytest.approx(expected_s)


def test_a_message_has_one_of_several_cards() -> None:
    """A send that is as fast as all cards of a node together, or one that keeps the others from sending."""
    device = ClusterDevice("gpu", "cuda", 1, 1.0, {})
    cluster = Cluster("lab", "", device, 4, 4, Link(1e11), Link(100.0), Link(1e10))
    clock = Clock()
    network = Network(clock, cluster, [rank // 4 for rank in range(8)])
    alone = network.send(0, 4, 100.0)
    clock.run()
    assert alone.at_s == pytest.approx(1.0)
    together = [network.send(rank, rank + 4, 100.0) for rank in range(4)]
    clock.run()
    assert [one.at_s for one in together] == pytest.approx([2.0] * 4)
    copied = network.copy(0, 1e10)
    clock.run()
    assert copied.at_s == pytest.approx(2.0 + 1.0)
