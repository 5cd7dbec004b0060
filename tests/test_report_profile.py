"""In: traces written by hand. Out: the report has the numbers that follow from them, and says what to look at.
Does not record a trace: test_profile_runs does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from runs import make_project

from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.plan import Plan
from codescent.preflight import plan_of
from codescent.report.profile import ProfileReport, profile_report
from codescent.report.profile_collectives import BETWEEN_STAGES
from codescent.report.profile_text import sentences, tables
from codescent.trace import operators, ranks
from codescent.trace.operators import Operator
from codescent.trace.ranks import RankHead

Events = list[dict[str, Any]]
Made = tuple[Events, list[tuple[str, float, float]]]
"""Events and flights (name, begin and end in milliseconds) of one step."""
MS = 1000.0
STEP = 100 * MS


def block(name: str, begin_ms: float, end_ms: float, category: str = "user_annotation", **more: Any) -> dict[str, Any]:
    times = {"ts": begin_ms * MS, "dur": (end_ms - begin_ms) * MS}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, **more}


def write(
    run: Path, make: Callable[[int], tuple[Events, list[tuple[str, float, float]]]], number: int, **head: Any
) -> None:
    """The files of so many ranks: two steps of 100 ms, alike, of what `make` gives for a rank."""
    folder = ranks.folder_of(run, 1)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(number):
        events, flights = make(rank)
        all_events, all_flights = [], []
        for step in (0, 1):
            all_events.append(block(f"step {4 + step}", 100 * step, 100 * step + 100))
            all_events += [{**event, "ts": event["ts"] + STEP * step} for event in events]
            all_flights += [
                (name, round((begin + 100 * step) * 1e6), round((end + 100 * step) * 1e6))
                for name, begin, end in flights
            ]
        raw = folder / "raw.json"
        raw.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": all_events}))
        values = {"offset_s": 0.0, "error_s": 0.0, "device": "cpu", "torch": "2.13.0", **head}
        about = RankHead(rank=rank, world_size=number, window=1, steps=(4, 5), **values)
        ranks.write_rank(ranks.file_of(folder, rank), raw, about, all_flights, 0)
        rows = [Operator("aten::mm", "", "host", 8, 0.09, 0.09), Operator("aten::add", "", "host", 2, 0.01, 0.01)]
        operators.file_of(folder, rank).write_text(operators.to_csv(rows))


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda number, *words: plan_of(load("run.toml", words).config, number)


def printed(report: ProfileReport) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        for one in tables(report):
            console.print(one)
    return captured.get()


def two_replicas(rank: int) -> Made:
    """Rank 1 works 85 ms of a step, rank 0 67 ms; both end the all-reduce of their gradients at 92 ms."""
    arrives, waits = (50, 62) if rank == 0 else (62, 80)
    events = [
        block("next batch", 0, 1),
        block("load 0", 1, 2),
        block("forward 0", 2, 30),
        block("backward 0", 30, waits),
        block("reduce", waits, 93),
        block("waiting", waits, 93),
        block("waiting", waits, 92),  # inside the one before
        block("all_reduce over dp_replicate", 92, 93),
        block("gloo:all_reduce", 70, 92),
        block("all_reduce over nowhere", 40, 50),  # of no axis of the Plan
    ]
    return events, [("all_reduce over dp_replicate", arrives, 92)]


def test_the_numbers_of_two_replicas_follow_from_their_traces(tmp_path: Path, planned: Callable[..., Plan]) -> None:
    plan = planned(2, "parallel.dp_replicate=2")
    write(tmp_path, two_replicas, 2)
    report = profile_report(tmp_path, plan)
    assert report.step_s == pytest.approx(0.1)
    parts = [(one.busy_s, one.waiting_s, one.data_s, one.host_s) for one in report.ranks]
    assert parts == [pytest.approx((0.067, 0.031, 0.002, 0.0)), pytest.approx((0.085, 0.013, 0.002, 0.0))]
    (row,) = report.collectives
    sent = sum(t.wire_bytes(2) * t.times for t in plan.traffic)
    assert (row.kind, row.axis, row.calls, row.planned, row.sent_bytes) == ("all_reduce", "dp_replicate", 2, 2, sent)
    assert row.wire_s == pytest.approx(0.030 + 0.001)  # from the last arrival, at 62 and at 92 ms
    assert row.bus_bytes_per_s == pytest.approx(sent / 0.031)
    assert row.skew_s == pytest.approx((0.012 + 0.0) / 2)
    assert row.flight_s == pytest.approx((0.043 + 0.031) / 2)
    assert row.hidden == pytest.approx(1 - (0.031 + 0.013) / (0.043 + 0.031))
    (slow,) = report.slow
    assert (slow.rank, slow.others) == (1, "rank 0")
    assert slow.ratio == pytest.approx(85 / 67)
    gains = {one.name: one.gain_s for one in report.candidates}
    assert gains == {
        "rank 1, which is slow": pytest.approx(0.018),
        "communication, most of it all_reduce over dp_replicate": pytest.approx(0.013),
        "waiting for data": pytest.approx(0.002),
        "the host, for which the device waits": 0.0,
    }
    assert sentences(report) == [
        "Look first at rank 1, which is slow.",
        "It would bring at most 18 % of a step: from 100 ms to 82.0 ms.",
        "Rank 1 is slow: it works 1.27 times as long as rank 0.",
    ]
    text = printed(report)
    cells = [line.split() for line in text.splitlines()]
    assert any("all_reduce dp_replicate 2 43.9 kB 31.0 ms 1.41 MB/s 6.00 ms 41 %" in " ".join(row) for row in cells)
    assert ["aten::mm", "4", "45.0", "ms", "90", "%"] in cells
    assert max(map(len, text.splitlines())) <= 80


def test_where_nothing_waits_the_first_operator_is_named(tmp_path: Path, planned: Callable[..., Plan]) -> None:
    write(tmp_path, lambda rank: ([block("next batch", 0, 1), block("forward 0", 1, 99)], []), 1)
    report = profile_report(tmp_path, planned(1))
    assert sentences(report) == [
        "Look first at computation: aten::mm takes 90 % of it, and all waiting is small.",
        "It would bring at most 45 % of a step: from 100 ms to 55.0 ms.",
        "There is one rank, so none is slow.",
    ]
    assert report.collectives == []


def test_one_rank_of_four_that_is_late_is_named_by_the_median(tmp_path: Path, planned: Callable[..., Plan]) -> None:
    def one(rank: int) -> Made:
        works = 65 if rank == 2 else 50
        return [block("forward 0", 0, works), block("waiting", works, 100)], []

    write(tmp_path, one, 4)
    report = profile_report(tmp_path, planned(4, "parallel.tp=2", "parallel.dp_replicate=2"))
    (slow,) = report.slow
    assert (slow.rank, slow.ratio, slow.others) == (2, pytest.approx(1.3), "the median of the others")
    rows = [(row.calls, row.wire_s, row.bus_bytes_per_s) for row in report.collectives]
    assert set(rows) == {(0, 0.0, None)}  # planned, and not seen
    assert "0 calls were seen in a step, " in printed(report)


def test_of_stages_of_one_rank_the_longest_is_named_if_its_flops_do_not_explain_it(
    tmp_path: Path, planned: Callable[..., Plan]
) -> None:
    plan = planned(2, "parallel.pp=2", "train.microbatch_size=8")
    for works, named in ((60, []), (10, [0])):

        def stage(rank: int, works: int = works) -> Made:
            end = 90 if rank == 0 else works
            return [block("forward 0", 0, end), block("waiting", end, 100)], []

        write(tmp_path, stage, 2)
        report = profile_report(tmp_path, plan)
        assert [one.rank for one in report.slow] == named
        assert not any(one.is_sure for one in report.slow)


def test_messages_between_stages_end_where_they_are_received(tmp_path: Path, planned: Callable[..., Plan]) -> None:
    def stage(rank: int) -> Made:
        if rank == 0:
            waits = [block("waiting", 20, 60), block("waiting", 90, 100)]
            passes = [block("forward 0", 0, 20), block("backward 0", 60, 90)]
            return [*passes, *waits], [("send over pp[0,1]", 20, 70)]
        waits = [block("waiting", 0, 24), block("waiting", 60, 100)]
        return [*waits, block("forward 0", 24, 44), block("backward 0", 44, 60)], [("receive over pp[0,1]", 0, 24)]

    plan = planned(2, "parallel.pp=2", "train.microbatch_size=8")
    write(tmp_path, stage, 2)
    report = profile_report(tmp_path, plan)
    row = next(row for row in report.collectives if row.kind == "send" and row.calls)
    assert (row.axis, row.calls, row.planned, row.skew_s) == (BETWEEN_STAGES, 1, 1, None)
    assert row.wire_s == pytest.approx(0.004)  # from the send, at 20 ms
    sent = next(t for t in plan.traffic if t.axis == "pp[0,1]").payload_bytes
    assert row.bus_bytes_per_s == pytest.approx(sent / 0.004)
    assert report.busiest.head.rank == 0
    assert report.bubble_s == pytest.approx(0.036)  # the passes of rank 1
    gains = {one.name: one.gain_s for one in report.candidates}
    assert gains["the bubble of the pipeline"] == pytest.approx(0.036)
    assert gains["communication, most of it send over stages"] == pytest.approx(0.1 - 0.050 - 0.036)
    assert "The bubble of the pipeline is " in printed(report)


def test_on_cuda_kernels_decide(tmp_path: Path, planned: Callable[..., Plan]) -> None:
    about = {"Collective name": "allreduce", "Process Group Name": "7"}

    def one(rank: int) -> Made:
        events = [
            block("waiting", 0, 90),  # of the host, which waits for nobody
            block("gemm", 2, 30, "kernel"),
            block("ncclDevKernel_AllReduce_Sum", 20, 50, "kernel", args=about, tid=7),
            block("copy", 50, 52, "gpu_memcpy"),
            block("aten::add", 45, 60, "cpu_op"),  # the device has nothing to do from 52 ms on
        ]
        return events, []

    write(tmp_path, one, 2, device="cuda", axes={"7": "dp_replicate"})
    report = profile_report(tmp_path, planned(2, "parallel.dp_replicate=2"))
    assert [(one.waiting_s, one.host_s) for one in report.ranks] == [pytest.approx((0.02, 0.008))] * 2
    (row,) = report.collectives
    assert (row.kind, row.axis, row.calls) == ("all_reduce", "dp_replicate", 1)
    assert (row.wire_s, row.skew_s, row.hidden) == (pytest.approx(0.03), 0.0, pytest.approx(1 / 3))
    text = printed(report)
    assert "for the host" in text
    assert "the device is the host" not in text
    assert "all_reduce over dp_replicate: 1 calls were seen in a step, 2 are planned" in text


def test_a_damaged_trace_is_named(tmp_path: Path, planned: Callable[..., Plan]) -> None:
    plan = planned(2, "parallel.dp_replicate=2")
    write(tmp_path, two_replicas, 2)
    path = ranks.file_of(ranks.folder_of(tmp_path, 1), 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"rank_00001\.json\.gz: damaged: "):
        profile_report(tmp_path, plan)
    for broken, said in (({"dur": "x"}, "could not convert"), ({"cat": "flight", "ph": "b", "id": None}, "")):
        write(tmp_path, lambda rank, more=broken: ([{**block("waiting", 0, 1), **more}], []), 2)  # type: ignore[misc]
        if said:
            with pytest.raises(UserError, match=rf"rank_00000\.json\.gz: damaged: an event: ValueError: {said}"):
                profile_report(tmp_path, plan)
        else:
            assert profile_report(tmp_path, plan).collectives[0].calls == 0
