"""In: traces, whole and damaged. Out: their events one by one, operators with self times, several ranks as one file.
Does not record a trace: test_profile_runs does."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.base.range_names import collective_name, collective_of, step_name, step_of
from codescent.trace import chrome, operators, ranks
from codescent.trace.chrome import ChromeTrace
from codescent.trace.intervals import intersection, seconds, union, without
from codescent.trace.operators import Operator, Operators
from codescent.trace.ranks import RankHead, RankTrace

HEAD = RankHead(0, 2, 1, (4, 6), 0.0, 0.0, "cpu", "2.13.0", {"7": "tp"})


def span(name: str, begin: float, duration: float, category: str = "cpu_op", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": 9, "ts": begin, "dur": duration, **more}


def trace(path: Path, *events: dict[str, Any], **head: Any) -> Path:
    """A file as torch writes it: events over several lines, and values before and after them."""
    values = json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 1_000_000, **head}, indent=2)[:-2]
    text = f'{values},\n  "traceEvents": [\n{json.dumps(list(events), indent=2)[1:-1]}  ],"traceName": "x" }}'
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


POINTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=12)


@given(POINTS, POINTS)
def test_intervals_are_sets_of_points(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    one, other = (union((begin, begin + length) for begin, length in points) for points in (first, second))
    inside = [
        {point for begin, length in points for point in range(begin, begin + length)} for points in (first, second)
    ]
    assert round(seconds(one) * 1e6) == len(inside[0])
    assert round(seconds(intersection(one, other)) * 1e6) == len(inside[0] & inside[1])
    assert round(seconds(without(one, other)) * 1e6) == len(inside[0] - inside[1])
    assert union(without(one, other)) == without(one, other)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_events_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    events = [span("aten::mm", number, 0.5, args={"Input Dims": [[2, 3], []]}) for number in range(50)]
    path = trace(tmp_path / name, *events)
    for chunk in (1 << 20, 7):  # a value may end anywhere in a chunk
        monkeypatch.setattr(chrome, "_CHUNK", chunk)
        found = ChromeTrace(path)
        assert found.head == {"schemaVersion": 1, "baseTimeNanoseconds": 1_000_000}
        assert list(found.events()) == events
    assert list(ChromeTrace(trace(tmp_path / "none.json")).events()) == []


def test_a_large_trace_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "_CHUNK", 1 << 14)
    path = trace(tmp_path / "a.json.gz", *[span(f"aten::op{number % 9}", number, 0.5) for number in range(8_000)])
    tracemalloc.start()
    assert sum(1 for _ in ChromeTrace(path).events()) == 8_000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(gzip.decompress(path.read_bytes())) > 4 * most


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "damaged: the file ends too early"),
        (b"\x1f\x8b\x08\x00", "damaged: "),
        (b"[]", r"damaged: '\[' where '{' must stand"),
        (b'{"schemaVersion": 1}', "damaged: no traceEvents"),
        (b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "na', "damaged: "),
        (b'{"schemaVersion": 1, "traceEvents": [{}] "a"', "damaged: "),
        (b'{"schemaVersion": 1, "traceEvents": [1]}', "damaged: an event is no object with a name"),
        (b'{"schemaVersion": 1, "traceEvents": [{"name": 3}]}', "damaged: an event is no object with a name"),
        (b'{"schemaVersion": 1, "traceEvents": [{"name": "\xff"}]}', "damaged: "),
        (b'{"schemaVersion": 2, "traceEvents": []}', "schemaVersion 2: codescent reads traces of schemaVersion 1"),
        (b'{"traceEvents": []}', "no schemaVersion: codescent reads traces of schemaVersion 1"),
        (b'{"schemaVersion": 1, "a": ' + b"[" * 100_000, "damaged: "),
    ],
)
def test_damage_and_other_versions_are_named_in_one_sentence(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match=rf"^{path}: {said}") as caught:
        list(ChromeTrace(path).events())
    assert len(caught.value.problems) == 1
    with pytest.raises(UserError, match="cannot be read: No such file"):
        ChromeTrace(tmp_path / "b.json")


def test_a_value_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "MOST_CHARS", 1000)
    monkeypatch.setattr(chrome, "_CHUNK", 100)
    path = trace(tmp_path / "a.json", span("x" * 5000, 0, 1))
    with pytest.raises(UserError, match="damaged: a value of more than 1,000 characters"):
        list(ChromeTrace(path).events())


def test_self_time_is_without_the_operators_inside(tmp_path: Path) -> None:
    found = Operators()
    for event in (
        span("inner", 3e6, 1e6),  # the file's order is not that of time
        span("outer", 1e6, 6e6),
        span("inner", 4e6, 2e6),
        span("other thread", 2e6, 9e6, tid=1),
        span("outer", 9e6, 1e6),
        span("a range", 0, 9e6, "user_annotation"),
        span("waiting", 6.25e6, 0.25e6, "user_annotation"),  # in outer
        span("gemm", 0, 5e6, "kernel", args={"Input Dims": [[4, 5]]}),
        {"ph": "M", "name": "process_name"},
    ):
        found.add(event)
    rows = [
        Operator("other thread", "", "host", 1, 9.0, 9.0),
        Operator("gemm", "[[4, 5]]", "device", 1, 5.0, 5.0),
        Operator("outer", "", "host", 2, 3.75, 7.0),
        Operator("inner", "", "host", 2, 3.0, 3.0),
        Operator("waiting", "", "host", 1, 0.25, 0.25),
    ]
    assert found.rows() == rows
    path = tmp_path / "operators.csv"
    path.write_text(operators.to_csv(rows))
    assert operators.read_csv(path) == rows
    for text, said in (("a,b\n", "damaged: its first line"), (path.read_text() + "x,y\n", "damaged: ")):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            operators.read_csv(path)


def test_an_operator_that_begins_with_the_one_inside() -> None:
    found = Operators()
    for event in (span("inner", 1e6, 1e6), span("outer", 1e6, 6e6)):
        found.add(event)
    assert [(row.operator, row.self_s) for row in found.rows()] == [("outer", 5.0), ("inner", 1.0)]


def test_ranks_are_merged_on_one_clock(tmp_path: Path) -> None:
    paths = []
    for rank, offset_s in enumerate((0.0, 0.25)):
        raw = trace(
            tmp_path / "raw.json",
            {"ph": "M", "name": "process_name", "ts": 5, "pid": 77, "tid": 0, "args": {"name": "python"}},
            span("aten::mm", 10.0, 2.0, pid=77),
            {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 3, "pid": 77, "tid": 1, "ts": 11},
            span("PyTorch Profiler", 0, 9, "Trace", pid="Spans"),
            baseTimeNanoseconds=2_000_000_000,
        )
        head = RankHead(rank, 2, 1, (4, 6), offset_s, rank * 1e-6, "cpu", "2.13.0", {"7": "tp"})
        paths.append(ranks.file_of(tmp_path, rank))
        flights = [("all_reduce over tp", 2_000_020_000, 2_000_030_000)]
        ranks.write_rank(paths[-1], raw, head, flights, origin_ns=1_000_000_000)
        assert RankTrace(paths[-1]).head == head
    merged = tmp_path / ranks.MERGED
    ranks.merge(paths, merged)
    found = ChromeTrace(merged)
    clocks = [{"rank": 0, "offset_s": 0.0, "error_s": 0.0}, {"rank": 1, "offset_s": 0.25, "error_s": 1e-6}]
    assert found.head["codescent"]["clocks"] == clocks
    events = list(found.events())
    starts = [(event["pid"], event["ts"]) for event in events if event["name"] == "aten::mm"]
    assert starts == [(0, 1_000_010.0), (1000, 1_250_010.0)]
    flown = [(event["ph"], event["ts"]) for event in events if event.get("cat") == ranks.FLIGHT]
    assert flown == [("b", 1_000_020.0), ("e", 1_000_030.0), ("b", 1_250_020.0), ("e", 1_250_030.0)]
    assert len({event["id"] for event in events if event["name"] == "fwdbwd"}) == 2
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0: python", "rank 0: collectives", "rank 1: python", "rank 1: collectives"]
    lines = gzip.decompress(merged.read_bytes()).decode().splitlines()
    assert sum(line.startswith("{") and "ph" in line for line in lines) == len(events)


def test_files_of_other_recordings_are_not_merged(tmp_path: Path) -> None:
    raw = trace(tmp_path / "raw.json", span("aten::mm", 1, 1))
    for rank, steps in enumerate(((4, 6), (7, 9))):
        head = RankHead(rank, 2, 1, steps, 0.0, 0.0, "cpu", "2.13.0")
        ranks.write_rank(ranks.file_of(tmp_path, rank), raw, head, [], 0)
    with pytest.raises(UserError, match=r"rank_00001.json.gz: of another recording than .*: its steps is \(7, 9\)"):
        ranks.merge([ranks.file_of(tmp_path, rank) for rank in (0, 1)], tmp_path / ranks.MERGED)
    assert not (tmp_path / ranks.MERGED).exists()
    with pytest.raises(UserError, match="no trace of a codescent run"):
        RankTrace(raw)
    with pytest.raises(UserError, match="written by another codescent"):
        RankTrace(trace(tmp_path / "b.json", codescent={"format": 9}))
    with pytest.raises(UserError, match=r"b.json: damaged: 'steps'"):
        RankTrace(trace(tmp_path / "b.json", codescent={"format": 1}))
    cut = ranks.file_of(tmp_path, 0)
    cut.write_bytes(cut.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"rank_00000.json.gz: damaged: "):
        list(RankTrace(cut).events())
    with pytest.raises(UserError, match=r"rank_00000.json.gz: damaged: "):
        list(chrome.lines_of(cut))


def test_names_of_ranges_can_be_read_back() -> None:
    assert step_of(step_name(12)) == 12
    assert [step_of(name) for name in ("step", "step x", "12", "forward 12")] == [None] * 4
    assert collective_of(collective_name("all_reduce", "dp_replicate*cp")) == ("all_reduce", "dp_replicate*cp")
    assert [collective_of(name) for name in ("waiting", "forward 1", "game over", "1 over 2")] == [None] * 4
