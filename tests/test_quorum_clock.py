"""In: rounds of three workers at a server, a clock. Out: a push that is late, or of a lost worker, is refused and told.
Does not start ranks (test_served_rounds does) and does not test the deadline itself (test_servers does)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clock import Clock

from codescent.build import build
from codescent.config.load import load
from codescent.coupling import round_server
from codescent.coupling.outer_optimizer import OuterOptimizer
from codescent.coupling.parameter_server import LOOK_S
from codescent.coupling.round_server import RoundServer
from codescent.servers.arrivals import SIGMA_PER_MAD, SPREADS
from codescent.train.server_weights import server_weights
from codescent.transport import Answer, Frame, Kind, Refused

WORKERS, PERIOD = 3, 5
WORDS = (
    "parallel.servers=1",
    f"parallel.average_every={PERIOD}",
    "parallel.quorum=2",
    "train.global_batch_size=12",
    "train.num_steps=50",
    "train.eval_every=50",
)
ARRIVED_S = (1.0, 1.1, 1.2)
"""When the workers arrive in a usual round, of which two are known."""
DEADLINE_S = 1.1 + SPREADS * SIGMA_PER_MAD * 0.1


class Rounds:
    """A server, the requests of its workers, and its clock. No thread: `look` is a look of SERVE."""

    def __init__(self, project: Path, clock: Clock, words: tuple[str, ...] = WORDS) -> None:
        plan = build(load(project / "run.toml", words).config, 256, WORKERS + 1)
        optimizer = OuterOptimizer(server_weights(plan, 0, replaced=False), plan)
        self.clock, self.begun_s = clock, 0.0
        self.server = RoundServer(plan, 0, optimizer, None, 0, lambda: False)
        self.server.queue.begin(0, 50)
        self.number = 0
        self.computing: dict[int, tuple[int, list[int]]] = {}  # by worker: ticket and portion
        self.sent: dict[int, Frame] = {}

    def _ask(self, kind: Kind, worker: int, **facts: Any) -> Answer:
        self.number += 1
        answer = self.server.answer(Frame(kind, worker, self.number, 0, facts))
        assert answer is not None
        return answer

    def begin(self) -> None:
        """A round begins: workers that compute nothing pull, and take their portion."""
        self.begun_s = self.clock.now_s
        for worker in sorted(set(range(WORKERS)) - set(self.computing)):
            pulled = self._ask(Kind.PULL, worker, final=False, after=0, have=[-1, -1])
            asked = self._ask(Kind.ASK, worker, known=0)  # so that it is told of all rounds
            self.computing[worker] = pulled.metadata["ticket"], asked.metadata["portion"]

    def at(self, seconds: float) -> None:
        """So many seconds after the begin of the round. The server looks."""
        self.clock.now_s = self.begun_s + seconds
        self.look()

    def look(self) -> None:
        while self.server._apply_ready(0.0) or self.server._close_late(0.0):
            pass

    def push(self, worker: int) -> bool:
        """Whether the push of a worker counts."""
        ticket, portion = self.computing.pop(worker)
        self.number += 1
        facts = {
            "ticket": ticket, "portion": portion, "commits": True, "loss": 1.0, "losses": 1, "square": 1.0,
            "stop": False, "finite": True, "tokens": 1, "skips": 0, "first": 0, "count": PERIOD,
            "seconds": 0.0,
        }  # fmt: skip
        frame = Frame(Kind.PUSH, worker, self.number, 0, facts, (self.server.messages.length,))
        memory = self.server.into(frame)
        assert memory is not None
        memory[0][:] = bytes(memory[0].nbytes)
        try:
            self.server.answer(frame)
            self.look()
            return self.server.answer(frame) is not None
        except Refused:
            return False

    def usual(self, arrived_s: tuple[float, ...] = ARRIVED_S) -> None:
        """A round in which all arrive, at these seconds."""
        self.begin()
        for worker, seconds in enumerate(arrived_s):
            self.at(seconds)
            assert self.push(worker)

    @property
    def late(self) -> list[int]:
        """How many portions of each round came late, as rank 0 is told."""
        return [int(sums[-1]) for sums in self.server.queue.facts(0, 0, None)["sums"]]


@pytest.fixture
def rounds(project: Path, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    clock = Clock()
    monkeypatch.setattr(round_server, "time", clock)
    return Rounds(project, clock)


def test_the_first_two_rounds_wait_for_all(rounds: Rounds) -> None:
    for number in (1, 2):
        rounds.usual((1.0, 1.1, 1000.0))
        assert rounds.server.queue.done == number * PERIOD
    assert rounds.late == [0, 0]


def test_a_round_without_a_quorum_waits(rounds: Rounds) -> None:
    rounds.usual()
    rounds.usual()
    rounds.begin()
    assert rounds.push(0)
    rounds.at(1000.0)
    assert (rounds.server.queue.done, rounds.server._look_s()) == (2 * PERIOD, LOOK_S)
    assert rounds.push(1)  # it completes the quorum, long after the deadline: the round waits only a moment more
    rounds.at(1000.0 + round_server.FLOOR_S - 0.01)
    assert rounds.server.queue.done == 2 * PERIOD
    rounds.at(1000.0 + round_server.FLOOR_S + 0.01)
    assert rounds.server.queue.done == 3 * PERIOD


def test_who_comes_after_the_deadline_is_refused_and_counted(rounds: Rounds) -> None:
    rounds.usual()
    rounds.usual()
    rounds.begin()
    for worker in (0, 1):
        rounds.at(ARRIVED_S[worker])
        assert rounds.push(worker)
    rounds.at(DEADLINE_S - 0.01)
    assert rounds.server.queue.done == 2 * PERIOD
    assert rounds.server._look_s() == pytest.approx(0.01)  # not LOOK_S: it looks again at the deadline
    rounds.at(DEADLINE_S + 0.01)
    assert rounds.server.queue.done == 3 * PERIOD
    assert rounds.late == [0, 0, 1]
    version = rounds.server.ledger.version
    assert not rounds.push(2)
    assert rounds.server.ledger.refused == {2: 1}
    assert (rounds.server.ledger.version, rounds.server.queue.done) == (version, 3 * PERIOD)
    rounds.usual()  # the late one pulls the new weights, and computes its part of the present round
    assert rounds.late == [0, 0, 1, 0]


def test_who_was_away_is_refused_and_counted(project: Path) -> None:
    words = ("parallel.updates=asynchronous", "parallel.staleness=auto")
    rounds = Rounds(project, Clock(), (*(word for word in WORDS if "quorum" not in word), *words))
    rounds.begin()
    lost = rounds.computing[2]
    rounds.server.left(2, "its connection was lost")
    assert rounds.push(0)
    rounds.begin()
    assert rounds.computing[0][1] == lost[1]  # another worker has its portion
    assert not rounds.push(2)
    assert rounds.server.ledger.refused == {2: 1}
    assert rounds.push(0)
    assert rounds.push(1)
    assert rounds.late == [1]


def test_who_comes_before_the_deadline_counts(rounds: Rounds) -> None:
    rounds.usual()
    rounds.usual()
    rounds.usual((1.0, 1.1, DEADLINE_S - 0.01))
    assert rounds.late == [0, 0, 0]
    assert rounds.server.ledger.refused == {}


def test_a_round_that_has_ended_begins_the_next_one(rounds: Rounds) -> None:
    """Its seconds are counted from there: a deadline that was counted from the first round would be over at once."""
    for _ in range(4):
        rounds.usual()
    assert rounds.late == [0] * 4
    assert rounds.server.arrivals.deadline_s() == pytest.approx(DEADLINE_S)
