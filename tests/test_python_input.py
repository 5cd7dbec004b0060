"""In: wrong arguments, programs that set up logging, code of a program. Out: one clear error; what ranks know of it.
Does not test wrong values of keys: the tests of configs do. Runs and plans as objects: test_python.py."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import called, environment, make_project

import codescent
from codescent.api import own_code
from codescent.api.process import _whole_imports, as_before
from codescent.base import messages
from codescent.base.messages import LEVEL, LOGGER, nearest_level
from codescent.base.own_names import FOLDERS
from codescent.config.load import load

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
SCHEDULE = """
from codescent import RateSchedule

class Steady(RateSchedule):
    def rate(self, at):
        return at.peak
"""
RAISES = SCHEDULE.replace("return at.peak", "return at.peak / (3 - at.step)")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(call: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(codescent.UserError) as refused:
        call()
    return refused.value.problems


def test_every_problem_is_in_one_error_with_its_place(project: Path) -> None:
    def planned(*config: Any, **keywords: Any) -> tuple[str, ...]:
        return problems(lambda: codescent.plan(*config, **keywords))

    (unknown,) = planned(train={"num_step": 3})
    assert unknown == "keywords: train.num_step: unknown key in [train]; did you mean train.num_steps?"
    wrong = planned({"train": {"num_step": 3, "seed": object()}})
    assert len(wrong) == 1
    assert wrong[0].startswith("config: train.seed: given <object")
    both = planned({"train": {"num_step": 3, "num_steps": "many"}})
    assert [one.split(":")[:2] for one in both] == [["config", " train.num_step"], ["config", " train.num_steps"]]
    (base,) = planned({"base": "nope.toml"})
    assert base.startswith(f"config: base: {project / 'nope.toml'}: no such file")
    assert planned(3) == ("config: given 3; must be a name, a path, or a dict of sections",)
    assert planned({"base": 3})[0].startswith("config: base: given 3; must be the name")
    assert planned(software="x") == ("software: needs cluster, such as cluster h100-sxm",)
    forms = planned(**{"train.num_steps": 3, "trian": {}, "model": 3})
    assert forms == (
        "keywords: train.num_steps: write train={'num_steps': 3}",
        "keywords: trian: unknown section; did you mean [train]?",
        'keywords: model: given 3; must be a dict of its keys, such as train={"num_steps": 20}',
    )
    assert not (project / "runs").exists()


def test_arguments_of_other_types_are_one_error(project: Path) -> None:
    """Catches an AttributeError or a TypeError from somewhere inside, and resume="runs/one", which is true."""
    function: Any = codescent.train
    assert problems(lambda: function(resume="runs/one")) == ("resume: given 'runs/one'; must be True or False",)
    function = codescent.Run
    assert problems(lambda: function(3)) == ("path: given 3; must be a string or a path",)
    function = codescent.plan
    assert problems(lambda: function(cluster=["a"], software=3)) == (
        "cluster: given ['a']; must be a string, a path or None",
        "software: given 3; must be a string or None",
    )
    run = SimpleNamespace(path=project)
    function = codescent.Run.sample
    given = {"prompt": 3, "tokens": True, "temperature": "hot", "top_k": 2.5, "seed": None, "best": 1, "step": "3"}
    wrong = problems(lambda: function(run, **given))
    assert [one.split(":")[0] for one in wrong] == list(given)
    assert "step: given 3 together with best" in problems(lambda: function(run, step=np.int64(3), best=True))[0]


@pytest.mark.parametrize(
    ("value", "right"), [("\ud800", False), (ENDLESS, False), (np.arange(3), True), (np.longdouble(1), False)]
)
def test_values_that_no_file_can_have_are_named(project: Path, value: object, right: bool) -> None:
    """Half a character, a list that contains itself, a number of numpy that Python lacks. Arrays are lists."""
    form = "must be a string, a number, True, False, None, a path, a list or a dict"
    (found,) = problems(lambda: codescent.plan({"base": "run.toml", "train": {"num_steps": value}}))
    assert (form in found) is not right, found
    assert found.startswith("config: train.num_steps: given ")


def test_a_key_is_no_part_of_a_command_line(project: Path) -> None:
    """Catches a key whose "=" or "#" changes another key."""
    for key in ("num_steps=7#", "a b", ""):
        (found,) = problems(lambda key=key: codescent.plan("run.toml", train={key: 1}))  # type: ignore[misc]
        assert found.startswith(f"keywords: train.{key}: unknown key in [train]; ")


def test_a_program_sets_its_level_before_the_first_call_or_the_import(project: Path) -> None:
    """Catches a logger that is set up when a function is called first: it would undo what the program has set."""
    program = """
import logging
{}
import codescent
{}
codescent.plan("run.toml")
logger = logging.getLogger("codescent")
assert (logger.level, len(logger.handlers)) == (logging.ERROR, 1), logger
assert not logging.getLogger().handlers
"""
    sets = 'logging.getLogger("codescent").setLevel("ERROR")'
    for places in ((sets, ""), ("", sets)):
        command = [sys.executable, "-c", program.format(*places)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_logger_has_one_handler_after_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython loads files again that were edited: each message would be printed twice."""
    own = logging.NullHandler()
    monkeypatch.setattr(LOGGER, "handlers", [messages.Terminal(), own])
    LOGGER.handlers[0].set_name(LOGGER.name)
    messages._set_up()
    assert [type(handler).__name__ for handler in LOGGER.handlers] == ["NullHandler", "Terminal"]


@pytest.mark.parametrize(
    ("level", "name"), [(50, "ERROR"), (40, "ERROR"), (35, "ERROR"), (15, "INFO"), (10, "DEBUG"), (1, "DEBUG")]
)
def test_ranks_show_no_more_than_the_program(monkeypatch: pytest.MonkeyPatch, level: int, name: str) -> None:
    """Catches a level without a name of ours, such as CRITICAL, with which ranks would print everything."""
    monkeypatch.setattr(LOGGER, "level", level)
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
    assert nearest_level() == name
    with as_before(computes=False):
        assert os.environ[LEVEL] == name


def test_a_level_of_the_environment_is_refused_in_programs_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL, "loud")
    wrong = (f"{LEVEL}=loud: must be one of DEBUG, INFO, WARNING, ERROR",)
    assert problems(lambda: codescent.plan("run.toml")) == problems(lambda: codescent.train("run.toml")) == wrong


@pytest.mark.parametrize("words", [("-q", "train"), ("train", "-q"), ("--quiet", "train")])
def test_the_level_may_stand_before_the_command(project: Path, words: tuple[str, ...]) -> None:
    done = called(project, *words, "run.toml", "train.num_steps=1", "run.name=one", "log.sample_tokens=0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[1].startswith("The run is in runs/one ")
    assert len(done.stdout.splitlines()) == 2


def test_code_beside_the_program_is_found_by_its_ranks(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a run that works on one rank and not on two: Python adds the folder of a script for the script alone."""
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "beside_it.py").write_text(SCHEDULE)
    monkeypatch.syspath_prepend(folder)
    with as_before(computes=False):
        given = os.environ[FOLDERS]
    assert str(folder) in given.split(os.pathsep)
    program = "from codescent.base.own_names import load; load('optimizer.schedule', 'beside_it:Steady')"
    for folders, code in ((given, 0), ("", 1)):
        command = [sys.executable, "-P", "-c", program]
        done = subprocess.run(command, env=environment(**{FOLDERS: folders}), capture_output=True, check=False)
        assert done.returncode == code


def test_code_of_the_program_itself_needs_one_rank(project: Path) -> None:
    """Catches a message that names a file of codescent: in ranks, __main__ is another one."""
    keys: dict[str, Any] = {"log": {"to": "__main__:asks"}, "parallel": {"ranks": 2}}
    (found,) = problems(lambda: codescent.train("run.toml", **keys))
    assert found.startswith("log.to = __main__:asks: with parallel.ranks = 2 each rank is a process with another")
    assert not (project / "runs").exists()


def test_code_that_was_edited_after_its_import_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run with old code and the hash of new code, as when a notebook edits a module between two runs."""
    monkeypatch.setattr(own_code, "_first", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = project / "edited_schedule.py"
    file.write_text(SCHEDULE)
    config = load("run.toml", ['optimizer.schedule="edited_schedule:Steady"']).config
    own_code.refuse_stale(config)
    own_code.refuse_stale(config)
    file.write_text(f"{SCHEDULE}# edited\n")
    (found,) = problems(lambda: own_code.refuse_stale(config))
    assert f"{file} has changed since this program imported it" in found
    shutil.rmtree(project / "__pycache__", ignore_errors=True)
    importlib.reload(sys.modules["edited_schedule"])
    own_code.refuse_stale(config)


def test_an_error_of_the_callers_code_keeps_its_traceback(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a class of one's own that nobody can debug: the sentence alone does not show how it was called."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (project / "raising_schedule.py").write_text(RAISES)
    keys: dict[str, Any] = {"schedule": "raising_schedule:Steady", "warmup_steps": 0}
    with pytest.raises(codescent.UserError, match="raised ZeroDivisionError") as refused:
        codescent.train("run.toml", optimizer=keys)
    assert isinstance(refused.value.__cause__, ZeroDivisionError)
    assert refused.value.__cause__.__traceback__ is not None


def test_ctrl_c_does_not_break_off_an_import() -> None:
    """Catches half of torch in a notebook: every later import of it fails, so the kernel must be started again."""
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    done: list[str] = []

    def imports() -> None:
        with _whole_imports():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)
            done.append("imported")

    try:
        with pytest.raises(KeyboardInterrupt):
            imports()
        assert (done, signal.getsignal(signal.SIGINT)) == (["imported"], signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, outside)
