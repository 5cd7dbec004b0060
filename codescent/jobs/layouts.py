"""In: the config of a run. Out: for a number of ranks that are left, the largest layout for them.
As a program it answers an agent (launch/run_layouts.py), which imports no model: a request and the answer are JSON."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict

from codescent.base.errors import UserError
from codescent.build.saved import plan_of
from codescent.build.shrunk import shrunk
from codescent.config.load import flat
from codescent.config.sections import Config
from codescent.config.toml_file import loads
from codescent.launch.places import Fewer, FewerRanks
from codescent.planner.fits import fits_cluster
from codescent.planner.search.space import SEARCHED

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

    @functools.cache  # it is asked again and again
    def fewer(there: int) -> FewerRanks | None:
        try:
            found = shrunk(config, vocab_size, wanted, there, fits)
        except UserError:
            return None
        values = {k: value for k, value in flat(found.config).items() if before.get(k) != value or k in CHOSEN}
        return FewerRanks(found.ranks, values, found.notes, found.parts)

    return fewer


def main() -> int:
    """Answer one request: the texts of a run folder, the ranks that are wanted, and those that are there."""
    asked = json.loads(sys.stdin.read())
    config = Config.model_validate(loads(asked["config"]))
    vocab_size = plan_of(asked["plan"]).model.vocab_size or None
    found = layouts_of(config, vocab_size, asked["wanted"])(asked["there"])
    print(json.dumps(None if found is None else asdict(found), default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
