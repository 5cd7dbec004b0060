"""In: layouts with train.compile = "blocks". Out: what Dynamo compiled, on rank 0 of the layout alone or on each rank.
Does not assert anything (test_compiled_graphs does). Dynamo traces; a backend that runs the graph needs no compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from declared_ranks import plan_of, trainer_of
from device_spy import fused_optimizers, make_tables
from fake_world import fake_world, fully_shard_on_meta
from rank_server import Place
from torch._dynamo.utils import counters

from codescent.plan import Verb


def graphs(place: Place, cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By case: how many graphs the blocks make on a device that is no CPU, and why graphs end, each reason's count."""
    torch.compile = partial(torch.compile, backend="eager")
    found = {}
    for name, case in cases.items():
        torch._dynamo.reset()
        counters.clear()
        forward_and_backward(case)
        found[name] = {"graphs": counters["stats"]["unique_graphs"], "breaks": counters["graph_break"]}
    return found


def forward_and_backward(case: dict[str, Any]) -> None:
    """A step of rank 0 without its end: nobody reads the loss, or updates weights, on the meta device."""
    plan = plan_of(case)
    with fully_shard_on_meta(), fused_optimizers(), fake_world(0, case["world_size"], "meta") as world:
        trainer = trainer_of(case, plan, 0, world=world)
        executor = trainer.executor
        executor.memory.counted = True
        for part in trainer.parts:
            make_tables(part, plan)
        executor.arms[Verb.REDUCE] = executor.arms[Verb.STEP] = lambda _: None
        executor.launch(0, 1.0)
        trainer.close()


def step(place: Place, case: dict[str, Any]) -> dict[str, Any]:
    """One step of SGD by each way, from the same weights and tokens: by what the losses and the new weights differ."""
    place.join()
    torch.compile = partial(torch.compile, backend="eager")
    found, weights = {}, {}
    for compiles in ("none", "blocks"):
        case["config"]["train"]["compile"] = compiles
        counters.clear()
        trainer = trainer_of(case, plan_of(case), place.rank)
        torch.manual_seed(place.rank)
        result = trainer.executor.step(0, 1.0)
        found[compiles] = [result.train_loss, result.grad_norm]
        weights[compiles] = [weight.master.clone() for weight in trainer.optimizer.weights]
        found[f"{compiles} graphs"] = counters["stats"]["unique_graphs"]
        trainer.close()
    pairs = zip(weights["none"], weights["blocks"], strict=True)
    return {**found, "difference": max(float((mine - other).abs().max()) for mine, other in pairs)}
