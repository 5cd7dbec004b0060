"""In: a run folder, a text or questions. Out: how good its model is by its task, in lines.
Does not train, and does not know how a task scores a model (tasks do)."""

from __future__ import annotations

from pathlib import Path

from codescent.base.errors import UserError
from codescent.preflight import saved_plan
from codescent.tasks import Trial
from codescent.verbs.trained import dataset_of, device_of, find, module_of


def evaluate_run(
    run: Path,
    *,
    data: Path | None = None,
    out: Path | None = None,
    best: bool = False,
    step: int | None = None,
    device: str = "auto",
) -> list[str]:
    """Score the model of a run by what it was trained for.

    Args:
        run: the run folder.
        data: a file to score instead of the run's validation split, where its task reads one: see `Task.scores_files`.
        out: where predictions are written, where its task writes some; None: in the run folder.
        best: the checkpoint with the lowest validation loss, not the newest.
        step: the checkpoint of this step.
        device: "auto", "cpu" or "cuda".

    Returns:
        What was found, in lines.

    Raises:
        UserError: not a run, no such checkpoint, data that cannot be used, a device that is not there.
    """
    where = device_of(device)
    if isinstance(where, str):
        raise UserError(where)
    trained = find(run, best=best, step=step)
    trial = Trial(
        ask=trained.ask,
        work=saved_plan(trained.folder).work,
        device=where,
        make_module=lambda: module_of(trained, where).eval(),
        open_dataset=lambda: dataset_of(trained),
        tokenizer=trained.tokenizer,
        data=data,
        out=out,
    )
    if problems := list(trained.task.refuse_trial(trial)):
        raise UserError(*problems)
    return [f"{run}, step {trained.saved.step}", *trained.task.score(trial)]
