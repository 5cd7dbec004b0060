"""In: arguments of `codescent report --profile`. Out: the printed report about the profile of a run.
Does not compute it (report/profile.py does)."""

from __future__ import annotations

from argparse import Namespace

from codescent.base.console import new_console
from codescent.build import saved_plan
from codescent.record import RunFolder
from codescent.report.profile import profile_report
from codescent.report.profile_text import tables


def main(arguments: Namespace) -> int:
    """Print the report. Raises UserError: the run has no profile, or its files are damaged."""
    folder = RunFolder.open(arguments.profile)
    console = new_console()
    for one in tables(profile_report(folder.path, saved_plan(folder), arguments.window or 1)):
        console.print(one)
    return 0
