"""In: processes that ask rank 0 whether they are ranks; some are of an earlier start, end or stand still. Out: who is
taken, and what is said of the others. Does not connect: a clock and the questions are given."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codescent.meeting.members import DISPUTE_S, LOOK_S, SILENT_S, Members

LIMIT_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Process:
    """One that asks. `peer` stands for its connection."""

    def __init__(self, members: Members, rank: int, ranks: int = 2, pid: int = 1, *, late: bool = False) -> None:
        self.members, self.peer = members, object()
        self.head: dict[str, Any] = {"number": secrets.token_hex(8), "rank": rank, "ranks": ranks, "host": f"h{rank}"}
        self.head |= {"pid": pid, "agrees": 0, "late": late}

    def ask(self) -> dict[str, Any]:
        answer = self.members.ask(self.peer, self.head)
        self.head["agrees"] = answer.get("list", 0)
        return answer

    def ends(self) -> None:
        self.members.left(self.peer, "")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def members(clock: Clock) -> Members:
    return Members(2, LIMIT_S, clock)


def test_a_rank_of_another_call_keeps_nobody_from_meeting(clock: Clock) -> None:
    """Fault: a rank of a host that was taken for lost has another number of ranks, and ends the run by this dispute."""
    members = Members(2, LIMIT_S, clock, meets_anew=True, call=1)
    of_before, first, other = Process(members, 2, 3), Process(members, 0), Process(members, 1)
    first.head["call"] = other.head["call"] = 1
    assert "refused" in of_before.ask()
    assert first.ask() == {"list": 0, "missing": [1], "came": 1}
    other.ask()
    first.ask()
    other.ask()
    assert (first.ask(), other.ask()) == ({"met": True}, {"met": True})


def test_ranks_meet_when_all_are_there_and_have_agreed(members: Members) -> None:
    first, other = Process(members, 0), Process(members, 1)
    assert first.ask() == {"list": 0, "missing": [1], "came": 1}
    number = other.ask()["list"]
    assert number
    assert first.ask()["list"] == number  # it has not heard of the list before
    assert "met" in other.ask() or "met" in first.ask()
    assert (first.ask(), other.ask()) == ({"met": True}, {"met": True})


def test_an_answer_after_the_limit_is_early_enough_where_it_is_the_last_one(members: Members, clock: Clock) -> None:
    first, other = Process(members, 0), Process(members, 1)
    clock.now_s = LIMIT_S - LOOK_S
    for one in (first, other, first, first):
        assert "problems" not in one.ask()
    clock.now_s = LIMIT_S + LOOK_S
    assert other.ask() == {"met": True}


def test_the_last_answer_does_not_take_one_that_stands_still(members: Members, clock: Clock) -> None:
    first, other = Process(members, 0), Process(members, 1)
    for one in (first, other, first, first):
        one.ask()
    clock.now_s = SILENT_S + LOOK_S  # `first` has agreed, and asks no more
    assert "met" not in other.ask()


def test_who_has_ended_is_not_waited_for_and_its_successor_is_taken(members: Members) -> None:
    first, old = Process(members, 0), Process(members, 1, pid=7)
    first.ask()
    old.ask()
    old.ends()
    assert first.ask() == {"list": 0, "missing": [1], "came": 1}
    new = Process(members, 1, pid=8)
    for _ in range(2):
        new.ask()
        first.ask()
    assert (new.ask(), first.ask()) == ({"met": True}, {"met": True})
    assert "refused" in old.ask()


def test_one_that_does_not_answer_is_not_taken_though_its_connection_stands(members: Members, clock: Clock) -> None:
    """Its host was cut off before it could agree."""
    first, old = Process(members, 0), Process(members, 1, pid=7)
    old.ask()
    first.ask()
    while clock.now_s < SILENT_S + 2 * LOOK_S:
        assert "met" not in first.ask()
        clock.now_s += LOOK_S
    assert first.ask()["missing"] == [1]
    new = Process(members, 1, pid=8)
    for _ in range(2):
        new.ask()
        first.ask()
    assert "met" in new.ask()


def test_an_old_and_a_new_process_of_one_rank_are_not_mixed(members: Members, clock: Clock) -> None:
    first, old, new = Process(members, 0), Process(members, 1, pid=7), Process(members, 1, pid=8)
    for _ in range(5):
        assert [one.ask()["list"] for one in (old, new, first)][1:] == [0, 0]
        clock.now_s += DISPUTE_S / 10
    old.ends()
    for _ in range(2):
        new.ask()
        first.ask()
    assert first.ask() == {"met": True}


def test_two_processes_that_both_stay_one_rank_are_named_to_all(members: Members, clock: Clock) -> None:
    everyone = [Process(members, 0), Process(members, 1, pid=7), Process(members, 1, pid=8)]
    while clock.now_s < DISPUTE_S + 2:
        answers = [one.ask() for one in everyone]
        clock.now_s += 0.5
    (problem,) = answers[0]["problems"]
    assert (
        "2 processes say that they are rank 1 of 2: pid 7 on h1, pid 8 on h1: give each process another RANK" in problem
    )
    assert answers == [answers[0]] * 3
    assert members.all_told()


@pytest.mark.parametrize(("rank", "ranks"), [(1, 3), (2, 3), (2, 2)])
def test_a_rank_of_a_run_of_another_size_is_named_to_all(members: Members, clock: Clock, rank: int, ranks: int) -> None:
    everyone = [Process(members, 0), Process(members, rank, ranks, 7)]
    while clock.now_s < DISPUTE_S + 2:
        answers = [one.ask() for one in everyone]
        clock.now_s += 0.5
    (problem,) = answers[1]["problems"]
    assert f"rank 0 was started as one of 2 ranks, but rank {rank} (pid 7 on h{rank}) as one of {ranks}" in problem
    assert answers[0] == answers[1]


def test_who_came_and_who_did_not_is_said_by_rank_and_host(clock: Clock) -> None:
    members = Members(4, LIMIT_S, clock)
    first, third, second = (Process(members, rank, 4, pid=rank) for rank in (0, 3, 2))
    second.ask()
    second.ends()
    while clock.now_s < LIMIT_S + 2:
        answers = [first.ask(), third.ask()]
        clock.now_s += 1
    (problem,) = answers[0]["problems"]
    assert "within 60 s (parallel.meet_s): missing ranks 1, 2 of 4; came: ranks 0 (on h0), 3 (on h3)" in problem
    assert "rank 2 (pid 2 on h2) came and left: see its error message" in problem


def test_a_rank_that_has_failed_is_named_soon(members: Members, clock: Clock) -> None:
    first = Process(members, 0)
    first.ask()
    failing = Process(members, 1, pid=7)
    failing.head["failed"] = True
    failing.ask()
    while clock.now_s < SILENT_S + 1:
        answer = first.ask()
        clock.now_s += 0.5
    assert answer == {"problems": ["rank 1 (pid 7 on h1) failed before the ranks met: see its message"]}


def test_a_rank_of_an_earlier_start_that_has_failed_ends_nobody(members: Members, clock: Clock) -> None:
    """Its launcher has started another process in its place, which comes."""
    first, second, failing = Process(members, 0), Process(members, 1, pid=8), Process(members, 1, pid=7)
    failing.head["failed"] = True
    failing.ask()
    first.ask()
    clock.now_s += 1
    second.ask()
    while clock.now_s < SILENT_S + 2:
        answers = [first.ask(), second.ask()]
        clock.now_s += 0.5
    assert answers == [{"met": True}] * 2


def test_the_end_of_the_wait_in_a_dispute_names_the_dispute(clock: Clock) -> None:
    members = Members(2, 2.0, clock)
    everyone = [Process(members, 0), Process(members, 1, pid=7), Process(members, 1, pid=8)]
    while clock.now_s < 3:
        answers = [one.ask() for one in everyone]
        clock.now_s += 0.5
    assert "2 processes say that they are rank 1 of 2" in answers[0]["problems"][0]


def test_a_rank_that_does_not_agree_is_named(clock: Clock) -> None:
    members = Members(2, 2.0, clock)
    first, second = Process(members, 0), Process(members, 1, pid=7)
    while clock.now_s < 3:
        answer = first.ask()
        second.head["agrees"] = 0
        members.ask(second.peer, second.head)
        clock.now_s += 0.5
    assert answer == {
        "problems": ["all ranks came within 2 s (parallel.meet_s), but rank 1 (pid 7 on h1) did not answer any more"]
    }


def test_a_process_that_was_started_for_a_dead_rank_joins_the_others(members: Members) -> None:
    first, other = Process(members, 0), Process(members, 1)
    for _ in range(3):
        first.ask()
        other.ask()
    assert "refused" in Process(members, 1).ask()
    assert Process(members, 1, late=True).ask() == {"met": True}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.data())
def test_those_that_meet_are_alive_and_one_for_each_rank(ranks: int, data: st.DataObject) -> None:
    """Whatever starts, ends and asks in whatever order: a list is agreed to by processes that were there together."""
    clock = Clock()
    members = Members(ranks, LIMIT_S, clock)
    living: list[Process] = []
    for _ in range(data.draw(st.integers(1, 60))):
        act = data.draw(st.sampled_from(["start", "ask", "ask", "ask", "end", "wait"]))
        if act == "start":
            living.append(Process(members, data.draw(st.integers(0, ranks - 1)), ranks, len(living)))
        elif act == "wait":
            clock.now_s += data.draw(st.sampled_from([0.1, 1.0]))
        elif living:
            one = data.draw(st.sampled_from(living))
            if act == "end":
                living.remove(one)
                one.ends()
            else:
                one.ask()
        if members._met:
            taken = [one for one in living if one.head["number"] in members._met]
            assert sorted(one.head["rank"] for one in taken) == list(range(ranks))
            return


@pytest.mark.parametrize("meets_anew", [False, True])
def test_who_leaves_after_the_meeting_is_told_to_ranks_that_meet_anew(clock: Clock, meets_anew: bool) -> None:
    """Fault: a rank meets anew after a loss, and the others wait for its values at the store for five minutes."""
    members = Members(2, LIMIT_S, clock, meets_anew=meets_anew)
    first, other = Process(members, 0), Process(members, 1)
    for one in (first, other) * 3:
        one.ask()
    assert first.ask() == {"met": True}
    assert members.left(object(), "a stranger") is False
    assert members.left(other.peer, "") is meets_anew
