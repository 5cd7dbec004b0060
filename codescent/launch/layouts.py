"""In: the config of a run, or its folder. Out: for each number of ranks that are left, the largest layout for them.
Does not know who is left (decider.py does)."""

from __future__ import annotations

from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.progress import Pages
from codescent.build import saved_plan
from codescent.build.shrunk import shrunk
from codescent.config.load import flat
from codescent.config.sections import Config
from codescent.config.toml_file import loads
from codescent.launch.places import Fewer, FewerRanks
from codescent.planner.fits import fits_cluster
from codescent.planner.search.space import SEARCHED
from codescent.record import RunFolder

CHOSEN = ("parallel.layout", *SEARCHED)
"""Keys that a rank would choose anew for another number of ranks, where the user leaves them open."""


def layouts_of(config: Config, vocab_size: int | None, wanted: int) -> Fewer:
    """The layouts of a run.

    Args:
        config: with which it begins: its layout is given or chosen, the samples of a step are known.
        vocab_size: see `build`.
        wanted: the number of ranks that the user wants.
    """
    fits, before = fits_cluster(config), flat(config)

    def fewer(there: int) -> FewerRanks | None:
        try:
            found = shrunk(config, vocab_size, wanted, there, fits)
        except UserError:
            return None
        values = {k: value for k, value in flat(found.config).items() if before.get(k) != value or k in CHOSEN}
        return FewerRanks(found.ranks, values, found.notes, found.parts)

    return fewer


def layouts_of_folder(pages: Pages, wanted: int) -> Fewer:
    """The same of a run that only its ranks know. Before its first step there is none: its folder may be incomplete.

    `pages`: of the ranks of this host; they have the path of the run folder.
    """
    known: list[Fewer] = []  # by the first config of this start: later ones have fewer ranks

    def fewer(there: int) -> FewerRanks | None:
        if not known and pages.folder and any(pages.read(rank).position > 0 for rank in range(wanted)):
            try:
                folder = RunFolder.open(Path(pages.folder))
                config = Config.model_validate(loads(folder.config_text))
                known.append(layouts_of(config, saved_plan(folder).model.vocab_size or None, wanted))
            except UserError:  # the ranks read the folder, too, and say what is wrong
                return None
        return known[0](there) if known else None

    return fewer
