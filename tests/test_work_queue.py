"""In: workers that ask for work and finish it in random orders. Out: rank 0 hears of each step once, in order.
Does not answer requests: test_pair_gossip and test_parameter_server do, with real ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from codescent.coupling.work_queue import MOST_TOLD, WorkQueue

WORKERS = 3


def compute(queue: WorkQueue, worker: int, loss: float = 1.0) -> bool:
    """A worker takes a portion and finishes it. Returns whether there was one."""
    queue.weights_given(worker)
    portion = queue.take(worker)
    if portion is None:
        return False
    assert queue.take(worker) == portion  # the answer was lost: it asks again
    queue.step.count(0, stop=False)
    queue.step.loss += loss
    queue.finish(worker, portion)
    queue.complete_step()
    return True


@given(st.lists(st.integers(0, WORKERS - 1), max_size=60), st.integers(1, 3))
def test_rank_0_hears_of_each_step_once_though_it_asks_again(workers: list[int], period: int) -> None:
    queue, known, heard = WorkQueue(WORKERS, 0, period=period), 0, list[float]()
    queue.begin(0, 6 * period)
    for number, worker in enumerate(workers):
        compute(queue, worker, loss=float(number))
        if worker == 0:
            facts = queue.facts(0, known, None)
            assert queue.facts(0, known, None) == facts
            assert len(facts["sums"]) == (facts["done"] - known) // period
            heard += [sums[0] for sums in facts["sums"]]
            known = facts["done"]
    rounds = [sum(range(first, first + WORKERS)) for first in range(0, len(workers), WORKERS)]
    assert heard == rounds[: known // period]


def test_the_others_hear_of_the_last_step_alone() -> None:
    queue = WorkQueue(WORKERS, 0)
    queue.begin(0, 1000)
    while compute(queue, 1):
        pass
    assert [len(queue.facts(worker, 0, None)["sums"]) for worker in (2, 0)] == [1, MOST_TOLD]
    assert queue.facts(2, 1000, None)["sums"] == []
    assert queue.is_known(1000)
    assert not queue.is_known(999)


def test_a_stop_ends_with_the_step_that_was_begun() -> None:
    queue = WorkQueue(WORKERS, 4)
    queue.stop()
    assert not queue.stopping  # it gives out nothing: who does is told by its own workers
    queue.begin(4, 9)
    assert compute(queue, 0)
    queue.stop()
    assert [compute(queue, 1) for _ in range(3)] == [True, True, False]
    assert queue.ends
    assert queue.facts(1, 4, None) == {"done": 5, "ends": True, "stopped": True, "sums": [queue.sums]}


def test_portions_that_come_too_late_are_counted_and_not_done() -> None:
    queue = WorkQueue(WORKERS, 0, own=True)
    queue.begin(0, 2)
    queue.weights_given(2)
    late = queue.take(2)
    assert late is not None
    assert all(compute(queue, worker) for worker in (0, 1))
    queue.drop_open()
    queue.complete_step()
    assert (queue.done, queue.sums[0], queue.sums[-1]) == (1, 2.0, 1)
    assert not queue.holds(2, late)
    assert queue.needs_weights(2)


def test_who_gives_out_nothing_counts_the_same_steps() -> None:
    first, other = WorkQueue(2, 0), WorkQueue(2, 0)
    first.begin(0, 2)
    first.weights_given(0)
    for _ in range(3):
        portion = first.take(0)
        assert portion is not None
        for queue in (first, other):
            queue.finish(0, portion)
            queue.complete_step()
    assert first.done == other.done == 1
    assert (len(first.unread), len(other.unread)) == (1, 0)
    assert other.take(0) is None
