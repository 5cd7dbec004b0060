"""In: arguments of `codescent doctor`. Out: what is wrong with this machine, or with all machines of a job, printed.
Does not check anything (doctor/ does). Imports no torch: the answer comes within seconds."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.base.rank import Rank
from codescent.doctor.examine import examine
from codescent.doctor.report import Report
from codescent.doctor.wanted import Wanted
from codescent.launch.environment import read
from codescent.verbs.arguments import OVERRIDE

if TYPE_CHECKING:
    from codescent.config.sections import Config
    from codescent.cost.network import HostLinks
    from codescent.jobs.site import Site

STANDARD_OUTPUT = "-"


def main(arguments: Namespace) -> int:
    """Check, and print the report on rank 0. Returns 0: nothing; 1: warnings; 2: something is wrong."""
    link = _refuse(arguments)
    if arguments.hosts is not None:
        return _on_hosts(arguments)
    place = read(os.environ) or Rank()
    wanted = Wanted(link=link, bandwidth=not arguments.no_bandwidth, wait_s=float(arguments.wait))
    if place.rank == 0 and arguments.config is not None:
        from codescent.doctor.from_config import of_config

        config = _config(arguments)
        ranks = place.world_size if place.launcher else config.parallel.ranks
        wanted = of_config(wanted, config, ranks, socket.gethostname())
    report = examine(place, os.environ, wanted)
    if report is None:
        return 0
    _give(report, arguments.json)
    return report.exit_code


def _refuse(arguments: Namespace) -> HostLinks | None:
    """The declared links. Raises UserError with all problems of the arguments."""
    problems: list[str] = []
    link = None
    if arguments.link is not None:
        from codescent.verbs.plan_link import host_links_of

        try:
            link = host_links_of(arguments.link)
        except UserError as error:
            problems += [f"--link: {problem}" for problem in error.problems]
        if arguments.no_bandwidth:
            problems.append("--link: says what bandwidth is expected, and --no-bandwidth does not measure it; give one")
    if OVERRIDE.match(arguments.config or ""):
        raise UserError(f"{arguments.config}: is of a config; name it first: codescent doctor CONFIG")
    if arguments.site is not None and arguments.hosts is None:
        problems.append("--site: says what --hosts need before the command; give --hosts, too")
    for given, check in (
        (arguments.hosts, lambda: _read_hosts(arguments)),
        (arguments.site, lambda: _site(arguments)),
        (arguments.config, lambda: _config(arguments) if (read(os.environ) or Rank()).rank == 0 else None),
    ):
        try:
            if given is not None:
                check()
        except UserError as error:
            problems += error.problems
    if arguments.json not in (None, STANDARD_OUTPUT) and not Path(arguments.json).absolute().parent.is_dir():
        problems.append(f"--json {arguments.json}: there is no folder {Path(arguments.json).absolute().parent}")
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return link


def _config(arguments: Namespace) -> Config:
    from codescent.config.load import load

    return load(arguments.config, arguments.overrides).config


def _read_hosts(arguments: Namespace) -> tuple[tuple[str, ...], tuple[int, ...]]:
    from codescent.jobs.job import read_hosts

    place = read(os.environ)
    if place is not None and place.world_size > 1:
        raise UserError(f"--hosts: {place.launcher} has started this process already; leave --hosts out")
    return read_hosts(arguments.hosts)


def _site(arguments: Namespace) -> Site:
    """The site, with the virtual environment of this command where it names none."""
    from codescent.jobs.site import load_site

    site = load_site(arguments.site).site
    if site.environment is None and sys.prefix != sys.base_prefix:
        return site.model_copy(update={"environment": sys.prefix})
    return site


def _give(report: Report, file: str | None) -> None:
    """Print the report; or write it as JSON, to a file beside."""
    text = json.dumps(report.to_json(), indent=1) + "\n"
    if file == STANDARD_OUTPUT:
        print(text, end="")
        return
    say(report.lines())
    if file is not None:
        try:
            replace_file(Path(file), text)
        except OSError as error:
            raise UserError(f"--json {file}: {error.strerror}") from error


def _on_hosts(arguments: Namespace) -> int:
    """Start the ranks on hosts that ssh reaches, as `codescent launch --to ssh` does. Returns the exit code."""
    from codescent.jobs import hosts
    from codescent.jobs.job import Job

    names, slots = _read_hosts(arguments)
    words = ["codescent", "doctor", *([arguments.config] if arguments.config else []), *arguments.overrides]
    words += ["--wait", str(arguments.wait)]
    for name in ("link", "json"):
        if (value := getattr(arguments, name)) is not None:
            words.append(f"--{name}={value}")
    if arguments.no_bandwidth:
        words.append("--no-bandwidth")
    job = Job(
        "doctor", shlex.join(words), tuple(words), ("-m", *words), Path.cwd(), slots, names,
        _site(arguments),         mark=str(Path.cwd() / "codescent-doctor"),
    )  # fmt: skip
    return subprocess.run(["bash", "-c", hosts.ssh(job)], check=False).returncode
