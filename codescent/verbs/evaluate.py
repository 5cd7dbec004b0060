"""In: a run folder, or answers to questions. Out: how good its model is by its task, in lines.
Does not train, and does not know how a task scores a model (tasks do)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.preflight import saved_plan
from codescent.tasks import ScoreRequest
from codescent.tasks.answers.predictions import score_files


def main(arguments: Namespace) -> int:
    """Print the scores of a run, or of a file of answers; the latter needs no torch."""
    predictions, data = vars(arguments).pop("predictions"), arguments.data
    if (arguments.run is None) == (predictions is None):
        raise UserError("codescent evaluate: give a RUN, or --predictions FILE with --data FILE")
    if predictions is None:
        said = evaluate_run(**vars(arguments))
    elif data is None:
        raise UserError("codescent evaluate --predictions: give the questions too: --data dev-v1.1.json")
    else:
        for name in ("out", "best", "step"):
            if getattr(arguments, name):
                raise UserError(f"--{name}: of a run; --predictions FILE has none: leave it out")
        said = score_files(predictions, data)
    say(said)
    return 0


def evaluate_run(
    run: Path,
    *,
    data: Path | None = None,
    out: Path | None = None,
    best: bool = False,
    step: int | None = None,
    device: str = "auto",
) -> list[str]:
    """Score a checkpoint (see `find`) by the task of its run; returns lines to print.

    Some tasks (`Task.scores_files`) read the file `data` instead of the validation split. Some write predictions, to
    `out` or into the run folder. `device` is "auto", "cpu" or "cuda".

    Raises UserError: not a run, no such checkpoint, data that cannot be used, a device that is not there.
    """
    from codescent.verbs.trained import dataset_of, device_of, find, module_of

    where = device_of(device)
    if isinstance(where, str):
        raise UserError(where)
    trained = find(run, best=best, step=step)
    request = ScoreRequest(
        task=trained.request,
        work=saved_plan(trained.folder).work,
        device=where,
        make_module=lambda: module_of(trained, where).eval(),
        open_dataset=lambda: dataset_of(trained),
        open_tokenizer=lambda: trained.tokenizer,
        data=data,
        out=out,
    )
    if problems := list(trained.task.refuse_score(request)):
        raise UserError(*problems)
    return [f"{run}, step {trained.saved.step}", *trained.task.score(request)]
