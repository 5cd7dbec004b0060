"""In: words of a run with parameter servers. Out: what a worker sent to the servers, or a run with a fault in it.
Does not assert anything (test_parameter_server does) and starts no process (rank_server does)."""

from __future__ import annotations

import contextlib
from typing import Any

import layout_ranks
from rank_server import Place

from codescent.transport import Client, Kind


def run(place: Place, words: list[str], fault: str, rank: int, resume: bool = False) -> None:
    """A run; `rank` has the fault."""
    if place.rank == rank:
        name, *arguments = fault.split()
        layout_ranks.FAULTS[name](*arguments)
    layout_ranks.run(place, words, resume)


def frames(place: Place, words: list[str]) -> list[list[Any]]:
    """A run. For each request of this rank with payloads: its kind, the server's address, bytes sent and received."""
    found: list[list[Any]] = []
    whole = Client.request

    def request(self: Client, kind: Kind, **options: Any) -> Any:
        answer = whole(self, kind, **options)
        sent = sum(payload.nbytes for payload in options.get("payloads", ()))
        if sent or answer.lengths:
            found.append([kind.name, self._name, sent, sum(answer.lengths)])
        return answer

    Client.request = request  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        layout_ranks.run(place, words, resume=False)
    return found
