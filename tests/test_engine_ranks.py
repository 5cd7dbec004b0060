"""In: a model divided over two ranks of tp. Out: the tokens of one device, and the collectives that are declared.
Does not start ranks by itself: engine_ranks does all the cases in one start."""

from __future__ import annotations

from typing import Any

import engine_ranks
import pytest
from forker import Forker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def answers(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]]
    found = forker.call("engine_ranks:work", tmp_path_factory.mktemp("engine"), engine_ranks.DEGREE)
    return found


@pytest.mark.parametrize("number", range(len(engine_ranks.CASES)))
def test_tokens_are_those_of_one_device(answers: list[list[dict[str, Any]]], number: int) -> None:
    """Fault: a rank reads another pass, its heads are in the wrong order, or logits are gathered in another."""
    first = answers[0][number]
    assert first["tokens"] == first["alone"]
    assert all(len(tokens) == 20 for tokens in first["tokens"])
    assert len(set(map(tuple, first["tokens"]))) == 3
    assert first["preemptions"] == 0


@pytest.mark.parametrize("number", range(len(engine_ranks.CASES)))
def test_collectives_are_those_that_are_declared(answers: list[list[dict[str, Any]]], number: int) -> None:
    """Fault: a pass sends more than `inference/ranks.py` says, or ranks differ in what they send."""
    first, second = answers[0][number], answers[1][number]
    passes = second["passes"]
    assert passes > 20
    reduced = 1 + 2 * engine_ranks.LAYERS + engine_ranks.LAYERS * ("qk_norm" in engine_ranks.CASES[number])
    assert first["sent"] == second["sent"]
    assert first["sent"]["broadcast_"] == 2 * passes + 1
    assert first["sent"]["allreduce_"] == reduced * passes
    gathered = {name: count for name, count in first["sent"].items() if name not in ("broadcast_", "allreduce_")}
    assert sum(gathered.values()) in (passes, 2 * passes)  # over gloo, two ranks send each other messages
