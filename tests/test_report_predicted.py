"""In: run folders with a prediction, made without training. Out: the section of a report, its figures, what is refused.
Does not check a price (test_price.py does) and does not judge beauty: people have looked at the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reported import make_run, predicted_run
from runs import called

from codescent.base.errors import UserError
from codescent.report.content import Picture, ReportSection, Table, Words
from codescent.report.sections import report
from codescent.results import open_runs


def section(*paths: Path) -> ReportSection | None:
    """That of the predictions; None: there is none."""
    found = report(open_runs(paths)).sections
    return next((one for one in found if one.name == "predicted"), None)


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_a_run_without_a_prediction_shows_nothing_new(tmp_path: Path) -> None:
    make_run(tmp_path / "bare")
    assert section(tmp_path / "bare") is None


def test_time_and_memory_are_compared_by_part(tmp_path: Path) -> None:
    """A part beside another one; parts of the mean over stages beside those of the busiest stage."""
    predicted_run(tmp_path / "one", 2, "parallel.pp=2", step_s=0.2, band_s=[0.15, 0.3])
    found = section(tmp_path / "one")
    assert found is not None
    time, memory = (item for item in found.items if isinstance(item, Table))
    assert [row[0] for row in texts(time)] == [
        "step",
        "computing",
        "messages",
        "bubble",
        "optimizer",
        "data",
        "the rest",
    ]
    assert [column.title for column in time.columns] == ["part", "predicted", "8 of 10", "measured", "error"]
    step, computing = texts(time)[:2]
    assert step[1:3] == ["200 ms", "150 to 300 ms"]
    assert step[3].startswith("100 ms") or step[3].startswith("99.")
    assert time.rows[0][4].odd, "the measured step is outside of the band"
    assert computing[3].startswith(("60.", "59."))
    assert texts(memory)[0][0] == "memory"
    assert [row[3] for row in texts(memory)][1:] == ["–"] * (len(memory.rows) - 1), "no memory.csv"
    (said,) = [words.paragraphs[0] for words in found.items if isinstance(words, Words)][1:]
    assert "too long, outside of its band" in said
    names = [item.name for item in found.items if isinstance(item, Picture)]
    assert names == ["predicted_time", "predicted_memory"]


def test_of_many_runs_each_is_a_row_and_the_worst_is_named(tmp_path: Path) -> None:
    for number, step_s in enumerate((0.1, 0.11, 0.3, 0.09)):
        predicted_run(tmp_path / f"run{number}", step_s=step_s)
    found = section(*(tmp_path / f"run{number}" for number in range(4)))
    assert found is not None
    (table,) = (item for item in found.items if isinstance(item, Table))
    assert [row[0] for row in texts(table)] == ["run0", "run1", "run2", "run3"]
    assert [words.paragraphs[0] for words in found.items if isinstance(words, Words)][1].startswith(
        "Furthest off of 4 runs is run2. The step is predicted "
    )


def test_the_page_and_its_figures_are_written(tmp_path: Path) -> None:
    """A figure that cannot be drawn; a name of a run that the page or the figure reads as a format."""
    predicted_run(tmp_path / "one<b>$x$")
    predicted_run(tmp_path / "two", 2)
    done = called(tmp_path, "report", "one<b>$x$", "two", "--out", "a.html", "--figures", "figures")
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "a.html").read_text()
    assert '<section id="predicted">' in page
    assert 'aria-label="Time of a step, predicted and measured"' in page
    assert "<b>$x$" not in page
    for name in ("predicted_time.svg", "predicted_memory.svg"):
        assert "predicted" in (tmp_path / "figures" / name).read_text()


@pytest.mark.parametrize("text", ['{"step_s": 1', "[]", '{"step_s": 1e999}', '{"cluster": "laptop"}'])
def test_a_damaged_prediction_is_one_message(tmp_path: Path, text: str) -> None:
    for name in ("one", "two"):
        predicted_run(tmp_path / name).path.joinpath("prediction.json").write_text(text)
    done = called(tmp_path, "report", "one", "two", "--out", "a.html")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [line.startswith(f"error: {name}/prediction.json: not a") for line, name in zip(lines, ("one", "two"))] == [
        True,
        True,
    ]
    assert len(lines) == 2
    assert not (tmp_path / "a.html").exists()


def test_a_prediction_of_another_number_of_stages_is_damaged(tmp_path: Path) -> None:
    predicted_run(tmp_path / "one")
    predicted_run(tmp_path / "two", 2, "parallel.pp=2")
    (tmp_path / "one/prediction.json").write_bytes((tmp_path / "two/prediction.json").read_bytes())
    with pytest.raises(UserError, match="must be lists of 1 stage, as the plan has"):
        section(tmp_path / "one")
    assert json.loads((tmp_path / "two/prediction.json").read_text())["device_kind"] == "cpu"
