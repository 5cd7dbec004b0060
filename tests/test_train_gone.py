"""In: real runs whose folder is renamed or removed while they train. Out: all of the run in one place, or a refusal.
Does not damage files: test_record_rows does."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from runs import called, start

from codescent.checkpoint import storage
from codescent.record import RunFolder

STEPS = 240


def begun(project: Path, name: str, ranks: int, *more: str) -> tuple[subprocess.Popen[str], Path]:
    """A run that has a checkpoint, and goes on."""
    words = (*more, "train.eval_every=0", "checkpoint.every=40", "checkpoint.keep_best=false", "log.every=40")
    ranked = () if ranks == 1 else ("--ranks", str(ranks))
    process = start(project, "train", "run.toml", f"run.name={name}", f"train.num_steps={STEPS}", *words, *ranked)
    run = project / "runs" / name
    while not list(run.glob("checkpoints/step_*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    return process, run


GOSSIP = "parallel.gossip=ring", "parallel.gossip_every=4", "parallel.gossip_mode=asynchronous"
SERVED = "parallel.servers=1", "parallel.updates=asynchronous"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ()),
        pytest.param(2, (), marks=pytest.mark.slow),
        (3, SERVED),
        pytest.param(2, GOSSIP, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_folder_is_renamed_goes_on_there(project: Path, ranks: int, words: tuple[str, ...]) -> None:
    """Also the order of what was applied, which ranks write that do not hold the folder."""
    name = f"{ranks}-{len(words)}"
    process, run = begun(project, f"renamed-{name}", ranks, *words)
    new = run.rename(run.with_name(f"new-{name}"))
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, out + err
    assert f"was renamed; the run continues in {new}" in out
    assert f"The run is in {new}" in out
    assert not run.exists()
    folder = RunFolder.open(new)
    assert [row["step"] for row in folder.iter_metrics()] == list(range(1, STEPS + 1))
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_00000200", "step_00000240"]
    assert [event["after"] for event in folder.read_events() if event["kind"] == "moved"] == [str(new)]


@pytest.mark.parametrize("published", [False, True])
def test_a_checkpoint_is_saved_again_if_the_folder_is_renamed_during_the_save(
    project: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """Before the checkpoint gets its name, and just after."""
    name, commit = f"during-{published}", storage.commit
    old, new = project / "runs" / name, project / "runs" / f"new-{name}"

    def renames(making: Path, path: Path, *more: Path) -> None:
        monkeypatch.setattr(storage, "commit", commit)
        if published:
            making.rename(path)
        old.rename(new)
        commit(making, path, *more)

    monkeypatch.setattr(storage, "commit", renames)
    done = called(project, "train", "run.toml", f"run.name={name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("was renamed; the run continues in") == 1
    assert sorted(path.name for path in (new / "checkpoints").iterdir()) == ["step_00000010", "step_00000020"]
    assert not old.exists()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_whose_folder_is_removed_ends(project: Path, ranks: int) -> None:
    process, run = begun(project, f"removed-{ranks}", ranks)
    subprocess.run(["rm", "-rf", str(run)], check=False, stderr=subprocess.DEVNULL)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 2, out + err
    assert "the run folder was removed, or moved to another disk, while the run was writing it" in err
    assert "Traceback" not in err
    assert not (run / "checkpoints").exists()
    assert not (run / "config.toml").exists()
