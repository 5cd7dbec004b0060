"""In: run folders and checkpoints of formats that other versions write. Out: they are continued, or refused in words.
Does not train: test_train_resume continues a run of format 1."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_project
from test_checkpoint_damage import forge

import codescent
from codescent.base.errors import UserError
from codescent.checkpoint import manifest
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.config.words import KEYS
from codescent.plan import Plan
from codescent.record import METRICS, RunFolder, memory, ranks, run_folder
from codescent.verbs.cli import run as cli

TESTS = Path(__file__).resolve().parent
DOCS = TESTS.parent / "docs"


def run_of_format(path: Path, number: object, writer: str | None) -> RunFolder:
    """A run folder whose plan.json says that it is of a format, and environment.json which version wrote it."""
    run = RunFolder.create(path, '[run]\nname = "one"\n', {"mesh": {"tp": 1}})
    (path / "plan.json").write_text(json.dumps({"format": number, "mesh": {"tp": 1}}))
    if writer is not None:
        run.write_environment({"codescent": writer})
    return run


@pytest.mark.parametrize(
    "words",
    [
        ["train", "run.toml", "run.folder=one", "--resume"],
        ["sample", "one", "--prompt", "x"],
        ["evaluate", "one"],
        ["export", "one", "folder"],
        ["plot", "one", "--out", "a.png"],
    ],
    ids=lambda words: words[0],
)
def test_a_newer_run_folder_is_refused_by_every_verb_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    newer = run_folder.FORMAT + 1
    run_of_format(tmp_path / "one", newer, "7.8.9")
    before = {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert cli(words) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: one/plan.json: run folder of format {newer}, written by codescent 7.8.9: codescent "
        f"{codescent.__version__} reads formats 1 to {newer - 1}: use codescent 7.8.9 or newer"
    ]
    assert {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("number", "writer", "said"),
    [
        (3, "0.0.9", r"format 3, written by codescent 0\.0\.9: .* reads formats 4 to 5: use codescent 0\.0\.9$"),
        (3, None, r"format 3: codescent \S+ reads formats 4 to 5: use the version that wrote it$"),
        (6, None, r"format 6: codescent \S+ reads formats 4 to 5: use a newer version$"),
        (6, codescent.__version__, r"format 6: codescent \S+ reads formats 4 to 5: use a newer version$"),
        ("5", None, r'format "5": must be a whole number'),
        (True, None, r"format true: must be a whole number"),
        (None, None, r"format null: must be a whole number"),
        (10**400, None, r"format 10{36}\.\.\.: codescent \S+ reads formats 4 to 5: use a newer version$"),
        ("x" * 400, None, r'format "x{36}\.\.\.: must be a whole number'),
        (0, None, r"format 0: must be a whole number"),
    ],
)
def test_an_older_run_folder_and_a_number_that_is_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: object, writer: str | None, said: str
) -> None:
    monkeypatch.setattr(run_folder, "OLDEST_FORMAT", 4)
    monkeypatch.setattr(run_folder, "FORMAT", 5)
    run_of_format(tmp_path / "one", number, writer)
    with pytest.raises(UserError, match=said):
        RunFolder.open(tmp_path / "one")


def test_a_run_folder_without_a_number_is_of_format_1_and_gets_the_number_when_it_is_continued(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"mesh": {"tp": 1}}
    created = RunFolder.create(tmp_path / "one", "", plan)
    assert json.loads((tmp_path / "one" / "plan.json").read_text()) == {"format": run_folder.FORMAT, **plan}
    (tmp_path / "one" / "plan.json").write_text(json.dumps(plan))
    run = RunFolder.open(tmp_path / "one")
    assert run.plan == plan == created.plan
    run.write_config("", plan)
    assert json.loads((tmp_path / "one" / "plan.json").read_text())["format"] == run_folder.FORMAT
    assert RunFolder.open(tmp_path / "one").plan == plan == run.plan


@pytest.mark.parametrize(("number", "right"), [(1, "the version that wrote it"), (3, "a newer version")])
def test_a_checkpoint_of_another_format_is_whole_and_nobody_is_told_to_delete_it(
    tmp_path: Path, number: int, right: str
) -> None:
    checkpoints = Checkpoints(tmp_path, 5, keep_best=False)
    for step in (1, 2):
        path = checkpoints.save(step, {"t": torch.ones(2)}, {}, None)
    forge(path, lambda data: data.update(version=number))
    with pytest.raises(UserError) as error:
        checkpoints.latest()
    assert error.value.problems == (
        f"{path}/manifest.json: checkpoint of format {number}: codescent {codescent.__version__} reads format "
        f"{manifest.VERSION}: use {right}",
    )


def test_the_page_has_a_row_for_each_format() -> None:
    page = (DOCS / "versions.md").read_text(encoding="utf-8")
    tables = [set(map(int, re.findall(r"^\| (\d+) \|", part, re.MULTILINE))) for part in page.split("\n## ")]
    assert {1, 2} <= set(range(1, run_folder.FORMAT + 1)) in tables
    assert set(range(1, manifest.VERSION + 1)) in tables


def test_the_number_rises_when_a_run_folder_holds_something_else() -> None:
    """An older program refuses keys and fields that it does not know, or passes over them."""
    held = sorted(set(held_by_a_run_folder()))
    kept = TESTS / f"run_folder_format_{run_folder.FORMAT}.txt"
    assert held == kept.read_text(encoding="utf-8").splitlines(), (
        f"a run folder holds something else than {kept.name} says: if format {run_folder.FORMAT} is released, count "
        "FORMAT in record/run_folder.py on, with a new file and a row in docs/versions.md; if not, edit the file"
    )


def held_by_a_run_folder() -> Iterator[str]:
    """Every key of config.toml, field of plan.json, column of a CSV file; the format of checkpoints."""
    yield from (f"config.toml {key.section}.{key.name}" for key in KEYS.values())
    yield from fields_of(Plan, "plan.json")
    yield from (f"metrics.csv {name}" for name in METRICS)
    yield from (f"{table.name} {name}" for table in (ranks.TABLE, memory.TABLE) for name in table.columns)
    yield f"checkpoints {manifest.VERSION}"


def fields_of(kind: Any, name: str) -> Iterator[str]:
    """Names of the fields of a dataclass, and of those inside."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        for field, hint in typing.get_type_hints(kind).items():
            yield from fields_of(hint, f"{name}.{field}")
        return
    inside = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    if not inside:
        yield f"{name}: {kind.__name__}"
    for each in dict.fromkeys(inside):
        yield from fields_of(each, name)
