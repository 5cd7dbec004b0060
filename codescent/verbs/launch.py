"""In: arguments of `codescent launch`. Out: a script that starts a run somewhere else, printed or saved.
Does not say what a script looks like (jobs/ does) and starts nothing."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.build import needs_vocab_size
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.jobs.grace import LEAST_GRACE_S, grace_of, saves_s
from codescent.jobs.job import Job, job_name
from codescent.jobs.schedulers import SCHEDULERS
from codescent.jobs.shape import Asked, Shape, shape_of
from codescent.jobs.site import LoadedSite, Site, load_site
from codescent.jobs.targets import TARGETS, contradictions, missing, unread
from codescent.preflight import plan_of, prepared, run_folder
from codescent.verbs import launch_jobs

SITE = "site."


def main(arguments: Namespace) -> int:
    """Print or save the script. What does not fit is refused before, with all problems."""
    if any(getattr(arguments, name) for name in launch_jobs.VERBS):
        return launch_jobs.main(arguments)
    _refuse_target(arguments.to)
    words = [word for word in arguments.overrides if not word.startswith(SITE)]
    is_script = arguments.config.endswith(".py")
    problems: list[str] = []
    config, loaded, shape = None, None, None
    try:
        loaded = load_site(arguments.site, [word for word in arguments.overrides if word.startswith(SITE)])
        problems += [*missing(arguments.to, loaded), *contradictions(arguments.to, loaded)]
    except UserError as error:
        problems += error.problems
    try:
        config = None if is_script else load(arguments.config, words).config
        if is_script and not Path(arguments.config).is_file():
            problems.append(f"{arguments.config}: there is no such script")
    except UserError as error:
        problems += error.problems
    try:
        shape = shape_of(arguments.to, _asked(arguments), None if config is None else config.parallel.ranks)
    except UserError as error:
        problems += error.problems
    problems += _problems(arguments, words, is_script=is_script)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    assert loaded is not None
    assert shape is not None
    job = _job(arguments, [*words, *arguments.script_words], config, shape, loaded)
    for sentence in unread(arguments.to, loaded):
        warn(sentence)
    if arguments.submit:
        return launch_jobs.submit_job(job, arguments.to)
    _give(TARGETS[arguments.to].script(job), arguments.out, secret=arguments.to == "kubernetes")
    return 0


def _refuse_target(name: str | None) -> None:
    """Raise UserError: there is no such target."""
    if name is None:
        raise UserError(f"codescent launch: give --to TARGET: {', '.join(TARGETS)}")
    if name not in TARGETS:
        near = difflib.get_close_matches(name.lower(), TARGETS, n=1)
        known = f"did you mean {near[0]}?" if near else f"the targets are {', '.join(TARGETS)}"
        raise UserError(f"--to {name}: unknown target; {known}")


def _problems(arguments: Namespace, words: Sequence[str], *, is_script: bool) -> Iterator[str]:
    """What is wrong with single words of the command line."""
    if arguments.submit and arguments.to not in SCHEDULERS:
        yield f"--submit: only jobs of {' and '.join(SCHEDULERS)} are submitted; save the script with --out"
    if arguments.out is not None and os.path.lexists(arguments.out):
        yield f"--out {arguments.out}: is there already; delete it, or give another name"
    if arguments.script_words and not is_script:
        given = shlex.join(arguments.script_words)
        yield f"-- {given}: such words are for a script of yours; overrides of {arguments.config} stand before --"
    for word in (*words, *arguments.script_words):
        if any("\ud800" <= character <= "\udfff" for character in word):
            yield f"{word!r}: is not UTF-8 text, which a script is"


def _asked(arguments: Namespace) -> Asked:
    return Asked(arguments.nodes, arguments.devices, arguments.hosts, arguments.max_restarts, arguments.times)


def _job(arguments: Namespace, words: Sequence[str], config: Config | None, shape: Shape, loaded: LoadedSite) -> Job:
    """The job. Raises UserError: the config's layout does not fit its number of ranks; its time is too short."""
    grace_s = LEAST_GRACE_S
    if config is None:
        name = job_name(Path(arguments.config).stem)
        run, python = Path("runs") / name, [arguments.config, *words]
        command = ["python", *python]
    else:
        for ranks in shape.possible:
            _refuse_layout(config, ranks)
        run, name = run_folder(config), job_name(config.run.name)
        grace_s = grace_of(saves_s(run))
        command = ["codescent", "train", arguments.config, *words, "--resume=auto"]
        python = ["-m", *command]
    job = Job(
        name, f"codescent {shlex.join(arguments.said)}", tuple(command), tuple(python), Path.cwd(), shape.slots,
        shape.hosts, _in_environment(loaded), run, config is not None, grace_s, shape.least_nodes,
        arguments.max_restarts or 0, arguments.times or 1, None if arguments.out is None else arguments.out.absolute(),
    )  # fmt: skip
    if job.limit_s is not None and job.limit_s <= grace_s:
        raise UserError(
            f"site.time={loaded.site.time} ({loaded.origins['site.time']}): the run saves {grace_s} s before it, "
            "so there would be no time for a step; give more"
        )
    return job


def _refuse_layout(config: Config, ranks: int) -> None:
    """Raise UserError: the layout does not fit so many ranks. Where it depends on a corpus that is not prepared, say
    so: a login node is no place to prepare it."""
    if needs_vocab_size(config) and prepared(config) is None:
        warn(f"the corpus is not prepared, so nobody has checked that the layout fits {counted(ranks, 'rank')}")
    else:
        plan_of(config, ranks, without_data=not needs_vocab_size(config))


def _in_environment(loaded: LoadedSite) -> Site:
    """The site, with the environment of this command where it names none: a virtual one, or one of conda."""
    is_own = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    if loaded.site.environment is not None or not is_own:
        return loaded.site
    return loaded.site.model_copy(update={"environment": sys.prefix})


def _give(text: str, out: Path | None, *, secret: bool) -> None:
    """Print the script, or save it: executable, or for nobody else if it has a secret."""
    if out is None:
        print(text, end="")
        return
    try:
        replace_file(out, text, 0o600 if secret else 0o777 if text.startswith("#!") else 0o666)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from error
    print(f"{out} is written; {'read it, then ' if os.isatty(1) else ''}start it as its first lines say")
