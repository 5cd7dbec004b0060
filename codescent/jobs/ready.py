"""In: the config of a run. Out: whether its data is prepared, and its run folder free or its own; who holds the folder.
Does not prepare data and writes nothing."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from codescent import tasks
from codescent.base.amounts import of_bytes
from codescent.base.command import command
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.build import saved_plan, task_request
from codescent.config.mixture import MIXTURE
from codescent.config.sections import Config, Data
from codescent.data.samples import AnyDataset
from codescent.data.text import corpora, download
from codescent.data.text.download import Published
from codescent.data.tokenizers.wordpiece import KINDS
from codescent.huggingface.named import all_held
from codescent.jobs.schedulers import SCHEDULERS
from codescent.jobs.submitted import RECORD, files_of_jobs, jobs_of
from codescent.plan import Plan
from codescent.preflight import check_same_files, check_same_trajectory, ended_at, imported, is_begun, run_folder
from codescent.record import RunFolder
from codescent.record.beginning import refuse_taken
from codescent.record.run_folder import LOCK
from codescent.tasks.answers import PUBLISHED, SQUAD
from codescent.tasks.text import TextTask


def not_downloaded(config: Config) -> Iterator[str]:
    """What the config names of a hub and the cache lacks: nodes may have no internet."""
    try:
        for key, one in all_held(config):
            if one.missing:
                files = (
                    f"{counted(len(one.missing), 'file')} ({of_bytes(sum(file.size_bytes for file in one.missing))})"
                )
                yield (
                    f"{key} = {one.name}: {files} of it are not in the cache of the hub, and nodes without internet "
                    f"cannot download; do it here: {command('fetch', str(one.name))}"
                )
    except UserError as error:
        yield from error.problems


def unprepared(config: Config) -> tuple[list[str], list[str]]:
    """Problems and notes where the data is not prepared: a job may have no internet, and it pays for its devices."""
    request = task_request(config)
    absent = tasks.absent(request)
    if any(f"data.{key}" in absent for key in request.named):
        return [], []  # not_downloaded says it
    problems, notes = list[str](), list[str]()
    for name, one in request.corpora.items():
        if tasks.task_of(one).locate(one) is None:
            more, others = _unprepared(one)
            problems += [f"{MIXTURE}.{name}: {problem}" for problem in more]
            notes += [f"{MIXTURE}.{name}: {note}" for note in others]
    return (problems, notes) if request.corpora else _unprepared(request)


def _unprepared(request: tasks.TaskRequest) -> tuple[list[str], list[str]]:
    """`unprepared`, for one corpus."""
    data, task, absent = request.data, tasks.task_of(request), tasks.absent(request)
    missing = [f"{key}: {file}: no such file" for key, file in absent.items()]
    if isinstance(task, TextTask) and not missing:
        own = [("data.corpus", data.corpus), ("data.validation", data.validation)]
        missing = [
            f"{key}: {name}: no such file or folder"
            for key, name in own
            if name is not None and name not in corpora.NAMES and not corpora.is_present(name)
        ]
    if missing:
        return missing, []
    how = _how_to_prepare(data, is_text=isinstance(task, TextTask))
    if lacking := [one.name for one in published_files(data) if download.found(one) is None]:
        wanted = "has" if len(lacking) == 1 else "have"
        return [
            f"data.corpus = {data.corpus}: is not prepared, and {', '.join(lacking)} {wanted} to be downloaded, which "
            f"nodes without internet cannot; {how}"
        ], []
    return [], [f"data.corpus = {data.corpus}: is not prepared: the job would do it first, in its own time; {how}"]


def published_files(data: Data) -> Iterator[Published]:
    """The published files that the corpus, its validation and the tokenizer are made of."""
    names = {data.corpus, data.validation}
    if "shakespeare" in names:
        yield download.SHAKESPEARE
    if "openwebtext" in names and not corpora.is_present("openwebtext"):
        yield download.OPENWEBTEXT
    if data.corpus == SQUAD:
        yield PUBLISHED["train"]
    if data.validation == SQUAD or (data.corpus == SQUAD and data.validation is None):
        yield PUBLISHED["validation"]
    if data.tokenizer == "gpt2":
        yield from (download.GPT2_VOCABULARY, download.GPT2_MERGES)
    if data.tokenizer in KINDS:
        yield KINDS[data.tokenizer]


def _how_to_prepare(data: Data, *, is_text: bool) -> str:
    """How the data is prepared on this machine: a text by its own command, all else by the config of the run."""
    if not is_text or data.validation is not None:
        return "prepare it here: codescent data CONFIG, with the config and the overrides of this run"
    words = [data.corpus, "--tokenizer", data.tokenizer, "--folder", str(data.folder)]
    words += ["--validation-fraction", str(data.validation_fraction)]
    words += ["--text-key", data.text_key] if data.text_key is not None else []
    words += ["--as-text"] if data.as_text else []
    return f"prepare it here: {command('data', *words)}"


def folder(config: Config, plan: Plan | None, dataset: AnyDataset | None) -> Iterator[str]:
    """Why `codescent train --resume=auto` could not begin the run in its folder, or continue it there."""
    path = run_folder(config)
    try:
        if not is_begun(config):
            refuse_taken(path)
            yield from _unwritable(path)
            return
        run = RunFolder.open(path)
        if [event.get("kind") for event in run.read_events()] == ["import"]:
            raise imported(path)
        if plan is not None and dataset is not None:
            check_same_trajectory(run, plan, dataset, config.train.num_steps)
            check_same_files(task_request(config), run, dataset)
        elif plan is not None:
            yield from _other_run(run, plan)
        yield from _unwritable(path)
        ended = ended_at(run)
    except UserError as error:
        yield from error.problems
        return
    if ended is not None and config.train.num_epochs is None and ended >= config.train.num_steps:
        yield (
            f"{path}: the run has ended after step {ended}: a job would have nothing to do; give more steps "
            f"(train.num_steps={ended * 2}), or another run.name"
        )


def _other_run(run: RunFolder, plan: Plan) -> Iterator[str]:
    """Keys by which the run in the folder is another one, as far as that is known without its data.

    Files may have moved, and keys of the optimizer may change in some cases: preflight.check_same_trajectory knows.
    """
    for key, (old, new) in saved_plan(run).differing(plan).items():
        if not key.startswith(("data.", "optimizer.", "model.weights")):
            yield f"{key}: the run in {run.path} has {old!r}, this config {new!r}; start a new run.name"


def _unwritable(path: Path) -> Iterator[str]:
    above = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        yield f"{path}: {above} is not writable: give another run.folder"


def writer(run: Path) -> Iterator[str]:
    """The process that writes the run now, if the file system of the folder has locks."""
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # nobody has written the run yet
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        named = os.read(descriptor, 64).decode(errors="replace").strip() or "another process"
        yield f"{run}: is being written by {named}: wait for its end, or stop it"
    except OSError:  # no locks there: the records of the jobs are left
        pass
    finally:
        os.close(descriptor)


def jobs(run: Path) -> Iterator[str]:
    """The jobs of the run that wait or run."""
    if not files_of_jobs(run, RECORD.format("*")):
        return
    for job in jobs_of(run):
        state = SCHEDULERS[job.target].state(job.job)
        if not state.is_over:
            yield (
                f"{run}: job {job.job} of {job.target}, submitted {job.moment}, holds it ({state.text}): wait for its "
                f"end, or end it: codescent launch {shlex.quote(str(run))} --cancel"
            )
