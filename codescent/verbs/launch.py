"""In: arguments of `codescent launch`. Out: a script that starts a run somewhere else, printed, saved or submitted.
Does not say what a script looks like (jobs/ does). By itself it starts nothing: with --submit the scheduler does."""

from __future__ import annotations

import shlex
import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.secret import warnings
from codescent.base.visible import one_line
from codescent.config.sections import Config
from codescent.jobs.checks import preflight
from codescent.jobs.findings import Findings, Preflight
from codescent.jobs.grace import LEAST_GRACE_S, grace_of, saves_s
from codescent.jobs.job import Job, folder_of_script, job_name
from codescent.jobs.machines import machines, not_for_scripts
from codescent.jobs.schedulers import SCHEDULERS
from codescent.jobs.shape import Asked, JobShape
from codescent.jobs.site import LoadedSite, Site
from codescent.jobs.survival import loss_words, stopped_words
from codescent.jobs.targets import TARGETS, site_for, unread
from codescent.preflight import run_folder
from codescent.verbs import launch_jobs
from codescent.verbs.arguments import SITE
from codescent.verbs.config import resolved_of
from codescent.verbs.script_file import give, taken


def main(arguments: Namespace) -> int:
    """Print or save the script. What does not fit is refused before, with all problems."""
    if any(getattr(arguments, name) for name in launch_jobs.OPTIONS):
        return launch_jobs.main(arguments)
    job, notes = job_of(arguments)
    for sentence in notes:
        warn(one_line(sentence))
    if arguments.submit:
        return launch_jobs.submit_job(job, arguments.to)
    give(TARGETS[arguments.to].script(job), arguments.out, secret=arguments.to == "kubernetes")
    return 0


def job_of(arguments: Namespace) -> tuple[Job, list[str]]:
    """The job that a script is for, and sentences for the user. Raises UserError: everything that does not fit."""
    words = [word for word in arguments.overrides if not word.startswith(SITE)]
    is_script = arguments.config.endswith(".py")
    problems: list[str] = []
    config = None
    try:
        config = None if is_script else resolved_of(Namespace(config=arguments.config, overrides=words)).config
        if is_script and not Path(arguments.config).is_file():
            problems.append(f"{arguments.config}: there is no such script")
    except UserError as error:
        problems += error.problems
    site_words = [word for word in arguments.overrides if word.startswith(SITE)]
    ranks = None if config is None else config.parallel.ranks
    loaded, shape = machines(arguments.to, arguments.site, site_words, _asked(arguments), ranks, problems)
    problems += _problems(arguments, words, is_script=is_script)
    job, notes = None, []
    if not problems and loaded is not None and shape is not None:
        notes = [*unread(arguments.to, loaded), *loaded.secrets()]
        said = " ".join([*words, *arguments.script_words])
        notes += warnings([(f"the words for {arguments.config}", said)], "scripts are")
        try:
            job = _job(arguments, [*words, *arguments.script_words], config, shape, loaded)
        except UserError as error:
            problems += error.problems
    if shape is not None:  # with what else is wrong, all that can be known before the job
        found = _preflight(arguments, words, config, shape, Site() if loaded is None else loaded.site, job)
        problems, notes = [*problems, *found.problems], [*notes, *found.notes]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    assert job is not None
    return job, notes


def _problems(arguments: Namespace, words: Sequence[str], *, is_script: bool) -> Iterator[str]:
    """What is wrong with single words of the command line. `words`: overrides of the config, or words of the script."""
    if arguments.submit and arguments.to in SCHEDULERS:
        program = SCHEDULERS[arguments.to].submit[0]
        if shutil.which(program) is None:
            yield f"--submit: there is no {program} here; is this a machine that submits jobs?"
    elif arguments.submit and arguments.to in TARGETS:
        yield f"--submit: only jobs of {' and '.join(SCHEDULERS)} are submitted; save the script with --out"
    if arguments.out is not None:
        yield from taken(arguments.out)
    if arguments.script_words and not is_script:
        given = shlex.join(arguments.script_words)
        yield f"-- {given}: such words are for a script of yours; overrides of {arguments.config} stand before --"
    yield from not_for_scripts(arguments.said, Path.cwd())


def _preflight(
    arguments: Namespace, words: Sequence[str], config: Config | None, shape: JobShape, site: Site, job: Job | None
) -> Findings:
    """All reasons why the job could not do its work. `job` None: something else is wrong, so there is no script."""
    run, times = _run(arguments.config, config), arguments.times or 1
    is_run = config is not None or arguments.config.endswith(".py")
    submits = arguments.submit and is_run and arguments.to in SCHEDULERS
    asked = Preflight(
        arguments.to, config, shape, site, run, tuple(words), submits, times, submits or arguments.out is not None
    )
    return preflight(asked, None if job is None else partial(TARGETS[arguments.to].script, job))


def _run(name: str, config: Config | None) -> Path:
    """The run folder; of a script the folder where its jobs are recorded."""
    return folder_of_script(name) if config is None else run_folder(config)


def _asked(arguments: Namespace) -> Asked:
    return Asked(arguments.nodes, arguments.devices, arguments.hosts, arguments.max_restarts, arguments.times)


def _job(arguments: Namespace, words: Sequence[str], config: Config | None, shape: JobShape, loaded: LoadedSite) -> Job:
    """The job. Raises UserError: its time is too short."""
    grace_s = LEAST_GRACE_S
    if config is None:
        run, python = folder_of_script(arguments.config), [arguments.config, *words]
        name = run.name
        command = ["python", *python]
    else:
        run, name = run_folder(config), job_name(config.run.name)
        grace_s = grace_of(saves_s(run))
        command = ["codescent", "train", arguments.config, *words, "--resume=auto"]
        python = ["-m", *command]
    job = Job(
        name, f"codescent {shlex.join(arguments.said)}", tuple(command), tuple(python), Path.cwd(), shape.slots,
        shape.hosts, site_for(arguments.to, loaded), run, True, config is not None, grace_s, shape.least_nodes,
        arguments.max_restarts or 0, arguments.times or 1, None if arguments.out is None else arguments.out.absolute(),
        survives=() if config is None else loss_words(config),
        agents=() if config is None else stopped_words(config),
        spares=0 if config is None else config.survive.spares,
    )  # fmt: skip
    if job.limit_s is not None and job.limit_s <= grace_s:
        raise UserError(
            f"site.time={loaded.site.time} ({loaded.origins['site.time']}): the run saves {grace_s} s before it, "
            "so there would be no time for a step; give more"
        )
    return job
