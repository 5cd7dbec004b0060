"""In: a run, steps after which its generation is replaced. Out: the run, and what each rank holds after each of them.
Does not compare anything: test_generations.py does."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import layout_ranks
from rank_server import Place

from codescent.coupling import Coupling
from codescent.coupling.membership import MembershipChange
from codescent.train.generation import Generation


def replaced(place: Place, words: list[str], after: Sequence[int]) -> dict[str, list[int]]:
    """Train; all ranks replace their generation after these steps. What this rank held after each replacement."""
    held: dict[str, list[int]] = {"threads": [], "descriptors": [], "bytes": [], "alive": []}
    whole, make, made = Generation.replace, Generation._make, list[weakref.ref[Any]]()

    def meet(self: Coupling, step: int) -> MembershipChange:
        return MembershipChange(replaces=step in after)

    def made_anew(self: Generation) -> None:
        held["alive"].append(sum(one() is not None for one in made))  # trainers of the generations before
        make(self)
        made.append(weakref.ref(self.trainer.executor))

    def replace(self: Generation) -> None:
        whole(self)
        held["threads"].append(len(list(Path("/proc/self/task").iterdir())))
        held["descriptors"].append(len(list(Path("/proc/self/fd").iterdir())))
        pages = Path("/proc/self/statm").read_text().split()[1]
        held["bytes"].append(int(pages) * os.sysconf("SC_PAGE_SIZE"))

    Coupling.meet = meet  # type: ignore[method-assign]
    Generation.replace = replace  # type: ignore[method-assign]
    Generation._make = made_anew  # type: ignore[method-assign]
    try:
        layout_ranks.run(place, words, resume=False)
    except SystemExit as end:
        assert end.code == 0  # noqa: PT017 - how the run ends is its result
    return json.loads(json.dumps(held))  # type: ignore[no-any-return]
