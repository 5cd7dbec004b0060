"""In: the folder of a run, a step whose weights are in memory. Out: whether the run can go on from them.
Does not lose a rank: tests/faults/test_from_memory.py does."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from shutil import rmtree

from forker import Forker

from codescent.build import saved_plan
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.config.load import load
from codescent.train.written import is_written

WORDS = ("run.name=written", "log.metrics_every=3", "train.eval_every=4", "train.num_steps=6")


def test_a_step_counts_when_its_row_and_its_last_checkpoint_are_written(project: Path, forker: Forker) -> None:
    """Fault: a rank is lost in a validation or in the last save, and the run goes on from memory: a row, a validation
    loss or the trained model is missing for ever."""
    run = forker.train(project, "written", 1, *WORDS[1:])
    checkpoints = Checkpoints(run.checkpoints, 1, keep_best=False)

    def written(*words: str) -> list[int]:
        with chdir(project):
            config = load("run.toml", [*WORDS, *words]).config
        return [step for step in range(1, 7) if is_written(step, config, saved_plan(run), run, checkpoints)]

    assert [row["step"] for row in run.iter_metrics()] == [3, 4, 6]
    assert written() == [1, 2, 3, 4, 5, 6]
    assert written("train.stop_after=1") == [1, 2, 3, 5, 6], "step 4 may be the last one, and it is not saved"
    rmtree(run.checkpoints / "step_00000006")
    assert written() == [1, 2, 3, 4, 5]
    run.rewind(5)
    assert written() == [1, 2, 3, 4, 5]
    run.rewind(3)
    assert written() == [1, 2, 3], "the validation of step 4 is due"
    run.rewind(2)
    assert written() == [1, 2]
