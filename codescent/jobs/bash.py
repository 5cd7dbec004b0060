"""In: words of commands. Out: text of bash that runs them with these words, whatever characters they have.
Does not know a launcher."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from codescent.jobs.job import Job

WIDTH = 110
INDENT = "    "


class Raw(str):
    """Text that bash shall expand, such as "$SLURM_JOB_ID": it is not quoted."""

    __slots__ = ()


def quoted(word: str) -> str:
    """A word as bash reads it back."""
    return str(word) if isinstance(word, Raw) else shlex.quote(word)


def command(words: Iterable[str], after: str = "") -> str:
    """A command with these words, broken into lines. `after`: text of bash behind the last word."""
    lines, line = [], ""
    for piece in [*map(quoted, words), *([after] if after else [])]:
        if line and len(line) + len(piece) + 3 > WIDTH:
            lines.append(line)
            line = INDENT + piece
        else:
            line = f"{line} {piece}" if line else piece
    return " \\\n".join([*lines, line])


def export(name: str, value: str) -> str:
    """Set a variable for all later commands."""
    return f"export {name}={quoted(value)}"


def comment(text: str) -> list[str]:
    """A text as lines of a comment. Characters that end a line are shown."""
    return [f"# {line}" for line in text.splitlines()]


def head(job: Job, target: str, use: Sequence[str], directives: Sequence[str] = ()) -> list[str]:
    """The first lines of a script: what it is, how it is used, and what the scheduler reads."""
    what = f"{job.name}, {job.shape()}. Written for {target} by:"
    said = [line for text in (what, job.said, *use) for line in comment(text)]
    return ["#!/bin/bash", *directives, *said, "", "set -eo pipefail"]


def setting(job: Job) -> Iterator[str]:
    """The site's lines before the command: folder, modules, lines of the site, environment, interface, scratch."""
    site = job.site
    yield f"cd {quoted(str(job.folder))}"
    if site.modules:
        yield command(["module", "load", *site.modules])
    yield from site.before
    if site.environment is not None and site.environment != "none":
        yield f"source {quoted(f'{site.environment}/bin/activate')}"
    if site.scratch is not None:
        yield export("TMPDIR", site.scratch)


def run_variables(job: Job) -> list[tuple[str, str, str]]:
    """Variables of every rank: comment, name and value. Launchers that do not pass them on have to be told."""
    found = [
        ("the secret by which the ranks recognise each other, new for each start", "CODESCENT_TOKEN",
         Raw("$(python3 -c 'import secrets; print(secrets.token_hex(32))')")),
        ("by this mark codescent launch --kill finds what the run has left", "CODESCENT_MARK", job.mark),
    ]  # fmt: skip
    if job.limit_s is not None:
        end = Raw(f"$(($(date +%s) + {job.limit_s - job.grace_s}))")
        found.append((f"when the run saves and stops: {job.grace_s} s before the time limit", "CODESCENT_STOP_AT", end))
    if job.site.interface is not None:
        found += [
            ("the network interface of the ranks", name, job.site.interface)
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        ]
    return found


def exports(variables: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Set the variables, each under its comment."""
    said = ""
    for text, name, value in variables:
        if text != said:
            yield from comment(text)
        said = text
        if isinstance(value, Raw) and value.startswith("$("):  # `export NAME=$(...)` would hide that it failed
            yield f"{name}={value}"
            yield f"export {name}"
        else:
            yield export(name, value)
