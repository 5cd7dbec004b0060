"""In: commands with -q and -v, programs that configure logging. Out: which lines are printed where, which are records.
Does not test the words of messages: the tests of their commands do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from runs import called, make_project

import codescent
from codescent.base.messages import LEVEL, LOGGER
from codescent.base.output import note, warn


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_quiet_leaves_the_result_and_warnings(project: Path) -> None:
    words = ("train", "run.toml", "train.num_steps=2", "train.dropout=0")
    usual = called(project, *words[:3], "run.name=usual")
    quiet = called(project, *words[:3], "run.name=quiet", "-q")
    assert "step 2/2" in usual.stdout
    assert quiet.stdout.splitlines() == ["", usual.stdout.splitlines()[-1].replace("usual", "quiet")]
    refused = called(project, *words, "-q")
    assert (refused.returncode, refused.stderr.startswith("error: ")) == (2, True)
    assert LOGGER.level == logging.INFO


def test_verbose_adds_details_and_changes_no_result(project: Path) -> None:
    usual, more = called(project, "plan", "run.toml"), called(project, "plan", "run.toml", "-v")
    assert more.stdout == usual.stdout
    assert "config: run.toml\n" in more.stderr
    assert not usual.stderr
    both = called(project, "plan", "run.toml", "-v", "-q")
    assert (both.returncode, "not allowed with" in both.stderr) == (2, True)


def test_the_environment_gives_the_level_or_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL, "DEBUG")
    assert "config: run.toml\n" in called(project, "plan", "run.toml").stderr
    assert "config: run.toml\n" not in called(project, "plan", "run.toml", "-q").stderr
    monkeypatch.setenv(LEVEL, "loud")
    wrong = called(project, "plan", "run.toml")
    assert (wrong.returncode, wrong.stderr) == (2, f"error: {LEVEL}=loud: must be one of DEBUG, INFO, WARNING, ERROR\n")


def test_a_program_decides_what_is_logged_and_where(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[logging.LogRecord] = []
    own = logging.Handler()
    own.emit = records.append  # type: ignore[method-assign]
    LOGGER.addHandler(own)
    LOGGER.setLevel(logging.WARNING)
    try:
        note("no")
        warn("one\x1b", "two 100 %")
        codescent.train("run.toml", run={"name": "one"}, train={"num_steps": 1})
        assert [(one.levelname, one.getMessage()) for one in records] == [("WARNING", "one\\x1b\ntwo 100 %")]
        LOGGER.setLevel(logging.INFO)
        codescent.train("run.toml", run={"name": "two"}, train={"num_steps": 1})
        assert any(one.getMessage().startswith("step 1/1") for one in records)
    finally:
        LOGGER.removeHandler(own)
        LOGGER.setLevel(logging.INFO)
    printed = capsys.readouterr()
    assert printed.err == "one\\x1b\ntwo 100 %\n"
    assert printed.out.count("step 1/1  loss") == 1
