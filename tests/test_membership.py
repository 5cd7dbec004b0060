"""In: deaths and returns of workers in random orders; agreements of ranks. Out: each is counted once, and read again.
Does not start a process: test_launch_again and test_workers_come_again do."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from codescent.base import agreement
from codescent.base.errors import UserError
from codescent.coupling.membership import Death, Membership
from codescent.meeting.past import StoredPast
from codescent.meeting.store import LocalStore

WORKERS = range(3)
Event = tuple[str, int]


@given(st.lists(st.tuples(st.sampled_from(["dies", "is seen", "comes", "meets"]), st.sampled_from(WORKERS))))
def test_deaths_and_returns_are_counted_once(events: list[Event]) -> None:
    """Whether the server sees a death first, or the next process tells it."""
    membership, moment = Membership(), 0.0
    dead: dict[int, Death] = {}  # what the launcher says
    untold: dict[int, Death] = {}  # what the server has not been told of
    lost, joined = [], []
    there = set(WORKERS)
    membership.deaths = lambda: dict(dead)

    def seen(worker: int) -> None:
        untold.pop(worker, None)
        there.discard(worker)

    for what, worker in events:
        if what == "dies" and worker not in dead:
            moment += 1.0
            dead[worker] = untold[worker] = Death(moment, 4.5)
            lost.append(worker)
        elif what == "is seen":
            assert sorted(membership.new_deaths()) == sorted(untold)
            for one in list(untold):
                seen(one)
        elif what == "comes" and worker in dead:
            told = dead.pop(worker)
            assert membership.died(worker, told) == (worker in untold)
            assert not membership.died(worker, told)  # its connection was lost, and it asks again
            seen(worker)
            membership.comes(worker, done=7)
            membership.comes(worker, done=8)
            joined.append(worker)
            there.add(worker)
        elif what == "meets" and not untold:
            deaths, returns = membership.take()
            assert sorted(one.rank for one in deaths) == sorted(lost)
            assert [(one.rank, one.step) for one in returns] == [(one, 8) for one in joined]
            lost, joined = [], []
        assert membership.absent | set(untold) >= set(WORKERS) - there


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone: that of a rank that comes late, and of a small run."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def start(number: int) -> list[Any]:
    """The way of a rank to its first step. `number`: what differs between ranks."""
    found: list[Any] = [agreement.from_first(UserError, lambda: {"of": number})]
    found.append(agreement.together(UserError, lambda: f"of rank {number}"))
    found.append(agreement.kept(lambda: number > 5))
    return found


@pytest.mark.usefixtures("group")
def test_a_late_rank_reads_what_the_others_agreed_on() -> None:
    store = LocalStore(timedelta(seconds=1))
    first = StoredPast(store, is_late=False)
    with agreement.with_past(first):
        told = start(0)
        first.end()
        agreement.from_first(UserError, lambda: "of a step")  # not kept
    late = StoredPast(store, is_late=True)
    with agreement.with_past(late):
        assert late.is_read
        assert start(9) == told == [{"of": 0}, ["of rank 0"], False]
        late.end()
        assert not late.is_read
        assert agreement.from_first(UserError, lambda: "of a step") == "of a step"
    assert len(store._values) == 3


@pytest.mark.usefixtures("group")
def test_a_late_rank_raises_its_own_error() -> None:
    def fails() -> None:
        raise UserError("this rank has other samples")

    with (
        agreement.with_past(StoredPast(LocalStore(timedelta(seconds=1)), is_late=True)),
        pytest.raises(UserError) as raised,
    ):
        agreement.together(UserError, fails)
    assert str(raised.value) == "this rank has other samples"
    assert not raised.value.everywhere  # so it is printed
