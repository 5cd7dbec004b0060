"""In: ranks on several machines that end by an error, and one that says nothing. Out: a line that names the silent one.
Does not cut a link: test_slow_hosts does, on hosts of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_store import SECOND, Served

from codescent.base.rank import Rank
from codescent.coupling.lost_peer import is_lost_peer
from codescent.meeting import silent
from codescent.meeting.store import StoreError
from codescent.meeting.store_client import StoreClient

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:1] in /gloo/: Timed out waiting 4000ms for recv operation to complete")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(silent, "GRACE_S", 0.5)
    made = Served()
    yield made
    made.close()


def _tell(store: StoreClient, this_rank: Rank, living: Sequence[int], error: BaseException) -> None:
    silent.tell(store, this_rank, living, lost_peer=is_lost_peer(error))


def end(served: Served, errors: dict[int, BaseException], ranks: int, living: Sequence[int] = ()) -> None:
    """These ranks end at the same time, by these errors; the others say nothing."""
    stores = {rank: served.join() for rank in range(ranks)}
    for rank, store in stores.items():
        store.set(f"rank{rank}", json.dumps({"host": f"host{rank}"}))
    places = {rank: Rank(rank, world_size=ranks, master_addr="10.0.0.1") for rank in errors}
    with ThreadPoolExecutor(ranks) as pool:
        told = living or range(ranks)
        list(pool.map(lambda rank: _tell(stores[rank], places[rank], told, errors[rank]), errors))


def test_one_of_the_others_names_the_silent_ranks(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    end(served, {0: LOST, 2: LOST}, 4)
    assert capsys.readouterr().err == (
        "codescent: the others waited in vain for rank 1 (on host1), rank 3 (on host3): they stand still, or their "
        "link is cut\n"
    )


def test_a_rank_that_fails_by_itself_is_not_silent(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    end(served, {0: LOST, 1: ValueError("its own"), 2: LOST}, 3)
    assert capsys.readouterr().err == ""


def test_a_rank_that_cannot_reach_the_store_says_so(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: StoreClient, *_: object) -> None:
        raise StoreError("no answer")

    monkeypatch.setattr(StoreClient, "set", nothing)
    _tell(served.join(timeout=SECOND), Rank(2, world_size=3, master_addr="10.0.0.1"), range(3), LOST)
    assert capsys.readouterr().err == (
        "codescent: rank 2 cannot reach rank 0 at 10.0.0.1: it has ended, or the link of one of the two is cut\n"
    )


def test_a_rank_that_was_lost_before_is_not_named_again(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    end(served, {0: LOST}, 4, living=(0, 1, 3))
    assert capsys.readouterr().err.startswith("codescent: the others waited in vain for rank 1 (on host1), rank 3 (on")
