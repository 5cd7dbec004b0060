"""In: the options of `codescent plan` that begin with --link, a cluster. Out: the ranks' walk, in rows.
Does not simulate (cost/ranks_walk.py does) and does not measure a link."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from codescent.base.amounts import of_bytes, of_number, of_rate, of_seconds, of_share
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.refusal import Change
from codescent.build.accept import changed
from codescent.clusters.by_links import UNKNOWN, cluster_of_text, link_of, of_links
from codescent.clusters.cluster import Cluster
from codescent.clusters.files import software_of
from codescent.clusters.link import AT_ONCE, Link
from codescent.config.sections import Config
from codescent.cost.amounts import phases
from codescent.cost.coding import MEMORY_BYTES_PER_S, Coding, rate_of
from codescent.cost.stage_memory import stage_memory
from codescent.cost.walked import Walk
from codescent.plan import Collective, Plan
from codescent.planner.links import Apart, Links, on_device, slow_of
from codescent.planner.period import KEEP, MOST_PERIOD, NOTHING_DUE, least_handed, least_period
from codescent.planner.prediction import not_there, own_as_run
from codescent.preflight import plan_of
from codescent.verbs.plan_price import cluster_of

NEEDS_LINK = ("slow", "compute_s", "flops_per_s", "per_host", "coding", "inside", "memory")
"""Options that have an effect with --link only."""
HERE = "here"
"""Value of --coding that measures."""


def machines_of(arguments: Namespace, problems: list[str]) -> tuple[Cluster | None, Links | None]:
    """The cluster of --cluster and the links of --link; None: without one. What is wrong is added to `problems`."""
    cluster, links = None, None
    try:
        cluster = cluster_of(arguments)
    except UserError as error:
        problems += error.problems
    try:
        links = links_of(arguments, cluster)
    except UserError as error:
        problems += error.problems
    return cluster, links


def links_of(arguments: Namespace, cluster: Cluster | None) -> Links | None:
    """The options of a command line; None: without --link. Raises UserError: every option that is wrong.

    `cluster`: of --cluster; None where it is wrong. Its devices say how long the arithmetic takes, and --link is the
    card of each node.
    """
    is_beside = arguments.cluster is not None
    needs = [name for name in NEEDS_LINK if not (name == "slow" and is_beside)]
    given = [f"--{name.replace('_', '-')}" for name in needs if getattr(arguments, name) is not None]
    if arguments.link is None:
        if given:
            raise UserError(*(f"{name}: needs --link, such as --link 49mbit,0.2ms" for name in given))
        return None
    problems = list(_refused_beside(arguments)) if is_beside else []
    speeds = (arguments.compute_s is not None) + (arguments.flops_per_s is not None)
    if speeds == 2 or (speeds == 0 and not is_beside):
        wrong = "give only one of them" if speeds else "it needs one of them, or --cluster, which knows its devices"
        problems.append(
            f"--link: --compute-s (seconds of a step's arithmetic) or --flops-per-s (speed of a rank): {wrong}"
        )
    if arguments.flops_per_byte is not None:
        problems.append("--flops-per-byte: --link says the speed of links; give one of them")
    if arguments.json:
        problems.append("--json: prints the plan alone, without the rows of --link; give one of them")
    found, slow, memory, inside = of_links(AT_ONCE), dict[int, float](), None, AT_ONCE
    try:
        found = cluster_of_text(arguments.link)
    except UserError as error:
        problems += [f"--link: {problem}" for problem in error.problems]
    if arguments.inside is not None:
        inside = link_of(arguments.inside, 0.0, "--inside: ", problems) or AT_ONCE
    try:
        slow = {} if arguments.slow is None else slow_of(arguments.slow)
    except ValueError as error:
        problems.append(f"--slow: {error}")
    try:
        memory = coding_of(arguments.coding)
    except ValueError as error:
        problems.append(f"--coding: {error}")
    if problems:
        raise UserError(*problems)
    speed = arguments.compute_s, arguments.flops_per_s
    if cluster is not None:
        given_links = replace(cluster_links(arguments, cluster), compute_s=speed[0], flops_per_s=speed[1])
        cards = replace(given_links.cluster, between=found.between, hosts=found.hosts, cards=1)
        return replace(given_links, cluster=cards)
    machines = replace(found, inside=inside, bus=inside, devices=arguments.per_host or 1)
    return Links(machines, None, *speed, slow, memory, arguments.memory)


def cluster_links(arguments: Namespace, cluster: Cluster) -> Links:
    """The machines of a cluster, for a walk over all ranks: links as its software reaches them."""
    software = software_of(cluster, arguments.software)
    rate = cluster.device.memory_bytes_per_s * software.memory_efficiency
    memory = rate if arguments.coding is None else coding_of(arguments.coding)
    slow = slow_of(arguments.slow) if arguments.slow else {}
    return Links(cluster.reached(software), software, None, None, slow, memory)


BESIDE = {
    "per_host": "node.devices of the cluster is how many ranks share a host; change it by --with node.devices=N",
    "inside": "the cluster has a link inside; change it by --with links.inside=RATE,LATENCY",
    "memory": "the cluster has the memory of a device; change it by --with device.memory=SIZE",
    "most": "is asked of the price of a cluster; leave out --link",
    "mtbf": "is asked of the price of a cluster; leave out --link",
    "save_s": "is asked of the price of a cluster; leave out --link",
}
"""Options that say nothing beside --link and --cluster together, and what to give instead."""


def _refused_beside(arguments: Namespace) -> Iterator[str]:
    for name, instead in BESIDE.items():
        if getattr(arguments, name) is not None:
            yield f"--{name.replace('_', '-')}: {instead}"


def refuse_price(arguments: Namespace) -> None:
    """Refuse options of a price, for a plan whose ranks are given portions of work: all its ranks are walked."""
    asked = [name for name in ("most", "mtbf", "save_s") if getattr(arguments, name) is not None]
    asked += ["json"] * arguments.json
    if asked:
        why = "ranks that are given portions of work have no common step, so they are simulated and have no price"
        raise UserError(*(f"--{name.replace('_', '-')}: {why}; leave it out" for name in asked))


def as_configured(links: Links, config: Config, software: str | None) -> Links:
    """The links as a config uses them. Known devices have their own collectives, and software as the config runs it.

    Others have those of train.device: NCCL's are rings, and auto counts as a CPU. `software`: of the command line.
    """
    if links.software is None:
        return on_device(links, config.train.device)
    return replace(links, software=own_as_run(links.software, software, config, links.cluster))


def coding_of(text: str | None) -> float | None:
    """Read --coding: bytes per second of a rank's memory; None: measure. Raises ValueError, which names the forms."""
    if text is None:
        return MEMORY_BYTES_PER_S
    try:
        return None if text.strip() == HERE else rate_of(text)
    except ValueError as error:
        raise ValueError(f"{error}; or {HERE}, which measures") from error


def coding_on(links: Links, plan: Plan) -> Coding:
    """How fast the ranks encode, decode and add what they exchange."""
    if links.memory_bytes_per_s is not None:
        return Coding.of_memory(plan, links.memory_bytes_per_s)
    from codescent.collectives.coding_speed import measure

    return measure(plan)


def refuse_absent(links: Links, plan: Plan, cluster: Cluster | None, device: str) -> None:
    """Refuse hosts and ranks that the plan does not have, a plan that does not fit in the memory that is given, and one
    that the machines of --cluster cannot run. `device`: train.device."""
    host, rank = links.hosts(plan) - 1, plan.mesh.world_size - 1
    each = f" of {counted(links.cluster.devices, 'rank')}"
    problems = [
        f"--link: host {one}: the plan has hosts 0 to {host}{each}" for one in links.cluster.hosts if one > host
    ]
    problems += [f"--slow: rank {one}: the plan has ranks 0 to {rank}" for one in links.slow if one > rank]
    problems += [] if cluster is None else [f"--cluster: {reason}" for reason in not_there(plan, cluster, device)]
    needed = max(stage_memory(plan, stage, links.cluster, UNKNOWN).state for stage in range(plan.mesh.pp))
    if links.memory is not None and needed > links.memory.size_bytes:
        problems.append(
            f"--memory {links.memory.text} ({of_bytes(links.memory.size_bytes)}): the weights, gradients and optimizer "
            f"state of a rank take {of_bytes(needed)} on its device, without activations. So the run cannot be, and "
            "has no time. Give more ranks of dp_shard, tp or pp, or parallel.offload"
        )
    if problems:
        raise UserError(*problems)


def apart_of(plan: Plan, config: Config, period: int | None, *, without_data: bool) -> Plan:
    """The plan whose replicas train apart: that in which they average after each step, if they do not yet.

    Args:
        plan: of the config.
        config: of the command.
        period: another one. Then nothing is due besides: what the config has does not fit each period.
        without_data: as in `plan_of`.

    Raises:
        UserError: averaging is refused here.
    """
    key = "parallel.average_every" if plan.layout.gossip == "none" else "parallel.gossip_every"
    if period is None and (plan.layout.average_every or plan.layout.gossip != "none"):
        return plan
    values: dict[str, Any] = {key: period or 1}
    if period is not None:
        values |= NOTHING_DUE | {"train.num_steps": period * math.ceil((config.train.num_steps or 1) / period)}
    return plan_of(changed(config, Change(values)), plan.world_size, without_data=without_data)


class RankRows(NamedTuple):
    """What the ranks did, its rows, and those of what has no time."""

    found: Walk
    rows: list[tuple[str, list[str]]]
    free: list[tuple[str, list[str]]]


def walked_on(
    links: Links, arguments: Namespace, plan: Plan, config: Config, cluster: Cluster | None, *, without_data: bool
) -> RankRows:
    """Walk all ranks. Raises UserError: the machines cannot run the plan. `without_data`: as in `plan_of`."""
    refuse_absent(links, plan, cluster, config.train.device)
    links = as_configured(links, config, arguments.software)
    coding = coding_on(links, plan)
    found = links.walk(plan, coding, timeline=arguments.timeline is not None)
    apart = partial(apart_of, plan, config, without_data=without_data)
    return RankRows(found, list(link_rows(plan, links, found, coding, apart)), list(free_rows(plan, links)))


def free_rows(plan: Plan, links: Links) -> Iterator[tuple[str, list[str]]]:
    """What has no link and so no time, before all other rows."""
    free = []
    if min(links.cluster.devices, plan.world_size) > 1 and not links.cluster.inside.takes_time:
        free.append("what ranks of one host send each other")
    if any(record.collective is Collective.COPY for record in plan.traffic) and not links.cluster.bus.takes_time:
        free.append("copies between device and host")
    if free:
        yield "not in the time", [f"{' and '.join(free)}: give its rate by --inside, such as --inside 50GB/s,5us"]


def link_rows(plan: Plan, links: Links, found: Walk, coding: Coding, apart: Apart) -> Iterator[tuple[str, list[str]]]:
    """A heading, then what the ranks do.

    `apart`: the plan whose replicas train apart, with this period, or with that of the config (None). It is asked for
    where there are replicas, and may raise UserError.
    """
    mesh, machines = plan.mesh, links.cluster
    each = counted(min(machines.devices, plan.world_size), "rank")
    hosts = f"{counted(links.hosts(plan), 'host')} of {each}"
    own = [f"host {host}: {_size(link)}" for host, link in sorted(machines.hosts.items())]
    inside = [f"inside a host: {_size(machines.inside)}"] if machines.inside.takes_time else []
    cards = f", {machines.cards} cards each" if machines.cards > 1 else ""
    whose = "no link is measured" if links.software is None else f"arithmetic and links inside of {machines.name}"
    yield "simulated", [f"{_size(machines.between)} between {hosts}{cards}; {whose}", *inside, *own]
    slow = ", ".join(f"rank {rank}: {factor:g} times as long" for rank, factor in sorted(links.slow.items()))
    most = " on the stage that computes most" if mesh.pp > 1 else ""
    yield "  arithmetic", [f"{of_seconds(links.step_s(plan))} a step and rank{most}{slow and f'; {slow}'}"]
    if coding_s := max(rank.coding_s for rank in found.ranks):
        yield (
            "  coding",
            [f"{of_seconds(coding_s)} a step and rank to encode, decode and add", *_figures(coding, links)],
        )
    tokens = f"{of_number(found.tokens_per_s)} tokens/s"
    period = 1 if plan.layout.hands_out else phases(plan)[-1].period
    mean = f", mean of {counted(period, 'step')}" if period > 1 else ""
    yield "  step", [f"{of_seconds(found.step_s)}{mean}: {tokens}"]
    yield "  waiting", [_waiting(found)]
    if any(found.servers):  # else no message of a server has a link: see `free_rows`
        yield "  load", [f"busiest link of a server: {of_share(max(found.servers))} of the time"]
    if found.staleness:
        mean_age = sum(found.staleness) / len(found.staleness)
        unit = "averages" if plan.layout.averages_beside else "versions"
        yield "  staleness", [f"{mean_age:.2f} {unit} on average, at most {max(found.staleness)}"]
    if mesh.dp_replicate > 1 and (plan.layout.average_every or not plan.layout.served):
        yield "  period", [_period(links, coding, apart)]


def _size(link: Link) -> str:
    return f"{of_rate(link.bytes_per_s, 'B/s')} and {of_seconds(link.latency_s)}"


def _figures(coding: Coding, links: Links) -> tuple[str, str]:
    """What an element costs, and how that is known."""
    forms = [("encoded", coding.encode_s), ("decoded", coding.decode_s), ("read or written", coding.stream_s)]
    each = ", ".join(f"{1e9 * seconds:.3g} ns {what}" for what, seconds in forms if seconds)
    if links.memory_bytes_per_s is None:
        return each, "an element, measured here"
    return each, f"an element, not measured: by {of_rate(links.memory_bytes_per_s, 'B/s')} of memory"


def _waiting(found: Walk) -> str:
    """How long the ranks wait in a step, and what share of the time is left."""
    waits = [rank.waits_s for rank in found.ranks if rank.step_s] or [0.0]
    several = f"{of_seconds(min(waits))} to " if max(waits) - min(waits) > 0.005 * max(waits) else ""
    return f"{several}{of_seconds(max(waits))} of a step; the busiest rank computes {of_share(found.computes)} of it"


def _period(links: Links, coding: Coding, apart: Apart) -> str:
    try:
        plan = apart(None)
    except UserError as error:
        return f"averaging is refused here: {error.problems[0]}"
    layout, key, least = plan.layout, "average_every" if plan.layout.average_every else "gossip_every", None
    try:
        if layout.hands_out:
            least = least_handed(links.with_period(plan, coding, apart))
        else:
            given = links.seconds(plan), links.cluster
            of_period = None if layout.average_every else apart
            least = least_period(plan, *given, coding=coding, collective_s=links.collective_s, of_period=of_period)
    except UserError as error:
        return f"another {key} is refused here: {error.problems[0]}"
    share = f"{of_share(KEEP)} of the speed without a network"
    if least is None:
        return f"no {key} up to {MOST_PERIOD:,} keeps {share}"
    wire = f' with wire = "{layout.wire}"' if layout.wire != "none" else ""
    return f"{key} = {least:,} or more{wire} keeps {share}"
