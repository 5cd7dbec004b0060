"""In: a config with parallel.layout = "auto", a number of ranks. Out: the keys of the fastest layout, a line on it.
Does not change a config and does not ask ranks (preflight.py and train/layout.py do)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from codescent.base.amounts import of_bytes, of_seconds
from codescent.base.errors import UserError
from codescent.base.refusal import Change, Value
from codescent.build import Began
from codescent.build.accept import changed
from codescent.clusters.cluster import Cluster
from codescent.config.sections import Config
from codescent.cost.stage_memory import Fitting, share_that_fits
from codescent.plan import Plan
from codescent.planner.prediction import cluster_of_run, software_of_run
from codescent.planner.search.best import LayoutSearch
from codescent.planner.search.found import Found
from codescent.planner.search.space import SEARCHED, Space, given_keys
from codescent.planner.search.unfit import nothing_fits
from codescent.planner.search.words import layout_words

OPEN = 'parallel.layout = "auto"'
GIVEN: Mapping[str, Value] = {"parallel.layout": "given"}
"""A config with a chosen layout: nothing chooses again."""
RELEASE = "those that the config leaves out are chosen"


class Chosen(NamedTuple):
    """A layout that is chosen.

    Attributes:
        keys: those of the layout that the config does not give; none: the config gives its layout.
        said: the layout, and why it is chosen; "": the config gives it.
    """

    keys: Mapping[str, Value]
    said: str

    @property
    def change(self) -> Change:
        """Of the config: it gives its layout then."""
        return Change({**self.keys, **GIVEN} if self.said else {})


def is_open(config: Config) -> bool:
    """Whether the layout of a config is still to be chosen."""
    return config.parallel.layout == "auto"


def layout_of(config: Config, vocab_size: int | None, ranks: int, began: Plan | None = None) -> Chosen:
    """The layout of a config: what it gives, that of the run to resume, or the fastest one.

    A run that is resumed keeps its layout, if it goes on with as many ranks and the config gives no other value.

    Args:
        config: `preflight.settled`.
        vocab_size: see `build.resolve`.
        ranks: of the run.
        began: the plan of the run to resume; None: a new run.

    Raises:
        UserError: run.cluster is missing or wrong, or see `choose`.
    """
    if not is_open(config):
        return Chosen({}, "")
    kept = None if began is None else _as_began(config, ranks, began)
    if kept is not None:
        return kept
    cluster = cluster_of_run(config)
    if cluster is None:
        raise UserError(
            f'{OPEN}: needs run.cluster, such as run.cluster = "laptop", or a file that `codescent measure --out FILE` '
            "writes"
        )
    return choose(config, vocab_size, ranks, cluster)


def _as_began(config: Config, ranks: int, began: Plan) -> Chosen | None:
    """The layout with which a run began; None: the command cannot keep it."""
    before, given = Began.of(began), given_keys(config)
    if before.ranks != ranks or any(before.layout[key] != value for key, value in given.items()):
        return None
    keys = {key: before.layout[key] for key in SEARCHED if key not in given}
    kept = Chosen(keys, f"{layout_words(began)}: as the run began")
    try:
        changed(config, kept.change)
    except ValueError:  # another key of the command excludes it
        return None
    return kept


def choose(config: Config, vocab_size: int | None, ranks: int, cluster: Cluster) -> Chosen:
    """The fastest layout by prediction. Keys that the config gives stay.

    First the memory of a device counts as far as it may be predicted full (`share_that_fits`). If nothing fits so, all
    of it counts, and the layout is tight.

    Args:
        config: of the run.
        vocab_size: see `build.resolve`.
        ranks: of the run.
        cluster: on which the run is predicted.

    Raises:
        UserError: the model or the task has problems, build refuses all layouts, the cluster cannot price the run, or
            nothing fits.
    """
    space = Space(config, vocab_size, ranks, tuple(given_keys(config)), cluster.device.kind)
    software = software_of_run(cluster, config)
    shares, spaces = (share_that_fits(calibrated=bool(software.fitted_on)), 1.0), (space.without_offload(), space)
    for share, one in product(shares, spaces):
        device = replace(cluster.device, memory_bytes=int(share * cluster.device.memory_bytes))
        search = LayoutSearch(one, replace(cluster, device=device), software, wanted=1, asked=OPEN, release=RELEASE)
        if best := search.fastest():
            return Chosen(best[0].change.values, _words(best[0], cluster, tight=share == 1.0))
    raise UserError(f"{OPEN}: {nothing_fits(space, cluster, software, search.least_memory(), RELEASE)}")


def _words(best: Found, cluster: Cluster, *, tight: bool) -> str:
    size = f"{of_bytes(best.memory.total)} of {of_bytes(cluster.device.memory_bytes)}"
    memory = f"; {Fitting.TIGHT}: {size}" if tight else ""
    why = f"chosen for {cluster.name}, {of_seconds(best.price.step_s)} a step predicted"
    return f"{layout_words(best.price.plan)}: {why}{memory}"
