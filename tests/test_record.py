"""In: real run folders, real processes killed while they write. Out: whether the run folder keeps what it was given.
Does not test checkpoints."""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import small_disk

from codescent.base.errors import UserError
from codescent.record import METRICS, METRICS_CSV, METRICS_JSONL, RunFolder, Table

CONFIG = '[run]\nname = "naïve"\n'
PLAN: dict[str, Any] = {"mesh": {"tp": 1}, "work": [1, 2.5, None]}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "one", CONFIG, PLAN)


def row(step: int) -> dict[str, float | int | None]:
    rng = random.Random(step)
    return {name: rng.uniform(-1, 1) * 10 ** rng.randint(-30, 30) for name in METRICS} | {
        "step": step,
        "step_s": 0.1 * (step + 1),
        "tokens": step * 12_345_678_901,
        "peak_memory_bytes": 3 << 40,
        "val_loss": None if step % 3 else 1 / 3,
    }


def write_events(run: RunFolder, count: int) -> None:
    for _ in range(count):
        run.event("filler", text="x" * 1000)


def write_metrics(run: RunFolder, count: int) -> None:
    for step in range(count):
        run.metrics(row(step))


def test_what_is_created_opens_equal(run: RunFolder) -> None:
    again = RunFolder.open(run.path)
    assert again.config_text == CONFIG == (run.path / "config.toml").read_text("utf-8")
    assert again.plan == PLAN == run.plan
    assert again.checkpoints.is_dir()
    assert sorted(path.name for path in run.path.parent.iterdir()) == ["one"]
    assert (run.path / "metrics.csv").read_text() == ",".join(METRICS) + "\n"


def test_an_existing_run_is_never_overwritten(run: RunFolder) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    with pytest.raises(UserError, match=r"runs/one.*--resume.*run\.name"):
        RunFolder.create(run.path, "other", {})
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_an_empty_folder_becomes_a_run_and_a_file_does_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", CONFIG, PLAN).plan == PLAN
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file: is a file"):
        RunFolder.create(tmp_path / "file", CONFIG, PLAN)
    with pytest.raises(UserError, match="file"):
        RunFolder.create(tmp_path / "file" / "below", CONFIG, PLAN)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_plan_that_is_no_json_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        RunFolder.create(tmp_path / "run", CONFIG, {"bad": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_says_what_it_lacks(tmp_path: Path, run: RunFolder) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.toml, no plan\.json, no checkpoints/"):
        RunFolder.open(tmp_path)
    (run.path / "plan.json").write_text("{" * 100_000)
    with pytest.raises(UserError, match=r"plan\.json: not a JSON object"):
        RunFolder.open(run.path)
    (run.path / "config.toml").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"config\.toml: not UTF-8 text"):
        RunFolder.open(run.path)


def test_metrics_round_trip_to_the_last_bit(run: RunFolder) -> None:
    rows = [row(step) for step in range(50)]
    for values in rows:
        run.metrics(values)
    assert run.read_metrics() == rows
    with (run.path / "metrics.csv").open() as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == METRICS
    assert [float(line["mfu"]) for line in read] == [values["mfu"] for values in rows]
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_absent_and_non_finite_values(run: RunFolder) -> None:
    run.metrics({"step": 1, "train_loss": math.inf, "val_loss": math.nan})
    read = run.read_metrics()[0]
    assert read["train_loss"] == math.inf
    assert math.isnan(read["val_loss"])
    assert read["mfu"] is None
    line = (run.path / "metrics.jsonl").read_text()
    parsed = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (parsed["train_loss"], parsed["val_loss"], parsed["mfu"]) == ("inf", "nan", None)


def test_a_row_of_unknown_names_or_without_a_step_is_refused(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="losss"):
        run.metrics({"step": 1, "losss": 2.0})
    with pytest.raises(ValueError, match="step"):
        run.metrics({"train_loss": 2.0})
    assert run.read_metrics() == []


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_left_out_and_cut_off(run: RunFolder, cut: int) -> None:
    for step in range(3):
        run.metrics(row(step))
        run.event("tick", step=step)
    for name in ("metrics.csv", "metrics.jsonl", "events.jsonl"):
        data = (run.path / name).read_bytes()
        (run.path / name).write_bytes(data[:-cut])
    assert [read["step"] for read in run.read_metrics()] == [0, 1]
    assert [event["step"] for event in run.read_events()] == [0, 1]
    run = RunFolder.open(run.path)
    run.metrics(row(7))
    run.event("tick", step=7)
    assert run.read_metrics() == [row(0), row(1), row(7)]
    assert [event["step"] for event in run.read_events()] == [0, 1, 7]
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_damaged_line_in_the_middle_is_named(run: RunFolder) -> None:
    for step in range(3):
        run.metrics(row(step))
        run.event("tick")
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = (run.path / name).read_text().splitlines(keepends=True)
        lines[2] = "what,is,this\n"
        (run.path / name).write_text("".join(lines))
    with pytest.raises(UserError, match=r"metrics\.jsonl line 3: not a row of 26 numbers"):
        run.read_metrics()
    with pytest.raises(UserError, match=r"events\.jsonl line 3"):
        run.read_events()


def test_rewind_drops_later_steps_from_both_files_and_says_so(run: RunFolder) -> None:
    for step in range(10):
        run.metrics(row(step))
    assert run.rewind(6) == 3
    assert run.read_metrics() == [row(step) for step in range(7)]
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == list(
        range(7)
    )
    event = run.read_events()[-1]
    assert (event["kind"], event["step"], event["dropped_rows"]) == ("rewind", 6, 3)
    assert run.rewind(6) == 0
    assert len(run.read_events()) == 1
    run.metrics(row(7))
    assert run.read_metrics()[-1] == row(7)
    assert not list(run.path.glob(".*"))


def test_metrics_of_another_version_are_read_and_continued(run: RunFolder) -> None:
    """Also by a program that does not rewind: a row below another header would have its numbers in wrong columns."""
    (run.path / "metrics.csv").write_text("step,train_loss,gone\n1,2.5,9.0\n")
    (run.path / "metrics.jsonl").write_text('{"step": 1, "train_loss": 2.5, "gone": 9.0}\n')
    assert run.read_metrics()[0]["train_loss"] == 2.5
    run.metrics(row(2))
    assert run.read_metrics()[1:] == [row(2)]
    with (run.path / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["step"], line["train_loss"]) for line in lines] == [("1", "2.5"), ("2", repr(row(2)["train_loss"]))]


def test_environment_is_replaced_whole(run: RunFolder) -> None:
    run.write_environment({"cores": 2, "peak": 1.5e12, "folder": run.path})
    run.write_environment({"cores": 4, "nested": {"x": math.nan}})
    assert run.read_environment() == {"cores": 4, "nested": {"x": "nan"}}
    with pytest.raises(TypeError):
        run.write_environment({"bad": object()})
    assert run.read_environment()["cores"] == 4
    assert not list(run.path.glob(".*"))


def test_config_and_plan_of_a_resumed_run_are_replaced_whole(run: RunFolder) -> None:
    run.write_config("b = 2\n", {"mesh": {"tp": 2}})
    for folder in (run, RunFolder.open(run.path)):
        assert folder.config_text == "b = 2\n"
        assert folder.plan == {"mesh": {"tp": 2}}
    assert not list(run.path.glob(".*"))


def test_every_metric_is_documented() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "run_folder.md").read_text()
    documented = [
        line.split("`")[1] for line in page.split("### Where the time")[0].splitlines() if line.startswith("| `")
    ]
    assert tuple(documented) == METRICS


def test_events_carry_both_clocks(run: RunFolder) -> None:
    run.event("start", ranks=2)
    run.event("end", note="tschüß\nzweite Zeile\u2028dritte")
    first, second = run.read_events()
    assert first["ranks"] == 2
    assert second["note"] == "tschüß\nzweite Zeile\u2028dritte"
    assert first["monotonic_s"] <= second["monotonic_s"]
    assert first["wall_time"].endswith("+00:00")
    with pytest.raises(ValueError, match="wall_time"):
        run.event("x", wall_time=1)


WRITER = """
import sys
from codescent.record import METRICS, METRICS_CSV, METRICS_JSONL, RunFolder, Table
run = RunFolder.open(sys.argv[1])
step = len(run.read_metrics())
while True:
    run.metrics({name: step for name in METRICS} | {"step_s": 0.1})
    run.event("tick", step=step, padding="x" * 500)
    step += 1
"""


def test_kill_9_while_rows_are_written_loses_none_that_was_written(run: RunFolder) -> None:
    """Twelve kills of a real process that appends without a pause: the rows stay whole and without a gap."""
    rng = random.Random(5)
    before = 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(run.path)])
        csv_file = run.path / "metrics.csv"
        size = csv_file.stat().st_size
        while csv_file.stat().st_size == size:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.wait()
        steps = [read["step"] for read in run.read_metrics()]
        assert steps == list(range(len(steps)))
        assert len(steps) > before
        before = len(steps)
        run.rewind(before)
        json_steps = [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        with csv_file.open() as file:
            assert [int(line["step"]) for line in csv.DictReader(file)] == json_steps == steps
        assert [event["step"] for event in run.read_events() if event["kind"] == "tick"][-1] <= steps[-1]


def test_kill_9_during_create_leaves_no_run_folder(tmp_path: Path) -> None:
    """Killed at each point where `create` touches the disk: the run is there whole, or its name is still free."""
    code = """
import os, sys
from codescent.record import RunFolder
seen = 0
def hook(event, arguments):
    global seen
    if event in ("os.mkdir", "os.rename") or (event == "open" and isinstance(arguments[2], int) and arguments[2] & 3):
        seen += 1
        if seen == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
sys.addaudithook(hook)
RunFolder.create(sys.argv[1], "a = 1", {"b": 2})
"""
    for count in range(1, 30):
        path = tmp_path / str(count) / "run"
        done = subprocess.run([sys.executable, "-c", code, str(path), str(count)], check=False)
        if path.exists():
            assert RunFolder.open(path).plan == {"b": 2}
        else:
            assert RunFolder.create(path, "a = 1", {"b": 3}).plan == {"b": 3}
        if done.returncode == 0:
            assert count > 6
            return
    pytest.fail("create never ended")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 256 << 10) as folder:
        yield folder


def test_full_disk_names_the_path_and_keeps_whole_lines(disk: Path) -> None:
    run = RunFolder.create(disk / "run", CONFIG, PLAN)
    with pytest.raises(UserError, match=r"events\.jsonl: no space left"):
        write_events(run, 10_000)
    events = len(run.read_events())
    assert events > 100
    assert (run.path / "events.jsonl").read_bytes().endswith(b"}\n")
    with pytest.raises(UserError, match=r"no space left"):
        write_metrics(run, 10_000)
    with pytest.raises(UserError, match=r"environment\.json.*no space left"):
        run.write_environment({"text": "x" * 100_000})
    assert not (run.path / "environment.json").exists()
    with pytest.raises(UserError, match="no space left"):
        RunFolder.create(disk / "second", CONFIG * 10_000, PLAN)
    assert [path.name for path in disk.iterdir()] == ["run"]
    assert len(run.read_events()) == events
    steps = [read["step"] for read in run.read_metrics()]
    assert steps == list(range(len(steps)))


def test_import_needs_neither_torch_nor_anything_heavy() -> None:
    code = (
        "import sys, codescent.record; print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_table_has_the_columns_of_its_first_row(tmp_path: Path) -> None:
    Table(tmp_path / "new").append({"step": 1, "loss": 0.5, "later": None})
    continued = Table(tmp_path / "new")
    continued.append({"step": 2, "later": float("nan")})
    with pytest.raises(UserError, match="has no column more, only step, loss, later"):
        continued.append({"step": 3, "more": 1})
    assert (tmp_path / "new" / METRICS_CSV).read_text() == "step,loss,later\n1,0.5,\n2,,nan\n"
    rows = [json.loads(line) for line in (tmp_path / "new" / METRICS_JSONL).read_text().splitlines()]
    assert rows == [{"step": 1, "loss": 0.5, "later": None}, {"step": 2, "loss": None, "later": "nan"}]


def test_a_table_refuses_names_that_would_break_its_lines(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a valid name of a column"):
        Table(tmp_path).append({"a,b": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        Table(tmp_path / "file" / "folder")


def test_a_folder_that_is_being_removed_is_said_whichever_file_goes_first(run: RunFolder) -> None:
    """Catches the advice to put metrics.jsonl back, while `rm -r` still has files to delete."""
    run.hold()
    run.metrics(row(1))
    (run.path / METRICS_JSONL).unlink()
    removal = threading.Timer(0.05, shutil.rmtree, [run.path])
    removal.start()
    with pytest.raises(UserError, match="the run folder was removed"):
        run.metrics(row(2))
    removal.join()
    run.release()
