"""In: plans with parameter servers, a link. Out: what the simulated ranks do agrees with closed forms.
Does not start ranks."""

from __future__ import annotations

import pytest

from codescent.build import build
from codescent.clusters.by_links import of_links
from codescent.clusters.link import Link
from codescent.config.load import load
from codescent.cost.arithmetic import arithmetic
from codescent.cost.handed import segments_of
from codescent.cost.network import PIECES
from codescent.cost.ranks_walk import walk
from codescent.cost.walked import Walk
from codescent.plan import Collective, Plan, Verb

RATE = 1e6
COMPUTE_S = 0.5


def plan_of(ranks: int, *words: str) -> Plan:
    overrides = ["train.global_batch_size=12", "data.seq_len=16", *words]
    return build(load("gpt2_124m", ["train.microbatch_size=1", *overrides]).config, None, ranks)


def walked(plan: Plan, slow: dict[int, float] | None = None, rate: float = RATE) -> Walk:
    return walk(plan, arithmetic(plan, COMPUTE_S, slow), of_links(Link(rate)))


def sizes(plan: Plan, collective: Collective) -> list[int]:
    return [record.payload_bytes for record in plan.traffic if record.collective is collective]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_one_server_receives_and_sends_for_each_worker_in_turn(workers: int) -> None:
    """All workers push at once, and pull when the step is complete. They share its card fairly, up to a piece: whoever
    has its weights first computes while the others still pull."""
    plan = plan_of(workers + 1, "parallel.servers=1")
    (pushed,), (pulled,) = sizes(plan, Collective.PUSH), sizes(plan, Collective.PULL)
    found = walked(plan)
    assert found.step_s == pytest.approx(COMPUTE_S + workers * (pushed + pulled) / RATE, rel=0.04)
    assert set(found.staleness) == {0}


@pytest.mark.parametrize(("servers", "wire"), [(1, "none"), (1, "int8"), (2, "none")])
def test_the_load_of_a_server_is_the_share_of_the_time_for_which_its_card_is_busy(servers: int, wire: str) -> None:
    """One worker fetches the first weights, then in each step pushes and fetches new ones. Nothing overlaps. A card
    receives more than it sends, but with int8 less: gradients are fp32 and weights bf16."""
    plan, steps = plan_of(1 + servers, f"parallel.servers={servers}", f"parallel.wire={wire}"), 100
    assert segments_of(plan) == [range(steps)]
    pushed, pulled = sizes(plan, Collective.PUSH), [2 * sum(piece.numel for piece in part) for part in plan.pieces]
    whole_s = steps * (COMPUTE_S + sum(pushed) / RATE) + (steps + 1) * sum(pulled) / RATE
    busy_s = [max(steps * push, (steps + 1) * pull) / RATE for push, pull in zip(pushed, pulled, strict=True)]
    expected = pytest.approx([seconds / whole_s for seconds in busy_s], rel=1e-6)
    assert walked(plan).servers == expected
    inside = of_links(Link(1e12), inside=Link(RATE), devices=plan.world_size)
    on_one_host = walk(plan, arithmetic(plan, COMPUTE_S), inside)
    assert on_one_host.servers == expected, "its link inside the host is the busiest one"


def test_two_servers_carry_twice_as_much_as_one() -> None:
    one, two = (walked(plan_of(4 + servers, f"parallel.servers={servers}"), rate=1e5) for servers in (1, 2))
    assert one.step_s / two.step_s == pytest.approx(2.0, rel=0.05)


def test_synchronous_workers_fall_to_the_slowest_and_asynchronous_ones_do_not() -> None:
    """On a fast link: with a rank four times slower, three and a quarter workers are left."""
    slow = {3: 4.0}
    together = walked(plan_of(5, "parallel.servers=1"), slow, 1e15)
    alone = walked(plan_of(5, "parallel.servers=1", "parallel.updates=asynchronous"), slow, 1e15)
    equal = walked(plan_of(5, "parallel.servers=1"), None, 1e15)
    assert together.tokens_per_s == pytest.approx(equal.tokens_per_s / 4, rel=0.02)
    assert alone.tokens_per_s == pytest.approx(equal.tokens_per_s * 3.25 / 4, rel=0.05)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_update_is_older_than_the_bound(bound: int) -> None:
    words = ("parallel.servers=2", "parallel.updates=asynchronous", f"parallel.staleness={bound}")
    found = walked(plan_of(6, *words), {1: 7.0})
    assert max(found.staleness) <= bound


def test_the_staleness_of_equal_workers_is_the_number_of_the_others() -> None:
    found = walked(plan_of(5, "parallel.servers=1", "parallel.updates=asynchronous"), rate=1e15)
    late = found.staleness[len(found.staleness) // 2 :]
    assert sum(late) / len(late) == pytest.approx(3.0, abs=0.1)


ROUNDS = ("parallel.average_every=4", "train.eval_every=0", "checkpoint.every=0", "train.num_steps=400")
FAST = 1e15


def test_a_round_sends_once_in_its_steps() -> None:
    plan = plan_of(3, "parallel.servers=1", *ROUNDS)
    (pushed,), (pulled,) = sizes(plan, Collective.PUSH), sizes(plan, Collective.PULL)
    found = walked(plan)
    assert found.step_s == pytest.approx(COMPUTE_S + 2 * (pushed + pulled) / RATE / 4, rel=0.03)
    assert found.ranks[0].sent_bytes == pytest.approx(pushed / 4)


def test_a_quorum_leaves_the_slow_worker_out() -> None:
    """Its pushes are refused; without a quorum all fall to its speed, and asynchronous rounds use it too."""
    slow, words = {3: 4.0}, ("parallel.servers=1", *ROUNDS)
    speeds = {
        "all": walked(plan_of(5, *words), slow, FAST).tokens_per_s,
        "quorum": walked(plan_of(5, *words, "parallel.quorum=3"), slow, FAST).tokens_per_s,
        "asynchronous": walked(plan_of(5, *words, "parallel.updates=asynchronous"), slow, FAST).tokens_per_s,
    }
    tokens = 12 * 16 / COMPUTE_S
    assert speeds["all"] == pytest.approx(tokens / 4, rel=0.05)
    assert speeds["quorum"] == pytest.approx(tokens * 3 / 4, rel=0.1)
    assert speeds["asynchronous"] == pytest.approx(tokens * 3.25 / 4, rel=0.05)


def test_steps_by_speed_make_the_changes_of_a_slow_worker_younger() -> None:
    """A worker four times slower pushes after one step of four, as often as the others."""
    words = ("parallel.servers=1", "parallel.updates=asynchronous", *ROUNDS)
    equal = walked(plan_of(5, *words), {3: 4.0}, FAST)
    by_speed = walked(plan_of(5, *words, "parallel.local_steps=by_speed"), {3: 4.0}, FAST)
    assert max(equal.staleness) >= 12 > max(by_speed.staleness[len(by_speed.staleness) // 2 :])
    assert by_speed.tokens_per_s == pytest.approx(equal.tokens_per_s, rel=0.05)


def test_weights_that_a_worker_has_are_not_sent_again() -> None:
    """A fast worker pushes both parts of a step, and between them asks for the version that it has. Pieces are parts of
    the longest message: a push, in fp32. Weights are bf16, so half as many pieces."""
    plan = plan_of(3, "parallel.servers=1", "parallel.updates=asynchronous", "parallel.staleness=2")
    found = walk(plan, arithmetic(plan, 0.1, {1: 8.0}), of_links(Link(1e9)), steps=40, warm_up=0)
    pulls = sum(span.instruction.verb is Verb.PULL for span in found.timeline)
    assert 0 < sum(flight.stage == 2 for flight in found.flights) < PIECES // 2 * pulls


@pytest.mark.parametrize(("workers", "steps"), [(1, 100), (4, 100), (8, 50), (16, 25), (32, 20)])
def test_many_workers_walk_fewer_steps(workers: int, steps: int) -> None:
    words = ("parallel.updates=asynchronous", "train.eval_every=0", "checkpoint.every=0", "train.num_steps=1000")
    plan = plan_of(workers + 1, "parallel.servers=1", *words, f"train.global_batch_size={workers}")
    assert sum(map(len, segments_of(plan))) == steps
