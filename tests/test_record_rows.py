"""In: run folders whose files of metrics are cut, empty, gone or garbage. Out: metrics.csv copies metrics.jsonl.
Does not train: test_train_gone does."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from itertools import count as count_from
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from codescent.base.errors import UserError
from codescent.record import METRICS, METRICS_CSV, METRICS_JSONL, RunFolder, Table
from codescent.record.lines import BLOCK_BYTES, append, backward, count, forward
from codescent.record.rows import json_line

ROWS = 300


def row(step: int) -> dict[str, Any]:
    rng = random.Random(step)
    numbers = {name: rng.uniform(-1, 1) * 10 ** rng.randint(-30, 30) for name in METRICS}
    numbers["step_s"] = rng.uniform(0.1, 1)
    return numbers | {"step": step, "tokens": step << 20, "peak_memory_bytes": 3, "val_loss": None if step % 3 else 0.5}


def make(path: Path, rows: int = ROWS) -> RunFolder:
    """A run folder with that many rows, which two writes make instead of so many appends."""
    run = RunFolder.create(path, "a = 1", {})
    with (path / METRICS_CSV).open("a") as csv, (path / METRICS_JSONL).open("a") as jsonl:
        for step in range(1, rows + 1):
            csv.write(",".join("" if value is None else repr(value) for value in row(step).values()) + "\n")
            jsonl.write(json_line(row(step)))
    return run


def rows_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What any reader reads: the rows of metrics.csv, and those of metrics.jsonl."""
    header, *lines = (path / METRICS_CSV).read_text().splitlines()
    assert header == ",".join(METRICS)
    fields = [dict(zip(METRICS, line.split(","), strict=True)) for line in lines]
    csv = [{name: None if field == "" else json.loads(field) for name, field in one.items()} for one in fields]
    return csv, [json.loads(line) for line in (path / METRICS_JSONL).read_text().splitlines()]


def cut(share: float) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def without(first: int, last: int) -> Callable[[Path], object]:
    """The file without some of its lines, from 0."""
    return lambda path: path.write_text(
        "".join(line for n, line in enumerate(path.read_text().splitlines(True)) if not first <= n <= last)
    )


def more(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes() + data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "torn": lambda path: os.truncate(path, path.stat().st_size - 7),
    "half": cut(0.5),
    "header torn": lambda path: os.truncate(path, 9),
    "empty": cut(0),
    "gone": Path.unlink,
    "emptied in the middle of the run": without(1, 100),
    "without some lines": without(150, 160),
    "zeros after a loss of power": more(b"\0" * 9000),
    "a line of garbage": more(b"\xff\xfe no row\n"),
    "rows of other steps": more(b"nonsense," * 15 + b"\n"),
}
AT_THE_END = ("torn", "zeros after a loss of power")
"""A line that is not whole."""
FEWER: dict[str, list[int]] = {
    "half": list(range(1, ROWS // 2)),
    "header torn": [],
    "empty": [],
    "emptied in the middle of the run": [1, *range(102, ROWS + 1)],
    "without some lines": [step for step in range(1, ROWS + 1) if not 151 <= step <= 161],
}
"""The steps that metrics.jsonl has left."""


def whole(steps: Iterable[int]) -> list[dict[str, Any]]:
    return [row(step) for step in steps]


@pytest.mark.parametrize("damage", DAMAGE)
def test_metrics_csv_is_written_again_from_metrics_jsonl(tmp_path: Path, damage: str) -> None:
    """Catches a reader that needs metrics.csv, and a resume that leaves it as the damage left it."""
    run = make(tmp_path / "run")
    DAMAGE[damage](run.path / METRICS_CSV)
    assert RunFolder.open(run.path).read_metrics() == whole(range(1, ROWS + 1))
    assert RunFolder.open(run.path).rewind(ROWS - 10) == 10
    assert rows_of(run.path) == (whole(range(1, ROWS - 9)),) * 2
    again = RunFolder.open(run.path)
    again.metrics(row(ROWS - 9))
    assert rows_of(run.path) == (again.read_metrics(),) * 2 == (whole(range(1, ROWS - 8)),) * 2
    assert [event["kind"] for event in run.read_events()] == ["rewind"]


@pytest.mark.parametrize("damage", AT_THE_END + tuple(FEWER))
def test_what_metrics_jsonl_has_lost_metrics_csv_has_not_either(tmp_path: Path, damage: str) -> None:
    """Catches two files with different rows, which no reader could believe."""
    run = make(tmp_path / "run")
    DAMAGE[damage](run.path / METRICS_JSONL)
    run.rewind(ROWS - 10)
    left = [step for step in FEWER.get(damage, range(1, ROWS)) if step <= ROWS - 10]
    assert rows_of(run.path) == (run.read_metrics(),) * 2 == (whole(left),) * 2


@pytest.mark.parametrize("damage", ["a line of garbage", "rows of other steps"])
def test_a_whole_line_at_the_end_that_is_no_row_is_not_deleted_in_silence(tmp_path: Path, damage: str) -> None:
    """It may have been the row of a step before the checkpoint."""
    run = make(tmp_path / "run")
    DAMAGE[damage](run.path / METRICS_JSONL)
    before = (run.path / METRICS_JSONL).read_bytes()
    with pytest.raises(UserError, match=rf"metrics\.jsonl line {ROWS + 1}: not a row of 26 numbers"):
        run.rewind(ROWS - 10)
    assert (run.path / METRICS_JSONL).read_bytes() == before


def test_rows_that_only_metrics_csv_has_are_not_deleted_in_silence(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 3)
    (run.path / METRICS_JSONL).unlink()
    before = (run.path / METRICS_CSV).read_bytes()
    acts = (run.read_metrics, lambda: run.rewind(1), lambda: run.metrics(row(4)), run.derive)
    for act in acts:
        with pytest.raises(UserError, match=r"csv: has rows, but metrics\.jsonl, of which it is a copy, is missing"):
            act()
    assert (run.path / METRICS_CSV).read_bytes() == before
    (run.path / METRICS_CSV).unlink()
    run.rewind(1)
    run.metrics(row(2))
    assert rows_of(run.path) == ([row(2)],) * 2


@pytest.mark.parametrize("to", ["nowhere", METRICS_JSONL])
def test_a_link_that_leads_nowhere_is_no_missing_file(tmp_path: Path, to: str) -> None:
    """Catches a resume that reads no rows, and deletes those of metrics.csv: a disk is not mounted."""
    run = make(tmp_path / "run", 3)
    (run.path / METRICS_JSONL).unlink()
    (run.path / METRICS_JSONL).symlink_to(run.path / to)
    before = (run.path / METRICS_CSV).read_bytes()
    for act in (run.read_metrics, lambda: run.rewind(1), lambda: run.metrics(row(4)), run.derive):
        with pytest.raises(UserError, match=r"metrics\.jsonl: is a symbolic link that leads nowhere: mend the link"):
            act()
    assert (run.path / METRICS_CSV).read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        cut(0),
        cut(0.5),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: path.rename(path.parent / "moved") and path.symlink_to(path.parent / "moved"),
    ],
    ids=["deleted", "emptied", "half", "without the last newline", "moved, and a link"],
)
def test_metrics_csv_that_changes_during_a_run_is_written_again(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """Catches a metrics.csv that has only the rows after the change."""
    run = make(tmp_path / "run", 3)
    run.metrics(row(4))
    change(run.path / METRICS_CSV)
    for step in (5, 6):
        run.metrics(row(step))
        assert rows_of(run.path) == (whole(range(1, step + 1)),) * 2
    assert not (run.path / METRICS_CSV).is_symlink()


def test_metrics_jsonl_that_is_deleted_during_a_run_is_not_begun_anew(tmp_path: Path) -> None:
    """Catches rows that only metrics.csv has left, and that the next resume deletes."""
    run = make(tmp_path / "run", 3)
    run.metrics(row(4))
    (run.path / METRICS_JSONL).unlink()
    with pytest.raises(UserError, match=r"csv: has rows, but metrics\.jsonl, of which it is a copy, is missing"):
        run.metrics(row(5))
    assert not (run.path / METRICS_JSONL).exists()


CHANGE = ("writing.py", "durable.py")
"""The files of codescent/base that open, cut and replace files. `append` of lines.py writes a row."""


def killed_at(line: int, act: Callable[[], object]) -> bool:
    """Whether a process that does `act` was killed before the given one of the lines of code that change files."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal left
        if event == "call":
            return trace if Path(frame.f_code.co_filename).name in CHANGE or frame.f_code.co_name == "append" else None
        left -= event == "line"
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    if not (pid := os.fork()):
        sys.settrace(trace)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("damage", "apart"),
    [("half", 13), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("torn", "half", "gone", "whole"))],
)
def test_after_a_kill_at_any_line_of_code_a_resume_gives_both_files_the_same_rows(
    tmp_path: Path, damage: str, apart: int
) -> None:
    """Real kills while metrics.csv is cut or replaced, and while rows are appended to both files."""
    before = make(tmp_path / "before", 3).path
    DAMAGE.get(damage, lambda path: None)(before / METRICS_CSV)

    def resume(path: Path) -> None:
        again = RunFolder.open(path)
        again.rewind(2)
        for step in (3, 4):
            again.metrics(row(step))

    for line in count_from(1, apart):
        path = shutil.copytree(before, tmp_path / str(line))
        if not killed_at(line, lambda path=path: resume(path)):
            break
        found = RunFolder.open(path).read_metrics()
        assert found == whole(range(1, 5))[: max(2, len(found))]
        resume(path)
        assert rows_of(path) == (whole(range(1, 5)),) * 2
    assert line > 100


def test_a_line_of_metrics_jsonl_that_is_no_row_is_named_before_metrics_csv_is_replaced(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 9)
    lines = (run.path / METRICS_JSONL).read_text().splitlines(keepends=True)
    (run.path / METRICS_JSONL).write_text("".join([*lines[:3], "{}\n", *lines[4:]]))
    with (run.path / METRICS_CSV).open("a") as file:
        file.write("no row\n" * 2)
    os.truncate(run.path / METRICS_CSV, 900)
    before = (run.path / METRICS_CSV).read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl line 4: not a row of 26 numbers \(no step\)"):
        run.rewind(8)
    assert (run.path / METRICS_CSV).read_bytes() == before


def test_a_rewind_cuts_the_files_and_does_not_write_them_anew(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    before = {name: (run.path / name).stat() for name in (METRICS_CSV, METRICS_JSONL)}
    content = (run.path / METRICS_CSV).read_bytes()
    assert run.rewind(7) == ROWS - 7
    for name, stat in before.items():
        assert (run.path / name).stat().st_ino == stat.st_ino
    assert content.startswith((run.path / METRICS_CSV).read_bytes())
    assert rows_of(run.path)[0] == [row(step) for step in range(1, 8)]


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """8,000 rows are 5 MB: nothing of that size is in memory, whether the files are whole or to be mended."""
    run = make(tmp_path / "run", 8_000)
    size = sum((run.path / name).stat().st_size for name in (METRICS_CSV, METRICS_JSONL))
    assert size > 4_800_000
    for damage in (None, METRICS_CSV):
        if damage:
            cut(0.5)(run.path / damage)  # it is written anew
        tracemalloc.start()
        again = RunFolder.open(run.path)
        again.rewind(7_900 if damage is None else 7_800)
        again.metrics(row(7_901))
        assert sum(1 for _ in again.iter_metrics()) > 7_800
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 2_000_000


def test_lines_read_from_the_end_are_those_read_from_the_beginning(tmp_path: Path) -> None:
    rng, path = random.Random(3), tmp_path / "lines"
    for lengths in ([], [0], [0, 0, 5], [BLOCK_BYTES - 1], [BLOCK_BYTES], [1, 3 * BLOCK_BYTES, 2], [40] * 5000):
        lines = [bytes(rng.choices(b"abc,", k=length)) for length in lengths]
        for tail in (b"", b"torn"):
            path.write_bytes(b"".join(line + b"\n" for line in lines) + tail)
            found = list(backward(path))
            assert [line for _, line in reversed(found)] == lines == list(forward(path))
            assert [begin for begin, _ in reversed(found)] == [sum(lengths[:n]) + n for n in range(len(lines))]
            assert count(path) == len(lines)
        append(path, "next\n", "header\n")
        assert path.read_bytes() == b"".join(line + b"\n" for line in lines or [b"header"]) + b"next\n"


@pytest.mark.parametrize("damage", ["half", "header torn", "empty", "gone", "emptied in the middle of the run"])
def test_a_table_that_is_continued_loses_no_row(tmp_path: Path, damage: str) -> None:
    """A user's own loop: no column need be a step, a number may be whole or not, and rows may be alike."""
    rows = [{"loss": 1 / (n // 2 + 1), "samples": n * 32, "later": None} for n in range(ROWS)]
    rows[3]["loss"], rows[4]["loss"] = float("inf"), float("nan")
    table = Table(tmp_path)
    for one in rows:
        table.append(one)
    before = {file: (tmp_path / file).read_text() for file in (METRICS_CSV, METRICS_JSONL)}
    DAMAGE[damage](tmp_path / METRICS_CSV)
    Table(tmp_path).append({"loss": 0.5, "samples": 7, "later": 1.25})
    assert (tmp_path / METRICS_CSV).read_text() == before[METRICS_CSV] + "0.5,7,1.25\n"
    assert (tmp_path / METRICS_JSONL).read_text() == before[METRICS_JSONL] + json_line(
        {"loss": 0.5, "samples": 7, "later": 1.25}
    )


@pytest.mark.parametrize("rows", [0, 3, ROWS, ROWS + 2])
def test_a_table_keeps_its_first_rows(tmp_path: Path, rows: int) -> None:
    table, kept = Table(tmp_path), min(rows, ROWS)
    for number in range(ROWS):
        table.append({"loss": number / 2, "later": None})
    with (tmp_path / METRICS_CSV).open("a") as file:
        file.write("torn")
    assert len(table) == ROWS
    assert table.keep(rows) == ROWS - kept
    assert len(table) == kept
    table.append({"loss": 7.5})
    lines = [f"{number / 2}," for number in range(kept)]
    assert (tmp_path / METRICS_CSV).read_text().splitlines() == ["loss,later", *lines, "7.5,"]
    assert len((tmp_path / METRICS_JSONL).read_text().splitlines()) == kept + 1


OTHERS = {
    "csv alone": ({METRICS_CSV: "step,note\n1,begun\n2,ended\n"}, r"metrics\.csv: has rows, but metrics\.jsonl, "),
    "words": (
        {METRICS_CSV: "step,note\n1,begun\n2,ended\n", METRICS_JSONL: '{"step": 1, "note": "begun"}\n'},
        r"metrics\.jsonl line 1: not a row of 2 numbers",
    ),
    "lists": ({METRICS_CSV: "a\n1\n2\n", METRICS_JSONL: "[1]\n"}, r"metrics\.jsonl line 1: not a row of 0 numbers"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_table_of_somebody_else_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    files, said = OTHERS[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=said):
        Table(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_table_without_rows_has_the_columns_of_its_next_row(tmp_path: Path) -> None:
    Table(tmp_path).append({"a": 1})
    Table(tmp_path).keep(0)
    Table(tmp_path).append({"b": 2})
    assert (tmp_path / METRICS_CSV).read_text() == "b\n2\n"
    assert (tmp_path / METRICS_JSONL).read_text() == '{"b": 2}\n'


def test_a_run_goes_on_in_a_folder_that_is_renamed(tmp_path: Path) -> None:
    run = make(tmp_path / "before", 3)
    run.hold()
    run.path.rename(tmp_path / "after")
    make(tmp_path / "before", 5)  # another run takes the name
    run.metrics(row(4))
    run.event("tick")
    assert run.path == run.follow() == tmp_path / "after"
    assert [one["step"] for one in run.read_metrics()] == [1, 2, 3, 4]
    (moved, tick) = RunFolder.open(tmp_path / "after").read_events()
    assert (moved["kind"], moved["before"], moved["after"]) == ("moved", str(tmp_path / "before"), str(run.path))
    assert tick["kind"] == "tick"
    assert len(RunFolder.open(tmp_path / "before").read_metrics()) == 5
    assert not RunFolder.open(tmp_path / "before").read_events()
    with pytest.raises(UserError, match="is being written"):
        RunFolder.open(tmp_path / "after").hold()
    run.release()
    RunFolder.open(tmp_path / "after").hold()


@pytest.mark.parametrize("left", [[], ["metrics.csv"], ["metrics.csv", "events.jsonl", ".writer", "plan.json"]])
def test_nothing_is_made_anew_where_the_folder_was_removed(tmp_path: Path, left: list[str]) -> None:
    """The whole folder, or what `rm -r` has not come to yet."""
    run = make(tmp_path / "run", 3)
    run.hold()
    for path in run.path.iterdir():
        if path.name not in left:
            path.rmdir() if path.is_dir() else path.unlink()
    if not left:
        run.path.rmdir()
    sizes = {path: path.stat().st_size for path in run.path.iterdir()} if left else {}
    for write in (lambda: run.metrics(row(4)), lambda: run.event("tick"), run.follow):
        with pytest.raises(UserError, match="run folder was removed"):
            write()
    assert sizes == ({path: path.stat().st_size for path in run.path.iterdir()} if left else {})
    assert run.path.exists() == bool(left)
