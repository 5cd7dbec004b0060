"""In: a job of this file and its options: loops of users with average_every or wire. Out: what one rank of it returned.
Does not assert what the values are (test_own_averaging does) and starts no process (rank_server does)."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_ranks
import torch
import torch.distributed as dist
from local_sgd_ranks import Counting
from own_models import make, make_optimizer
from rank_server import Place
from torch import nn

import codescent
from codescent.checkpoint.checkpoints import Checkpoints, read_tensors
from codescent.own import registry

RATE = 0.1


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)
    return x.to(dtype), torch.sin(3 * x).to(dtype)


def made(kind: str) -> nn.Module:
    if kind == "norm":
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 6)).double()
    if kind == "bf16":
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)).bfloat16()
    return make(kind)


def taken(module: nn.Module, rule: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One step of a rank's loop."""
    dtype = next(module.parameters()).dtype
    x, y = batch(rank, step, dtype)
    rule.zero_grad()
    nn.functional.mse_loss(module(x), y).backward()
    rule.step()


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: own_ranks.whole(tensor) for name, tensor in module.state_dict().items()}


def walked(
    folder: str, kind: str = "odd", optimizer: str = "sgd", steps: int = 9, **options: Any
) -> list[dict[str, list[float]]]:
    """Weights and buffers of this rank after each step."""
    ranks = codescent.init(device="cpu")
    module = made(kind)
    rule = make_optimizer(optimizer, module)
    if ranks.rank:  # what rank 0 has counts
        nn.init.zeros_(next(module.parameters()))
    codescent.distribute(module, rule, **options)
    seen = []
    for step in range(steps):
        taken(module, rule, ranks.rank, step)
        seen.append(values(module))
    return seen


def simulated(
    folder: str, replicas: int, kind: str, optimizer: str, steps: int, period: int, outer: list[Any] | None
) -> list[list[dict[str, list[float]]]]:
    """`walked` of all ranks, in one process without codescent. `outer`: learning rate, momentum, whether Nesterov's."""
    first = made(kind)
    modules = [copy.deepcopy(first) for _ in range(replicas)]
    rules = [make_optimizer(optimizer, module) for module in modules]
    anchors = [parameter.detach().clone() for parameter in first.parameters()]
    momenta = [torch.zeros_like(anchor) for anchor in anchors]
    seen: list[list[dict[str, list[float]]]] = [[] for _ in modules]
    for step in range(steps):
        for rank, (module, rule) in enumerate(zip(modules, rules, strict=True)):
            taken(module, rule, rank, step)
        if (step + 1) % period == 0:
            for number, copies in enumerate(zip(*(module.parameters() for module in modules), strict=True)):
                mean = torch.stack([one.detach() for one in copies]).mean(0)
                if outer is not None:
                    rate, momentum, nesterov = outer
                    change = anchors[number] - mean
                    momenta[number] = momentum * momenta[number] + change
                    change = change + momentum * momenta[number] if nesterov else momenta[number]
                    mean = anchors[number] - rate * change
                anchors[number] = mean.clone()
                with torch.no_grad():
                    for one in copies:
                        one.copy_(mean)
            for buffers in zip(*(module.buffers() for module in modules), strict=True):
                if buffers[0].is_floating_point():
                    mean = torch.stack(buffers).mean(0)
                    for one in buffers:
                        one.copy_(mean)
        for module, rows in zip(modules, seen, strict=True):
            rows.append(values(module))
    return seen


def met(folder: str, steps: int, **options: Any) -> list[int]:
    """For each collective of all ranks, the step (from 0) in which it ran."""
    ranks = codescent.init(device="cpu")
    module = made("norm")
    rule = make_optimizer("adamw", module)
    codescent.distribute(module, rule, **options)
    watch = Counting(ranks.world_size)
    with watch:
        for step in range(steps):
            watch.step = step
            taken(module, rule, ranks.rank, step)
            codescent.clip_(module, 1.0)
    return watch.met


def delivered(folder: str, steps: int, numel: int, **options: Any) -> dict[str, Any]:
    """Gradients that do not depend on weights: their sum over steps, what has moved the weights, what is unsent."""
    ranks = codescent.init(device="cpu")
    module = nn.Linear(numel, 1, bias=False, dtype=torch.float64)
    rule = torch.optim.SGD(module.parameters(), lr=RATE)
    codescent.distribute(module, rule, **options)
    before, true = module.weight.detach().clone(), torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(7 * step + ranks.rank)).double()
        true += gradient
        rule.zero_grad()
        module(gradient).sum().backward()
        rule.step()
    known = registry.find(module, "test")[1]
    unsent = {**known.averaged.state(), **(known.rounds.own() if known.rounds else {})}
    scale = RATE / ranks.world_size if options.get("average_every") else 1 / ranks.world_size
    moved = (before - module.weight.detach())[0] / RATE
    return {
        "true": (true / ranks.world_size).tolist(),
        "moved": moved.tolist(),
        "unsent": {
            name.split(".")[-1]: (value * (scale if not options.get("average_every") else scale / RATE**2)).tolist()
            for name, value in unsent.items()
        },
    }


def resumed(
    folder: str, kind: str, optimizer: str, before: int, after: int, other: str = "", **options: Any
) -> dict[str, Any]:
    """A run with a save, and one that goes on from it: final values and optimizer state of both, and the file's."""
    ranks = codescent.init(device="cpu")
    path, found = Path(folder) / "saves", []

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = made(kind)
        rule = make_optimizer(optimizer, module)
        codescent.distribute(module, rule, **options)
        return module, rule

    def ended(module: nn.Module, rule: torch.optim.Optimizer) -> list[Any]:
        for step in range(before, before + after):
            taken(module, rule, ranks.rank, step)
        names = {parameter: name for name, parameter in module.named_parameters()}
        states = {
            f"{key} {names[parameter]}": own_ranks.whole(value)
            for parameter, state in rule.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        return [values(module), states]

    module, rule = built()
    for step in range(before):
        taken(module, rule, ranks.rank, step)
    now, state = values(module), [v.clone() for one in rule.state.values() for v in one.values()]
    saved = codescent.save(path, module, rule, note=3)
    assert values(module) == now, "a save changes nothing"
    assert all(map(torch.equal, state, (v for one in rule.state.values() for v in one.values())))
    found.append(ended(module, rule))
    module, rule = built()
    nn.init.zeros_(next(module.parameters()))
    if before > 1:
        taken(module, rule, ranks.rank, 99)  # what it has done before the load leaves nothing
    assert codescent.load(saved, module, rule) == {"note": 3}
    found.append(ended(module, rule))
    file = {name.removeprefix("model."): v for name, v in read_tensors(saved).items() if name.startswith("model.")}
    return {"now": now, "runs": found, "file": {name: own_ranks.whole(value) for name, value in file.items()}}


def lacking(folder: str) -> dict[str, Any]:
    """Momentum of a layer that all ranks but the last one train, equal on these: this rank's, and a save's."""
    ranks = codescent.init(device="cpu")
    module = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
    rule = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    codescent.distribute(module, rule, average_every=4)
    x = torch.ones(1, 2)
    (module[0](x) + (0 if ranks.rank == ranks.world_size - 1 else module[1](x))).sum().backward()
    rule.step()
    own = rule.state.get(module[1].bias, {}).get("momentum_buffer")
    saved = read_tensors(codescent.save(Path(folder) / "saves", module, rule))
    (name,) = [name for name in saved if name.startswith("optimizer.") and "1.bias" in name]
    return {"own": None if own is None else own.tolist(), "saved": saved[name].tolist()}


def moved(folder: str, saves: dict[str, Any] | None, loads: dict[str, Any], alone: bool = False) -> Any:
    """Save after 3 steps with some options; or load into a module with others and go on for 4. Returns the weights."""
    ranks = codescent.init(device="cpu")
    module = made("odd")
    rule = make_optimizer("adamw", module)
    codescent.distribute(module, rule, **(loads if saves is None else saves))
    if saves is not None:
        for step in range(3):
            taken(module, rule, ranks.rank, step)
        with codescent.averaged(module):
            found = values(module)
        codescent.save(Path(folder) / "saves", module, rule)
        return found
    try:
        codescent.load(Path(folder) / "saves", module, None if alone else rule)
    except codescent.UserError as error:
        return list(error.problems)
    with codescent.averaged(module):
        found = values(module)
    for step in range(3, 7):
        taken(module, rule, ranks.rank, step)
    with codescent.averaged(module):
        return [found, values(module), Checkpoints(Path(folder) / "saves", 1, False).newest_step()]


def lent(folder: str) -> dict[str, Any]:
    """Weights within a round: own, in `averaged`, after it; what is refused in it; then the end of the round."""
    ranks = codescent.init(device="cpu")
    module = made("norm")
    rule = make_optimizer("sgd", module)
    codescent.distribute(module, rule, average_every=3)
    found: dict[str, Any] = {"said": []}
    for step in range(2):
        taken(module, rule, ranks.rank, step)
    found["own"] = values(module)
    calls: list[Callable[[], Any]] = [
        rule.step,
        lambda: codescent.save(Path(folder) / "saves", module, rule),
        lambda: codescent.load(Path(folder) / "saves", module),
    ]
    with codescent.averaged(module):
        found["mean"] = values(module)
        for call in calls:
            try:
                call()
            except codescent.UserError as error:
                found["said"] += error.problems
    found["after"] = values(module)
    taken(module, rule, ranks.rank, 2)
    found["end"] = values(module)
    with codescent.averaged(module):
        found["end mean"] = values(module)
    return found


def two_optimizers(folder: str) -> list[Any]:
    """Which steps of two optimizers over one module end a round; weights that were set before the first step."""
    ranks = codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = torch.optim.SGD(module[0].parameters(), lr=RATE)
    second = torch.optim.SGD(module[1].parameters(), lr=RATE)
    codescent.distribute(module, first, average_every=2, outer_optimizer="nesterov")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    agreed = []
    for step in range(6):
        module(torch.full((1, 2), (ranks.rank + step) / 10)).square().sum().backward()
        second.step()
        if step % 2:  # the first optimizer takes half as many steps
            first.step()
            module.zero_grad()
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        everyone = [torch.empty_like(flat) for _ in range(ranks.world_size)]
        dist.all_gather(everyone, flat)
        agreed.append(all(torch.equal(flat, one) for one in everyone))
    return [agreed, float(flat.abs().max())]


def accumulated(folder: str, wire: str) -> dict[str, list[float]]:
    """Gradients of two backward passes that add, of three dtypes; and of one that follows."""
    ranks = codescent.init(device="cpu")
    module = nn.ModuleList([nn.Linear(3, 3, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)])
    for number, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, 0.5 + number)
    codescent.distribute(module, torch.optim.SGD(module.parameters()), wire=wire, bucket_bytes=40)
    found: dict[str, list[float]] = {}
    for number in range(3):
        if number == 2:
            module.zero_grad()
        x = torch.full((1, 3), 1.0 + ranks.rank + number)
        with codescent.accumulate(module) if number == 0 else contextlib.nullcontext():
            sum(part(x.to(part.weight.dtype)).double().square().sum() for part in module).backward()
        if number:
            found |= {f"{name} {number}": own_ranks.whole(p.grad) for name, p in module.named_parameters()}
            assert all(p.grad is not None and p.grad.dtype == p.dtype for p in module.parameters())
    return found


def let_go(folder: str) -> list[bool]:
    """Whether a module that the script drops is gone, though its optimizer is not and takes steps."""
    codescent.init(device="cpu")
    gone = []
    for options in ({"average_every": 2, "outer_optimizer": "sgd", "wire": "int8"}, {"wire": "int8"}):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        module.register_buffer("mask", torch.ones(2))  # of the root, too
        rule = torch.optim.SGD(module.parameters())
        codescent.distribute(module, rule, **options)
        with codescent.accumulate(module):
            module(torch.randn(4, 2)).sum().backward()
        module(torch.randn(4, 2)).sum().backward()
        known = weakref.ref(module)
        del module
        gc.collect()
        rule.step()
        rule.step()
        gone.append(known() is None)
    return gone


WRONG: dict[str, dict[str, Any]] = {
    "zero": {"average_every": 0},
    "fraction": {"average_every": 1.5},
    "wire": {"wire": "int3"},
    "sharded": {"strategy": "zero3", "average_every": 4},
    "wire sharded": {"strategy": "zero1", "wire": "int8"},
    "outer alone": {"outer_optimizer": "nesterov"},
    "unknown outer": {"average_every": 4, "outer_optimizer": "adam"},
    "rate alone": {"average_every": 4, "outer_learning_rate": 0.5},
    "rate": {"average_every": 4, "outer_optimizer": "sgd", "outer_learning_rate": 0.0},
    "no rate": {"average_every": 4, "outer_optimizer": "sgd", "outer_learning_rate": float("inf")},
    "momentum": {"average_every": 4, "outer_optimizer": "sgd", "outer_momentum": 1.0},
    "no momentum": {"average_every": 4, "outer_optimizer": "nesterov", "outer_momentum": 0},
}


def refused(folder: str) -> dict[str, list[str]]:
    """What each wrong call says; then what a right one does."""
    ranks = codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rule = torch.optim.SGD(module.parameters())
    said: dict[str, list[str]] = {}
    for name, options in (*WRONG.items(), ("differs", {"average_every": 2 + ranks.rank})):
        try:
            codescent.distribute(module, rule, **options)
        except codescent.UserError as error:
            said[name] = list(error.problems)
    codescent.distribute(module, rule, average_every=2)
    calls: dict[str, Callable[[], Any]] = {
        "again": lambda: codescent.distribute(module, rule, average_every=4),
        "part": lambda: codescent.save(Path(folder) / "x", module[0], torch.optim.SGD(module[0].parameters())),
    }
    for name, call in calls.items():
        try:
            call()
        except codescent.UserError as error:
            said[name] = list(error.problems)
    return said


def act(place: Place, job: str, options: dict[str, Any]) -> Any:
    """What one rank returns for a job of this file."""
    own_ranks.launched(place)
    return globals()[job](str(place.folder), **options)
