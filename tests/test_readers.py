"""In: a run that saves every step and keeps one checkpoint. Out: sample, evaluate and export read whole checkpoints.
Does not test damage: test_checkpoint_damage does."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forker import Forker
from runs import called, environment, make_project, start

from codescent.checkpoint import hold as holding
from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints, Saved, TensorReader, read_tensors
from codescent.inference.trained import Values, find, module_of

EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=false", "train.eval_every=0")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project of a run that trains all the time, as `runs/live`. Its first checkpoint is deleted already."""
    project = tmp_path_factory.mktemp("readers")
    make_project(project)
    words = ("run.name=live", *EVERY_STEP, "train.num_steps=1000000", "optimizer.decay_steps=1000000")
    process = start(project, "train", "run.toml", *words)
    checkpoints = project / "runs" / "live" / "checkpoints"
    while min((path.name for path in checkpoints.glob("step_*")), default="") <= "step_00000001":
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    yield project
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert len([name for name in names(checkpoints) if name.startswith("step_")]) <= 2, out


READERS = [("sample", "runs/live", "--tokens", "1"), ("evaluate", "runs/live")]


@pytest.mark.parametrize(
    "words", [("export", "runs/live", "out"), *(pytest.param(words, marks=pytest.mark.slow) for words in READERS)]
)
def test_beside_a_training_that_deletes_what_is_read(training: Path, words: tuple[str, ...]) -> None:
    done = called(training, *words)
    assert done.returncode == 0, done.stderr


def test_a_step_that_is_deleted_is_said_to_be_gone(training: Path) -> None:
    done = called(training, "evaluate", "runs/live", "--step", "1")
    assert done.returncode == 2
    assert "no checkpoint of step 1; there are: " in done.stderr


@pytest.fixture
def run(tmp_path: Path, forker: Forker) -> Path:
    make_project(tmp_path)
    return forker.train(tmp_path, "run", 1, "train.num_steps=2", *EVERY_STEP).path


def another(run: Path, step: int) -> None:
    """What a training does: save the next step, delete the one before."""
    checkpoints = Checkpoints(run / "checkpoints", 1, keep_best=False)
    checkpoints.save(step, {"t": torch.ones(1)}, {})


def test_a_checkpoint_that_is_held_stays_until_it_is_read(run: Path) -> None:
    """A module is read at once, an export box by box for minutes; both hold it from the moment in which it is found."""
    exported, sampled = find(run), find(run)
    values = Values(exported)
    another(run, 3)
    module = module_of(sampled, torch.device("cpu"))
    another(run, 4)
    assert names(run / "checkpoints") == ["step_00000002", "step_00000004"]
    for name, parameter in module.named_parameters():
        assert torch.equal(values.box(name, tuple(slice(0, size) for size in parameter.shape)), parameter)
    exported.hold.close()
    another(run, 5)
    assert names(run / "checkpoints") == ["step_00000005"]


def test_a_reader_that_is_killed_holds_nothing(run: Path) -> None:
    program = "import sys, time; from codescent.inference.trained import find; held = find(sys.argv[1]); print('held', "
    command = [sys.executable, "-c", program + "flush=True); time.sleep(100)", str(run)]
    reader = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "held\n"
    another(run, 3)
    assert names(run / "checkpoints") == ["step_00000002", "step_00000003"]
    reader.kill()
    reader.communicate()
    another(run, 4)
    assert names(run / "checkpoints") == ["step_00000004"]


def test_one_that_goes_before_it_is_held_is_chosen_anew(run: Path) -> None:
    checkpoints = Checkpoints(run / "checkpoints", 1, keep_best=False)
    chosen: list[int] = []

    def choose() -> Saved:
        saved = checkpoints.latest()
        assert saved is not None
        chosen.append(saved.step)
        if len(chosen) < 3:
            another(run, saved.step + 1)
        return saved

    saved, hold = checkpoints.hold(choose)
    hold.close()
    assert (chosen, saved.step) == ([2, 3, 4], 4)


def test_one_that_goes_between_opening_and_holding_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, 1, keep_best=False)
    lock = holding._lock

    def too_late(descriptor: int, kind: int) -> None:
        monkeypatch.setattr(holding, "_lock", lock)
        checkpoints.save(1, {"t": torch.ones(1)}, {})  # the same step again: its folder is another one now
        lock(descriptor, kind)

    path = checkpoints.save(1, {"t": torch.zeros(1)}, {})
    monkeypatch.setattr(holding, "_lock", too_late)
    assert holding.hold(path) is None
    held = holding.hold(path)
    assert held is not None
    held.close()


def test_one_that_somebody_deletes_by_hand_is_not_called_damaged(run: Path) -> None:
    path = find(run).saved.path
    reader = TensorReader(path, ["model.norm.weight"])
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="does not exist; perhaps it was deleted while it was read"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match="perhaps it was deleted"):
        reader.box("model.norm.weight", (slice(0, 16),))


def test_the_best_is_found_among_those_that_are_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(run / "checkpoints", 9, keep_best=True)
    checkpoints.save(5, {"t": torch.ones(1)}, {}, 0.5)
    stale = checkpoints._found() | {4: run / "checkpoints" / "step_00000004"}
    monkeypatch.setattr(Checkpoints, "_found", lambda self: stale)
    best = checkpoints.best()
    assert best is not None
    assert best.step == 5
