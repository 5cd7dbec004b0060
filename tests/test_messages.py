"""In: commands with -q and -v, programs that configure logging. Out: which lines are printed where, which are records.
Does not test the words of messages: the tests of their commands do."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from runs import called, make_project

import codescent
from codescent.base.messages import LEVEL, LOGGER
from codescent.base.output import note, warn
from codescent.verbs.arguments import make_parser
from codescent.verbs.cli import VERBS

PACKAGE = Path(codescent.__file__).parent


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
    assert "reads run.toml\n" in more.stderr
    assert not usual.stderr
    both = called(project, "plan", "run.toml", "-v", "-q")
    assert (both.returncode, "not allowed with" in both.stderr) == (2, True)


def test_every_command_has_both_options_and_one_meaning_of_them() -> None:
    """Catches a command that has one of them for something else, or that is run without its level."""
    _, verbs = make_parser()
    assert len(verbs) == len(VERBS)
    for name, parser in verbs.items():
        options = {option: action for action in parser._actions for option in action.option_strings}
        levels = [options[word].const for word in ("-q", "--quiet", "-v", "--verbose")]
        assert levels == ["WARNING", "WARNING", "DEBUG", "DEBUG"], name


@pytest.mark.parametrize(
    ("words", "progress"),
    [
        (("data", "corpus*.txt", "--tokenizer", "byte", "--folder", "shards"), "corpus*.txt: no file has"),
        (("docs", "which"), ""),
        (("config", "run.toml", "--toml"), ""),
        (("launch", "run.toml", "--to", "torchrun", "--hosts", "a:2,b:2"), ""),
    ],
)
def test_quiet_commands_print_their_result_alone(project: Path, words: tuple[str, ...], progress: str) -> None:
    usual, quiet, more = (called(project, *words, *level) for level in ((), ("-q",), ("-v",)))
    assert (usual.returncode, quiet.returncode, more.returncode) == (0, 0, 0), usual.stderr + quiet.stderr
    # a script says by which command it was made
    assert usual.stdout == more.stdout.replace(" -v\n", "\n") == quiet.stdout.replace(" -q\n", "\n")
    assert progress in usual.stderr
    assert usual.stderr.replace(quiet.stderr, "").startswith(progress), "warnings stay"
    assert f"{words[0]}: exit code 0" in more.stderr


def test_of_the_ranks_of_a_launcher_one_logs_details(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for rank, speaks in (("0", True), ("1", False)):
        for name, value in {**ranks, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        assert ("exit code 0" in called(project, "plan", "run.toml", "-v").stderr) is speaks


def test_no_stream_is_a_terminal_because_colours_are_forced(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks set FORCE_COLOR for each kernel, CI for each job: a bar would fill the cell with escape sequences."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    words = ("train", "run.toml", "train.num_steps=2", "run.name=colours", "data.folder=anew")
    done = called(project, *words)
    assert "step 2/2" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    sources = [path for path in PACKAGE.rglob("*.py") if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))]
    assert [path.name for path in sources] == ["console.py"], "new_console makes them"


def test_the_environment_gives_the_level_or_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL, "DEBUG")
    assert "reads run.toml\n" in called(project, "plan", "run.toml").stderr
    assert "reads run.toml\n" not in called(project, "plan", "run.toml", "-q").stderr
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
