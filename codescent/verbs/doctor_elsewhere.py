"""In: arguments of `codescent doctor` that name other machines. Out: the doctor, run there by ssh; or a script.
Does not say what a script looks like (jobs/ does) and submits nothing."""

from __future__ import annotations

import shlex
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.rank import Rank
from codescent.config.sections import Config
from codescent.jobs.job import Job
from codescent.jobs.machines import machines, not_for_scripts
from codescent.jobs.shape import Asked, JobShape
from codescent.jobs.site import LoadedSite
from codescent.jobs.targets import TARGETS, site_for, unread
from codescent.verbs.script_file import give, taken

SSH = "ssh"


def main(
    arguments: Namespace, site_words: Sequence[str], config: Config | None, this_rank: Rank, problems: list[str]
) -> int:
    """Run it on --hosts, or print the script of --to. Returns the exit code.

    Raises UserError: with all problems, those found before, too.
    """
    if this_rank.world_size > 1:
        given = "--to" if arguments.hosts is None else "--hosts"
        problems.append(f"{given}: {this_rank.launcher} has started this process already; leave {given} out")
    target, asked = arguments.to or SSH, None
    if arguments.to is None and arguments.hosts is None:
        problems.append("give --hosts HOST:SLOTS,... (by ssh), or --to TARGET: which machines are to be looked at?")
    else:
        asked = Asked(arguments.nodes, arguments.devices, arguments.hosts)
    ranks = None if config is None else config.parallel.ranks
    loaded, shape = machines(target, arguments.site, site_words, asked, ranks, problems)
    problems += not_for_scripts(arguments.said, Path.cwd())
    if arguments.out is not None:
        problems += taken(arguments.out)
        if arguments.to is None:
            problems.append("--out: is for the script of --to; --hosts starts the doctor at once")
    if problems:
        raise UserError(*dict.fromkeys(problems))
    assert loaded is not None
    assert shape is not None
    text = TARGETS[target].script(_job(arguments, site_words, shape, loaded))
    for sentence in (*unread(target, loaded), *loaded.secrets()):
        warn(sentence)
    if arguments.to is None:
        return subprocess.run(["bash", "-c", text], check=False).returncode
    give(text, arguments.out, secret=target == "kubernetes")
    return 0


def _job(arguments: Namespace, site_words: Sequence[str], shape: JobShape, loaded: LoadedSite) -> Job:
    """The ranks of the doctor as a job: they save nothing, and nobody starts them again."""
    site = site_for(arguments.to or SSH, loaded).model_copy(update={"requeues": 0})
    words = ["codescent", "doctor", *([arguments.config] if arguments.config else [])]
    words += [word for word in arguments.overrides if word not in site_words]
    words += [f"--{name}={value}" for name in ("link", "json") if (value := getattr(arguments, name)) is not None]
    words += ["--no-bandwidth"] * arguments.no_bandwidth + [f"--wait={arguments.wait}"]
    return Job(
        "doctor", f"codescent {shlex.join(arguments.said)}", tuple(words), ("-m", *words), Path.cwd(),
        shape.slots, shape.hosts, site, Path("codescent-doctor"), trains=False, has_checkpoints=False,
        least_nodes=shape.least_nodes, does="looks at the machines.",
        saved_as=None if arguments.out is None else arguments.out.absolute(),
    )  # fmt: skip
