"""In: times of products and of steps. Out: the peak is the fastest product at the begin; MFU is relative to it.
Does not measure this machine: the times are given."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codescent.train import machine
from codescent.train.report import Report

CPU = torch.device("cpu")


@given(st.lists(st.floats(0.001, 1.0), min_size=60, max_size=60))
def test_the_peak_is_the_fastest_of_products_until_they_get_no_faster(seconds: list[float]) -> None:
    times, side = iter(seconds), machine.PEAK_SIDE["cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(machine.PEAK_SIDE, "cpu", 8)
        patch.setattr(machine, "PEAK_S", 1e9)
        patch.setattr(machine, "PEAK_LEAST_S", 0.0)
        patch.setattr(machine, "_best_seconds", lambda *_: next(times))
        found = machine.peak_flops_per_s(CPU, "fp32")
    used = seconds[: 60 - len(list(times))]
    assert found == 2 * 8**3 / min(used)
    assert len(used) >= machine.PEAK_TRIES
    before, last = used[: -machine.PEAK_TRIES], used[-machine.PEAK_TRIES :]
    assert not before or min(last) >= machine.PEAK_FASTER * min(before)
    assert side == machine.PEAK_SIDE["cpu"]


def test_matrices_of_the_peak_are_no_part_of_the_memory_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch.cuda notes what is asked of it, and whether the matrices are alive then."""
    device, asked, matrices = torch.device("cuda", 1), list[Any](), list[weakref.ref[torch.Tensor]]()
    plain_randn, plain_mm = torch.randn, torch.mm

    def noting(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = plain_mm(a, b)
        matrices.extend(map(weakref.ref, (a, b, product)))
        return product

    def alive() -> int:
        return sum(one() is not None for one in matrices)

    monkeypatch.setitem(machine.PEAK_SIDE, "cuda", 8)
    monkeypatch.setattr(torch, "randn", lambda *size, device: plain_randn(*size))
    monkeypatch.setattr(torch, "mm", noting)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(("empty_cache", alive())))
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda of: asked.append(("reset_peak_memory_stats", of, alive()))
    )
    assert machine.peak_flops_per_s(device, "bf16") > 0
    assert len(matrices) >= 3 * machine.PEAK_TRIES
    assert asked == [("empty_cache", 0), ("reset_peak_memory_stats", device, 0)]
    asked.clear()
    monkeypatch.setitem(machine.PEAK_SIDE, "cpu", 8)
    monkeypatch.setattr(torch, "randn", lambda *size, device: plain_randn(*size, device=device))
    assert machine.peak_flops_per_s(CPU, "fp32") > 0
    assert not asked


def test_a_step_above_the_peak_is_not_cut_off_and_no_report_measures_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of the begin: rank 0 would measure it while the others wait in their next step."""
    monkeypatch.setattr(machine, "peak_flops_per_s", lambda device, precision: pytest.fail("measured beside a step"))
    monkeypatch.setattr(torch, "mm", lambda *_: pytest.fail("a report multiplies matrices"))
    report = Report.__new__(Report)
    report.peak, report.has_peak, report.devices = 1e9, True, 2
    assert [report._mfu(flops) for flops in (1e9, 4e9, 2e9)] == [0.5, 2.0, 1.0]


def test_a_peak_that_other_programs_slowed_gives_no_mfu() -> None:
    """The products of a busy machine are up to ten times too slow, and a step would have an MFU of 168 %."""
    report = Report.__new__(Report)
    report.has_peak, report.flops, report.hardware_flops, report.spec_peak = False, 3e9, 4e9, None
    assert report._mfu(1e9) is None
    assert report._of_peaks(None, 1e9) == {"mfu_spec": None, "hfu": None}


def test_the_peak_is_measured_as_long_as_the_load_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick of the kernel's clock is 10 ms: within a few of them, the load is a rough guess."""
    clock = iter([0.01 * tick for tick in range(100)])
    monkeypatch.setitem(machine.PEAK_SIDE, "cpu", 8)
    monkeypatch.setattr(machine, "_best_seconds", lambda *_: 1.0)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    machine.peak_flops_per_s(CPU, "fp32")
    assert next(clock) >= machine.PEAK_LEAST_S
