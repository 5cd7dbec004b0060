"""In: plans, how fast a processor codes. Out: the simulated seconds of coding, of pieces, of meetings are closed forms.
Does not compare with a run: benchmarks/slow_network.py does."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.clusters.by_links import of_links
from codescent.clusters.cluster import Cluster
from codescent.clusters.link import Link
from codescent.collectives import coding_speed
from codescent.config.load import load
from codescent.cost.arithmetic import arithmetic
from codescent.cost.coding import MEMORY_BYTES_PER_S, STREAMS, Coding, rate_of
from codescent.cost.events import Clock, Process
from codescent.cost.network import stalls_s
from codescent.cost.processor import Processor
from codescent.cost.ranks_walk import walk
from codescent.cost.walked import Walk
from codescent.plan import Plan
from codescent.plan.wire import PIECE_BYTES, PIECES_AT_ONCE
from codescent.preflight import plan_of

SIZES = (
    "train.precision=fp32", "train.compile=none", "train.microbatch_size=1", "train.eval_every=0", "checkpoint.every=0",
    "train.num_steps=840000",
)  # fmt: skip
FAST, COMPUTE_S = of_links(Link(math.inf)), 0.3
CODING = Coding(stream_s=1e-9, encode_s=7e-9, decode_s=5e-9)


@cache
def plan(ranks: int, *words: str) -> Plan:
    size = () if any("servers" in word for word in words) else (f"train.global_batch_size={ranks}",)
    return plan_of(load("gpt2_124m", [*SIZES, *size, *words]).config, ranks)


def walked(of: Plan, link: Cluster = FAST, coding: Coding = CODING) -> Walk:
    return walk(of, arithmetic(of, COMPUTE_S), link, coding=coding)


def numel(of: Plan) -> int:
    return sum(tensor.parameter.numel for tensor in of.trained)


@pytest.mark.parametrize(
    ("ranks", "words", "streams", "encoded", "decoded"),
    [
        # its share, into the memory of the sum; distance, the mean into the weights
        (2, ("parallel.average_every=1",), 2 + 5 + 2, 0, 0),
        # change, share | residual | own residual and its choice, the sum | distance, mean, step, into the weights
        (2, ("parallel.average_every=1", "parallel.wire=int8"), 5 + 3 + 6 + 3 + 5 + 6 + 2, 1, 2),
        # of the owner of a quarter: the messages and its residual, its own residual and choice
        (4, ("parallel.average_every=1", "parallel.wire=sign"), 5 + 3 + 3 + 6 / 4 + 6 + 13, 1.25, 3.25),
        (4, ("parallel.wire=int4",), 3 + 3 + 6 / 4 + 6 + 2, 1.25, 3.25),
        (2, ("parallel.wire=topk:0.01",), 3 + 3 + 1 + 2, 1, 2),
        (4, ("parallel.wire=powersgd:2",), 3 + 3 + 2 + 2, 1, 1),
        (4, (), 0, 0, 0),
        (2, ("parallel.gossip=ring",), 2 + 2 + 3 + 2, 0, 0),
        # copied and scaled | own and the other's, scaled, into the weights
        (2, ("parallel.gossip=push-sum",), 2 + 2 + 2 + 3 + 2 + 2, 0, 0),
        (4, ("parallel.gossip=ring", "parallel.wire=int8"), 2 + 3 + 2 + 4 * 3 + 3 + 3 + 2, 1, 4),
        (3, ("parallel.servers=1",), 2 + 2, 0, 0),
        (3, ("parallel.servers=1", "parallel.wire=int4"), 2 + 3 + 3 + 1 + 2 + 2, 1, 1),
    ],
)  # fmt: skip
def test_coding_takes_what_its_operations_take(
    ranks: int, words: tuple[str, ...], streams: float, encoded: float, decoded: float
) -> None:
    of = plan(ranks, *words)
    found = walked(of)
    each_s = streams * CODING.stream_s + encoded * CODING.encode_s + decoded * CODING.decode_s
    for rank in found.ranks:
        assert rank.coding_s == pytest.approx(numel(of) * each_s, rel=1e-3)  # blocks are padded
        assert rank.busy_s == pytest.approx(COMPUTE_S)


@pytest.mark.parametrize("words", [("parallel.average_every=1",), ("parallel.average_every=1", "parallel.wire=int8")])
def test_what_overlaps_with_nothing_is_added(words: tuple[str, ...]) -> None:
    """Arithmetic, coding and the link's bytes one after the other."""
    of, link = plan(4, *words), of_links(Link(6.12e6))
    slow, free = walked(of, link), walked(of, link, Coding())
    assert slow.step_s == pytest.approx(free.step_s + slow.ranks[0].coding_s)
    assert slow.ranks[0].waits_s == pytest.approx(slow.step_s - COMPUTE_S)


def test_gradients_are_coded_beside_backward_on_the_same_processor() -> None:
    """On a fast link the processor is never idle: the thread of the sums gets what the backward pass leaves."""
    found = walked(plan(4, "parallel.wire=int8"))
    assert found.step_s == pytest.approx(COMPUTE_S + found.ranks[0].coding_s)


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=6))
def test_threads_share_a_processor_equally(seconds: list[float]) -> None:
    """Job i ends when each other one has got as much as it, or is done."""
    clock, ends = Clock(), dict[int, float]()
    processor = Processor(clock)

    def job(number: int) -> Process:
        yield from processor.work(seconds[number])
        ends[number] = clock.now_s

    for number in range(len(seconds)):
        clock.start(job(number))
    clock.run()
    for number, own in enumerate(seconds):
        assert ends[number] == pytest.approx(sum(min(own, other) for other in seconds))


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=6))
def test_a_thread_has_one_core_at_most(seconds: list[float]) -> None:
    """With a core for each thread nobody waits; with two, no more than two threads' work is done at a time."""
    for cores in (len(seconds), 2):
        clock, ends = Clock(), dict[int, float]()
        processor = Processor(clock, cores)

        def job(number: int, ends: dict[int, float] = ends, processor: Processor = processor) -> Process:
            yield from processor.work(seconds[number])
            ends[number] = processor.clock.now_s

        for number in range(len(seconds)):
            clock.start(job(number))
        clock.run()
        if cores == len(seconds):
            assert list(ends.values()) == pytest.approx(sorted(seconds))
        assert max(ends.values()) >= max(max(seconds), sum(seconds) / cores) - 1e-9


def test_hosts_of_one_machine_get_what_those_that_wait_leave() -> None:
    """Four ranks on two cores compute as fast together as each with half a core; a rank alone has a whole one."""
    of = plan(4)
    alone, shared = walked(of), walk(of, arithmetic(of, COMPUTE_S / 2), of_links(Link(1e15)), cores=2)
    assert shared.step_s == pytest.approx(alone.step_s, rel=1e-5)
    fewer = walk(of, arithmetic(of, COMPUTE_S / 2), of_links(Link(1e15)), cores=4)
    assert fewer.step_s == pytest.approx(alone.step_s / 2, rel=1e-5)


def test_a_thread_that_comes_later_takes_its_share_from_then_on() -> None:
    clock, ends = Clock(), list[float]()
    processor = Processor(clock)

    def job(begin_s: float, seconds: float) -> Process:
        yield begin_s
        yield from processor.work(seconds)
        ends.append(clock.now_s)

    clock.start(job(0.0, 3.0))
    clock.start(job(1.0, 1.0))
    clock.start(job(9.0, 2.0))
    clock.run()
    assert ends == [3.0, 4.0, 11.0]


@given(st.integers(1, 40), st.floats(1e-4, 1.0), st.floats(0.0, 3.0))
def test_pieces_wait_for_the_second_before_them(pieces: int, piece_s: float, latency_s: float) -> None:
    arrivals, free_s = list[float](), 0.0
    for number in range(pieces):
        before_s = arrivals[number - PIECES_AT_ONCE] if number >= PIECES_AT_ONCE else 0.0
        free_s = max(free_s, before_s) + piece_s
        arrivals.append(free_s + latency_s)
    assert stalls_s(pieces, piece_s, latency_s) == pytest.approx(arrivals[-1] - pieces * piece_s, abs=1e-9)


def test_latency_counts_once_for_each_turn_of_pieces() -> None:
    of = plan(2, "parallel.average_every=1", "parallel.wire=sign")
    sent = next(record for record in of.traffic if record.what.startswith("weights"))
    pieces = math.ceil(sent.payload_bytes / 2 / PIECE_BYTES)
    link = of_links(Link(1e12, 0.01))
    fast = walked(of, of_links(Link(1e12)), Coding())
    assert pieces > 10 * PIECES_AT_ONCE
    turns = math.ceil(pieces / PIECES_AT_ONCE)
    assert walked(of, link, Coding()).step_s - fast.step_s == pytest.approx(0.01 * (turns + 2), rel=1e-3)


LATENCY_S = 0.25


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        # a push and its answer, a request and the weights, a request for work and its answer
        (("parallel.servers=1",), 6),
        # beside that: the answers of all servers and the word to the first one, and the grant before the weights
        (("parallel.servers=2",), 10),
        (("parallel.servers=2", "parallel.updates=asynchronous"), 8),
    ],
)
def test_a_portion_crosses_the_link_so_often(words: tuple[str, ...], messages: int) -> None:
    servers = int(words[0][-1])
    of = plan(1 + servers, *words, "train.global_batch_size=1")
    found = walked(of, of_links(Link(1e15, LATENCY_S)), Coding())
    assert found.step_s == pytest.approx(COMPUTE_S + messages * LATENCY_S, rel=1e-3)


def test_weights_that_a_worker_has_are_not_sent_again() -> None:
    """Two pushes make a version. A worker 40 times as fast as the other makes most of both, so every second time it has
    the version already."""
    words = ("parallel.servers=1", "parallel.updates=asynchronous", "parallel.staleness=3")
    of = plan(3, *words, "train.global_batch_size=2")
    found = walk(of, arithmetic(of, 1.0, {1: 40.0}), of_links(Link(1e12)))
    pulled = sum(flight.end_s - flight.start_s for flight in found.flights if flight.stage == 2)
    pushed = sum(flight.end_s - flight.start_s for flight in found.flights if flight.stage < 2)
    assert pulled < 0.75 * pushed


PAIRS = ("parallel.gossip=ring", "parallel.gossip_mode=asynchronous")


def test_ranks_meet_when_the_last_average_has_landed() -> None:
    """Two replicas, a segment of 8 steps: 16 portions, an average after 4 updates of the active one. On a link on which
    an average takes far longer than all portions, the second one begins when the first has come back."""
    of = plan(2, *PAIRS, "parallel.gossip_every=4", "train.num_steps=8")
    rate = numel(of) * 4 / 100.0  # 100 s for the weights, 100 s back
    found = walk(of, arithmetic(of, 1.0), of_links(Link(rate)), steps=8, warm_up=0)
    assert 8 * found.step_s == pytest.approx(4 + 200 + 200, rel=1e-3)
    none = walk(of, arithmetic(of, 1.0), FAST, steps=8, warm_up=0)
    assert none.step_s == pytest.approx(1.0)


def test_memory_bounds_what_is_not_measured() -> None:
    of = plan(4, "parallel.wire=int8")
    found = Coding.of_memory(of)
    encode, decode = STREAMS["int8"]
    assert found.stream_s == 4 / MEMORY_BYTES_PER_S
    assert (found.encode_s, found.decode_s) == (encode * found.stream_s, decode * found.stream_s)
    assert rate_of("10GB/s") == MEMORY_BYTES_PER_S
    for text in ("", "10", "0GB/s", "10mbit", "here"):
        with pytest.raises(ValueError, match=r"is no rate: .* such as 10GB/s"):
            rate_of(text)


@pytest.mark.parametrize("wire", ["none", "bf16", "int8", "int4", "sign", "powersgd:2", "topk:0.01"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_coding_is_measured_with_the_encoders_of_a_run(wire: str, ranks: int) -> None:
    words = ("model.num_layers=1", "model.hidden_dim=48")
    found = coding_speed.measure(plan(ranks, *words, f"parallel.wire={wire}"), seconds=0.0)
    assert found.stream_s > 0
    assert (found.encode_s > 0, found.decode_s > 0) == (wire != "none", wire != "none")


def test_messages_have_all_trained_elements() -> None:
    for words in ((), ("parallel.average_every=2",), ("parallel.gossip=ring",)):
        of = plan(2, *words)
        assert sum(math.prod(shape) for one in coding_speed.messages_of(of) for shape in one) == numel(of)
    served = plan(4, "parallel.servers=2", "train.global_batch_size=2")
    sizes = [math.prod(shape) for one in coding_speed.messages_of(served) for shape in one]
    assert (len(sizes), sum(sizes)) == (2, numel(served))


def test_of_a_large_model_the_first_elements_are_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_speed, "MOST_ELEMENTS", 100)
    assert coding_speed._first([[(5, 10), (3,)], [(40, 4), (7, 1)], [(2,)]]) == [[(5, 10), (3,)], [(11, 4), (3, 1)]]
