"""In: the options of `codescent plan --search`, a config, a cluster. Out: the fastest layouts, printed; a config file.
Does not search (planner/search/ does)."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.base.amounts import of_bytes, of_number, of_seconds, of_share
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.output import note, warn
from codescent.base.refusal import Value
from codescent.clusters.cluster import Cluster, Software
from codescent.config.load import DEFAULT, LoadedConfig
from codescent.config.sections import Config
from codescent.config.words import toml_value
from codescent.planner.by_rules import Devices, by_rules
from codescent.planner.prediction import price_json, software_of_run
from codescent.planner.search.apart import Apart, apart
from codescent.planner.search.best import LayoutSearch
from codescent.planner.search.found import Found, Searched
from codescent.planner.search.space import OFFLOAD, SEARCHED, Space, given_keys
from codescent.planner.search.unfit import nothing_fits
from codescent.planner.search.words import FREE, layout_words, others, reason, size_words
from codescent.preflight import absent, notes, vocabulary_of
from codescent.verbs.columns import columns
from codescent.verbs.config import resolved_of
from codescent.verbs.layout_file import write_layout
from codescent.verbs.plan_by_rules import SIZES, devices_of, rows
from codescent.verbs.plan_price import cluster_of
from codescent.verbs.script_file import taken

WITHOUT = {
    "operators": "--operators", "timeline": "--timeline", "most": "--most", "mtbf": "--mtbf", "save_s": "--save-s",
    "slow": "--slow", "flops_per_byte": "--flops-per-byte", "compute_s": "--compute-s", "coding": "--coding",
}  # fmt: skip
"""Options of a plan that say nothing of a search."""
ALL = "all"
Rows = Iterator[tuple[str, list[str]]]


def problems_of(arguments: Namespace) -> Iterator[str]:
    """What is wrong with the options of a search, beside what a cluster says."""
    yield from (f"{name}: is of one plan; leave out --search" for key, name in WITHOUT.items() if given(arguments, key))
    if arguments.out is not None:
        yield from taken(arguments.out)
        if arguments.out.suffix != ".toml":
            yield f"--out {arguments.out}: is a config, whose name ends with .toml; give such a name"
    if len(set(arguments.ranks or ())) < len(arguments.ranks or ()):
        yield f"--ranks {','.join(map(str, arguments.ranks))}: has a number twice"
    if arguments.out is not None and len(arguments.ranks or ()) > 1:
        yield "--out: is the config of one number of ranks; give one, or leave --out out"
    for key in free_of(arguments):
        if key not in SEARCHED:
            yield f"--free {key}: is no key of a search; these are {', '.join(SEARCHED)}, or {ALL}"


def given(arguments: Namespace, key: str) -> bool:
    """Whether an option of the command line is there."""
    return getattr(arguments, key) not in (None, False)


def free_of(arguments: Namespace) -> tuple[str, ...]:
    """The keys of --free."""
    if arguments.free is None:
        return ()
    words = [word.strip() for word in arguments.free.split(",")]
    return SEARCHED if ALL in words else tuple(words)


def stay_of(arguments: Namespace, config: Config) -> dict[str, Value]:
    """The searched keys that stay, with their values: those that the config gives, without those of --free."""
    free = free_of(arguments)
    return {key: value for key, value in given_keys(config).items() if key not in free}


def refuse_without(arguments: Namespace) -> None:
    """Refuse options of a search where there is none. Raises UserError: each of them."""
    problems = [f"--{name}: is of --search" for name in ("free", "out") if given(arguments, name)]
    if len(arguments.ranks or ()) > 1:
        problems.append(
            f"--ranks {','.join(map(str, arguments.ranks))}: a plan has one number of ranks; --search several"
        )
    if problems:
        raise UserError(*problems)


def main(arguments: Namespace) -> int:
    """Search, and print the layouts.

    Raises UserError: options are wrong, nothing is admissible, or nothing fits.
    """
    numbers, problems = arguments.ranks, [*problems_of(arguments)]
    arguments.ranks = numbers[0] if numbers else None
    cluster, loaded = None, None
    try:
        cluster = cluster_of(arguments)
    except UserError as error:
        problems += error.problems
    try:
        loaded = resolved_of(arguments)
    except UserError as error:
        problems += error.problems
    devices = None
    if arguments.cluster is not None:
        sizes = [f"--{name.replace('_', '-')}" for name in SIZES if given(arguments, name)]
        problems += [f"{name}: --cluster says it; leave it out" for name in sizes]
    elif loaded is not None:
        try:
            devices = devices_of(arguments, loaded.config.parallel.ranks)
        except UserError as error:
            problems += error.problems
        if len(numbers or ()) > 1:
            problems.append("--ranks: without --cluster there is nothing to compare; give one number")
    if problems or loaded is None:
        raise UserError(*problems)
    arguments.ranks = numbers
    if cluster is not None:
        return _main(arguments, loaded, cluster)
    assert devices is not None
    return _by_rules(arguments, loaded, devices)


def _by_rules(arguments: Namespace, loaded: LoadedConfig, devices: Devices) -> int:
    """The answer of the rules of docs/which.md."""
    ranks, missing = loaded.config.parallel.ranks, absent(loaded.config)
    stay = stay_of(arguments, loaded.config)
    for sentence in [*notes(loaded), *missing]:
        warn(sentence)
    vocab_size = vocabulary_of(loaded.config, ranks, without_data=bool(missing))
    found = by_rules(loaded.config, vocab_size, ranks, devices, stay)
    if arguments.json:
        print(json.dumps({"row": str(found.row), "layout": dict(found.change.values), "why": found.why}, indent=1))
    else:
        print(columns([*_given_rows(loaded, stay), *rows(found)]))
    if arguments.out is not None:
        said = f"The layout of {counted(ranks, 'rank')} by the rules of `codescent docs which`"
        write_layout(arguments, loaded, said, found.change.values)
        note(f"{arguments.out} is written: this layout on top of {arguments.config}")
    return 0


def _main(arguments: Namespace, loaded: LoadedConfig, cluster: Cluster) -> int:
    software = software_of_run(cluster, loaded.config, arguments.software)
    stay = stay_of(arguments, loaded.config)
    numbers = arguments.ranks or [loaded.config.parallel.ranks]
    begin_s, found = time.perf_counter(), list[Searched]()
    missing = absent(loaded.config)
    for sentence in [*notes(loaded), *missing]:
        warn(sentence)
    vocab_size = vocabulary_of(loaded.config, numbers[0], without_data=bool(missing))
    for ranks in numbers:
        if len(numbers) > 1:
            note(f"{counted(ranks, 'rank')} ...")
        found.append(_searched(loaded, vocab_size, ranks, stay, cluster, software))
    took_s = time.perf_counter() - begin_s
    known = [key for key, origin in loaded.origins.items() if origin != DEFAULT]
    slower = [apart(one, known) for one in found]
    if arguments.json:
        print(json.dumps([_json(*one) for one in zip(found, slower, strict=True)], indent=1))
    elif len(found) == 1:
        print(columns([*_heading(found[0], loaded, stay, took_s), *_rows(found[0], slower[0])]))
    else:
        print(columns([*_heading(found[0], loaded, stay, took_s, found), *_compared(found)]))
    if arguments.out is not None:
        first = found[0].best[0]
        said = (
            f"The fastest layout of {counted(found[0].space.ranks, 'rank')} on {cluster.name}, by codescent plan "
            f"--search: {of_seconds(first.price.step_s)} a step"
        )
        write_layout(arguments, loaded, said, first.change.values)
        note(f"{arguments.out} is written: the first layout on top of {arguments.config}")
    return 0


def _searched(
    loaded: LoadedConfig,
    vocab_size: int | None,
    ranks: int,
    stay: Mapping[str, Value],
    cluster: Cluster,
    software: Software,
) -> Searched:
    space = Space(loaded.config, vocab_size, ranks, tuple(stay), cluster.device.kind)
    for one in (space.without_offload(), space):
        found = LayoutSearch(one, cluster, software).run()
        if found.best:
            return found
    raise UserError(f"--search: {nothing_fits(space, cluster, software, found.least, FREE)}")


def _heading(
    found: Searched, loaded: LoadedConfig, stay: Mapping[str, Value], took_s: float, several: Sequence[Searched] = ()
) -> Rows:
    cluster = found.least.price.cluster
    yield "cluster", [f"{cluster.name}: {cluster.what}", f"{of_bytes(cluster.device.memory_bytes)} on each device"]
    yield from _given_rows(loaded, stay)
    for one in several or [found]:
        counts = one.counts
        yield (
            "searched",
            [
                f"{counts.combinations:,} combinations on {counted(one.space.ranks, 'rank')}: "
                f"{counts.admissible:,} admissible, {counts.refused:,} refused",
                *_left_out(one),
                f"{counts.unfit:,} do not fit, {counts.ruled_out:,} ruled out by a bound, "
                f"{counts.simulated:,} simulated",
            ],
        )
    yield "", [f"in {of_seconds(took_s)}; no other key changes, so all have the same losses"]


def _given_rows(loaded: LoadedConfig, stay: Mapping[str, Value]) -> Rows:
    if stay:
        words = [f"{key} = {toml_value(value)} ({loaded.origins[key]})" for key, value in stay.items()]
        yield "given", [", ".join(words), f"they stay; --free {ALL} searches them, too"]


def _left_out(found: Searched) -> Iterator[str]:
    counts = found.counts
    if not found.space.offloads and OFFLOAD not in found.space.given:
        yield f"{OFFLOAD} is left out: it makes no layout faster, and some fit without it"
    if counts.other_losses:
        yield f"{counts.other_losses:,} would change the losses"
    if counts.unpriced:
        yield f"{counts.unpriced:,} have no price, such as parallel.offload without node.host_bandwidth"


def _rows(found: Searched, slower: Sequence[Apart]) -> Rows:
    """The ten best, those that are named besides, and other trajectories."""
    first = found.best[0]
    for number, one in enumerate(found.best, 1):
        yield str(number), [f"{size_words(one)}: {layout_words(one.price.plan)}", f"  {reason(one, first)}"]
    yield from others(found.least, found.first_unfit)
    for other in slower:
        faster = first.price.step_s / other.price.step_s
        method = ", ".join(f"{name} = {toml_value(value)}" for name, value in other.method.items())
        yield (
            "other losses",
            [
                f"{of_seconds(other.price.step_s)} a step, {faster:.3g} times as fast: {method}",
                f"{layout_words(other.price.plan)}; another trajectory (losses: codescent docs which)",
            ],
        )


def _compared(found: Sequence[Searched]) -> Rows:
    """The best layout of each number of ranks."""
    base = found[0].best[0].price
    for one in found:
        price = one.best[0].price
        share = price.tokens_per_s / base.tokens_per_s * base.devices / price.devices
        hours = (one.space.config.train.num_steps or 0) * price.step_s / 3600 * price.devices
        run = f", {of_number(hours)} device-hours" if hours else ""
        money = (
            f", {of_number(hours * price.cluster.device_hour)} in money" if price.cluster.device_hour and hours else ""
        )
        yield (
            counted(one.space.ranks, "rank"),
            [
                f"{size_words(one.best[0])}",
                f"{of_number(price.tokens_per_s)} tokens/s, a device {of_share(share)} of those on "
                f"{counted(base.devices, 'device')}{run}{money}",
                layout_words(price.plan),
            ],
        )


def _json(found: Searched, slower: Sequence[Apart]) -> dict[str, Any]:
    first = found.best[0]

    def of(one: Found) -> dict[str, Any]:
        return {"layout": dict(one.change.values), "reason": reason(one, first), **price_json(one.price)}

    return {
        "ranks": found.space.ranks,
        "given": sorted(found.space.given),
        "counts": {**vars(found.counts), "ruled_out": found.counts.ruled_out},
        "best": [of(one) for one in found.best],
        "least_memory": of(found.least),
        "first_unfit": None if found.first_unfit is None else of(found.first_unfit),
        "other_trajectories": [{"layout": dict(one.change.values), "step_s": one.price.step_s} for one in slower],
    }
