"""In: a run folder and what was read of it. Out: sentences about damage that leaves the rest of the folder readable.
Does not refuse a folder (run.py does) and does not print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.config.sections import SECTIONS
from codescent.config.words import KEYS
from codescent.record import CONFIG, ENVIRONMENT, METRICS_JSONL, RunFolder
from codescent.record.lines import ends_within_a_line
from codescent.record.ranks import RANKS_CSV, RankRow

ALWAYS = "torch"
"""A fact that every environment.json has."""
CHANGES_RANKS = ("resume", "regroup", "worker_lost", "worker_joined")
"""Events at which a run may get another number of ranks."""


def unknown_keys(folder: RunFolder, sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys and sections of config.toml that this version does not know, each with a sentence."""
    file = folder.path / CONFIG
    for section, values in sections.items():
        if section not in SECTIONS:
            yield section, f"{file}: [{section}] is left out: this version has no such section"
        elif not isinstance(values, Mapping):
            yield section, f"{file}: {section} is left out: it must be a section"
        else:
            unknown = [name for key in values if (name := f"{section}.{key}") not in KEYS]
            yield from ((name, f"{file}: {name} is left out: this version has no such key") for name in unknown)


def cut_row(folder: RunFolder) -> Iterator[str]:
    """What is said of a metrics.jsonl without its last newline, although the run has ended by itself."""
    if ends_within_a_line(folder.path / METRICS_JSONL):
        yield (
            f"{folder.path / METRICS_JSONL}: its last row is cut short and left out, though the run has ended: "
            "copy the file again"
        )


def problem_of_environment(folder: RunFolder, environment: Mapping[str, Any]) -> str:
    """Why environment.json cannot be what a run has written; "": it can, or there is none."""
    if not environment or ALWAYS in environment:
        return ""
    return (
        f"{folder.path / ENVIRONMENT}: has no {ALWAYS}: restore the file, or delete it: the machine of the run is not "
        "known then"
    )


def problem_of_ranks(
    folder: RunFolder, rows: Sequence[RankRow], events: Sequence[Mapping[str, Any]], num_ranks: int
) -> str:
    """Why ranks.csv cannot be of this run: a rank that it does not have; "": it can.

    Before an event of CHANGES_RANKS the run may have had more ranks.
    """
    since = max((event.get("step") or 0 for event in events if event["kind"] in CHANGES_RANKS), default=0)
    for number, row in enumerate(rows, start=2):
        if row["step"] > since and not 0 <= row["rank"] < num_ranks:
            return f"{folder.path / RANKS_CSV} line {number}: rank {row['rank']:g} of a run of {num_ranks} ranks"
    return ""
