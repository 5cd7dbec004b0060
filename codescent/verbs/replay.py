"""In: the folder of an asynchronous run. Out: how far its weights are from those of one process that applies the same
changes in the same order. Does not compute them (train/replay.py and train/replay_gossip.py do)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.output import say, warn
from codescent.base.refusal import Change
from codescent.build import saved_plan
from codescent.build.accept import changed
from codescent.config.load import load
from codescent.config.own_keys import changed_code, own_code
from codescent.config.sections import Config
from codescent.plan import Plan
from codescent.record import CHECKPOINTS, RunFolder

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-2}
"""Largest distance of the weights with the verdict "same", relative to their norm."""


def replay_run(path: Path, *, as_json: bool) -> int:
    """Replay a run and print the largest distance of a tensor, as a sentence or as JSON.

    Returns 0 if the weights are the same, else 1.

    Raises:
        UserError: the run has no order to replay, or no checkpoint.
    """
    from codescent.checkpoint.checkpoints import Checkpoints, read_tensors
    from codescent.train.replay import replay
    from codescent.train.replay_gossip import replay_gossip

    folder = RunFolder.open(path)
    plan, config = saved_plan(folder), load(str(folder.path / "config.toml"), []).config
    _refuse(folder.path, plan)
    saved = Checkpoints(folder.path / CHECKPOINTS, 1, keep_best=False).latest()
    if saved is None:
        raise UserError(f"{path}: has no checkpoint to compare with")
    again = replay_gossip if plan.layout.averages_beside else replay
    recorded = folder.read_environment()
    if not recorded:
        raise UserError(f"{path}: has no environment.json, which names its kernels and threads; it cannot be replayed")
    warn(*changed_code(recorded.get("own_code") or {}, own_code(config)))
    found = again(config, _alone(config, plan), plan, folder.path, saved, recorded)
    expected = read_tensors(saved.path, list(found))
    far = {name: distance(value, expected[name]) for name, value in found.items()}
    worst = max(far, key=lambda name: far[name])
    tolerance = TOLERANCE[plan.work.precision]
    portions = saved.step // plan.schedule.period * plan.mesh.world_size
    facts = {
        **{"run": path, "step": saved.step, "applied": portions, "of": _applied(plan), "tolerance": tolerance},
        **{"distance": far[worst], "tensor": worst, "same": far[worst] <= tolerance},
    }
    if as_json:
        print(json_text(facts))
    else:
        say(_lines(facts))
    return 0 if facts["same"] else 1


def _alone(config: Config, plan: Plan) -> Config:
    """The config of one process that computes what a replica or a worker of the run has computed."""
    synchronous = {
        "parallel.ranks": 1,
        "parallel.dp_replicate": None,
        "parallel.servers": 0,
        "parallel.restarts": 0,
        "parallel.updates": "synchronous",
        "parallel.staleness": None,
        "parallel.momentum_every": None,
        "parallel.local_steps": "equal",
        "parallel.average_every": 0,
        "parallel.outer_optimizer": "none",
        "parallel.outer_learning_rate": 0.7,
        "parallel.outer_momentum": 0.9,
        "parallel.gossip": "none",
        "parallel.gossip_mode": "synchronous",
        "parallel.wire": "none",
    }
    return changed(config, Change({**synchronous, "train.microbatch_size": plan.work.microbatch_size}))


def _applied(plan: Plan) -> str:
    """What the run has applied, in words."""
    if plan.layout.averages_beside:
        return f"updates of {counted(plan.mesh.dp_replicate, 'replica')}, and their averages"
    return f"pushes to {counted(len(plan.servers), 'server')}"


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts in sentences."""
    yield f"{facts['run']}, step {facts['step']}: {facts['applied']:,} {facts['of']}, applied in one process"
    verdict = "same" if facts["same"] else "DIFFERS"
    yield f"largest relative distance of a tensor: {facts['distance']:.2e} ({facts['tensor']}): {verdict}"


def distance(value: Tensor, expected: Tensor) -> float:
    """The norm of the difference, as a fraction of the norm of `value`; infinity where it is no number."""
    far, size = (float(vector.double().norm()) for vector in (value - expected, value))
    if far == 0.0:
        return 0.0
    return far / size if size and math.isfinite(far + size) else math.inf


def _refuse(path: Path, plan: Plan) -> None:
    """Raise UserError if a run has no order that could be replayed."""
    if plan.layout.averages_beside:
        return
    if not plan.layout.served or plan.layout.updates == "synchronous":
        raise UserError(
            f"{path}: --replay: only a run with asynchronous parameter servers or asynchronous gossip has an order to "
            "replay"
        )
