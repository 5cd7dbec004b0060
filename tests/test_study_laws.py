"""In: tables made of known laws of scaling. Out: the fits find their parameters, with intervals that contain them.
Does not run a study (test_study.py does)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.amounts import of_measured
from codescent.results import PARTS, Interval
from codescent.study import Kind, PointState
from codescent.study.batch import LinearStepTime, batch_that_keeps
from codescent.study.evaluate import Taken, evaluated
from codescent.study.laws import AMDAHL, GUSTAFSON, UNIVERSAL, fitted
from codescent.study.marks import Mark, MarkKind, mark
from codescent.study.repeat import Repeat
from codescent.study.words import efficiency_of, folded, times

WORKERS = [1, 2, 4, 8, 16]
SHARES = st.floats(0.001, 0.9)


def near(found: float, expected: float) -> bool:
    """Within 2 %."""
    return abs(found / expected - 1) < 0.02


@given(share=SHARES, speed=st.floats(1e-3, 1e6))
def test_amdahls_serial_share_is_found(share: float, speed: float) -> None:
    speeds = [[speed / (share + (1 - share) / p)] for p in WORKERS]
    fit = fitted(AMDAHL, WORKERS, speeds, per=speed)
    assert near(fit.parameters["serial share"].value, share)
    assert list(fit.curve) == list(range(1, 17)), "every number between the measured ones"
    assert near(fit.curve[16], 1 / (share + (1 - share) / 16))
    assert math.isnan(fit.parameters["serial share"].low), "one repeat allows no interval"


@given(share=SHARES, speed=st.floats(1e-3, 1e6))
def test_gustafsons_serial_share_is_found(share: float, speed: float) -> None:
    speeds = [[speed * (share + (1 - share) * p)] for p in WORKERS]
    fit = fitted(GUSTAFSON, WORKERS, speeds, per=speed)
    assert near(fit.parameters["serial share"].value, share)
    assert near(fit.curve[8], share + (1 - share) * 8)


@given(contention=st.floats(0.001, 0.5), coherency=st.floats(1e-5, 0.05), speed=st.floats(1e-3, 1e6))
def test_the_parameters_of_the_universal_law_are_found(contention: float, coherency: float, speed: float) -> None:
    def x(p: int) -> float:
        return speed * p / (1 + contention * (p - 1) + coherency * p * (p - 1))

    fit = fitted(UNIVERSAL, WORKERS, [[x(p)] for p in WORKERS], per=x(1))
    assert near(fit.parameters["contention"].value, contention)
    assert near(fit.parameters["coherency"].value, coherency)
    assert near(fit.curve[16], x(16) / x(1))


def test_the_interval_contains_the_law_behind_noisy_repeats() -> None:
    noise = np.random.default_rng(3)
    speeds = [[1 / (0.1 + 0.9 / p) * noise.normal(1, 0.02) for _ in range(5)] for p in WORKERS]
    found = fitted(AMDAHL, WORKERS, speeds).parameters["serial share"]
    assert found.low < found.value < found.high
    assert found.contains(0.1)
    assert found == fitted(AMDAHL, WORKERS, speeds).parameters["serial share"], "the same numbers, the same interval"


def test_the_maximum_of_the_universal_law_counts_the_contention() -> None:
    """Gunther 2007, equation 4.33: sqrt((1 - 0.5) / 0.005) = 10 workers, and not sqrt(1 / 0.005) = 14."""
    speeds = [[p / (1 + 0.5 * (p - 1) + 0.005 * p * (p - 1))] for p in WORKERS]
    assert "fastest with 10;" in fitted(UNIVERSAL, WORKERS, speeds).said


def test_the_repeats_of_each_point_are_drawn_by_themselves() -> None:
    """The same disturbances at every point cancel in the share only if all points are drawn alike."""
    disturbed = [0.8, 0.9, 1.0, 1.1, 1.2]
    speeds = [[factor / (0.1 + 0.9 / p) for factor in disturbed] for p in WORKERS]
    found = fitted(AMDAHL, WORKERS, speeds).parameters["serial share"]
    assert found.high - found.low > 0.01


@pytest.mark.parametrize(
    ("value", "half", "said"),
    [
        (1_140_405.0, 975_000.0, "1,100,000"), (4792.0, 1500.0, "5,000"), (2.174, 0.04, "2.17"), (2.174, 0.3, "2.2"),
        (0.028, 0.3, "0.03"), (0.0, 1.0, "0"), (13_421.0, math.nan, "13,420"), (9.96, 0.2, "10.0"),
        (math.nan, 1.0, "–"),
    ],
)  # fmt: skip
def test_a_number_has_the_digits_that_its_spread_allows(value: float, half: float, said: str) -> None:
    assert of_measured(value, half) == said


@pytest.mark.parametrize(
    ("gain", "half", "workers", "said"),
    [
        (2.9, 1.2, 2, ("2.9", "145 %")), (2.9, 4.0, 2, ("2.9", "145 %")), (1.925, 0.2, 2, ("1.9", "95 %")),
        (1.976, 0.02, 2, ("1.98", "99 %")), (45.2, 9.0, 64, ("45", "70 %")), (1.669, math.nan, 2, ("1.67", "83 %")),
        (0.0042, math.nan, 8, ("0.00420", "0.1 %")),
    ],
)  # fmt: skip
def test_rounding_lets_no_efficiency_contradict_its_speed_up(
    gain: float, half: float, workers: int, said: tuple[str, str]
) -> None:
    found = Interval(gain, gain - half, gain + half)
    share = Interval(*(end / workers for end in found))
    assert (times(found), efficiency_of(found, share)) == said


def test_marks_that_differ_in_numbers_are_one() -> None:
    marks: list[tuple[str, Mark | str]] = []
    marks += [(f"ranks={n}", mark(MarkKind.SPREADS, share=f"{n}.5 %")) for n in (10, 2, 8, 4)]
    marks += [("ranks=2", "a repeat failed: exit code 3"), ("ranks=4", "a repeat failed: exit code 4")]
    assert [(one.about, one.mark) for one in folded(marks)] == [
        ("4 points", "spreads 2.5 to 10.5 %"),
        ("ranks=2", "a repeat failed: exit code 3"),
        ("ranks=4", "a repeat failed: exit code 4"),
    ]
    assert [one.mark for one in folded([("a", "repeats: 3 of 5"), ("b", "repeats: 3 of 5")])] == ["repeats: 3 of 5"]
    for error in ("a repeat failed: no file '#a#b'", "failed: see #12", "a repeat failed: 1,024 of 3 4"):
        assert [one.mark for one in folded([("a", error), ("b", error)])] == [error]


def test_a_batch_is_not_named_where_the_repeats_spread_too_much() -> None:
    def taken(workers: int, seconds: list[float]) -> Taken:
        forward = 0.6 if workers > 1 else 1.0
        shares = {**dict.fromkeys(PARTS, 0.0), "forward_s": forward, "communication_s": 1 - forward}
        repeats = [Repeat(step_s=one, tokens=64.0, parts_s={n: s * one for n, s in shares.items()}) for one in seconds]
        return Taken({"ranks": workers}, workers, PointState.DONE, repeats=repeats)

    calm = evaluated("s", Kind.STRONG, {"ranks": 1}, [taken(1, [1.0, 1.01, 1.02]), taken(2, [0.8, 0.81, 0.82])])
    wild = evaluated("s", Kind.STRONG, {"ranks": 1}, [taken(1, [0.2, 1.01, 3.0]), taken(2, [0.2, 0.81, 3.0])])
    assert "would need about " in calm.paragraphs[0]
    assert "cannot be said: the repeats spread too much" in wild.paragraphs[0]


def test_no_coefficient_is_negative() -> None:
    """Faster than ideal: the nearest law has no serial share and no contention."""
    superlinear = [[p**1.2] for p in WORKERS]
    assert fitted(AMDAHL, WORKERS, superlinear).parameters["serial share"].value == 0
    assert fitted(UNIVERSAL, WORKERS, superlinear).parameters["contention"].value == 0
    assert "no limit shows" in fitted(AMDAHL, WORKERS, superlinear).said


@pytest.mark.parametrize(("law", "fewest"), [(AMDAHL, 3), (GUSTAFSON, 3), (UNIVERSAL, 4)])
def test_too_few_points_are_said(law: object, fewest: int) -> None:
    assert law.fewest == fewest  # type: ignore[attr-defined]
    fit = fitted(law, WORKERS[: fewest - 1], [[1.0]] * (fewest - 1))  # type: ignore[arg-type]
    assert (fit.parameters, fit.curve) == ({}, {})
    assert fit.said.startswith("too few points")
    assert fitted(law, [1, *[2] * 9], [[1.0]] * 10).said.startswith("too few points")  # type: ignore[arg-type]


@given(compute=st.floats(1e-6, 1e-2), fixed=st.floats(1e-3, 1.0), serial=st.floats(0.0, 1e-3), p=st.integers(2, 64))
def test_the_batch_that_keeps_the_efficiency_keeps_it(compute: float, fixed: float, serial: float, p: int) -> None:
    """Computation divides among the workers, the rest of a step does not."""
    small, large = LinearStepTime(serial, compute), LinearStepTime(fixed, compute / p)
    batch = batch_that_keeps(small, large, p, 0.8)
    alone_s, together_s = (line.fixed_s + line.per_token_s * batch for line in (small, large))
    assert alone_s / (p * together_s) == pytest.approx(0.8)
    assert batch_that_keeps(small, LinearStepTime(fixed, compute), p, 0.8) == math.inf, "computation does not divide"
    assert batch_that_keeps(small, LinearStepTime(0.0, compute / p), p, 0.8) == 0, "nothing is lost"
