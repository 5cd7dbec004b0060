"""In: schedules, and seconds of the passes of each stage. Out: the bubble is that of the closed forms.
Does not run a pipeline: benchmarks/pipeline.py compares with measured ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.cost.bubble import bubble_s
from codescent.plan.pipeline import pipeline
from codescent.plan.schedule import accumulate


@given(st.sampled_from(["naive", "gpipe", "1f1b"]), st.integers(2, 6), st.integers(1, 6), st.floats(0.1, 9))
def test_equal_stages_have_the_bubble_of_the_closed_form(name: str, p: int, factor: int, seconds: float) -> None:
    """(p - 1) (f + b) on every stage; of the naive schedule for each micro-batch (Narayanan et al. 2021, 2.2)."""
    m = p * factor
    found = bubble_s(pipeline(name, p, m), [{"forward_s": m * seconds, "backward_s": 2 * m * seconds}] * p)
    batches = m if name == "naive" else 1
    assert found == pytest.approx([3 * seconds * (p - 1) * batches] * p)


def test_chunks_divide_the_bubble() -> None:
    """Interleaved: by the number of virtual stages per rank."""
    found = bubble_s(pipeline("interleaved", 4, 8, 2), [{"forward_s": 8.0, "backward_s": 16.0}] * 4)
    assert found == pytest.approx([3 * 3 / 2] * 4)


def test_a_divided_backward_fills_it() -> None:
    found = bubble_s(pipeline("zero-bubble", 4, 8), [{"forward_s": 8.0, "backward_s": 16.0}] * 4)
    assert max(found) <= 3.0 + 1e-9


def test_a_slow_stage_is_the_bubble_of_the_others() -> None:
    times = [{"forward_s": 4.0, "backward_s": 8.0}, {"forward_s": 8.0, "backward_s": 16.0}]
    first, second = bubble_s(pipeline("1f1b", 2, 4), times)
    assert first > 12.0 > second > 0


def test_one_stage_has_none_and_other_numbers_are_refused() -> None:
    one = {"forward_s": 1.0, "backward_s": 2.0}
    assert bubble_s(accumulate(3), [one]) == (0.0,)
    with pytest.raises(ValueError, match="2 stages were measured, the plan has 1"):
        bubble_s(accumulate(3), [one, one])
