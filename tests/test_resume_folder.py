"""In: a run folder on the command line of `train --resume`. Out: the run goes on, by the commands that it prints.
Does not test what a resumed run computes (test_train_resume.py does)."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
from forker import Forker
from hypothesis import given
from hypothesis import strategies as st
from runs import assert_same, called, codescent, environment, losses, make_project

from codescent.base.command import resume_command
from codescent.base.errors import UserError
from codescent.config.load import load, to_toml
from codescent.preflight import plan_of
from codescent.record import RunFolder
from codescent.train import open as open_module
from codescent.verbs.arguments import parse
from codescent.verbs.resume import config_of

FIRST = ("train.num_steps=10", "optimizer.decay_steps=20")


def printed(text: str) -> list[str]:
    """The words of the command that a message prints, without `codescent`."""
    (line,) = re.findall(r"codescent (train --resume .*)", text)
    return shlex.split(line)


def folder_of(path: Path) -> RunFolder:
    """A run folder without a checkpoint."""
    config = load("run.toml", ["run.name=one", "train.num_steps=7", "model.vocab_size=257"]).config
    return RunFolder.create(path, to_toml(config), plan_of(config, 1).to_json())


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resumed(word: str, *overrides: str, resume: bool | None = True) -> Namespace:
    return Namespace(config=word, overrides=list(overrides), ranks=None, resume=resume)


@given(st.permutations([["--resume"], ["--ranks", "2"], ["runs/lr=1.5"], ["train.num_steps=9"], ["parallel.tp=2"]]))
def test_the_words_may_stand_in_any_order(words: list[list[str]]) -> None:
    arguments = parse(["train", *(word for part in words for word in part)])
    overrides = [word for part in words for word in part if "." in word and "/" not in word]
    assert (arguments.config, arguments.resume, arguments.ranks) == ("runs/lr=1.5", True, 2)
    assert arguments.overrides == overrides


def test_an_equals_sign_may_stand_before_the_run() -> None:
    arguments = parse(["train", "train.num_steps=9", "--resume=runs/lr=1.5"])
    assert (arguments.config, arguments.resume, arguments.overrides) == ("runs/lr=1.5", True, ["train.num_steps=9"])
    with pytest.raises(SystemExit):
        parse(["prove", "default", "--resume=runs/one"])


def test_auto_is_no_folder_and_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse(["train", "--resume=auto", "my.toml", "train.num_steps=9"])
    assert (arguments.config, arguments.resume, arguments.overrides) == ("my.toml", None, ["train.num_steps=9"])
    assert parse(["train", "--resume=./auto"]).config == "./auto"
    assert parse(["train", "--resume", "auto"]).config == "auto"
    with pytest.raises(SystemExit):
        parse(["train", "my.toml", "--resume", "--resume=auto"])
    assert "--resume=auto: not allowed with argument --resume" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["runs/one", "other place/the run", "default"])
def test_the_config_of_a_folder_is_that_of_the_run_there(empty: Path, path: str) -> None:
    folder_of(Path(path)).event("start", step=0)
    word = f"./{path}"  # without ./ the word "default" names the shipped config
    found = config_of(resumed(word, "train.num_steps=9", "parallel.tp=2")).config
    assert (found.run.folder or Path("runs") / found.run.name) == Path(path)
    assert (found.train.num_steps, found.parallel.tp, found.model.num_layers) == (9, 2, 2)
    assert config_of(resumed("default", resume=False)).config.run.name == "default"


@pytest.mark.parametrize(
    ("word", "overrides", "expected"),
    [
        ("runs", (), r"runs: not a run folder: it has no config.toml, no plan.json, no checkpoints/"),
        ("runs/on", (), "runs/on: no such run folder; did you mean runs/one?"),
        ("one", (), "one: no such run folder; did you mean runs/one?"),
        ("zzz", (), "zzz: no such run folder; give the folder of the run, or its CONFIG"),
        ("runs/one", ("run.name=b",), "run.name: given, but --resume runs/one names the run; leave it out"),
        ("runs/one", ("run.folder=b",), "run.folder: given, but --resume runs/one names the run; leave it out"),
        ("runs/one", ("train.num_step=9",), "command line: train.num_step: unknown key in [train]"),
        ("absent.toml", (), "absent.toml: no such file"),
        ("x" * 300, (), "cannot be read: File name too long"),
    ],
)
def test_what_names_no_run_is_refused(empty: Path, word: str, overrides: Sequence[str], expected: str) -> None:
    folder_of(Path("runs/one"))
    with pytest.raises(UserError) as caught:
        config_of(resumed(word, *overrides))
    assert expected in caught.value.problems[0]
    assert len(caught.value.problems) == 1


def test_the_config_of_a_renamed_run_names_the_folder(empty: Path) -> None:
    folder_of(Path("renamed"))
    with pytest.raises(UserError, match=r"^runs/one: no such .*did you mean: codescent train --resume renamed$"):
        config_of(resumed("renamed/config.toml"))


def test_a_run_folder_without_resume_names_both_commands(empty: Path) -> None:
    folder_of(Path("runs/one"))
    with pytest.raises(UserError, match=r"is a run folder; to continue this run: codescent train --resume runs/one; "):
        config_of(resumed("runs/one", resume=False))


@pytest.mark.parametrize(
    ("files", "word", "overrides", "expected"),
    [
        ([], "runs/none", (), "runs/none: no such run folder; give the folder of the run, or its CONFIG"),
        (["runs/one/notes.txt"], "run.toml", (), "runs/one: not a run folder: it has no config.toml, no plan.json"),
        (["runs"], "run.toml", ("run.folder=runs",), "runs: is a file, not a run folder"),
        ([], "default", ("train.num_step=9",), "command line: train.num_step: unknown key in [train]"),
    ],
)
def test_auto_refuses_what_is_neither_a_run_nor_free(
    empty: Path, files: list[str], word: str, overrides: Sequence[str], expected: str
) -> None:
    for file in map(Path, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    with pytest.raises(UserError) as caught:
        config_of(resumed(word, *overrides, *(["run.name=one"] if word == "run.toml" else []), resume=None))
    assert expected in caught.value.problems[0]


def test_auto_does_not_begin_a_renamed_run_anew(empty: Path) -> None:
    folder_of(Path("renamed"))
    with pytest.raises(UserError, match=r"^runs/one: no such .*did you mean: codescent train --resume renamed$"):
        config_of(resumed("renamed/config.toml", resume=None))


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_command_begins_a_run_goes_on_and_ends(project: Path, forker: Forker, ranks: int) -> None:
    words = ("train", "run.toml", f"run.name=job-{ranks}", "--resume=auto", "--ranks", str(ranks))
    path = project / "runs" / f"job-{ranks}"
    path.mkdir(parents=True)  # an empty folder is free
    begun = called(project, *words, *FIRST)
    assert begun.returncode == 0, begun.stderr
    on = called(project, *words)
    assert on.returncode == 0, on.stderr
    assert f"run     runs/job-{ranks} continues" in on.stdout
    run = RunFolder.open(path)
    assert losses(run) == losses(forker.train(project, f"expected-{ranks}", ranks))
    events = run.read_events()
    assert [event["kind"] for event in events if event["kind"] in ("start", "resume")] == ["start", "resume"]
    ended = called(project, *words)
    assert (ended.returncode, run.read_events()) == (0, events), ended.stderr
    other = called(project, *words, "run.seed=5")
    assert (other.returncode, "run.seed" in other.stderr) == (2, True)


def test_auto_goes_on_where_nothing_was_saved(project: Path, forker: Forker) -> None:
    begun = forker.train(project, "unsaved", 1, "train.num_steps=7")
    for save in begun.checkpoints.iterdir():
        shutil.rmtree(save)
    done = called(project, "train", "run.toml", "run.name=unsaved", "train.num_steps=7", "--resume=auto")
    assert done.returncode == 0, done.stderr
    assert len(losses(RunFolder.open(project / "runs" / "unsaved"))) == 7


def test_under_a_launcher_rank_0_decides_for_all(project: Path) -> None:
    words = ("train", "run.toml", "run.name=launched", "--resume=auto", "train.num_steps=4", "optimizer.decay_steps=6")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "codescent")
    for more in ((), ("train.num_steps=6",)):
        done = subprocess.run(
            [sys.executable, *torchrun, *words, *more], cwd=project, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert len(losses(RunFolder.open(project / "runs" / "launched"))) == 6


def test_a_moved_run_goes_on_by_its_folder_alone(project: Path, forker: Forker) -> None:
    expected = forker.train(project, "whole", 1)
    run = forker.train(project, "begun", 1, *FIRST)
    moved = project / "moved 'here'"
    run.path.rename(moved)
    words = shlex.split(resume_command(Path("moved 'here'"), "train.num_steps=20", "optimizer.decay_steps=auto"))
    done = called(project, *words[1:])
    assert done.returncode == 0, done.stderr
    assert losses(RunFolder.open(moved)) == losses(expected)
    assert "resumed from moved 'here'/checkpoints/step_00000010" in done.stdout
    assert not run.path.exists()
    again = called(project, "train", f"{moved}/config.toml", "--resume")  # the config now names the place
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("name", "words", "command", "rates"),
    [
        ("auto", (), "train.num_steps=40", "It is then 0.00541 at step 21 and 1.71e-05 at step 40."),
        ("ended", ("optimizer.decay_steps=15",), "train.num_steps=40 optimizer.decay_steps=40", "was 0 at step 20"),
        pytest.param(
            "lowest",
            ("optimizer.decay_steps=15", "optimizer.min_learning_rate=1e-3"),
            "train.num_steps=40",
            "0.001 at",
            marks=pytest.mark.slow,
        ),
        ("left", ("optimizer.decay_steps=30",), "train.num_steps=30", "was 0.00335 at step 20"),
        pytest.param(
            "constant",
            ("optimizer.schedule=constant",),
            "train.num_steps=40",
            "0.01 at step 21 and 0.01 at step 40",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_finished_run_names_the_command_that_continues_it(
    project: Path, forker: Forker, name: str, words: Sequence[str], command: str, rates: str
) -> None:
    run = forker.train(project, name, 1, *words)
    done = called(project, "train", "--resume", f"runs/{name}")
    assert done.returncode == 0, done.stderr
    assert rates in done.stdout
    assert printed(done.stdout) == ["train", "--resume", f"runs/{name}", *command.split()]
    first, last = re.findall(r"then (\S+) at step 21 and (\S+) at step", done.stdout)[0]
    done = called(project, *printed(done.stdout))
    assert done.returncode == 0, done.stderr
    rows = run.read_metrics()
    assert len(rows) == (30 if name == "left" else 40)
    assert f"{rows[20]['learning_rate']:.3g}" == first
    assert f"{rows[-1]['learning_rate']:.3g}" == last
    assert all(row["learning_rate"] > 0 for row in rows[20:])
    (event,) = [event for event in run.read_events() if event["kind"] == "resume"]
    assert ("changes" in event) == (name in ("auto", "ended"))


def content(run: RunFolder) -> dict[str, tuple[bytes, int]]:
    """The bytes and the time of each file of a run folder, except the lock and the lease."""
    files = [path for path in run.path.rglob("*") if path.is_file() and not path.name.startswith((".writer", ".lease"))]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_resume_with_nothing_to_do_changes_nothing(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    class Counted(RunFolder):
        @classmethod
        def open(cls, path: Path | str) -> RunFolder:
            opened.append(Path(path))
            return RunFolder.open(path)

    run = forker.train(project, "done", 1, "optimizer.schedule=constant")
    before = content(run)
    monkeypatch.setattr(open_module, "RunFolder", Counted)
    for words, said in (
        (("log.every=5", "log.sample_tokens=5"), "runs/done has all its 20 steps. For 20 more: "),
        (("train.num_steps=15",), "train.num_steps = 15: runs/done has 20 steps already; nothing is changed"),
    ):
        done = called(project, "train", "--resume", "runs/done", *words)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert "text generated" not in done.stdout
        assert content(run) == before
    assert opened == [Path("runs/done")] * 2  # once by each command
    events = run.path / "events.jsonl"
    events.write_text("".join(line for line in events.read_text().splitlines(keepends=True) if '"end"' not in line))
    forker.train(project, "done", 1, "optimizer.schedule=constant", resume=True)  # killed before it wrote the event
    assert [event["kind"] for event in run.read_events()][-2:] == ["resume", "end"]


@pytest.mark.parametrize(("lowest", "effect"), [("0", "is 0, which changes no weight;"), ("1e-3", "is 0.001; once")])
def test_more_steps_after_the_schedule_are_warned_of_once(
    project: Path, forker: Forker, lowest: str, effect: str
) -> None:
    words = ("optimizer.decay_steps=6", f"optimizer.min_learning_rate={lowest}")
    forker.train(project, f"over{lowest}", 1, *words, "train.num_steps=8")
    done = called(project, "train", "--resume", f"runs/over{lowest}", "train.num_steps=10")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert said.count("warning: optimizer.decay_steps = 6: the schedule is over") == 1
    assert f"the learning rate of all further steps {effect}" in said
    more = ("train.num_steps=12", "optimizer.decay_steps=12")
    done = called(project, "train", "--resume", f"runs/over{lowest}", *more)
    assert done.returncode == 0, done.stderr
    assert "the schedule is over" not in done.stdout


def test_a_schedule_that_is_not_over_stays(project: Path, forker: Forker) -> None:
    """More steps alone would have changed the learning rates so far; with what the refusal names they do not."""
    expected = forker.train(project, "undisturbed", 1, "train.num_steps=12", "optimizer.decay_steps=10")
    run = forker.train(project, "stopped", 1, "train.num_steps=10")
    (run.path / "events.jsonl").write_text((run.path / "events.jsonl").read_text().replace('"end"', '"stop"'))
    done = called(project, "train", "--resume", "runs/stopped", "train.num_steps=12")
    assert done.returncode == 2
    (more,) = re.findall(r"; add (\S+), which keeps the schedule", done.stderr)
    done = called(project, "train", "--resume", "runs/stopped", "train.num_steps=12", more)
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(expected)
    done = called(project, "train", "--resume", "runs/stopped", "optimizer.learning_rate=1", "model.dropout=0.5")
    assert done.returncode == 2  # no more steps: nothing of the schedule may change
    assert "optimizer.learning_rate: the run in runs/stopped has 0.01, this config 1.0" in done.stderr
    words = ("train.num_steps=14", "optimizer.kind=sgd", "model.dropout=0.5", "optimizer.learning_rate=1e-4")
    done = called(project, "train", "--resume", "runs/stopped", *words)
    assert done.returncode == 2  # more steps: the optimizer's kind and the model stay
    assert "optimizer.kind: the run" in done.stderr
    assert "model.dropout: the run" in done.stderr
    assert "optimizer.learning_rate" not in done.stderr


def test_commands_are_short_and_quoted(project: Path, forker: Forker) -> None:
    forker.train(project, "a run", 1, "train.num_steps=1")
    done = called(project, "train", "run.toml", "run.name=a run")
    assert printed(done.stderr.replace("), or", "\n")) == ["train", "--resume", "runs/a run"]
    (project / "full").mkdir()
    (project / "full" / "file").touch()
    done = called(project, "train", "run.toml", "run.folder=full")
    assert "full: is not empty: choose a new run.name (or run.folder)" in done.stderr


def test_no_code_beside_a_run_folder_is_imported(project: Path, forker: Forker) -> None:
    run = forker.train(project, "sent", 1, "train.num_steps=1")
    (project / "archive").mkdir()
    run.path.rename(project / "archive" / "run")
    (project / "archive" / "brought.py").write_text("def log(kind, data): print('brought along')\n")
    done = called(project, "train", "--resume", "archive/run", "log.to=brought:log")
    assert done.returncode == 2
    assert "log.to" in done.stderr
    assert "brought along" not in done.stdout


@pytest.mark.slow
def test_layouts_and_launchers(project: Path, forker: Forker) -> None:
    words = ("train.precision=fp64", "train.eval_every=0")
    expected = forker.train(project, "whole-64", 1, *words)
    forker.train(project, "ranks", 1, *words, *FIRST)
    more = ("train.num_steps=15", "--ranks", "2", "parallel.tp=2")
    done = codescent(project, "train", "--resume", "runs/ranks", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    (project / "runs" / "ranks").rename(project / "elsewhere")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "codescent", "train", "--resume", "elsewhere", "train.num_steps=20"]
    command += ["parallel.tp=1", "parallel.dp_shard=2", "optimizer.decay_steps=auto"]
    ran = subprocess.run(
        command, cwd=project, env=environment(), text=True, capture_output=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert_same(RunFolder.open(project / "elsewhere"), expected, 1e-9)
