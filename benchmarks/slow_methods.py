"""In: nothing. Out: the methods that `slow_network.py` measures, and what is asked of them.
Does not measure. A new method is a row here."""

from __future__ import annotations

from dataclasses import dataclass

from slow_runs import Method

REPLICAS = "parallel.dp_replicate={ranks}"

DDP = Method("ddp", (REPLICAS,))
"""Gradients in fp32, summed in each step: what the other methods are compared with."""


def _wire(form: str, least_steps: int = 0) -> Method:
    """Gradients of each step in another format."""
    return Method(f"wire {form}", (REPLICAS, f"parallel.wire={form}"), "wire", least_steps=least_steps)


def _mean(period: int, *more: str, name: str = "") -> Method:
    """Weights averaged after each `period` steps."""
    words = (REPLICAS, f"parallel.average_every={period}", *more)
    return Method(name or f"mean every {period}", words, "local_sgd", period)


NESTEROV = (
    "parallel.outer_optimizer=nesterov", "parallel.outer_learning_rate=0.9", "parallel.outer_momentum=0.4",
)  # fmt: skip
"""A run of 2,000 steps has 80 rounds of 25: too few for DiLoCo's rate of 0.7 and momentum of 0.9."""


def _outer(period: int, form: str = "none", *more: str, name: str = "") -> Method:
    """DiLoCo: Nesterov steps with the mean change of a round."""
    title = f"nesterov every {period}" + ("" if form == "none" else f", {form}") + name
    wire = () if form == "none" else (f"parallel.wire={form}",)
    return _mean(period, *NESTEROV, *wire, *more, name=title)


ASYNCHRONOUS = ("parallel.updates=asynchronous", "parallel.staleness=auto")


def _served(
    name: str, *words: str, servers: int = 0, learns_as: str = "", period: int = 1, least_steps: int = 0
) -> Method:
    """Weights on parameter servers. Workers that serve too need no further hosts. Synchronous ones learn as others."""
    keys, same = f"parallel.servers={servers or 'workers'}", bool(learns_as)
    return Method(name, (REPLICAS, keys, *words), "servers", period, same, servers, learns_as, least_steps)


BESIDE = "parallel.gossip_mode=asynchronous"


def _gossip(graph: str, period: int, *words: str, name: str = "") -> Method:
    """Weights mixed with those of neighbours after each `period` steps. Asynchronous averages are under way for several
    steps, and all ranks wait for the last ones at the end."""
    keys, waits = (f"parallel.gossip={graph}", f"parallel.gossip_every={period}"), BESIDE not in words
    title, least, end = f"gossip {graph} every {period}{name}", 0 if waits else 24 * period, 0 if waits else 2 * period
    words = (REPLICAS, *keys, *words)
    return Method(title, words, "gossip", period, repeatable=waits, least_steps=least, end_steps=end)


METHODS = (
    DDP,
    *(_wire(form) for form in ("bf16", "int8", "int4")),
    *(_wire(form, least_steps=25) for form in ("sign", "powersgd:4", "topk:0.01")),
    _mean(25),
    _mean(25, "parallel.wire=int4", name="mean every 25, int4"),
    *(_mean(period, "parallel.wire=sign", name=f"mean every {period}, sign") for period in (10, 16, 25)),
    *(_outer(25, form) for form in ("none", "int4")),
    _outer(40, "int4", "parallel.fragments=3", "parallel.overlap_steps=5", name=", 3 fragments, 5 steps under way"),
    _served("server, synchronous", servers=1, learns_as=DDP.name),
    _served("2 servers, synchronous", servers=2, learns_as=DDP.name),
    _served("workers serve, synchronous", learns_as=DDP.name),
    _served("server, asynchronous", *ASYNCHRONOUS, servers=1, least_steps=12),
    _served("server, staleness 2", "parallel.updates=asynchronous", "parallel.staleness=2", servers=1, least_steps=12),
    _served("workers serve, asynchronous, int4", *ASYNCHRONOUS, "parallel.wire=int4", least_steps=12),
    _served(
        "server, synchronous, mean every 25",
        "parallel.average_every=25",
        servers=1,
        learns_as="mean every 25",
        period=25,
    ),
    _served(
        "server, asynchronous, nesterov every 25",
        *(*ASYNCHRONOUS, "parallel.average_every=25", *NESTEROV),
        servers=1,
        period=25,
        least_steps=200,
    ),
    *(_gossip(graph, 25) for graph in ("ring", "pairs", "exponential", "push-sum")),
    _gossip("ring", 25, "parallel.wire=int8", name=", int8"),
    *(_gossip(graph, 25, BESIDE, name=", asynchronous") for graph in ("ring", "pairs")),
)
"""Rows of the table, in this order. The first is DDP."""

EVERY_STEP = (DDP, _mean(1))
"""Both send a sum of all weights' size in every step."""

SLOW_RANK_METHODS = (
    *EVERY_STEP,
    _mean(4),
    _gossip("ring", 4),
    _gossip("ring", 4, BESIDE, name=", asynchronous"),
    _served("server, synchronous", servers=1, learns_as=DDP.name),
    _served("server, asynchronous", *ASYNCHRONOUS, servers=1),
    _served("2 servers, asynchronous", *ASYNCHRONOUS, servers=2),
)
"""Rows of the tables of slow_rank.py."""


@dataclass(frozen=True)
class Goal:
    """Requirement: some method of a family is `times` as fast as DDP, at a loss at most `above` of DDP's higher.

    `bound_share`: where the speed without network is below 1.2 `times`, this share of it will do; None: no exception.
    """

    family: str
    times: float
    above: float
    bound_share: float | None = None


GOALS_MBIT = 49.0
"""The link for which the goals are."""

GOALS = (
    Goal("local_sgd", 50.0, 0.01, bound_share=0.8),
    Goal("wire", 3.5, 0.01),
    Goal("wire", 6.0, 0.015),
)

LAB_S = {2: 81.0, 4: 122.0}
"""Seconds of a step of DDP of GPT-2 124M by number of hosts, measured between machines linked at 49 Mbit/s."""
LAB_WITHIN = 0.05
GPT2_SHARE = 0.8
"""GPT-2 124M with the winner's keys reaches this share of the tokens/s without network."""
WINNERS = {2: "mean every 25, sign", 4: "mean every 16, sign"}
"""By number of hosts the fastest method of local_sgd whose loss is at most 1 % above DDP's, on the small model."""
SIMULATED_WITHIN = 0.15
"""The simulated tokens/s of each method are at most so far from the measured ones."""
SERVERS, SERVERS_TIMES = ("server, synchronous", "2 servers, synchronous"), 1.7
"""Two servers are so many times as fast as one, where its link is the bound."""
EQUAL_LOSSES = 3
"""First losses of a run on shaped links that must equal those of the run on links without a limit."""
