"""In: every kind of model, precision, recompute and layout. Out: autograd keeps for backward what the plan declares.
Does not run a step itself: kept_ranks does, on torch's fake process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from kept_cases import QUICK, SLOW
from kept_ranks import plan_of

from codescent.cost.activations import bytes_by_chunk, most_bytes
from codescent.plan.activations import CPU


def check(forker: Forker, folder: Path, cases: dict[str, Any]) -> None:
    """What each rank keeps of a micro-batch, and of all in flight, is what its plan declares."""
    (found,) = forker.call("kept_ranks:on_fake_ranks", folder, cases=cases)
    wrong = {}
    for name, ranks in found.items():
        plan = plan_of(cases[name])
        for rank, kept in ranks.items():
            stage = plan.mesh.coordinates(int(rank))["pp"]
            declared = {
                "chunks": bytes_by_chunk(plan, stage, CPU, int(rank)),
                "most": most_bytes(plan, stage, CPU, int(rank)),
            }
            if kept != declared:
                wrong[name, rank] = (kept, declared)
    assert not wrong


@pytest.mark.parametrize("half", [0, 1])
def test_a_rank_keeps_what_is_declared(forker: Forker, tmp_path: Path, half: int) -> None:
    check(forker, tmp_path, {name: make() for name, make in list(QUICK.items())[half::2]})


PARTS = {"kinds": 6, "layouts": 12, "samples": 2, "adapters": 2}
"""Into how many tests the cases are divided."""


@pytest.mark.slow
@pytest.mark.parametrize(("group", "part"), [(group, part) for group in SLOW for part in range(PARTS.get(group, 1))])
def test_a_rank_keeps_what_is_declared_in_all_cases(forker: Forker, tmp_path: Path, group: str, part: int) -> None:
    check(forker, tmp_path, dict(list(SLOW[group]().items())[part :: PARTS.get(group, 1)]))
