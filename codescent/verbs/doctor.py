"""In: arguments of `codescent doctor`. Out: what is wrong with this machine, or with all machines of a job, printed.
Does not check anything (doctor/ does) and starts no other machine (doctor_elsewhere.py does). Imports no torch."""

from __future__ import annotations

import json
import os
import socket
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import say, warn
from codescent.base.rank import Rank
from codescent.base.reading import read_json
from codescent.base.stopping import reported
from codescent.base.time_limit import forget_others, stop_at
from codescent.doctor.examine import dismiss, examine
from codescent.doctor.report import Report
from codescent.doctor.wanted import Wanted
from codescent.launch.environment import read
from codescent.verbs.arguments import OVERRIDE, SITE

if TYPE_CHECKING:
    from codescent.clusters.cluster import Cluster
    from codescent.config.sections import Config

STANDARD_OUTPUT = "-"
ELSEWHERE = ("hosts", "to", "nodes", "devices", "site", "out")
"""Options for other machines."""


def main(arguments: Namespace) -> int:
    """Check, and print the report on rank 0. Returns 0: nothing; 1: warnings; 2: something is wrong.

    Where CODESCENT_EXIT_FILE is set, this code is in that file: a launcher would take it for a failure of the rank.
    """
    if (arguments.config or "").startswith(SITE):
        arguments.config, arguments.overrides = None, [arguments.config, *arguments.overrides]
    if OVERRIDE.match(arguments.config or ""):
        raise UserError(f"{arguments.config}: is of a config; name it first: codescent doctor CONFIG")
    problems: list[str] = []
    machines, this_rank = _machines(arguments, problems), read(os.environ) or Rank()
    config, own = _of_rank_0(arguments) if this_rank.rank == 0 else (None, [])
    site_words = [word for word in arguments.overrides if word.startswith(SITE)]
    if site_words or any(getattr(arguments, name) is not None for name in ELSEWHERE):
        from codescent.verbs import doctor_elsewhere

        return doctor_elsewhere.main(arguments, site_words, config, this_rank, [*problems, *own])
    if own and not problems and this_rank.world_size > 1:
        dismiss(this_rank, os.environ, float(arguments.wait))
    if problems or own:
        raise UserError(*dict.fromkeys([*problems, *own]))
    wanted = Wanted(machines=machines, bandwidth=not arguments.no_bandwidth, wait_s=float(arguments.wait))
    if config is not None:
        from codescent.doctor.from_config import of_config

        ranks = this_rank.world_size if this_rank.launcher else config.parallel.ranks
        wanted = of_config(wanted, config, ranks, socket.gethostname())
    report = examine(this_rank, os.environ, wanted)
    if report is None:
        return 0
    _give(report, arguments.json)
    return reported(report.exit_code, os.environ)


def _machines(arguments: Namespace, problems: list[str]) -> Cluster | None:
    """The declared links of hosts."""
    if arguments.link is None:
        return None
    from codescent.clusters.by_links import cluster_of_text

    if arguments.no_bandwidth:
        problems.append("--link: says what bandwidth is expected, and --no-bandwidth does not measure it; give one")
    try:
        return cluster_of_text(arguments.link)
    except UserError as error:
        problems += [f"--link: {problem}" for problem in error.problems]
        return None


def _of_rank_0(arguments: Namespace) -> tuple[Config | None, list[str]]:
    """The config, which rank 0 alone reads, and the problems that it alone finds: with the config, with --json."""
    problems = [*_of_json(arguments.json)]
    warn(*(f"codescent: {sentence}" for sentence in forget_others(os.environ)))
    try:
        stop_at(os.environ)
    except UserError as error:
        problems += error.problems
    if arguments.config is None:
        return None, problems
    from codescent.config.load import load

    try:
        words = [word for word in arguments.overrides if not word.startswith(SITE)]
        return load(arguments.config, words).config, problems
    except UserError as error:
        return None, [*problems, *error.problems]


def _of_json(file: str | None) -> Iterator[str]:
    """A problem if the report cannot be written there, or would replace what is no report."""
    if file in (None, STANDARD_OUTPUT):
        return
    path = Path(file).absolute()
    if not path.parent.is_dir():
        yield f"--json {file}: there is no folder {path.parent}"
    elif os.path.lexists(path) and not _is_report(path):
        yield f"--json {file}: it exists, and is no report of this command; give another name"


def _is_report(path: Path) -> bool:
    """Whether a file is a report that an earlier call has written."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"hosts", "findings", "exit_code"} <= found.keys()


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
