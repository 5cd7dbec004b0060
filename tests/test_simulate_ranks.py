"""In: plans, seconds of arithmetic, links. Out: the ranks' walk has the times and bytes of closed forms.
Does not measure: benchmarks/slow_network.py compares it with machines."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import called

from codescent.clusters.by_links import of_links
from codescent.clusters.cluster import Cluster
from codescent.clusters.link import Link
from codescent.config.load import load
from codescent.cost.amounts import phases
from codescent.cost.arithmetic import arithmetic, arithmetic_s
from codescent.cost.coding import Coding, around
from codescent.cost.events import Clock, Process
from codescent.cost.lengths import lengths
from codescent.cost.memory import kept_kinds, wire_bytes
from codescent.cost.network import Network
from codescent.cost.ranks_walk import walk
from codescent.cost.simulate import Costs, Deadlock, simulate
from codescent.cost.walked import RankMeans, Walk, mean_step_s
from codescent.plan import SENDS, Collective, Plan, Traffic, Verb
from codescent.plan.state import kept_bytes
from codescent.planner.period import KEEP, least_period, with_period
from codescent.preflight import plan_of

GRADIENTS = 497_759_232
"""Bytes of GPT-2 124M in fp32."""
FAST = of_links(Link(math.inf))
FP32 = (
    "train.precision=fp32",
    "train.microbatch_size=1",
    "train.eval_every=0",
    "checkpoint.every=0",
    "train.num_steps=840000",
    "train.compile=none",
)
FROM = ("parallel.wire_from=1000",)
FORMS = ("none", "bf16", "int8", "int4", "sign", "powersgd:2", "topk:0.01")


@cache
def plan(ranks: int, *words: str) -> Plan:
    """A plan with as many samples as ranks, if nothing else is said."""
    size = () if any("batch_size" in word for word in words) else (f"train.global_batch_size={ranks}",)
    return plan_of(load("gpt2_124m", [*FP32, *size, *words]).config, ranks)


def walked(
    of: Plan, compute_s: float, cluster: Cluster, slow: dict[int, float] | None = None, devices: int = 1
) -> Walk:
    return walk(of, arithmetic(of, compute_s, slow), replace(cluster, devices=devices))


@pytest.mark.parametrize(("ranks", "reduction_s"), [(2, 81.2), (4, 121.9)])
def test_the_lab_is_reproduced(ranks: int, reduction_s: float) -> None:
    """Two ranks send a payload once, four 3/2 of it; nearly nothing of it hides behind 0.2 s of backward."""
    found = walked(plan(ranks), 0.3, of_links(Link(6.12e6)))
    exact = 0.1 + (2 * (ranks - 1) / ranks * (GRADIENTS + 24)) / 6.12e6  # gradients and three scalars; forward
    assert found.step_s == pytest.approx(exact, rel=1e-9)
    assert found.step_s == pytest.approx(reduction_s + 0.3, rel=0.005)
    assert found.tokens_per_s == pytest.approx(1024 * ranks / exact, rel=1e-9)
    assert found.ranks[0].waits_s == pytest.approx(exact - 0.3, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_signs_every_16_steps_are_50_times_faster_than_ddp_in_the_lab(ranks: int) -> None:
    """With 64 tokens of a rank. Coding takes time too: it is not measured here, and bounded by the memory."""
    lab = ("--ranks", str(ranks), "--link", "49mbit,0.2ms", "--compute-s", "0.3")
    sizes = ("data.seq_len=64", f"train.global_batch_size={ranks}")

    def tokens_per_s(*words: str) -> float:
        done = called(Path(), "plan", "gpt2_124m", *FP32, *sizes, *words, *lab)
        assert done.returncode == 0, done.stderr
        found = re.search(r"^  step .*: ([0-9,.]+) tokens/s$", done.stdout, re.MULTILINE)
        assert found is not None, done.stdout
        return float(found[1].replace(",", ""))

    ddp = tokens_per_s()
    assert ddp == pytest.approx(64 * ranks / {2: 81.5, 4: 122.2}[ranks], rel=0.005)
    assert tokens_per_s("parallel.average_every=16", "parallel.wire=sign") >= 50 * ddp


def test_latency_counts_each_message_of_a_ring_once() -> None:
    of = plan(4)
    collectives = sum(record.times for record in of.traffic)
    slow, fast = (walked(of, 0.3, of_links(Link(6.12e6, latency))) for latency in (0.01, 0.0))
    assert slow.step_s - fast.step_s == pytest.approx(collectives * 2 * 3 * 0.01)


@pytest.mark.parametrize("every", [1, 10, 100])
def test_averaging_every_n_steps_divides_the_bytes_by_n(every: int) -> None:
    found = walked(plan(4, f"parallel.average_every={every}"), 0.3, of_links(Link(6.12e6)))
    sent = 1.5 * (GRADIENTS + 5 * 8)
    assert found.ranks[0].sent_bytes == pytest.approx(sent / every)
    assert found.ranks[0].worst_bytes == sent
    assert found.step_s == pytest.approx(0.3 + sent / 6.12e6 / every)
    assert wire_bytes(plan(4, f"parallel.average_every={every}")) == pytest.approx(sent / every)


@pytest.mark.parametrize("overlap", [0, 1, 30, 90])
def test_an_overlap_hides_as_much_as_its_steps_compute(overlap: int) -> None:
    of = plan(2, "parallel.average_every=100", f"parallel.overlap_steps={overlap}")
    found, sent_s, scalars_s = walked(of, 1.0, of_links(Link(6.12e6))), GRADIENTS / 6.12e6, 40 / 6.12e6
    assert found.ranks[0].waits_s * 100 == pytest.approx(max(0.0, sent_s - overlap) + scalars_s)


@pytest.mark.parametrize(
    "words", [(), ("parallel.average_every=8", "parallel.fragments=4", "parallel.overlap_steps=2")]
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_format_sends_what_its_traffic_declares(ranks: int, form: str, words: tuple[str, ...]) -> None:
    of = plan(ranks, f"parallel.wire={form}", *words)
    period = of.schedule.period
    declared = [of.sent_bytes(0, number) for number in range(10 * period, 11 * period)]
    found = walked(of, 0.3, of_links(Link(6.12e6)))
    for rank in found.ranks:
        assert rank.sent_bytes == pytest.approx(sum(declared) / period)
        assert rank.worst_bytes == pytest.approx(max(declared))
    assert wire_bytes(of) == pytest.approx(sum(declared) / period)


LAYOUTS = (
    ("parallel.pp=2", "parallel.dp_replicate=2", "train.global_batch_size=8"),
    ("parallel.dp_shard=4",),
    ("parallel.dp_shard=2", "parallel.dp_replicate=2", "parallel.average_every=4"),
    ("parallel.tp=2", "parallel.cp=2", "train.global_batch_size=2"),
    ("parallel.pp=4", "parallel.schedule=interleaved", "parallel.virtual_stages=3", "train.global_batch_size=8"),
    ("parallel.pp=2", "parallel.schedule=zero-bubble", "parallel.dp_replicate=2", "parallel.average_every=3"),
)


@pytest.mark.parametrize("words", LAYOUTS)
def test_every_layout_sends_what_its_traffic_declares(words: tuple[str, ...]) -> None:
    of = plan(4, *words)
    period = of.schedule.period
    found = walked(of, 0.3, of_links(Link(6.12e6, 1e-3)))
    for number, rank in enumerate(found.ranks):
        declared = [of.sent_bytes(number, step) for step in range(period)]
        assert rank.sent_bytes == pytest.approx(sum(declared) / period)
        assert rank.worst_bytes == pytest.approx(max(declared))
        assert rank.busy_s <= 0.3 + 1e-9
    assert max(rank.busy_s for rank in found.ranks) == pytest.approx(0.3)


ROUNDS = "parallel.average_every=12"
SHORT = {
    "rounds": (ROUNDS,),
    "int4, fragments under way": (ROUNDS, "parallel.fragments=3", "parallel.overlap_steps=4", "parallel.wire=int4"),
    "nesterov after an opening": (ROUNDS, "parallel.outer_optimizer=nesterov", "parallel.synchronous_steps=24"),
    "replicas of two ranks": (ROUNDS, "parallel.dp_replicate=2", "parallel.tp=2"),
    "replicas of two stages": (ROUNDS, "parallel.dp_replicate=2", "parallel.pp=2", "train.global_batch_size=4"),
    "gossip": ("parallel.gossip=pairs", "parallel.gossip_every=12", "parallel.agree_every=24"),
    "sums in each step": (),
}


@pytest.mark.parametrize("case", SHORT)
@pytest.mark.parametrize("cores", [None, 2.5])
def test_without_a_timeline_steps_without_exchanges_are_one_and_take_as_long(case: str, cores: float | None) -> None:
    of = plan(4, *SHORT[case])
    seconds, coding = arithmetic(of, 0.3, {1: 1.5}), Coding.of_memory(of, 1e9)
    long, short = (
        walk(of, seconds, of_links(Link(6.12e7, 1e-3)), coding=coding, cores=cores, timeline=timeline)
        for timeline in (True, False)
    )
    assert (short.timeline, short.flights) == ((), ())
    assert short.step_s == pytest.approx(long.step_s, rel=1e-9)
    assert short.tokens_per_s == pytest.approx(long.tokens_per_s, rel=1e-9)
    for one, other in zip(long.ranks, short.ranks, strict=True):
        for name in ("step_s", "busy_s", "sent_bytes", "worst_bytes", "coding_s"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-9), name


def test_a_long_round_takes_as_few_events_as_a_short_one() -> None:
    """105,000 steps: to walk each of them would take a minute."""
    of = plan(2, "parallel.average_every=105000", "parallel.overlap_steps=40")
    found = walk(of, arithmetic(of, 1.0), of_links(Link(6.12e6)), timeline=False)
    assert found.ranks[0].waits_s * 105_000 == pytest.approx(GRADIENTS / 6.12e6 - 40 + 40 / 6.12e6)


def test_synchronous_ranks_fall_to_the_slowest() -> None:
    for words in ((), ("parallel.average_every=5",)):
        found = walked(plan(4, *words), 0.3, FAST, {3: 4.0})
        assert found.step_s == pytest.approx(1.2)
        assert [rank.waits_s for rank in found.ranks] == pytest.approx([0.9, 0.9, 0.9, 0.0])
        assert found.computes == pytest.approx(1.0)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero-bubble", 1)])
def test_a_pipeline_takes_as_long_as_its_stages(schedule: str, chunks: int) -> None:
    """With messages between stages alone, the walk of the ranks is the simulation of the stages (simulate.py)."""
    words = (f"parallel.schedule={schedule}", f"parallel.virtual_stages={chunks}", "train.global_batch_size=8")
    for stages, rate in ((2, 5e7), (4, math.inf)):
        of = plan(stages, f"parallel.pp={stages}", *words)
        messages = tuple(record for record in of.traffic if record.verb in SENDS)
        of = replace(of, traffic=messages)
        units = lengths(of).costs
        stage = max(simulate(of.schedule, units).stages, key=lambda one: one.busy_s)
        scale = 0.3 / stage.busy_s
        costs = Costs(
            **{name: _scaled(getattr(units, name), scale) for name in (
                "forward_s", "backward_s", "backward_input_s", "backward_weight_s",
            )},
            latency_s=0.004,
            transfer_s=messages[0].payload_bytes / rate,
        )  # fmt: skip
        expected = simulate(of.schedule, costs)
        found = walk(of, arithmetic(of, 0.3), of_links(Link(rate, 0.004)), warm_up=0)
        assert max(span.end_s for span in found.timeline) == pytest.approx(expected.makespan_s)
        assert [rank.busy_s for rank in found.ranks] == pytest.approx([one.busy_s for one in expected.stages])


def _scaled(seconds: float | tuple[float, ...], scale: float) -> float | tuple[float, ...]:
    return tuple(one * scale for one in seconds) if isinstance(seconds, tuple) else seconds * scale


def test_ranks_of_a_host_share_its_card() -> None:
    """A ring over two hosts of two ranks leaves each host once; two rings of two ranks each share both cards."""
    ring = 1.5 * (GRADIENTS + 40) / 6.12e6
    apart = ("parallel.average_every=1",)
    assert walked(plan(4, *apart), 0.3, of_links(Link(6.12e6)), devices=2).step_s == pytest.approx(0.3 + ring)
    assert walked(plan(4, *apart), 0.3, of_links(Link(6.12e6)), devices=4).step_s == pytest.approx(0.3)
    of = plan(4, "parallel.tp=2", *apart, "train.global_batch_size=2")
    weights = sum(record.payload_bytes for record in of.traffic if record.verb is Verb.AVERAGE)
    found = walked(of, 0.3, of_links(Link(6.12e6)), devices=2)
    scalars = 1.5 * 40  # a ring over all four ranks; tp exchanges inside of a host
    assert found.step_s == pytest.approx(0.3 + (2 * weights + scalars) / 6.12e6)


def test_phases_have_their_bytes() -> None:
    words = (
        "parallel.average_every=10",
        "parallel.synchronous_steps=20",
        "parallel.wire=int4",
        "parallel.wire_from=40",
    )
    of = plan(4, *words)
    assert [(phase.first, phase.until, phase.period) for phase in phases(of)] == [
        (0, 20, 1),
        (20, 40, 10),
        (40, None, 10),
    ]
    for phase in phases(of):
        numbers = range(phase.first, phase.first + phase.period)
        found = walk(of, arithmetic(of, 0.3), of_links(Link(6.12e6)), phase=phase, warm_up=0)
        declared = [of.sent_bytes(0, number) for number in numbers]
        assert found.ranks[0].sent_bytes == pytest.approx(sum(declared) / len(declared))
        assert found.ranks[0].worst_bytes == pytest.approx(max(declared))


def test_what_is_kept_is_counted_by_kind() -> None:
    words = ("parallel.average_every=10", "parallel.outer_optimizer=nesterov", "parallel.wire=int4")
    kinds = kept_kinds(plan(4, *words))
    assert {"anchor", "momentum", "residual", "owner residual"} <= set(kinds)
    assert kinds["anchor"] == kinds["momentum"] == GRADIENTS
    assert sum(kinds.values()) == kept_bytes(plan(4, *words), 0)
    assert kept_kinds(plan(4)) == {}


CASES = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from((2, 3, 4)),
        "words": st.sampled_from(
            (
                (),
                ("parallel.wire=int8",),
                ("parallel.average_every=3",),
                ("parallel.average_every=6", "parallel.fragments=2", "parallel.overlap_steps=2"),
                ("parallel.average_every=6", "parallel.fragments=3", "parallel.overlap_steps=3", "parallel.wire=int4"),
            )
        ),
        "compute_s": st.floats(1e-3, 100),
        "rate": st.floats(1e5, 1e11),
        "latency_s": st.floats(0, 1),
        "slow": st.floats(0.25, 8),
    }
)


@settings(deadline=None, max_examples=60)
@given(CASES)
def test_no_rank_computes_longer_than_it_takes_and_a_faster_link_never_takes_longer(case: dict) -> None:
    of, link = plan(case["ranks"], *case["words"]), of_links(Link(case["rate"], case["latency_s"]))
    slow = {case["ranks"] - 1: case["slow"]}
    found = walked(of, case["compute_s"], link, slow)
    for number, rank in enumerate(found.ranks):
        assert rank.step_s >= rank.busy_s * (1 - 1e-9)
        assert rank.busy_s == pytest.approx(case["compute_s"] * slow.get(number, 1.0))
    assert walked(of, case["compute_s"], link, slow) == found
    faster = walked(of, case["compute_s"], of_links(Link(2 * case["rate"], case["latency_s"])), slow)
    assert faster.step_s <= found.step_s * (1 + 1e-9)


@pytest.mark.parametrize("words", [(), ("parallel.fragments=4", "parallel.overlap_steps=5", "parallel.wire=int4")])
def test_the_least_period_keeps_the_computing_and_one_step_less_does_not(words: tuple[str, ...]) -> None:
    of, link = plan(4, "parallel.average_every=12", *words), of_links(Link(6.12e6, 2e-4))
    seconds = arithmetic(of, 0.3)
    least = least_period(of, seconds, link)
    kept = [walk(with_period(of, period), seconds, link).computes for period in (least - 1, least)]
    assert kept[0] < KEEP <= kept[1]
    if not words:
        exchange_s = 1.5 * (GRADIENTS + 40) / 6.12e6 + 2 * 2 * 3 * 2e-4
        assert least == math.ceil(KEEP * exchange_s / ((1 - KEEP) * 0.3))


@pytest.mark.parametrize(
    "words", [(), ("parallel.fragments=3", "parallel.overlap_steps=2", "parallel.pp=2", "train.global_batch_size=4")]
)
def test_a_plan_with_another_period_is_the_plan_that_is_built_with_it(words: tuple[str, ...]) -> None:
    one, other = (plan(4, f"parallel.average_every={period}", *words) for period in (20, 7))
    assert with_period(one, 7) == other
    if words:
        with pytest.raises(ValueError, match="no room"):
            with_period(one, 4)


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    of = plan(2, "parallel.pp=2", "train.global_batch_size=2")
    first = tuple(at for at in of.schedule.programs[0] if at.verb is not Verb.SEND_ACTIVATION)
    of = replace(of, schedule=replace(of.schedule, programs=(first, of.schedule.programs[1])))
    with pytest.raises(Deadlock, match="stage 1 waits at 'forward 0'"):
        walked(of, 0.3, FAST)


def test_seconds_from_flops() -> None:
    of = plan(4)
    assert arithmetic_s(of, 1e12) == pytest.approx(of.flops().total_flops / 4 / 1e12)
    stages = plan(4, "parallel.pp=4", "train.global_batch_size=8")
    mean = stages.flops().total_flops / 4 / 1e12
    assert mean <= arithmetic_s(stages, 1e12) < 2 * mean


@pytest.mark.parametrize(
    ("text", "rate", "latency_s"),
    [
        ("49mbit,0.2ms", 6.125e6, 2e-4),
        ("6.12MB/s", 6.12e6, 0.0),
        ("1 Gbit/s, 50 us", 1.25e8, 5e-5),
        ("100kbit,1s", 12_500, 1.0),
        ("25GB/s", 2.5e10, 0.0),
        ("800bit", 100, 0.0),
    ],
)
def test_a_link_is_read(text: str, rate: float, latency_s: float) -> None:
    found = Link.parse(text)
    assert found.bytes_per_s == pytest.approx(rate)
    assert found.latency_s == pytest.approx(latency_s)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "49",
        "mbit",
        "0mbit",
        "-1mbit",
        "1.2.3mbit",
        "49mbit,5",
        "49mbit;1ms",
        "1pbit",
        ".",
        "9" * 400 + "mbit",
        "1mbit," + "9" * 400 + "s",
    ],
)
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no link: .* such as 49mbit,0.2ms or 6.12MB/s"):
        Link.parse(text)


def test_a_card_receives_one_message_at_a_time() -> None:
    """Three ranks send to a fourth at once: its card is the bound, and what it sends back does not wait for them."""
    clock = Clock()
    network = Network(clock, of_links(Link(100.0, 1.0)), hosts=range(4))
    arrivals = [network.send(rank, 3, 200.0) for rank in range(3)]
    answer = network.send(3, 0, 100.0)
    inside = Network(clock, of_links(Link(100.0, 1.0)), hosts=[0, 0]).send(0, 1, 1e9)
    clock.run()
    assert [arrived.at_s for arrived in arrivals] == [3.0, 5.0, 7.0]
    assert (answer.at_s, inside.at_s) == (2.0, 0.0)
    card = network.cards[3]
    assert (card.receiving_s, card.sending_s) == (6.0, 1.0)


def test_a_group_does_one_collective_at_a_time() -> None:
    clock, group = Clock(), (0, 1)
    network = Network(clock, of_links(Link(100.0)), hosts=range(2))
    record = Traffic(Collective.ALL_REDUCE, "dp_replicate", 100, "fp32", Verb.AVERAGE, None, "weights")
    done = [[network.join(rank, group, record) for _ in range(2)] for rank in group]
    clock.run()
    assert done[0] == done[1]
    assert [one.at_s for one in done[0]] == [1.0, 2.0]


@pytest.mark.parametrize(("a_host", "ring_s", "all_to_all_s"), [(1, 30e-3, 15.0), (2, 15e-3, 28.0), (8, 4e-3, 64.0)])
def test_ranks_of_a_host_share_its_card_and_exchange_in_no_time(
    a_host: int, ring_s: float, all_to_all_s: float
) -> None:
    """16 ranks. A ring has 30 messages, of which those between hosts take 1 ms. In an all-to-all of 16 MB each pair
    sends 1 MB, and a card of p ranks p (16 - p) of them."""
    hosts = [rank // a_host for rank in range(16)]

    def ends_s(collective: Collective, cluster: Cluster) -> float:
        clock, group = Clock(), tuple(range(16))
        network = Network(clock, cluster, hosts)
        record = Traffic(collective, "dp_replicate", 16_000_000, "uint8", Verb.REDUCE, None, "gradients")
        done = [network.join(rank, group, record) for rank in group]
        clock.run()
        return done[0].at_s

    assert ends_s(Collective.ALL_REDUCE, of_links(Link(math.inf, 1e-3))) == pytest.approx(ring_s)
    assert ends_s(Collective.ALL_TO_ALL, of_links(Link(1e6))) == pytest.approx(all_to_all_s)


def test_the_least_period_does_not_depend_on_the_first_steps() -> None:
    coding = Coding(4e-9, 4e-8, 2e-8)
    found = [
        least_period(of, arithmetic(of, 0.3), of_links(Link(125e6)), coding=coding)
        for of in (plan(4, "parallel.average_every=20", "parallel.wire=sign", *words) for words in ((), FROM))
    ]
    assert found[0] == found[1] > 3


def test_gradients_that_ranks_of_cp_sum_are_coded_too() -> None:
    coding = Coding(4e-9, 4e-8, 2e-8)
    replicas, context = (plan(4, "parallel.wire=int4", *words) for words in ((), ("parallel.cp=4",)))
    seconds = [sum(one.before_s for one in around(of, coding, 0, 0).values()) for of in (replicas, context)]
    assert seconds[1] == pytest.approx(seconds[0]) != 0


def test_neighbours_that_come_in_turn_are_walked_once_round() -> None:
    """Two of four ranks a host: a round over one place and a round over two places take different times."""
    of = plan(4, "parallel.gossip=exponential", "parallel.gossip_every=5")
    seconds = arithmetic(of, 0.1)
    one, two = (walk(of, seconds, of_links(Link(6.12e6), devices=2), warm_up=turns) for turns in (1, 2))
    assert one.step_s == pytest.approx(two.step_s, rel=0.02)


@pytest.mark.parametrize(
    ("seconds", "wanted"), [((1.0, 3.0), 1.5), ((2.0, 2.0), 2.0), ((1.0, 0.0), 2.0), ((0.0,), 0.0)]
)
def test_speeds_of_ranks_add_up_and_not_their_seconds(seconds: tuple[float, ...], wanted: float) -> None:
    assert mean_step_s([RankMeans(step_s, step_s, 0.0, 0.0) for step_s in seconds]) == pytest.approx(wanted)


def test_a_rank_without_a_step_computes_nothing() -> None:
    idle, busy = RankMeans(0.0, 0.0, 0.0, 0.0), RankMeans(2.0, 1.0, 0.0, 0.0)
    assert Walk(2.0, 1.0, (idle, busy)).computes == 0.5


def test_rank_0_may_finish_its_first_portion_last() -> None:
    of = plan(3, "parallel.servers=1", "parallel.updates=asynchronous", "train.global_batch_size=2")
    seconds = arithmetic(of, 0.1, {0: 500.0})
    assert walk(of, seconds, of_links(Link(125e6)), steps=20).step_s > 0


def test_a_small_message_waits_behind_others_where_links_have_queues() -> None:
    """Rank 1 asks rank 0, whose card sends for 10 s. The second answer finds it free."""
    clock, ends = Clock(), list[float]()
    network = Network(clock, of_links(Link(100.0, 1.0, 0.5)), hosts=range(3))
    network.send(0, 2, 1000.0)

    def asks() -> Process:
        for _ in range(6):
            yield from network.request(1, 0)
            ends.append(clock.now_s)

    clock.start(asks())
    clock.run()
    assert ends == [2.5, 5.0, 7.5, 10.0, 12.0, 14.0]


@pytest.mark.parametrize("overlap", [1, 7])
def test_rounds_of_many_thousand_steps_are_not_walked(overlap: int) -> None:
    """On a slow link all but `overlap` steps of an exchange are exposed, in rounds of any length."""
    of = plan(4, "parallel.average_every=12", f"parallel.overlap_steps={overlap}")
    seconds = arithmetic(of, 0.05)
    exchange_s = 1.5 * GRADIENTS / 1.25e5
    expected = KEEP * (exchange_s - overlap * 0.05) / ((1 - KEEP) * 0.05)
    assert least_period(of, seconds, of_links(Link(1.25e5))) == pytest.approx(expected, rel=1e-3)
