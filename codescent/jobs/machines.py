"""In: a target, what a command line says of a site and of machines. Out: both, read; what is wrong with them.
Does not look at the run (checks.py does)."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.base.errors import UserError
from codescent.jobs.shape import Asked, Shape, shape_of
from codescent.jobs.site import LoadedSite, load_site
from codescent.jobs.targets import contradictions, missing


def machines(
    target: str, site: str | None, words: Sequence[str], asked: Asked | None, ranks: int | None, problems: list[str]
) -> tuple[LoadedSite | None, Shape | None]:
    """The site and the machines of a job; None: it cannot be read, or was not asked for.

    Args:
        target: the word of --to.
        site: the value of --site.
        words: overrides of the site.
        asked: the machines; None: none are asked for.
        ranks: number of ranks in the config; None: unknown.
        problems: gets what is wrong.
    """
    loaded, shape = None, None
    is_chain = asked is not None and (asked.times or 1) > 1
    try:
        loaded = load_site(site, words)
        problems += [*missing(target, loaded), *contradictions(target, loaded, is_chain=is_chain)]
    except UserError as error:
        problems += error.problems
    try:
        shape = None if asked is None else shape_of(target, asked, ranks)
    except UserError as error:
        problems += error.problems
    return loaded, shape
