"""In: a layout. Out: the numbers of a step with compiled blocks and without, and how many graphs were compiled.
Does not assert anything (test_compiled_graphs does). Dynamo traces; a backend that runs the graph needs no compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from declared_ranks import plan_of, trainer_of
from rank_server import Place
from torch._dynamo.utils import counters


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
