"""In: a space of which no layout fits on a cluster. Out: a sentence: the least memory, the fewest devices that do.
Does not look for fast layouts (best.py does)."""

from __future__ import annotations

from codescent.base.amounts import of_bytes
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, Software
from codescent.planner.search.best import LayoutSearch
from codescent.planner.search.found import Found
from codescent.planner.search.space import Space
from codescent.planner.search.words import kept_words, layout_words

MOST_RANKS_TRIED = 1 << 16
"""So many devices are tried for a model that fits on no layout."""


def nothing_fits(space: Space, cluster: Cluster, software: Software, least: Found, release: str) -> str:
    """Why no layout does, and what would do.

    Args:
        space: of the search.
        cluster: with all of its memory.
        software: with which layouts are priced.
        least: the layout with the least memory.
        release: how the keys that are given are searched, too, such as "--free searches them, too".
    """
    sentence = (
        f"no layout of {counted(space.ranks, 'rank')} fits: the one with the least memory needs "
        f"{of_bytes(least.memory.total)} of {of_bytes(cluster.device.memory_bytes)} ({layout_words(least.price.plan)})"
    )
    return f"{sentence}. {_fewest(space, cluster, software, release)}"


def _fewest(space: Space, cluster: Cluster, software: Software, release: str) -> str:
    """The fewest devices, doubled again and again, on which a layout fits."""
    more, why = 2 * space.ranks, ""
    while more <= MOST_RANKS_TRIED:
        try:
            search = LayoutSearch(space.on(more), cluster, software)
            search.admit()
            if search.least_memory().over_bytes <= 0:
                return f"Give {more:,} ranks, on which one does"
        except UserError as error:  # such as a batch that so many ranks cannot share
            why = why or f". {more:,} ranks are refused: {error.problems[0]}"
        more *= 2
    most = max(space.ranks, MOST_RANKS_TRIED)
    return f"None does on up to {most:,} ranks{kept_words(space.given, release)}{why}"
