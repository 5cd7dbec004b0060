"""In: study files, with real runs of a tiny model. Out: points run in rounds, continued, collected, evaluated, refused.
Does not check how long anything takes, and not the laws of scaling (test_study_laws.py does)."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forker import Forker
from runs import called, codescent, make_project, start

from codescent.base.errors import UserError
from codescent.record import RunFolder
from codescent.results import PARTS, Ended
from codescent.study import PointState, Study, open_study, runner
from codescent.study.folder import StudyFolder
from codescent.study.table import COLUMNS

STUDY = """
[study]
name = "tiny"
config = "run.toml"
kind = "{kind}"
repeats = {repeats}
steps = 3
warmup = 1
baseline = {{ {baseline} }}
[set]
data.folder = "datasets"
[axes]
{axes}
"""
Runner = Callable[[str, Sequence[str]], Ended]


def write(
    project: Path, axes: str = "ranks = [1, 2, 3]", kind: str = "strong", repeats: int = 2, baseline: str = "ranks = 1"
) -> Path:
    """A study file of the project's config; the folder of its runs is new."""
    file = project / "study.toml"
    file.write_text(STUDY.format(axes=axes, kind=kind, repeats=repeats, baseline=baseline))
    return file


@pytest.fixture
def project(tmp_path: Path) -> Path:
    make_project(tmp_path)
    return tmp_path


@pytest.fixture
def started(project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The run folders of the runs that a study starts, in order. The forker runs them: torch is imported once."""
    folders: list[str] = []

    def train_run(config: str, words: Sequence[str]) -> Ended:
        given = dict(word.split("=", 1) for word in words)
        folders.append(given["run.folder"].removeprefix("study-runs/tiny/"))
        done = forker.run(project, int(given.get("parallel.ranks", 1)), words)
        codes = {code for code in done.codes if code}
        return Ended(1 if codes else 0, done.said if codes else "")

    monkeypatch.setattr(runner, "train_run", train_run)
    return folders


def rows(project: Path) -> list[dict[str, str]]:
    with (project / "study-runs" / "tiny" / "study.csv").open() as file:
        return list(csv.DictReader(file))


def study_of(project: Path) -> Study:
    return open_study(project / "study-runs" / "tiny")


def test_points_are_run_in_rounds_and_evaluated(project: Path, started: list[str]) -> None:
    write(project)
    done = called(project, "study", "study.toml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("config  run.toml\n") == 1, "the config that is measured"
    assert "config: run.toml\n" in done.stdout
    assert started == ["ranks-1/1", "ranks-2/1", "ranks-2/2", "ranks-1/2"], "each round in the opposite order"
    assert max(map(len, done.stdout.partition("* ranks=")[0].splitlines())) <= 80

    study = study_of(project)
    (group,) = study.groups
    one, two, three = group.points
    assert [point.workers for point in group.points] == [1, 2, 3]
    assert (three.state, three.repeats, three.step_s.total) == (PointState.REFUSED, 0, None)
    assert "does not divide into 3" in three.why
    assert (one.state, one.repeats, two.repeats, group.baseline) == (PointState.DONE, 2, 2, "ranks=1")
    assert one.speed_up.total is not None
    assert (one.speed_up.total.value, one.serial_share) == (1.0, None)
    for point in (one, two):
        assert point.step_s.total is not None
        assert point.step_s.compute is not None
        assert point.step_s.compute.value < point.step_s.total.value
        assert point.tokens == 8 * 16
        assert sum(point.parts_s.values()) == pytest.approx(sum(_step_s(project, point.name)) / 2)
        assert point.memory_bytes
    assert two.speed_up.total is not None
    assert two.efficiency.total is not None
    assert two.serial_share is not None
    gain = two.speed_up.total.value
    assert two.efficiency.total.value == pytest.approx(gain / 2)
    assert two.serial_share.value == pytest.approx((1 / gain - 1 / 2) / (1 - 1 / 2))
    assert [fit.law for fit in group.fits] == ["Amdahl", "Gustafson", "universal scalability law"]
    assert all(not fit.parameters for fit in group.fits)
    assert study.paragraphs[0].startswith("2 ranks are ")

    found = rows(project)
    assert list(found[0]) == ["ranks", *COLUMNS]
    assert [(row["ranks"], row["repeat"], row["state"]) for row in found] == [
        *(("1", "1", "done"), ("1", "2", "done"), ("2", "1", "done"), ("2", "2", "done")),
        ("3", "", "refused"),
    ]
    for row in found[:4]:
        assert sum(float(row[part]) for part in PARTS) == pytest.approx(float(row["step_s"]))
    assert not list((project / "study-runs").glob("**/checkpoints/*")), "no run leaves a checkpoint"

    again = called(project, "study", "study-runs/tiny")
    assert again.returncode == 0
    assert again.stdout in done.stdout, "its folder says the same without the file"
    explained = called(project, "explain", "scaling", "study-runs/tiny")
    assert explained.returncode == 0, explained.stderr
    assert f"{gain:.2f} (" in explained.stdout, "its own points, with their intervals"
    assert "does not divide into 3" in " ".join(explained.stdout.split())
    done = called(project, "study", "study.toml", "--json")
    assert done.returncode == 0
    assert len(started) == 4, "nothing is left to do"
    facts = json.loads(done.stdout)
    assert "4 points" not in done.stdout
    assert "0 runs to do" in done.stderr, "what is no fact goes to the standard error"
    points = facts["groups"][0]["points"]
    assert [(one["name"], one["state"], one["repeats"]) for one in points] == [
        ("ranks=1", "done", 2), ("ranks=2", "done", 2), ("ranks=3", "refused", 0),
    ]  # fmt: skip
    assert points[1]["speed_up"]["total"]["value"] == two.speed_up.total.value
    assert points[1]["overhead"] == two.overhead
    assert facts["source"] == str(Path("study-runs/tiny/study.csv"))
    listed = json.loads(called(project, "study", "study.toml", "--list", "--json").stdout)
    assert [(one["point"], one["command"]) for one in listed["points"]] == [
        (f"ranks={number}", None) for number in (1, 2, 3)
    ]


def _step_s(project: Path, name: str) -> list[float]:
    return [float(row["step_s"]) for row in rows(project) if row["point"] == name]


def test_a_folder_that_is_removed_while_its_study_runs_is_not_made_again(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(config: str, words: Sequence[str]) -> Ended:
        shutil.rmtree(project / "study-runs" / "tiny")
        return Ended(2, "the run folder was removed")

    monkeypatch.setattr(runner, "train_run", removed)
    write(project, "ranks = [1, 2]")
    done = called(project, "study", "study.toml")
    assert done.returncode == 2
    assert "study-runs/tiny: was removed or renamed while its study ran; --folder says" in done.stderr
    assert not (project / "study-runs" / "tiny").exists()


def test_an_interrupted_study_goes_on_and_takes_the_last_run_again(
    project: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, "ranks = [1, 2]", repeats=1)
    real: Runner = runner.train_run

    def interrupted(config: str, words: Sequence[str]) -> Ended:
        real(config, [*words, "train.num_steps=2"])
        folder = project / next(word for word in words if word.startswith("run.folder=")).partition("=")[2]
        events = (folder / "events.jsonl").read_text().splitlines()
        (folder / "events.jsonl").write_text("\n".join(events[:-1]) + "\n")  # killed before its end
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "train_run", interrupted)
    stopped = called(project, "study", "study.toml")
    assert stopped.returncode == 130
    assert "goes on" in stopped.stderr
    assert [row["state"] for row in rows(project)] == ["to do", "to do"], "the table is there after Ctrl-C, too"
    assert {point.state for point in study_of(project).groups[0].points} == {PointState.TO_DO}
    monkeypatch.setattr(runner, "train_run", real)
    assert called(project, "study", "study.toml").returncode == 0
    assert started == ["ranks-1/1", "ranks-1/1", "ranks-2/1"]
    assert {point.state for point in study_of(project).groups[0].points} == {PointState.DONE}


def test_failed_points_wait_for_retry(project: Path, started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, "ranks = [1, 2]\nbatch = [4, 8]")
    real: Runner = runner.train_run
    why = {4: "torch.OutOfMemoryError: CUDA out of memory.", 8: "the disk is full"}

    def failing(config: str, words: Sequence[str]) -> Ended:
        given = dict(word.split("=", 1) for word in words)
        if given["parallel.ranks"] == "2":
            started.append("failed")
            return Ended(1, why[int(given["train.global_batch_size"])])
        return real(config, words)

    monkeypatch.setattr(runner, "train_run", failing)
    done = called(project, "study", "study.toml")
    assert done.returncode == 1
    assert started.count("failed") == 2, "a point that fails is not tried again"
    states = {point.name: (point.state, point.why) for group in study_of(project).groups for point in group.points}
    assert states["ranks=2 batch=4"] == (PointState.OUT_OF_MEMORY, why[4])
    assert states["ranks=2 batch=8"] == (PointState.FAILED, why[8])
    assert why[8] in done.stdout
    before = len(started)
    assert called(project, "study", "study.toml").returncode == 1
    assert len(started) == before
    monkeypatch.setattr(runner, "train_run", real)
    assert called(project, "study", "study.toml", "--retry", "failed").returncode == 0
    assert len(started) == before + 4
    assert [row["state"] for row in rows(project)] == ["done"] * 8


def test_a_weak_study_grows_the_batch(project: Path, started: list[str]) -> None:
    write(project, "ranks = [1, 2]\nbatch = [4]", kind="weak", repeats=1)
    assert called(project, "study", "study.toml").returncode == 0
    one, two = study_of(project).groups[0].points
    assert (one.tokens, two.tokens) == (4 * 16, 8 * 16)
    assert one.step_s.total is not None
    assert two.step_s.total is not None
    assert two.speed_up.total is not None
    assert two.serial_share is not None
    gain = 2 * one.step_s.total.value / two.step_s.total.value
    assert two.speed_up.total.value == pytest.approx(gain)
    assert two.serial_share.value == pytest.approx(2 - gain), "Gustafson: speed-up = serial + (1 - serial) x 2"


def test_repeats_that_failed_and_other_machines_are_marked(project: Path, started: list[str]) -> None:
    write(project, "ranks = [1, 2]", repeats=2)
    assert called(project, "study", "study.toml").returncode == 0
    folder = project / "study-runs" / "tiny" / "ranks-2"
    facts = json.loads((folder / "1" / "environment.json").read_text())
    (folder / "1" / "environment.json").write_text(json.dumps({**facts, "processor": "another", "num_threads": 7}))
    (folder / "2" / "events.jsonl").write_text(
        '{"kind": "start"}\n{"kind": "error", "problems": ["the disk is full"]}\n'
    )
    again = called(project, "study", "study-runs/tiny")
    assert again.returncode == 1
    point = study_of(project).groups[0].points[1]
    assert (point.state, point.repeats) == (PointState.DONE, 1)
    marks = list(map(str, point.marks))
    assert f"other machine: processor another, not {facts['processor']}" in marks
    assert "threads of a rank: 7, of the baseline: 1; train.num_threads sets them" in marks
    assert "a repeat failed: the disk is full" in marks
    assert "repeats: 1 of 2" in marks


def test_points_that_their_data_refuses_are_listed(project: Path, started: list[str]) -> None:
    write(project, "batch = [8, 100000]\nranks = [1]", repeats=1)
    done = called(project, "study", "study.toml")
    assert done.returncode == 0, done.stderr
    small, large = (group.points[0] for group in study_of(project).groups)
    assert (small.state, large.state) == (PointState.DONE, PointState.REFUSED)
    assert "fewer than train.global_batch_size = 100000" in large.why
    assert large.why in done.stdout
    assert started == ["batch-8_ranks-1/1"]


def test_a_run_that_the_machine_refuses_is_refused(
    project: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, "ranks = [1]", repeats=2)
    monkeypatch.setattr(runner, "train_run", lambda config, words: Ended(2, "train.device: there is no CUDA device"))
    assert called(project, "study", "study.toml").returncode == 0
    (point,) = study_of(project).groups[0].points
    assert (point.state, point.why) == (PointState.REFUSED, "train.device: there is no CUDA device")


def test_threads_beyond_the_cores_are_marked_and_no_part_of_a_fit(project: Path, started: list[str]) -> None:
    write(project, "threads = [1, 512]", kind="threads", repeats=1, baseline="threads = 1")
    file = project / "study.toml"
    file.write_text(file.read_text().replace("warmup = 1", "warmup = 1\noversubscribe = false"))
    done = called(project, "study", "study.toml")
    points = study_of(project).groups[0].points
    assert [point.state for point in points] == [PointState.DONE, PointState.REFUSED], done.stderr
    assert points[1].why.startswith("512 threads on")
    environment = project / "study-runs" / "tiny" / "threads-1" / "1" / "environment.json"
    facts = json.loads(environment.read_text())
    environment.write_text(json.dumps({**facts, "num_threads": facts["cores"] + 1}))
    (group,) = study_of(project).groups
    assert any(mark.oversubscribed for mark in group.points[0].marks)
    assert "1 oversubscribed left out" in group.fits[0].said


def test_a_grid_says_what_each_setting_changes(project: Path, started: list[str]) -> None:
    axes = '[axes.norms]\nexact = { "optimizer.max_grad_norm" = 1.0 }\noff = { optimizer.max_grad_norm = 0.0 }\n'
    write(project, axes, kind="grid", repeats=2, baseline='norms = "exact"')
    assert called(project, "study", "study.toml").returncode == 0
    study = study_of(project)
    assert [point.axes for point in study.groups[0].points] == [{"norms": "exact"}, {"norms": "off"}]
    assert study.groups[0].fits == []
    assert study.paragraphs[0].startswith("norms off instead of exact: ")
    assert study.paragraphs[1].startswith(("Fastest: norms=off", "No point is shown to be faster"))


def test_runs_of_other_machines_are_collected(project: Path, forker: Forker) -> None:
    write(project, "ranks = [1, 2]\nbatch = [4, 8]")
    listed = called(project, "study", "study.toml", "--list")
    assert listed.returncode == 0
    lines = [line for line in listed.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 4
    loop = shlex.split(lines[0])
    assert loop[:5] == ["for", "repeat", "in", "1", "2;"]
    words = [word for word in loop if "." in word and "=" in word and "run.folder" not in word]
    forker.run(project, 1, [*words, "run.folder=elsewhere/one"])
    forker.run(project, 1, [*words, "run.folder=elsewhere/other", "optimizer.beta1=0.8"])
    wrong = called(project, "study", "study.toml", "--collect", "elsewhere/one", "elsewhere/other")
    assert wrong.returncode == 2
    assert "elsewhere/other: is no point of tiny; nearest is ranks=1 batch=4" in wrong.stderr
    assert "optimizer.beta1 = 0.9 instead of 0.8" in wrong.stderr
    assert not list(Path(project / "study-runs").glob("tiny/*/1")), "nothing is taken if one run does not match"
    assert called(project, "study", "study.toml", "--collect", "elsewhere").returncode == 2

    events = project / "elsewhere" / "one" / "events.jsonl"
    events.write_text("".join(line + "\n" for line in events.read_text().splitlines() if '"end"' not in line))
    told = called(project, "study", "study.toml", "--collect", "elsewhere/one")
    assert told.returncode == 0, told.stderr
    assert "repeat 1 of ranks=1 batch=4; it has not ended" in told.stdout
    point = study_of(project).groups[0].points[0]
    assert (point.name, point.repeats) == ("ranks=1 batch=4", 1)
    assert any("has not ended" in str(mark) for mark in point.marks)
    again = called(project, "study", "study.toml", "--collect", "elsewhere/one")
    assert "is repeat 1 of ranks=1 batch=4 already" in again.stdout
    folder = project / "study-runs" / "tiny" / "ranks-1_batch-4"
    for end in ("", ".json"):  # the first repeat is missing
        (folder / f"1{end}").rename(folder / f"2{end}")
    shutil.copytree(project / "elsewhere" / "one", project / "elsewhere" / "two")
    more = called(project, "study", "study.toml", "--collect", "elsewhere/two")
    assert "elsewhere/two: repeat 1 of ranks=1 batch=4" in more.stdout, more.stderr
    (project / "study-runs" / "tiny" / "ranks-2_batch-8").mkdir()
    forker.run(project, 2, [*words, "train.global_batch_size=8", "run.folder=study-runs/tiny/ranks-2_batch-8/1"])
    states = {point.name: point.state for group in study_of(project).groups for point in group.points}
    assert states["ranks=2 batch=8"] is PointState.DONE, "a listed command leaves its run where the study looks"


def test_scripts_of_a_study_are_written_all_or_none(project: Path) -> None:
    write(project, "ranks = [1, 2]\nbatch = [4, 8]")
    wrong = called(project, "study", "study.toml", "--list", "--to", "slurm")
    assert wrong.returncode == 2
    assert wrong.stderr.count("4 points: --to slurm needs the time limit") == 1, "what all points lack is said once"
    assert not list(project.glob("study-runs/tiny/scripts/*"))
    assert "add --list" in called(project, "study", "study.toml", "--to", "slurm").stderr
    assert "add --to TARGET" in called(project, "study", "study.toml", "--list", "--site", "x").stderr
    (project / "sites").mkdir()
    (project / "sites" / "lab.toml").write_text('[site]\ntime = "01:00:00"\ndevices = "none"\n')
    done = called(project, "study", "study.toml", "--list", "--to", "slurm", "--site", "lab")
    assert done.returncode == 0, done.stderr
    files = [project / line for line in done.stdout.splitlines()]
    assert len(files) == 4 * 2 == len(set(files)), "one for each repeat of each point"
    last = files[-1].read_text()
    assert "#SBATCH --ntasks-per-node=2\n" in last
    assert "run.folder=study-runs/tiny/ranks-2_batch-8/2" in last
    assert "train.global_batch_size=8" in last


@pytest.mark.slow
def test_a_script_of_a_study_leaves_its_run_where_the_study_looks(project: Path) -> None:
    write(project, "ranks = [2]", repeats=1, baseline="ranks = 2")
    (file,) = called(project, "study", "study.toml", "--list", "--to", "local").stdout.splitlines()
    done = subprocess.run(["bash", file], cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert study_of(project).groups[0].points[0].state is PointState.DONE


def test_other_values_and_other_models_are_refused(project: Path, started: list[str]) -> None:
    file = write(project, "ranks = [1]", repeats=2)
    assert called(project, "study", "study.toml").returncode == 0
    file.write_text(file.read_text().replace("[axes]", "optimizer.beta1 = 0.8\n[axes]"))
    changed = called(project, "study", "study.toml")
    assert changed.returncode == 2
    assert "optimizer.beta1: was None, is 0.8" in changed.stderr
    config = project / "study-runs" / "tiny" / "ranks-1" / "2" / "config.toml"
    config.write_text(config.read_text().replace("num_layers = 2", "num_layers = 3"))
    with pytest.raises(UserError, match=r"different models, such as .*, which differ in model.num_layers = 2 and 3"):
        study_of(project)


def test_a_study_is_run_by_one_process(project: Path, started: list[str]) -> None:
    write(project, "ranks = [1]", repeats=1)
    assert called(project, "study", "study.toml", "--list").returncode == 0
    with StudyFolder.open(project / "study-runs" / "tiny").hold():
        assert "another process runs this study" in called(project, "study", "study.toml").stderr
    (project / "other").mkdir()
    (project / "other" / "file").write_text("")
    assert "is not empty" in called(project, "study", "study.toml", "--folder", "other").stderr
    assert started == []


@pytest.mark.slow
def test_the_command_runs_a_study_of_its_own(project: Path) -> None:
    """With processes of `codescent train`, as a user has them."""
    write(project, "ranks = [1, 2]", repeats=1)
    done = codescent(project, "study", "study.toml")
    assert done.returncode == 0, done.stderr
    assert "2 of 2  ranks=2, repeat 1" in done.stdout
    (point, _) = study_of(project).groups[0].points
    assert point.load is not None


@pytest.mark.slow
@pytest.mark.parametrize("all_processes", [True, False])
def test_ctrl_c_ends_the_run_and_the_same_command_goes_on(project: Path, all_processes: bool) -> None:
    file = write(project, "ranks = [2]", repeats=1, baseline="ranks = 2")
    file.write_text(file.read_text().replace("steps = 3", "steps = 2000"))
    study = start(project, "study", "study.toml", start_new_session=True)
    run = project / "study-runs" / "tiny" / "ranks-2" / "1"
    while not (run / "metrics.csv").is_file() or len((run / "metrics.csv").read_text().splitlines()) < 5:
        assert study.poll() is None
        time.sleep(0.1)
    (os.killpg if all_processes else os.kill)(study.pid, signal.SIGINT)
    _, stderr = study.communicate(timeout=120)
    assert study.returncode == 130
    assert "stopped after 0 of 1 run" in stderr
    assert study_of(project).groups[0].points[0].state is PointState.TO_DO
    with RunFolder.open(run).path.joinpath(".writer").open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody writes the run any more
    listed = called(project, "study", "study.toml", "--list")
    assert "ranks-2/1" in listed.stdout, "it is to do"
