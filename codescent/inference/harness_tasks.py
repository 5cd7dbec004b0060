"""In: names of tasks of lm-evaluation-harness, a model. Out: its scores, on files that are on this machine.
Does not download anything, and does not compute scores (harness.py and the harness do)."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.extra import library
from codescent.base.visible import one_line
from codescent.inference.open import Opened
from codescent.tasks.scores import Scores

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
"""So no library asks the network for data or metrics."""
MOST_NEAR = 3
MOST_REASON = 300


@dataclass(frozen=True)
class HarnessRequest:
    """What of which tasks is scored.

    Attributes:
        names: of tasks or groups of the harness.
        folder: with more tasks, as YAML files of the harness, which may run code of this folder; None: there are none.
        shots: examples before each question; None: what the task says.
        limit: the first so many questions of each task; None: all.
    """

    names: Sequence[str]
    folder: Path | None = None
    shots: int | None = None
    limit: int | None = None


def score_tasks(request: HarnessRequest, manager: Any, opened: Opened) -> Scores:
    """Score a model on tasks. `manager`: see `task_manager`.

    Raises UserError: the data of a task is not on this machine, or a task of the user's folder is wrong.
    """
    from codescent.inference.harness import HarnessModel  # noqa: PLC0415 - it needs an extra

    harness = library("lm_eval", "--tasks", "lm-eval")
    try:
        with redirect_stdout(sys.stderr):  # standard output is for the result
            found = harness.simple_evaluate(
                model=HarnessModel(opened),
                tasks=list(request.names),
                num_fewshot=request.shots,
                limit=request.limit,
                task_manager=manager,
                log_samples=False,
            )
    except OSError as error:  # the libraries' errors of files and of the network are such
        raise UserError(_without_data(error)) from error
    except UserError:
        raise
    except Exception as error:
        if request.folder is None:
            raise
        said = f"{type(error).__name__}: {one_line(str(error))[:MOST_REASON]}"  # such as a name that a template lacks
        raise UserError(f"--tasks-folder {request.folder}: lm-evaluation-harness failed with {said}") from error
    results: Mapping[str, Mapping[str, Any]] = found["results"]
    counts = {name: entry["effective"] for name, entry in found["n-samples"].items()}
    lines = [_line(name, values, counts.get(name)) for name, values in results.items()]
    facts = {name: {"samples": counts.get(name), **_metrics(values)} for name, values in results.items()}
    return Scores(lines, {"tasks": facts, "shots": request.shots, "limit": request.limit})


def task_manager(request: HarnessRequest) -> Any:
    """The harness's table of tasks.

    Raises UserError: the harness is not installed, or the folder is not there; the names of all tasks that are not in
    the table.
    """
    os.environ.update(OFFLINE)  # before its libraries are imported
    library("lm_eval", "--tasks", "lm-eval")
    tasks = library("lm_eval.tasks", "--tasks", "lm-eval")
    if request.folder is not None and not request.folder.is_dir():
        raise UserError(f"--tasks-folder {request.folder}: no such folder")
    folder = None if request.folder is None else str(request.folder.resolve())
    manager = tasks.TaskManager(include_path=folder)
    known = set(manager.all_tasks)
    problems = []
    for name in request.names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=MOST_NEAR)
            meant = f"; did you mean {' or '.join(near)}?" if near else "; `lm_eval ls tasks` lists them"
            problems.append(f"--tasks: there is no task {name!r} in lm-evaluation-harness{meant}")
    if problems:
        raise UserError(*problems)
    return manager


def _without_data(error: OSError) -> str:
    reason = one_line(str(error))[:MOST_REASON]
    return (
        f"--tasks: the data of a task is not on this machine, and nothing is downloaded: {reason}; fetch it where "
        "there is a network, into the cache of the library datasets (HF_HOME), or name files in a task of "
        "--tasks-folder"
    )


def _metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a task by their names in the harness, such as "acc,none"."""
    return {name: value for name, value in values.items() if isinstance(value, int | float) and name != "alias"}


def _line(name: str, values: Mapping[str, Any], samples: int | None) -> str:
    """Such as "arc_easy: acc 0.2500 ± 0.0089, 2,376 samples"."""
    said = []
    for metric, value in _metrics(values).items():
        what, _, form = metric.partition(",")
        if what.endswith("_stderr") or metric == "sample_len":
            continue
        error = values.get(f"{what}_stderr,{form}")
        spread = f" ± {error:.4f}" if isinstance(error, float) else ""
        said.append(f"{what}{'' if form in ('', 'none') else f' ({form})'} {value:.4f}{spread}")
    count = "" if samples is None else f", {samples:,} samples"
    return f"{name}: {', '.join(said)}{count}"
