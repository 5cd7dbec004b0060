"""In: the keys average_every and servers of a plan, both given. Out: what such rounds refuse, and which are exact.
Takes no steps (coupling/round_worker.py does) and updates no weights (delayed.py and coupling/round_server.py do)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from codescent.base.refusal import Change, Refusal, each
from codescent.plan import Plan
from codescent.plan.served import momentum_every
from codescent.plan.wire import Wire
from codescent.strategies.local_sgd import averages_linearly, wrong_outer, wrong_rounds
from codescent.strategies.strategy import Candidate


def refusals(candidate: Candidate) -> Iterator[str]:
    """Problems of rounds whose changes go to servers."""
    layout = candidate.layout
    said = f"parallel.servers = {json.dumps(layout.servers)}"
    yield from wrong_rounds(candidate)
    yield from wrong_outer(candidate)
    for key, value, off in (
        ("synchronous_steps", layout.synchronous_steps, 0),
        ("fragments", layout.fragments, 1),
        ("overlap_steps", layout.overlap_steps, 0),
    ):
        if value != off:
            yield Refusal(
                f"{said}: parallel.{key} = {value}: a worker sends the change of all weights, and waits for the answer",
                [Change({f"parallel.{key}": off}), Change({"parallel.servers": 0})],
            )
    if layout.local_steps == "by_speed" and layout.in_steps:
        yield Refusal(
            'parallel.local_steps = "by_speed": an update adds the rounds of all parts, which have equally many steps',
            [
                Change({"parallel.local_steps": "equal"}),
                Change({"parallel.updates": "asynchronous", "parallel.staleness": None}),
            ],
        )
    if layout.momentum_every is not None and layout.in_steps:
        yield Refusal(
            f"parallel.momentum_every = {layout.momentum_every}: an update adds the rounds of all parts, so each one "
            "updates the momentum",
            [
                Change({"parallel.momentum_every": None}),
                Change({"parallel.updates": "asynchronous", "parallel.staleness": None}),
            ],
        )
    yield from _wrong_quorum(candidate)


def _wrong_quorum(candidate: Candidate) -> Iterator[str]:
    """Problems of a quorum: rounds that close apart, and asynchronous servers for nobody."""
    layout, workers = candidate.layout, candidate.mesh.world_size
    if layout.quorum is None:
        return
    said, off = f"parallel.quorum = {layout.quorum}", Change({"parallel.quorum": None})
    if len(_servers(candidate)) > 1:
        yield Refusal(
            f"{said}: parallel.servers = {json.dumps(layout.servers)} would close their rounds at different moments",
            [Change({"parallel.servers": 1}), off],
        )
    if layout.updates != "synchronous":
        yield Refusal(
            f'{said}: parallel.updates = "{layout.updates}" waits for nobody',
            [off, Change({"parallel.updates": "synchronous", "parallel.staleness": None})],
        )
    if layout.quorum > workers:
        yield Refusal(f"{said}: there are {workers} workers", each("parallel.quorum", [workers]))


def not_in_rounds(candidate: Candidate) -> Iterator[str]:
    """Problems: keys of rounds, with servers that get gradients."""
    layout = candidate.layout
    if layout.momentum_every is not None:
        yield Refusal(
            f"parallel.momentum_every = {layout.momentum_every}: needs rounds of steps, parallel.average_every",
            [Change({"parallel.momentum_every": None})],
        )
    if layout.local_steps != "equal":
        yield Refusal(
            f'parallel.local_steps = "{layout.local_steps}": needs rounds of steps, parallel.average_every',
            [Change({"parallel.local_steps": "equal"})],
        )


def are_exact(plan: Plan) -> bool:
    """True if a run has the losses of one process: see `LocalSGD.exact`. Nobody may be left out."""
    layout, update, workers = plan.layout, plan.update, plan.mesh.world_size
    # With staleness 0 a fast worker may compute two parts: its momentum is then that of both.
    together = layout.updates == "synchronous" or (layout.staleness == 0 and not update.get("momentum"))
    if workers > 1 and not (layout.average_every == 1 and averages_linearly(plan) and together):
        return False
    outer = (layout.outer_optimizer, layout.outer_learning_rate, layout.outer_momentum)
    is_mean = layout.outer_optimizer == "none" or outer == ("sgd", 1.0, 0.0)
    all_count = layout.quorum in (None, workers) and momentum_every(layout, workers) == 1
    return is_mean and all_count and Wire.parse(layout.wire).exact


def _servers(candidate: Candidate) -> range:
    """The servers, as indices."""
    servers = candidate.layout.servers
    return range(candidate.mesh.world_size if servers == "workers" else int(servers))
