"""In: a run folder, or a file of answers to questions. Out: the scores of the run's model or of the answers, printed.
Does not know how to score: each task does (codescent/tasks)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.extra import library
from codescent.base.json_text import json_text
from codescent.base.output import say, warn
from codescent.build import saved_plan
from codescent.tasks import ScoreRequest, beside_text
from codescent.tasks.answers.predictions import score_files
from codescent.tasks.scores import Scores


def main(arguments: Namespace) -> int:
    """Print the scores of a run, or of a file of answers (without importing torch)."""
    predictions, data = vars(arguments).pop("predictions"), arguments.data
    as_json = vars(arguments).pop("json")
    harness = {name: vars(arguments).pop(name) for name in ("tasks", "tasks_folder", "shots", "limit")}
    if (arguments.run is None) == (predictions is None):
        raise UserError("codescent evaluate: give a RUN, or --predictions FILE with --data FILE")
    if harness["tasks"] is None and (given := [name for name, value in harness.items() if value is not None]):
        raise UserError(*(f"--{name.replace('_', '-')}: needs --tasks; leave it out" for name in given))
    if harness["tasks"] is not None:
        scores = _by_harness(arguments, predictions, **harness)
    elif predictions is None:
        scores = evaluate_run(**vars(arguments))
    elif data is None:
        raise UserError("codescent evaluate --predictions: also give the questions: --data dev-v1.1.json")
    else:
        for name in ("out", "best", "step", "ema"):
            if getattr(arguments, name):
                raise UserError(f"--{name}: needs a RUN; leave it out with --predictions FILE")
        scores = score_files(predictions, data)
    if as_json:
        print(json_text(scores.facts))
    else:
        say(scores.lines)
    return 0


def _by_harness(
    arguments: Namespace,
    predictions: Path | None,
    *,
    tasks: str,
    tasks_folder: Path | None,
    shots: int | None,
    limit: int | None,
) -> Scores:
    """Score a model on tasks of lm-evaluation-harness. Raises UserError: words of another way are given, too."""
    others = {"predictions": predictions, "data": arguments.data, "out": arguments.out}
    if given := [name for name, value in others.items() if value is not None]:
        raise UserError(*(f"--{name}: has no effect with --tasks; leave it out" for name in given))
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks: give names of tasks, such as hellaswag,arc_easy")
    library("lm_eval", "--tasks", "lm-eval")
    from codescent.inference.harness_tasks import HarnessRequest, score_tasks, task_manager
    from codescent.inference.open import open_engine

    request = HarnessRequest(names, tasks_folder, shots, limit)
    manager = task_manager(request)
    which = {"best": arguments.best, "step": arguments.step, "ema": arguments.ema}
    opened = open_engine(arguments.run, **which, device=arguments.device)
    scores = score_tasks(request, manager, opened)
    said = f"{arguments.run}{f', {opened.which}' if opened.which else ''}"
    return Scores([said, *scores.lines], {"run": arguments.run, "which": opened.which, **scores.facts})


def evaluate_run(
    run: Path,
    *,
    data: Path | None = None,
    out: Path | None = None,
    best: bool = False,
    step: int | None = None,
    ema: bool = False,
    device: str = "auto",
) -> Scores:
    """Score a checkpoint with the task of its run. Returns lines to print, and the same facts as data.

    Args:
        run: the run folder.
        data: a file to score on instead of the validation split, for tasks with `Task.scores_files`.
        out: file for predictions, for tasks that write them; None: in the run folder.
        best: score the checkpoint with the lowest validation loss.
        step: score the checkpoint of this step.
        ema: the moving average of its weights, not the weights.
        device: "auto", "cpu", "cuda", "xpu" or "mps".

    Raises:
        UserError: not a run folder, no such checkpoint, data that cannot be used, or no such device.
    """
    from codescent.inference.answers import likeliest_answers
    from codescent.inference.trained import dataset_of, device_of, find, module_of

    where = device_of(device)
    if isinstance(where, str):
        raise UserError(where)
    trained = find(run, best=best, step=step, ema=ema)
    if data is None and (missing := trained.saved.state.get("imported", {}).get("missing")):
        keys = " ".join(f"data.{key}=FILE" for key in missing)
        can_score = trained.request.kind in trained.task.scores_files
        give = (
            "give the file to score: --data FILE" if can_score else f"import it again, with another name, with {keys}"
        )
        raise UserError(f"{run}: was imported without a file of yours ({keys}), so it has no validation split; {give}")
    other, file = (None, "") if data is None else beside_text(str(data))
    if other is not None and other.name != trained.task.name:
        place = "" if file == str(data) else f" has a file {file}, which"
        warn(f"--data {data}:{place} holds {other.form}, and is read as text")
    request = ScoreRequest(
        task=trained.request,
        work=saved_plan(trained.folder).work,
        device=where,
        make_module=lambda: module_of(trained, where).eval(),
        open_dataset=lambda: dataset_of(trained),
        open_tokenizer=lambda: trained.tokenizer,
        data=data,
        out=out,
        answer=likeliest_answers,
    )
    if problems := list(trained.task.refuse_score(request)):
        raise UserError(*problems)
    scores = trained.task.score(request)
    said = [f"{run}, {trained.which}", *scores.lines]
    most = trained.config.train.eval_samples if data is None else None
    if most is not None:
        said.append(f"(validation losses during the run were those of at most {most:,} samples: train.eval_samples)")
    facts = {"run": run, "step": trained.saved.step, "ema": ema, "task": trained.task.name, **scores.facts}
    return Scores(said, {**facts, "validation_samples_of_the_run": most})
