"""In: arguments of `codescent launch`. Out: a script that starts a run somewhere else, printed or saved.
Does not say what a script looks like (jobs/ does) and starts nothing."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.jobs.asked import Findings, Preflight
from codescent.jobs.checks import preflight
from codescent.jobs.job import Job, grace_of, job_name
from codescent.jobs.schedulers import SCHEDULERS
from codescent.jobs.shape import Asked, Shape, shape_of
from codescent.jobs.site import LoadedSite, Site, load_site
from codescent.jobs.targets import TARGETS, missing, unread
from codescent.preflight import run_folder
from codescent.record import RunFolder
from codescent.verbs import launch_jobs

SITE = "site."


def main(arguments: Namespace) -> int:
    """Print or save the script. What does not fit is refused before, with all problems."""
    if any(getattr(arguments, name) for name in launch_jobs.VERBS):
        return launch_jobs.main(arguments)
    if arguments.to is None:
        raise UserError(f"codescent launch: give --to TARGET: {', '.join(TARGETS)}")
    words = [word for word in arguments.overrides if not word.startswith(SITE)]
    is_script = arguments.config.endswith(".py")
    problems: list[str] = []
    config, loaded, shape = None, None, None
    try:
        loaded = load_site(arguments.site, [word for word in arguments.overrides if word.startswith(SITE)])
        problems += missing(arguments.to, loaded)
    except UserError as error:
        problems += error.problems
    try:
        config = None if is_script else _config(arguments.config, words)
        if is_script and not Path(arguments.config).is_file():
            problems.append(f"{arguments.config}: there is no such script")
    except UserError as error:
        problems += error.problems
    try:
        shape = shape_of(arguments.to, _asked(arguments), None if config is None else config.parallel.ranks)
    except UserError as error:
        problems += error.problems
    if arguments.submit and arguments.to not in SCHEDULERS:
        problems.append(f"--submit: only jobs of {' and '.join(SCHEDULERS)} are submitted; save the script with --out")
    if arguments.out is not None and arguments.out.exists():
        problems.append(f"--out {arguments.out}: is there already; delete it, or give another name")
    job, notes = None, []
    if not problems and loaded is not None and shape is not None:
        job = _job(arguments, [*words, *arguments.script_words], config, shape, loaded)
        notes = list(unread(arguments.to, loaded))
    if shape is not None:  # with what else is wrong, all that can be known before the job
        found = _preflight(arguments, words, config, shape, Site() if loaded is None else loaded.site, job)
        problems, notes = [*problems, *found.problems], [*notes, *found.notes]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    assert job is not None
    for sentence in notes:
        warn(sentence)
    if arguments.submit:
        return launch_jobs.submit_job(job, arguments.to, _run(arguments.config, config).absolute())
    _give(TARGETS[arguments.to].script(job), arguments.out, secret=arguments.to == "kubernetes")
    return 0


def _config(name: str, overrides: Sequence[str]) -> Config:
    """The config of the run. Raises UserError: it is wrong."""
    return load(name, overrides).config


def _preflight(
    arguments: Namespace, words: Sequence[str], config: Config | None, shape: Shape, site: Site, job: Job | None
) -> Findings:
    """All reasons why the job could not do its work. `job` None: something else is wrong, so there is no script."""
    run, times = _run(arguments.config, config), arguments.times or 1
    submits = arguments.submit and (config is not None or arguments.config.endswith(".py"))  # else there is no run
    asked = Preflight(arguments.to, config, shape, site, run, tuple(words), submits, times)
    return preflight(asked, None if job is None else partial(TARGETS[arguments.to].script, job))


def _run(name: str, config: Config | None) -> Path:
    """The run folder; of a script the folder where its jobs are recorded."""
    return Path("runs") / job_name(Path(name).stem) if config is None else run_folder(config)


def _asked(arguments: Namespace) -> Asked:
    return Asked(arguments.nodes, arguments.devices, arguments.hosts, arguments.max_restarts, arguments.times)


def _job(arguments: Namespace, words: Sequence[str], config: Config | None, shape: Shape, loaded: LoadedSite) -> Job:
    """The job."""
    folder, grace_s = Path.cwd(), grace_of([])
    if config is None:
        name, mark = job_name(Path(arguments.config).stem), folder / arguments.config
        python = [arguments.config, *words]
        command = ["python", *python]
    else:
        path = run_folder(config)
        name, mark, grace_s = job_name(config.run.name), path.absolute(), grace_of(_saves_s(path))
        command = ["codescent", "train", arguments.config, *words, "--resume=auto"]
        python = ["-m", *command]
    return Job(
        name, f"codescent {shlex.join(arguments.said)}", tuple(command), tuple(python), folder, shape.slots,
        shape.hosts, _in_environment(loaded), str(mark), grace_s, shape.least_nodes, arguments.max_restarts or 0,
        arguments.times or 1, arguments.out,
    )  # fmt: skip


def _saves_s(run: Path) -> list[float]:
    """Seconds of the checkpoints that the run has saved already; empty: it has not begun."""
    if not (run / "events.jsonl").is_file():
        return []
    return [event["seconds"] for event in RunFolder.open(run).read_events() if event["kind"] == "checkpoint"]


def _in_environment(loaded: LoadedSite) -> Site:
    """The site, with the virtual environment of this command where it names none."""
    if loaded.site.environment is not None or sys.prefix == sys.base_prefix:
        return loaded.site
    return loaded.site.model_copy(update={"environment": sys.prefix})


def _give(text: str, out: Path | None, *, secret: bool) -> None:
    """Print the script, or save it: executable, or for nobody else if it has a secret."""
    if out is None:
        print(text, end="")
        return
    try:
        replace_file(out, text)
        out.chmod(0o600 if secret else 0o644 | (0o111 if text.startswith("#!") else 0))
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from error
    print(f"{out} is written; {'read it, then ' if os.isatty(1) else ''}start it as its first lines say")
