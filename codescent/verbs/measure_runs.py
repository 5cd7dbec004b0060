"""In: the options of `codescent measure --from`. Out: a cluster file whose constants runs have given; what changed.
Does not fit (planner/refit.py does) and measures nothing."""

from __future__ import annotations

from argparse import Namespace

from codescent.base.errors import UserError
from codescent.base.output import say, warn
from codescent.measure.runs import (
    changes_table,
    cluster_of_runs,
    device_of,
    fitted_to,
    notes_of,
    read_runs,
    refitted_cluster,
    text_of_runs,
)
from codescent.verbs.script_file import write_new


def main(arguments: Namespace, problems: list[str]) -> int:
    """Fit, write the file, and print what changed. `problems`: what the caller has found wrong.

    Raises UserError, with all of them: the file is there, a folder is no run, has no step or no price on this cluster,
    the devices of runs differ, a constant is unknown or there are too many.
    """
    runs = read_runs(arguments.runs, problems)
    cluster = cluster_of_runs(runs, arguments.cluster, problems)
    found = None if cluster is None else fitted_to(runs, cluster, arguments.constants, problems)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    assert cluster is not None
    assert found is not None
    changed = refitted_cluster(arguments.out.stem, cluster, found)
    for note in notes_of(runs, cluster):
        warn(f"codescent: {note}")
    write_new(arguments.out, text_of_runs(changed, found))
    on = f"{changed.software['codescent'].fitted_on}, {device_of(runs[0])}"
    say([f"constants of codescent, fitted on {on}", *changes_table(found, changed), f"{arguments.out} is written"])
    return 0
