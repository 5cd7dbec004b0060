"""In: for each rank the threads that it may use, and the choices of the run to resume. Out: what each rank chooses.
Does not assert anything (test_threads does) and starts no process (rank_server does)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from rank_server import Place

from codescent.config.load import load
from codescent.preflight import plan_of
from codescent.train import choices, threads
from codescent.train.world import World


def chosen(place: Place, most: list[int], kept: dict[str, Any]) -> dict[str, Any]:
    """The threads of a rank of a run, after real trials, as environment.json has them."""
    place.join()
    threads.TURN_S = 0.002  # real trials, but short ones
    plan = plan_of(load("run.toml", ["model.vocab_size=257"]).config, 1)
    world = SimpleNamespace(num_threads=most[place.rank], tries_threads=True, device=torch.device("cpu"))
    found = choices._threads(plan, cast(World, world), kept, fixed=False)
    assert torch.get_num_threads() == found["choice"]
    return found
