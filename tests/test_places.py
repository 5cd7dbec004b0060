"""In: ranks that die, processes that wait. Out: who takes which rank, and when a run ends.
Starts no process: tests/faults/test_restart.py kills ranks of runs."""

from __future__ import annotations

import json
import os

import pytest

from codescent.base.call import Call
from codescent.base.progress import CALL_BYTES, Pages, shared_memory
from codescent.launch.losses import LossCount
from codescent.launch.places import FewerRanks, LossPolicy, Places

HOUR = 3600.0


def losses(most: int = 3) -> LossCount:
    return LossCount(most, HOUR, batch=12)


def shrinks(*sizes: int) -> LossPolicy:
    """A run that goes on with each of these numbers of ranks."""
    return LossPolicy(losses(), fewer=lambda there: next((FewerRanks(n) for n in sizes if n <= there), None))


def test_the_window_of_losses_moves_on() -> None:
    """Fault: losses of a week ago end a run, or those of the last minute do not."""
    found = losses(most=2)
    assert [found.add(at, step=9, progressed=True) for at in (0.0, 10.0)] == ["", ""]
    assert found.add(20.0, step=9, progressed=True) == (
        "survive.max_restarts = 2: it is one loss of ranks more within 3600 s; "
        "step 9 was under way, with samples 97 to 108"
    )
    assert found.add(HOUR + 5.0, step=12, progressed=True) == "", "the first one is over"
    assert found.count == 3


def test_deaths_at_the_same_time_are_one_loss() -> None:
    """Fault: four ranks that a host loses at once count as four starts, and the run ends."""
    found = losses(most=1)
    assert [found.add(at, step=9, progressed=at == 0.0) for at in (0.0, 0.01, 0.02, 0.9)] == [""] * 4
    assert found.count == 1


def test_two_starts_without_a_step_end_the_run() -> None:
    """Fault: a rank that dies in the same step each time is started again until max_restarts, which may be 1000."""
    found = losses(most=1000)
    assert found.add(0.0, step=None, progressed=False) == ""
    assert found.add(1.0, step=3, progressed=True) == "", "a step came between"
    assert found.add(2.0, step=None, progressed=False) == ""
    why = found.add(3.0, step=4, progressed=False)
    assert why.startswith("2 starts in a row lost ranks before they had done a step; step 4 was under way")


def test_a_rank_that_is_started_again_gets_its_number() -> None:
    """Fault: ranks that live are renumbered, so that each reads other data of its own again."""
    places = Places(4, LossPolicy(losses()))
    (slot,) = places.new_slots(1)
    places.after_loss([2])
    assert places.ranks == [0, 1, slot, 3]
    assert (places.number, places.urgent) == (1, 1)
    assert (places.waiting, places.ready) == ([], [])


@pytest.mark.parametrize(
    ("parts", "lost", "ranks"),
    [
        ((0, 1, 0, 1), 1, [0, 3]),  # dp_replicate=2 dp_shard=2
        ((0, 1, 0, 1), 0, [2, 1]),
        ((0, 0, 1, 1), 3, [0, 2]),  # pp=2 dp_replicate=2
        ((0, 0, 1, 1), 0, [2, 1]),
        ((0, 0, 0, 0), 1, [0, 2]),
        ((0, 1, 2, 3), 1, [0, 2]),
    ],
)
def test_those_that_hold_everything_together_get_the_places(
    parts: tuple[int, ...], lost: int, ranks: list[int]
) -> None:
    """Fault: of three ranks two go on that have the same part, and the third, which has the other one, waits. So all
    read a checkpoint, although nothing was lost."""
    fewer = {4: FewerRanks(4, parts=parts), 3: FewerRanks(2, {"parallel.dp_replicate": 2})}
    places = Places(4, LossPolicy(losses(), fewer=fewer.get))
    assert places.after_loss([lost])
    assert places.ranks == ranks


def test_a_spare_that_is_ready_comes_before_one_that_is_not() -> None:
    """Fault: the ranks wait for a process that has just been started, while a spare stands ready."""
    places = Places(2, LossPolicy(losses(), spares=1))
    (spare,) = places.new_slots(1)
    places.became_ready([spare])
    (new,) = places.new_slots(1)
    places.after_loss([0])
    assert places.ranks == [spare, 1]
    assert (places.waiting, places.ready) == ([new], [])


def test_shrinks_and_grows_again() -> None:
    """Fault: a gap stays between the numbers of ranks; a rank without a place is lost; the layout never grows again."""
    places = Places(4, shrinks(2))
    (new,) = places.new_slots(1)
    places.after_loss([1])
    assert places.ranks == [0, 2], "the highest living ranks fill the gap, or wait"
    assert (places.ready, places.waiting) == ([3], [new])
    assert not places.grows(), "three are there, and the layouts have two or four"
    places.became_ready([new])
    assert places.grows()
    assert sorted(places.ranks) == [0, 2, 3, new]
    assert places.layout == FewerRanks(4)
    assert places.number == 2


def test_waits_for_new_processes_where_no_layout_fits() -> None:
    """Fault: a run that cannot go on with fewer ranks ends, although its ranks can be started again."""
    places = Places(2, shrinks())
    (new,) = places.new_slots(1)
    places.after_loss([1])
    assert places.ranks == [0, new]


def test_too_few_processes() -> None:
    """Fault: where no process can be started the launcher ends with an index error."""
    places = Places(2, LossPolicy(losses()))
    assert not places.after_loss([1])


def test_all_ranks_die_at_once() -> None:
    """Fault: without a survivor there is no layout, and an index error ends the launcher."""
    places = Places(2, shrinks(1))
    first, second = places.new_slots(2)
    places.after_loss([0, 1])
    assert places.ranks == [first, second]


def test_a_call_in_shared_memory() -> None:
    """Fault: a call does not come back as it was written; a text cut off by another write raises an error."""
    descriptor = shared_memory(2)
    try:
        pages = Pages(descriptor, 2)
        assert pages.call == Call()
        call = Call(3, {7: 0, 8: 1}, {"parallel.dp_replicate": 2}, urgent=2, notes=("1 rank waits",))
        pages.call = call
        assert pages.call == call
        pages.clear(1)
        assert pages.call == call, "a page is cleared, and not what lies behind"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"number": 1, "places": [1]})])
def test_a_damaged_call_is_none(text: str) -> None:
    """Fault: a process that reads while the launcher writes fails with a traceback."""
    assert Call.of(text.encode()) is None


def test_a_call_names_a_thousand_processes() -> None:
    """Fault: the space in shared memory is too small for the ranks of a large machine."""
    call = Call(10**6, {4_194_304 - number: number for number in range(1000)}, {}, 10**6)
    assert len(call.to_bytes()) < CALL_BYTES - 8
