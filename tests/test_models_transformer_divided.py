"""In: what two ranks of tp found. Out: a divided encoder-decoder is the whole one, and sends what its plan declares.
Does not start them more than once: transformer_ranks does all the cases in one start."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import transformer_ranks
from batches import selected
from declared_traffic import on_gloo_sent
from forker import Forker

from codescent.plan import Layout
from codescent.strategies import TensorParallel


@pytest.fixture(scope="module")
def answers(
    forker: Forker, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[int, dict[str, Any]]]:
    """Of each rank, by number of the case."""
    folder, numbers = tmp_path_factory.mktemp("divided"), {params["number"] for params in selected(request)}
    found = forker.call("transformer_ranks:work", folder, transformer_ranks.DEGREE, numbers=sorted(numbers))
    return [dict(of_rank) for of_rank in found]


QUICK = (2, 5, 11, 14, 16, 19)
"""Each option, each kind of recompute, with and without a divided sequence; the others are slow."""
NUMBERS = [
    pytest.param(number, marks=[] if number in QUICK else [pytest.mark.slow])
    for number in range(len(transformer_ranks.CASES))
]


@pytest.mark.parametrize("number", NUMBERS)
def test_divided_over_tp_it_is_the_whole(answers: list[dict[int, dict[str, Any]]], number: int) -> None:
    for answer in answers:
        assert answer[number]["loss"] < 1e-12
        for name, error in answer[number]["errors"].items():
            assert error < 1e-12, (transformer_ranks.CASES[number], name)


@pytest.mark.parametrize("number", NUMBERS)
def test_what_it_sends_is_what_the_plan_declares(answers: list[dict[int, dict[str, Any]]], number: int) -> None:
    declared: Counter[tuple[Any, ...]] = Counter()
    for t in transformer_ranks.plan_of(transformer_ranks.CASES[number]).traffic:
        for kind, size in on_gloo_sent(t, transformer_ranks.DEGREE):
            declared[str(kind), str(t.verb), size] += t.times
    for answer in answers:
        assert Counter(tuple(one) for one in answer[number]["issued"]) == declared


def test_sequences_that_do_not_divide_are_refused() -> None:
    candidate = transformer_ranks.candidate_of(transformer_ranks.CASES[0])
    odd = dataclasses.replace(candidate, work=dataclasses.replace(candidate.work, streams=(6, 5), seq_len=11))
    (problem,) = TensorParallel().refuse(odd)
    assert "5 positions" in problem
    assert "model.target_len = 4 or 6" in problem
    assert not list(TensorParallel().refuse(dataclasses.replace(odd, layout=Layout(sequence_parallel=False))))
