"""In: arguments of `codescent plan`. Out: the printed plan: a table with readable units (GiB), or JSON.
Does not compute costs (codescent/cost does) and does not draw (timeline.py does)."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

from codescent.base.console import new_console
from codescent.base.errors import UserError
from codescent.base.output import note, warn
from codescent.clusters.cluster import Cluster
from codescent.config.decided import with_device
from codescent.config.load import LoadedConfig
from codescent.config.sections import Config
from codescent.cost.price import Price
from codescent.plan import Plan
from codescent.plan.activations import CPU, CUDA
from codescent.planner.links import Links
from codescent.planner.prediction import has_common_step
from codescent.preflight import absent, laid_out, mixture_in_words, notes, plan_of, steps_in_words
from codescent.verbs import plan_search
from codescent.verbs.columns import columns
from codescent.verbs.config import resolved_of
from codescent.verbs.plan_link import cluster_links, machines_of, refuse_price, walked_on
from codescent.verbs.plan_operators import seconds_on, tables
from codescent.verbs.plan_price import price_json, price_rows, priced
from codescent.verbs.plan_rows import layout_rows, plan_rows
from codescent.verbs.timeline import draw_plan, draw_price, draw_ranks, refusals


def main(arguments: Namespace) -> int:
    """Print the plan of a config. Draw its timeline if --timeline names a file."""
    if arguments.search:
        return plan_search.main(arguments)
    plan_search.refuse_without(arguments)
    found = planned(arguments)
    for sentence in found.notes:
        warn(sentence)
    print(json.dumps(found.to_json(), indent=1) if arguments.json else found.table())
    if arguments.operators:
        _print_operators(found.plan, found.config, found.price)
    if found.drawn is not None:
        note(found.drawn)  # to standard error: what --json prints stays JSON
    return 0


class Printed(NamedTuple):
    """A plan as the command prints it.

    Attributes:
        plan, config: of the run. The config has its layout.
        price: of a step on the cluster of the command; None: without one.
        rows: what the table shows, in order.
        notes: sentences on the config and on data that is not there yet.
        drawn: a sentence on the picture of --timeline; None: none was asked for.
    """

    plan: Plan
    config: Config
    price: Price | None
    rows: Sequence[tuple[str, list[str]]]
    notes: Sequence[str]
    drawn: str | None

    def table(self) -> str:
        """The rows as text."""
        return columns(self.rows)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data; with a price the price, which says less of the plan."""
        return self.plan.to_json() if self.price is None else price_json(self.price)


def planned(arguments: Namespace) -> Printed:
    """The plan of a config; draws its timeline if --timeline names a file. Raises UserError: see `main`."""
    arguments.ranks = arguments.ranks[0] if arguments.ranks else None
    file, flops_per_byte = arguments.timeline, arguments.flops_per_byte
    loaded, cluster, links = _read(arguments)
    missing = absent(loaded.config)
    config = loaded.config
    if cluster is not None and config.train.device == "auto":
        config = with_device(config, cluster.device.kind)
    config, said = laid_out(config, config.parallel.ranks, without_data=bool(missing))
    plan = plan_of(config, config.parallel.ranks, without_data=bool(missing))
    rows: list[tuple[str, list[str]]] = []
    drawn, free = None, list[tuple[str, list[str]]]()
    if cluster is not None and links is None and not has_common_step(plan):
        refuse_price(arguments)
        links = cluster_links(arguments, cluster)
    is_priced = cluster is not None and links is None
    found = priced(arguments, plan, config, cluster) if cluster is not None and is_priced else None
    if found is not None:
        rows = [*layout_rows(plan), *price_rows(found, config, arguments)]
        drawn = None if file is None else draw_price(found, file)
    elif links is not None:
        walked = walked_on(links, arguments, plan, config, cluster, without_data=bool(missing))
        rows, free = walked.rows, walked.free
        drawn = None if file is None else draw_ranks(plan, file, walked.found)
    elif file is not None:
        drawn = draw_plan(plan, file, flops_per_byte)
    if found is None:
        steps = steps_in_words(config, without_data=bool(missing))
        mixed = mixture_in_words(config, plan, without_data=bool(missing))
        rows = [*free, *plan_rows(plan, steps, config), *([("mixture", mixed)] if mixed else []), *rows]
    notes_on_it = [*notes(loaded), *missing, *([f"layout: {said}"] if said else [])]
    return Printed(plan, config, found, rows, notes_on_it, drawn)


def _read(arguments: Namespace) -> tuple[LoadedConfig, Cluster | None, Links | None]:
    """The config and the machines of a command line. Raises UserError: everything that is wrong with it."""
    file, flops_per_byte = arguments.timeline, arguments.flops_per_byte
    problems: list[str] = []
    cluster, links = machines_of(arguments, problems)
    problems += [] if file is None else list(refusals(file))
    if arguments.operators and arguments.json:
        problems.append("--operators: prints a table, and --json the plan; give one of them")
    if file is None and flops_per_byte is not None:
        problems.append("--flops-per-byte: scales the pictures of --timeline FILE, which is not given")
    try:
        loaded = resolved_of(arguments)
    except UserError as error:
        raise UserError(*dict.fromkeys([*problems, *error.problems])) from error
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return loaded, cluster, links


def _print_operators(plan: Plan, config: Config, found: Price | None) -> None:
    """Print what a rank computes in a step; of a price with seconds."""
    console = new_console()
    kind, seconds = CPU if config.train.device == CPU else CUDA, None
    if found is not None:
        kind, seconds = found.cluster.device.kind, seconds_on(found)
    for one in tables(plan, kind, seconds):
        console.print(one)
