"""In: times of products and of steps. Out: the peak is the fastest product ever measured; MFU is relative to it.
Does not measure this machine: the times are given."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
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


def reporting(peaks: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> tuple[Report, list[Any], Iterator[float]]:
    """A report of two ranks whose first product was 1 GFLOP/s and the next ones `peaks`; its events; what is left."""
    left, events = iter(peaks), []
    monkeypatch.setattr(machine, "peak_flops_per_s", lambda device, precision: next(left))
    report = Report.__new__(Report)
    report.peak, report.above = 1e9, 0
    folder = SimpleNamespace(event=lambda kind, **fields: events.append((kind, fields)))
    world = SimpleNamespace(device=CPU, place=SimpleNamespace(world_size=2))
    report.run = SimpleNamespace(  # type: ignore[assignment]
        folder=folder, world=world, plan=SimpleNamespace(devices=1), machine={"peak_precision": "fp32"}
    )
    return report, events, left


def test_a_step_above_the_peak_measures_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events, left = reporting([4e9, 9e9], monkeypatch)
    assert report._mfu(1, 1e9) == 0.5
    assert report._mfu(2, 4e9) == 0.5  # 200 % of the first measurement
    assert events == [("peak", {"step": 2, "peak_flops_per_s": 4e9})]
    assert report._mfu(3, 2e9) == 0.25
    assert next(left) == 9e9


def test_a_step_that_stays_above_is_not_cut_off_and_is_not_measured_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    report, events, left = reporting([0.5e9] * 9, monkeypatch)
    assert [report._mfu(step, 4e9) for step in range(100)] == [2.0] * 100
    assert events == []
    assert len(list(left)) == 9 - 7  # after 1, 2, 4, 8, 16, 32, 64 steps
