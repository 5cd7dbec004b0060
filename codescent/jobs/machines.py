"""In: words of a command line: target, site, machines. Out: these, read; what is wrong with them, or in no script.
Does not look at the run (checks.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.visible import is_one_line
from codescent.jobs.shape import Asked, JobShape, shape_of
from codescent.jobs.site import LoadedSite, load_site
from codescent.jobs.targets import contradictions, missing, unknown


def machines(
    target: str | None,
    site: str | None,
    words: Sequence[str],
    asked: Asked | None,
    ranks: int | None,
    problems: list[str],
) -> tuple[LoadedSite | None, JobShape | None]:
    """The site and the machines of a job; None: it cannot be read, or was not asked for. Machines need a target.

    Args:
        target: the word of --to.
        site: the value of --site.
        words: overrides of the site.
        asked: the machines; None: none are asked for.
        ranks: number of ranks in the config; None: unknown.
        problems: gets what is wrong.
    """
    loaded, shape = None, None
    if problem := unknown(target):
        problems.append(problem)
    is_chain = asked is not None and (asked.times or 1) > 1
    try:
        loaded = load_site(site, words)
        if target is not None and not problem:
            problems += [*missing(target, loaded), *contradictions(target, loaded, is_chain=is_chain)]
    except UserError as error:
        problems += error.problems
    try:
        if asked is not None and target is not None and not problem:
            shape = shape_of(target, asked, ranks)
    except UserError as error:
        problems += error.problems
    return loaded, shape


def not_for_scripts(words: Sequence[str], folder: Path) -> Iterator[str]:
    """What a script cannot hold: it is UTF-8 text, and its folder is a part of a line.

    Args:
        words: of the command line.
        folder: where the command is called.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            yield f"{word!r}: is not UTF-8 text, which a script is"
    if not is_one_line(str(folder)):
        yield f"{str(folder)!r}: the name of this folder has characters that a script cannot have; call it elsewhere"
