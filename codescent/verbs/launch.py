"""In: arguments of `codescent launch`. Out: a script that starts a run somewhere else, printed or saved.
Does not say what a script looks like (jobs/ does) and starts nothing."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.build import needs_vocab_size
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.jobs.job import Job, grace_of, job_name
from codescent.jobs.schedulers import SCHEDULERS
from codescent.jobs.shape import Asked, Shape, shape_of
from codescent.jobs.site import LoadedSite, Site, load_site
from codescent.jobs.targets import TARGETS, missing, unread
from codescent.preflight import plan_of, prepared, run_folder
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
    if problems:
        raise UserError(*dict.fromkeys(problems))
    assert loaded is not None
    assert shape is not None
    job = _job(arguments, [*words, *arguments.script_words], config, shape, loaded)
    for sentence in unread(arguments.to, loaded):
        warn(sentence)
    if arguments.submit:
        run = Path(job.mark) if config is not None else Path("runs") / job.name
        return launch_jobs.submit_job(job, arguments.to, run)
    _give(TARGETS[arguments.to].script(job), arguments.out, secret=arguments.to == "kubernetes")
    return 0


def _config(name: str, overrides: Sequence[str]) -> Config:
    """The config of the run. Raises UserError: it is wrong."""
    return load(name, overrides).config


def _asked(arguments: Namespace) -> Asked:
    return Asked(arguments.nodes, arguments.devices, arguments.hosts, arguments.max_restarts, arguments.times)


def _job(arguments: Namespace, words: Sequence[str], config: Config | None, shape: Shape, loaded: LoadedSite) -> Job:
    """The job. Raises UserError: the config's layout does not fit its number of ranks."""
    folder, grace_s = Path.cwd(), grace_of([])
    if config is None:
        name, mark = job_name(Path(arguments.config).stem), folder / arguments.config
        python = [arguments.config, *words]
        command = ["python", *python]
    else:
        for ranks in shape.possible:
            _refuse_layout(config, ranks)
        path = run_folder(config)
        name, mark, grace_s = job_name(config.run.name), path.absolute(), grace_of(_saves_s(path))
        command = ["codescent", "train", arguments.config, *words, "--resume=auto"]
        python = ["-m", *command]
    return Job(
        name, f"codescent {shlex.join(arguments.said)}", tuple(command), tuple(python), folder, shape.slots,
        shape.hosts, _in_environment(loaded), str(mark), grace_s, shape.least_nodes, arguments.max_restarts or 0,
        arguments.times or 1, arguments.out,
    )  # fmt: skip


def _refuse_layout(config: Config, ranks: int) -> None:
    """Raise UserError: the layout does not fit so many ranks. Where it depends on a corpus that is not prepared, say
    so: a login node is no place to prepare it."""
    if needs_vocab_size(config) and prepared(config) is None:
        warn(f"the corpus is not prepared, so nobody has checked that the layout fits {counted(ranks, 'rank')}")
    else:
        plan_of(config, ranks, without_data=not needs_vocab_size(config))


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
