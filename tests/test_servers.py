"""In: events of a parameter server in random orders. Out: its decisions keep their promises in each order.
Does not open a socket (test_transport.py does)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from codescent.servers import Arrivals, Decided, Decision, Ledger, Portion, Portions, Verdict

WORKERS = range(4)
WORKER = st.sampled_from(WORKERS)


@dataclass
class Computing:
    """A worker between pull and acknowledgement."""

    base: int
    ticket: int
    number: int
    portion: Portion


class ParameterServer(RuleBasedStateMachine):
    """One server, its coordinator and workers that pull, push, lose acknowledgements, stall, die and come late."""

    @initialize(
        staleness=st.one_of(st.none(), st.integers(0, 3)),
        together=st.integers(1, 4),
        steps=st.integers(1, 5),
    )
    def begin(self, staleness: int | None, together: int, steps: int) -> None:
        self.staleness, self.together, self.steps = staleness, together, steps
        self.ledger, self.lives = Ledger(staleness, together), 0
        self.portions = Portions(together, 0, steps)
        self.computing: dict[int, Computing] = {}
        self.stalled: dict[int, list[Computing]] = {worker: [] for worker in WORKERS}
        self.applied: list[tuple[Decision, Portion]] = []
        self.saved: tuple[str, str, int] = self._state()

    def _state(self) -> tuple[str, str, int]:
        return json.dumps(self.ledger.state()), json.dumps(self.portions.state()), len(self.applied)

    @rule(worker=WORKER)
    def pull_and_take(self, worker: int) -> None:
        if worker in self.computing or (grant := self.ledger.pull(worker)) is None:
            return
        self.portions.weights_given(worker)
        portion = self.portions.take(worker)
        if portion is None:
            self.ledger.release(worker)
            return
        assert self.portions.take(worker) == portion  # the answer was lost: asked again
        number = self.ledger.join(worker) + 1
        self.computing[worker] = Computing(grant.version, grant.ticket, number, portion)

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), lost=st.booleans())
    def push(self, data: st.DataObject, lost: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.computing)))
        if self._push(worker, self.computing[worker]) is not Verdict.WAIT:
            one = self.computing.pop(worker)
            if lost:  # the acknowledgement was: the worker sends the push again
                assert self._push(worker, one) is Verdict.KNOWN

    def _push(self, worker: int, one: Computing) -> Verdict:
        decision = self.ledger.push(worker, one.number, one.ticket)
        if decision.verdict is Verdict.APPLY:
            assert self.portions.holds(worker, one.portion)
            self.portions.done(worker, one.portion)
            assert decision.base == one.base
            self.applied.append((decision, one.portion))
        return decision.verdict

    @rule(worker=WORKER)
    def dies_or_stalls(self, worker: int) -> None:
        if worker in self.computing:
            self.stalled[worker].append(self.computing.pop(worker))
        self.ledger.release(worker)
        self.portions.leave(worker)
        with pytest.raises(LookupError, match="before it has pulled weights"):
            self.portions.take(worker)

    @precondition(lambda self: any(self.stalled.values()))
    @rule(data=st.data())
    def a_stalled_one_pushes_late(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([one for one in WORKERS if self.stalled[one]]))
        before, late = self.ledger.refused.get(worker, 0), self.stalled[worker].pop()
        assert self._push(worker, late) in (Verdict.REFUSED, Verdict.KNOWN)
        assert self.ledger.refused.get(worker, 0) - before in (0, 1)

    @precondition(lambda self: self.ledger.pending == 0)
    @rule()
    def save(self) -> None:
        self.saved = self._state()

    @rule()
    def the_server_is_killed(self) -> None:
        ledger, portions, count = self.saved
        self.lives += 1
        self.ledger = Ledger.restored(json.loads(ledger), self.lives)
        self.portions = Portions.restored(json.loads(portions))
        del self.applied[count:]
        for worker, one in self.computing.items():
            self.stalled[worker].append(one)
        self.computing.clear()

    @invariant()
    def each_portion_is_applied_once_and_within_the_bound(self) -> None:
        if not hasattr(self, "applied"):
            return
        portions = [portion for _, portion in self.applied]
        assert len(set(portions)) == len(portions)
        decisions = [decision for decision, _ in self.applied]
        assert len({(decision.worker, decision.number) for decision in decisions}) == len(decisions)
        assert [decision.version for decision in decisions] == [i // self.together for i in range(len(decisions))]
        assert [decision.completes for decision in decisions] == [
            (i + 1) % self.together == 0 for i in range(len(decisions))
        ]
        if self.staleness is not None:
            assert all(0 <= decision.version - decision.base <= self.staleness for decision in decisions)
        if self.staleness == 0:  # synchronous: version v + 1 is the sum of the portions of step v, whoever died
            assert all(portion.step == decision.version for decision, portion in self.applied)
        assert self.ledger.version == len(decisions) // self.together

    @invariant()
    def somebody_can_go_on(self) -> None:
        if not hasattr(self, "applied"):
            return
        if self.computing:
            oldest = min(self.computing, key=lambda worker: self.computing[worker].base)
            assert self.ledger._leaves_time(oldest)
        elif not self.portions.finished:
            probe = Ledger.restored(self.ledger.state(), 0)
            assert probe.pull(0) is not None

    def teardown(self) -> None:
        """Whatever has happened, the workers finish: each portion of each step is applied exactly once."""
        if not hasattr(self, "applied"):
            return
        for _ in range(20 * self.steps * self.together + 20):
            for worker in WORKERS:
                self.pull_and_take(worker)
            for worker in sorted(self.computing):
                if self._push(worker, self.computing[worker]) is not Verdict.WAIT:
                    del self.computing[worker]
        assert self.portions.finished
        every = {Portion(step, part) for step in range(self.steps) for part in range(self.together)}
        assert {portion for _, portion in self.applied} == every
        assert len(self.applied) == len(every)


ParameterServer.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestParameterServer = ParameterServer.TestCase


def tickets(ledger: Ledger, *workers: int) -> list[int]:
    return [grant.ticket for worker in workers if (grant := ledger.pull(worker)) is not None]


def test_one_push_a_version_and_a_bound_of_two() -> None:
    ledger = Ledger(2)
    first, second, third = tickets(ledger, 0, 1, 2, 3)  # a fourth could be 3 versions old
    assert ledger.push(2, 1, third) == Decision(Verdict.APPLY, 2, 1, 0, 0, completes=True)
    (again,) = tickets(ledger, 2)
    assert ledger.push(2, 2, again).verdict is Verdict.WAIT  # 0 and 1 computed with version 0: one would come at 3
    assert ledger.push(1, 1, second).version == 1
    assert ledger.push(0, 1, first).version == 2
    assert ledger.push(2, 2, again) == Decision(Verdict.APPLY, 2, 2, 1, 3, completes=True)
    assert (ledger.version, ledger.granted, ledger.refused) == (4, {}, {})


def test_a_second_pull_replaces_the_first() -> None:
    ledger = Ledger(0)
    first, again = tickets(ledger, 0, 0)
    assert ledger.push(0, 1, first).verdict is Verdict.REFUSED
    assert ledger.push(0, 1, again).verdict is Verdict.APPLY


def test_a_dead_worker_holds_nobody_up() -> None:
    ledger = Ledger(0, together=2)
    first, dead = tickets(ledger, 0, 1)
    assert ledger.push(0, 1, first).completes is False
    assert not tickets(ledger, 0)  # version 1 needs what worker 1 computes
    ledger.release(1)
    (instead,) = tickets(ledger, 0)  # the portion of the dead one, with the same version
    assert ledger.push(0, 2, instead).completes
    assert ledger.push(1, 1, dead).verdict is Verdict.REFUSED
    assert ledger.refused == {1: 1}


def test_after_a_restart_nothing_is_applied_twice_and_old_grants_are_void() -> None:
    ledger = Ledger(None)
    used = []
    for number in (1, 2):
        used += tickets(ledger, 7)
        assert ledger.push(7, number, used[-1]).verdict is Verdict.APPLY
    saved = json.loads(json.dumps(ledger.state()))
    used += tickets(ledger, 7)
    assert ledger.push(7, 3, used[-1]).verdict is Verdict.APPLY
    again = Ledger.restored(saved, 1)
    assert (again.version, again.join(7)) == (2, 2)
    assert again.push(7, 2, used[1]).verdict is Verdict.KNOWN
    assert again.push(7, 3, used[2]).verdict is Verdict.REFUSED  # it was applied after the save: unknown
    (new,) = tickets(again, 7)
    assert again.push(7, 3, used[2]).verdict is Verdict.REFUSED  # of the life before: version 2 may have been another
    assert new not in used
    assert again.push(7, 3, new).verdict is Verdict.APPLY
    assert json.loads(json.dumps(again.state()))["refused"] == {"7": 2}


def test_the_end_after_what_is_given_is_not_before_the_first_step() -> None:
    portions = Portions(2, 10, 20)
    assert portions.end_after_given() == 11
    assert not portions.finished
    whole = Portions(2, 10, 10)
    assert whole.end_after_given() == 10


def test_portions_of_the_dead_are_given_first() -> None:
    portions = Portions(2, 5, 7)
    for worker in range(3):
        portions.weights_given(worker)
    assert [portions.take(worker) for worker in range(3)] == [Portion(5, 0), Portion(5, 1), Portion(6, 0)]
    portions.leave(2)
    portions.leave(0)
    portions.done(1, Portion(5, 1))
    assert portions.take(1) == Portion(5, 0)
    assert not portions.holds(0, Portion(5, 0))
    with pytest.raises(LookupError, match="does not hold"):
        portions.done(0, Portion(5, 0))
    assert (portions.done_before, portions.held) == (5, {1: Portion(5, 0)})
    portions.done(1, Portion(5, 0))
    assert portions.done_before == 6


@pytest.mark.parametrize(
    "wrong", [lambda: Ledger(-1), lambda: Ledger(1, 0), lambda: Portions(0, 0, 1), lambda: Portions(1, 3, 2)]
)
def test_what_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        wrong()  # type: ignore[operator]


# how long a quorum waits


def test_a_slow_replica_does_not_move_the_deadline_and_an_even_load_waits_for_all() -> None:
    arrivals = Arrivals(floor_s=0.01)
    assert math.isinf(arrivals.wait_s(1.0))
    for i in range(8):
        arrivals.record([1.0 + 0.01 * (i % 3), 1.02, 1.03, None if i % 2 else 4.0])
    assert 1.04 < arrivals.deadline_s() < 1.3
    assert arrivals.wait_s(1.03) == pytest.approx(arrivals.deadline_s() - 1.03)
    assert arrivals.wait_s(3.0) == 0.01
    for _ in range(16):
        arrivals.record([1.0, None, None])
    assert math.isinf(arrivals.wait_s(1.0))  # most did not arrive: nothing is known


@given(st.lists(st.lists(st.floats(0.9, 1.1), min_size=4, max_size=4), min_size=2, max_size=20), st.floats(0, 100))
def test_the_deadline_is_bounded_whatever_a_minority_does(rounds: list[list[float]], late: float) -> None:
    arrivals = Arrivals(floor_s=0.0)
    for one in rounds:
        arrivals.record([*one, late, None])
    # two thirds are in 0.9 to 1.1: so is the median, and the MAD is at most the width
    assert 0.9 <= arrivals.deadline_s() <= 1.1 + 6 * 1.4826 * 0.2 + 1e-9
    assert arrivals.wait_s(1e9) == 0.0


@given(st.lists(st.sampled_from(["decide", "first", "second", "lost"]), max_size=60))
def test_every_server_hears_of_each_push_once_and_in_order(events: list[str]) -> None:
    """Also if an answer is lost: the follower asks again from where it was."""
    decided, known = Decided(5, [7, 8]), {7: 5, 8: 5}
    pushes: list[tuple[int, int]] = []
    for event in [*events, "first", "second"]:
        if event == "decide":
            pushes.append((len(pushes) % 3, len(pushes)))
            decided.append(*pushes[-1])
        else:
            follower = 8 if event == "second" else 7
            found = decided.after(follower, known[follower])
            assert found == pushes[known[follower] - 5 :]
            known[follower] += 0 if event == "lost" else len(found)
    assert set(known.values()) == {5 + len(pushes)}
