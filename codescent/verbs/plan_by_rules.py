"""In: the options of `codescent plan --search` without a cluster. Out: the answer of docs/which.md, in rows.
Does not choose a layout (planner/by_rules.py does) and does not print."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping

from codescent.base.amounts import of_bytes, of_share
from codescent.base.errors import UserError
from codescent.base.refusal import Value
from codescent.clusters.link import Link
from codescent.config.words import toml_value
from codescent.planner.by_rules import ByRules, Devices

NOT_SIMULATED = "by the rules of `codescent docs which`: nothing was simulated; --cluster NAME|FILE compares all"
NO_KEY = "nothing: no key of a layout"
SIZES = ("memory", "per_host", "link", "flops_per_s", "inside")
"""Options that say what the devices are."""
NEEDS = (
    "--search: needs --cluster, such as --cluster h100-sxm; or, for the rules of `codescent docs which`, "
    "--memory SIZE{more}"
)
BETWEEN = ", --link RATE and --flops-per-s N"


def devices_of(arguments: Namespace, ranks: int) -> Devices:
    """The devices that the options describe. Raises UserError: each option that is missing or wrong."""
    each, problems, links = arguments.per_host or 1, list[str](), dict[str, float]()
    missing = arguments.memory is None or (ranks > 1 and (arguments.link is None or arguments.flops_per_s is None))
    if missing:
        problems.append(NEEDS.format(more=BETWEEN if ranks > 1 else ""))
    for name in ("link", "inside"):
        if (text := getattr(arguments, name)) is not None:
            try:
                links[name] = Link.parse(text).bytes_per_s
            except ValueError as error:
                problems.append(f"--{name}: {error}")
    if problems:
        raise UserError(*problems)
    free = float("inf")  # one rank sends nothing
    return Devices(
        arguments.memory.size_bytes,
        each,
        arguments.flops_per_s or 1.0,
        links.get("link", free),
        links.get("inside"),
    )


def rows(found: ByRules) -> Iterator[tuple[str, list[str]]]:
    """A name and lines for each row: how it was found, the layout, why, the memory, another trajectory."""
    held, size = found.held, found.devices.memory_bytes
    yield "layout", [NOT_SIMULATED]
    yield "  you have", [str(found.row)]
    yield "  take", list(_keys(found.change.values)) or [NO_KEY]
    yield "  why", list(found.why)
    yield "memory", [f"{of_bytes(held.total)} of {of_bytes(size)}, {of_share(held.total / size)}"]
    if found.other is not None:
        yield (
            "another trajectory",
            [
                f"{found.other.row}: {', '.join(_keys(found.other.keys))}",
                *found.other.why,
                "The losses are others then: compare them with your own model",
                f"all its keys: {', '.join(_keys(found.other.change.values))}",
            ],
        )


def _keys(values: Mapping[str, Value]) -> Iterator[str]:
    yield from (f"{key} = {toml_value(value)}" for key, value in values.items())
