"""In: a config, an open dataset, this rank's process groups. Out: the config with its layout, the same on every rank.
Does not choose the layout (planner/search/auto.py does)."""

from __future__ import annotations

from typing import Any

from codescent.base.output import progress
from codescent.base.refusal import Change
from codescent.build import saved_plan
from codescent.build.accept import changed
from codescent.config.sections import Config
from codescent.data.samples import AnyDataset
from codescent.planner.search.auto import is_open, layout_of
from codescent.preflight import settled
from codescent.record import RunFolder
from codescent.train.world import World


def laid_out(config: Config, dataset: AnyDataset, world: World, folder: RunFolder | None) -> tuple[Config, list[str]]:
    """The config with the layout that rank 0 chooses, and a note on it; without a note if the config gives its layout.

    Collective, if parallel.layout is "auto". Rank 0 prints the layout.

    Args:
        config: the same on all ranks (`World` has compared it).
        dataset: of the run.
        world: this rank's process groups.
        folder: on rank 0 the folder of the run to resume.

    Raises:
        UserError: on every rank: see `layout_of`.
    """
    if not is_open(config):
        return config, []

    def chosen() -> list[Any]:
        began = None if folder is None else saved_plan(folder)
        found = layout_of(settled(config, dataset), dataset.vocab_size, world.this_rank.world_size, began)
        progress([f"{'layout':<8}{found.said}"])
        return [dict(found.change.values), f"layout: {found.said}"]

    values, note = world.from_first(chosen)
    return changed(config, Change(values)), [note]
