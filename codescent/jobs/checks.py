"""In: what a command asks for: a config, ranks on nodes, a site. Out: all reasons why the job could not do its work.
Does not write the script and submits nothing. What each check knows is in a file of its own: counts, room, ready,
duration, tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codescent import tasks
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.build import Began, needs_vocab_size, saved_plan, task_request
from codescent.build.accept import changed
from codescent.config import decided
from codescent.config.sections import Config
from codescent.jobs import counts, duration, ready, room, survival, tested
from codescent.jobs.findings import Findings, Preflight
from codescent.plan import Plan
from codescent.planner.search.auto import layout_of
from codescent.preflight import is_begun, laid_out, plan_of, plan_with, prepared, run_folder, settled
from codescent.record import RunFolder

MOST_LOOKED, MOST_SAID = 32, 3
"""Numbers of ranks of an elastic job that are looked at, and those whose problems are said."""


def preflight(asked: Preflight, script: Callable[[], str] | None = None) -> Findings:
    """Look at everything that can be known before the job starts.

    What the script itself says wrongly is a problem always. What may change before it starts (data, disk, folder) is a
    problem only of a job that is submitted now, else a note.

    Args:
        asked: what the command asks for.
        script: makes the text that is submitted, for the scheduler's own test; None: it cannot be made.
    """
    found = Findings()
    found.refuse(counts.problems(asked))
    found.notes += counts.notes(asked)
    if asked.config is not None:
        _look_at_run(asked, found, asked.config)
    if asked.submits:
        found.refuse(_held(asked))
        if script is not None:
            tested.check(asked, script, found)
    found.problems = list(dict.fromkeys(found.problems))
    return found


def _look_at_run(asked: Preflight, found: Findings, config: Config) -> None:
    """Data, layout, memory, folder, disk and time of a run with a config."""
    found.refuse_now(ready.not_downloaded(config), asked)
    try:
        found.dataset = None if tasks.absent(task_request(config)) else prepared(config)  # other machines may have it
        if found.dataset is None:
            problems, notes = ready.unprepared(config)
            found.refuse_now(problems, asked)
            found.notes += notes
    except UserError as error:  # the data is damaged, or no task reads it
        found.refuse(error.problems)
    found.config = config if found.dataset is None else settled(config, found.dataset)
    _look_at_ranks(asked, found, found.config)
    found.refuse(survival.problems(asked.target, found.config, found.plan))
    found.refuse_now(ready.folder(found.config, found.plan, found.dataset), asked)
    if found.plan is not None:
        found.refuse_now(room.disk(found.config, found.plan, asked.run), asked)
        duration.check(asked, found, found.config, found.plan)


def _look_at_ranks(asked: Preflight, found: Findings, config: Config) -> None:
    """Layout and memory for each number of ranks that an elastic job may have; of many for some of them."""
    possible = asked.shape.possible
    looked = _some(possible)
    wrong = 0
    for ranks in looked:
        problems: list[str] = []
        try:
            chosen, plan, said = _plan(config, found, ranks)
            found.plan = found.plan or plan
            if said and ranks == looked[0]:
                found.notes.append(f"layout of {counted(ranks, 'rank')}: {said}")
            if plan is not None:
                problems += room.memory(asked, chosen, plan)
        except UserError as error:
            several = f"on {counted(ranks, 'rank')}: " if asked.shape.least_nodes else ""
            problems += (f"{several}{problem}" for problem in error.problems)
        wrong += bool(problems)
        if wrong <= MOST_SAID:
            found.refuse(problems)
    if wrong > MOST_SAID:
        found.refuse([f"{wrong - MOST_SAID} more of {len(looked)} numbers of ranks do not fit"])
    if len(looked) < len(possible):
        found.notes.append(
            f"{len(possible)} numbers of nodes are possible: it is checked for {len(looked)} of them whether they fit"
        )


def _some(numbers: Sequence[int]) -> list[int]:
    """All numbers, or MOST_LOOKED of them: the first, the last, and others evenly between."""
    last = len(numbers) - 1
    if last < MOST_LOOKED:
        return list(numbers)
    return [numbers[at * last // (MOST_LOOKED - 1)] for at in range(MOST_LOOKED)]


def _plan(config: Config, found: Findings, ranks: int) -> tuple[Config, Plan | None, str]:
    """The config with a layout for so many ranks, its plan, a line on a layout that is chosen. The job chooses again.

    Without a plan: it depends on data that is not prepared, and this may be no place to do it. Raises UserError: all
    that `build` refuses.
    """
    if found.dataset is not None:
        saved = _saved(config)
        chosen = layout_of(config, found.dataset.vocab_size, ranks, saved)
        config = changed(config, chosen.change)
        began = None if saved is None else Began.of(saved)
        return config, plan_with(config, found.dataset, ranks, began)[1], chosen.said
    needs, request = needs_vocab_size(config), task_request(config)
    if decided.averages_in_epochs(config) or (needs and tasks.task_of(request).vocab_size(request) is None):
        note = "the data is not prepared, so it is not checked whether the layout fits the ranks"
        if note not in found.notes:
            found.notes.append(note)
        return config, None, ""
    config, said = laid_out(config, ranks, without_data=not needs)
    return config, plan_of(config, ranks, without_data=not needs), said


def _saved(config: Config) -> Plan | None:
    """The plan with which the run began that goes on; None: a new run, or a folder with another thing."""
    try:
        return saved_plan(RunFolder.open(run_folder(config))) if is_begun(config) else None
    except UserError:  # ready.folder says it
        return None


def _held(asked: Preflight) -> list[str]:
    """Who holds the run folder. Jobs of a chain wait for a job that holds it, and so for the ranks of that job."""
    follows = asked.target == "slurm" and asked.times > 1
    try:
        holders = list(ready.jobs(asked.run))
        return [] if follows and holders else [*ready.writer(asked.run), *holders]
    except UserError as error:  # the scheduler does not answer, or a record is damaged
        return list(error.problems)
