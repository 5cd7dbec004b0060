"""In: a config, other values of its keys, perhaps a cluster. Out: the plan of the run, with its price, as an object.
Does not plan or price (verbs/plan.py asks the rooms that do) and does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.api.html_table import html_table
from codescent.api.short_errors import with_short_errors
from codescent.api.words import ConfigGiven, arguments_of, as_keyword, named_as_keywords
from codescent.base.output import warn
from codescent.base.own_names import in_a_sentence
from codescent.plan import Plan
from codescent.verbs.plan import Printed, planned


class Planned:
    """What a run would hold, send and compute; on a cluster also what it would cost.

    Attributes:
        plan: the decisions of the run, as plan.json has them.
        notes: sentences on the config and on data that is not there yet. They are logged as warnings, too.
    """

    def __init__(self, printed: Printed) -> None:
        self.plan: Plan = printed.plan
        self.notes: tuple[str, ...] = tuple(map(as_keyword, printed.notes))
        self._printed = printed

    @property
    def table(self) -> str:
        """The table of `codescent plan`; so is `str(planned)`."""
        return self._printed.table()

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step on the cluster; None: without a cluster."""
        return None if self._printed.price is None else self._printed.price.step_s

    def to_dict(self) -> dict[str, Any]:
        """The data of `codescent plan --json`: the plan; with a cluster the price."""
        return self._printed.to_json()

    def __str__(self) -> str:
        return self.table

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a row of a table for each row."""
        return html_table(self._printed.rows)


@with_short_errors
def plan(
    config: ConfigGiven = None,
    *,
    cluster: str | None = None,
    software: str | None = None,
    **overrides: Mapping[str, Any],
) -> Planned:
    """Plan a run as `codescent plan` does, without running it.

    Args:
        config: the name of a shipped config or a TOML file; or its sections as a dict, with "base" for a config below
            it; None: the default job.
        cluster: machines that the plan is priced on: a shipped one, such as "h100-sxm", or a cluster file.
        software: whose constants of the cluster file; None: those of codescent.
        overrides: a dict for each section, such as `parallel={"ranks": 8, "tp": 2}`. They win over the config.

    Raises:
        UserError: the config is wrong, no such plan exists, or the cluster cannot run it.
    """
    options = {"cluster": cluster, "software": software}
    with arguments_of("plan", config, overrides) as arguments, named_as_keywords(options), in_a_sentence():
        vars(arguments).update(options)
        found = Planned(planned(arguments))
    for sentence in found.notes:
        warn(sentence)
    return found
