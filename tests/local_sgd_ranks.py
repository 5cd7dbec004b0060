"""In: words of a run, or a plan of local SGD and changes of weights. Out: what a rank sent, saved, or averaged.
Does not assert anything (test_local_sgd does) and starts no process (rank_server does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import layout_ranks
import torch
import torch.distributed as dist
from rank_server import Place
from torch.utils._python_dispatch import TorchDispatchMode

from codescent.build import build
from codescent.checkpoint.box import Box
from codescent.config.sections import Config
from codescent.coupling.averaging import Averaging
from codescent.plan import Verb
from codescent.strategies import ThisRank
from codescent.train.execute import Executor
from codescent.train.open import OpenRun
from codescent.train.optimize import Weight
from codescent.train.tensor_hash import tensor_hash


class Counting(TorchDispatchMode):
    """The steps (from 0) of collectives in which all ranks meet. One between two steps counts for the first."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.step, self.met = ranks, -1, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and self.step >= 0:
            groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
            if groups and dist.ProcessGroup.unbox(groups[0]).size() == self.ranks:
                self.met.append(self.step)
        return func(*args, **(kwargs or {}))


def meetings(place: Place, words: list[str]) -> list[int]:
    """A run. The steps in which, or after which, a collective of all ranks ran, once for each."""
    watch, whole = Counting(place.ranks), Executor.launch

    def launch(self: Executor, number: int, rate: float) -> Any:
        watch.step = number
        return whole(self, number, rate)

    Executor.launch = launch  # type: ignore[method-assign]
    with watch:
        ended(place, words)
    return watch.met


def saved_names(place: Place, words: list[str]) -> list[dict[str, list[Any]]]:
    """A run. For each checkpoint: by name of a tensor, which part of the whole it is, and the hash of its values."""
    found: list[dict[str, list[Any]]] = []
    whole = OpenRun.save

    def save(self: OpenRun, step: int, tensors: Mapping[str, torch.Tensor | Box], val_loss: float | None) -> Any:
        found.append({name: _described(value) for name, value in tensors.items()})
        return whole(self, step, tensors, val_loss)

    OpenRun.save = save  # type: ignore[method-assign]
    ended(place, words)
    return found


def _described(value: torch.Tensor | Box) -> list[Any]:
    local, where = (value.local, list(value.offsets)) if isinstance(value, Box) else (value, [])
    return [where, int(tensor_hash([local]))]


def ended(place: Place, words: list[str]) -> None:
    """A run, which must end well."""
    code: object = None
    try:
        layout_ranks.run(place, words, resume=False)
    except SystemExit as end:
        code = end.code
    assert not code, code


def averaged(
    place: Place, config: Mapping[str, Any], pulls: Sequence[Sequence[float]], losses: Sequence[Sequence[int]]
) -> dict[str, list[float]]:
    """A rank as a replica of its own: in each step its weights move by a share of their distance from a point.

    `pulls`: by step and rank, the point. `losses`: by step and rank, how many losses the step had. Returns, by
    name of the tensor, its first element after each step; and as "distance" of each round what `distance` says, then
    the squares summed here: weights before the round's end less those after it, and those after it.
    """
    group = place.join()
    plan = build(Config.model_validate(config), 97, place.ranks)
    this_rank = ThisRank(plan, place.rank, {"dp_replicate": group})
    weights = [started(tensor.parameter.shape, number) for number, tensor in enumerate(this_rank.trained)]
    averaging = Averaging([Weight("", weight, weight, decay=False) for weight in weights], this_rank)
    seen: dict[str, list[float]] = {tensor.parameter.name: [] for tensor in this_rank.trained}
    own, distances = weights, list[float]()
    for number, (points, counts) in enumerate(zip(pulls, losses, strict=True)):
        moves = [0.1 * (points[place.rank] - weight) for weight in weights]
        for instruction in plan.schedule.program(0, number):
            if instruction.verb is Verb.REDUCE and instruction.axis:
                moves = [move / place.ranks for move in moves]
                averaging.sum_gradients(moves)
            elif instruction.verb is Verb.STEP:
                for weight, move in zip(weights, moves, strict=True):
                    weight += move
                averaging.stepped(number, counts[place.rank], sum(counts))
            elif instruction.verb is Verb.AVERAGE:
                assert instruction.fragment is not None
                own = [weight.clone() for weight in weights]
                averaging.average(instruction.fragment)
            elif instruction.verb is Verb.MERGE:
                assert instruction.fragment is not None
                averaging.merge(instruction.fragment)
                if instruction.last:
                    apart = [before - weight for before, weight in zip(own, weights, strict=True)]
                    summed = (sum(float(one.square().sum()) for one in tensors) for tensors in (apart, weights))
                    distances += [*averaging.distance().tolist(), *summed]
        for weight, rows in zip(weights, seen.values(), strict=True):
            rows.append(float(weight.flatten()[0]))
    dist.barrier()
    averaging.close()
    return {**seen, "distance": distances}


def started(shape: Sequence[int], number: int) -> torch.Tensor:
    """The first values of a tensor."""
    return torch.linspace(0, 1, int(torch.tensor(shape).prod()), dtype=torch.float64).add_(number).view(*shape)
