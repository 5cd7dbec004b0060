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

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.base.rank import Rank
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.cost.network import HostLinks
from codescent.doctor.examine import examine
from codescent.doctor.report import Report
from codescent.doctor.wanted import Wanted, of_config
from codescent.jobs import hosts
from codescent.jobs.job import Job, read_hosts
from codescent.jobs.site import load_site
from codescent.launch.environment import read
from codescent.verbs.plan_link import host_links_of

STANDARD_OUTPUT = "-"


def main(arguments: Namespace) -> int:
    """Check, and print the report on rank 0. Returns 0: nothing; 1: warnings; 2: something is wrong."""
    link = _refuse(arguments)
    if arguments.hosts is not None:
        return _on_hosts(arguments)
    place = read(os.environ) or Rank()
    wanted = Wanted(link=link, bandwidth=not arguments.no_bandwidth, wait_s=float(arguments.wait))
    if place.rank == 0 and arguments.config is not None:
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
        try:
            link = host_links_of(arguments.link)
        except UserError as error:
            problems += [f"--link: {problem}" for problem in error.problems]
        if arguments.no_bandwidth:
            problems.append("--link: says what bandwidth is expected, and --no-bandwidth does not measure it; give one")
    if arguments.config is None and arguments.overrides:
        problems.append(f"{arguments.overrides[0]}: is of a config; name it first: codescent doctor CONFIG")
    if arguments.site is not None and arguments.hosts is None:
        problems.append("--site: says what --hosts need before the command; give --hosts, too")
    try:
        if arguments.hosts is not None:
            read_hosts(arguments.hosts)
            if (place := read(os.environ)) is not None and place.world_size > 1:
                problems.append(f"--hosts: {place.launcher} has started this process already; leave --hosts out")
        if arguments.site is not None:
            load_site(arguments.site)
        if arguments.config is not None:
            _config(arguments)
    except UserError as error:
        problems += error.problems
    if arguments.json not in (None, STANDARD_OUTPUT) and not Path(arguments.json).absolute().parent.is_dir():
        problems.append(f"--json {arguments.json}: there is no folder {Path(arguments.json).absolute().parent}")
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return link


def _config(arguments: Namespace) -> Config:
    return load(arguments.config, arguments.overrides).config


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
    names, slots = read_hosts(arguments.hosts)
    site = load_site(arguments.site).site
    if site.environment is None and sys.prefix != sys.base_prefix:
        site = site.model_copy(update={"environment": sys.prefix})
    words = ["codescent", "doctor", *([arguments.config] if arguments.config else []), *arguments.overrides]
    words += ["--wait", str(arguments.wait)]
    for name in ("link", "json"):
        if (value := getattr(arguments, name)) is not None:
            words.append(f"--{name}={value}")
    if arguments.no_bandwidth:
        words.append("--no-bandwidth")
    job = Job(
        "doctor", shlex.join(words), tuple(words), ("-m", *words), Path.cwd(), slots, names, site,
        mark=str(Path.cwd() / "codescent-doctor"),
    )  # fmt: skip
    return subprocess.run(["bash", "-c", hosts.ssh(job)], check=False).returncode
