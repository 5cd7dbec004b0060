"""In: a job of this file and its options. Out: what one rank of it returned.
Does not assert anything (test_own does) and starts no process (rank_server does)."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
import traceback
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from own_models import Fails, HasAside, Recomputed, Sliced, Two, data, make, make_optimizer
from rank_server import Place
from torch import nn
from torch.distributed.tensor import DTensor

import codescent
from codescent.own.explained import explained

STEPS, BATCH = 20, 12


def whole(tensor: torch.Tensor) -> list[float]:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().double().flatten().tolist()


def walk(
    ranks: Any, module: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, parts: int, clip: str, steps: int
) -> list[list[float]]:
    """The user's loop: the mean loss over the ranks and the norm of the gradients, for each step."""
    seen: list[list[float]] = []
    while len(seen) < steps:
        for x, y in loader:
            optimizer.zero_grad(set_to_none=len(seen) % 2 == 0)
            loss = torch.tensor(0.0, dtype=torch.float64)
            for number, (inputs, targets) in enumerate(zip(x.chunk(abs(parts)), y.chunk(abs(parts)), strict=True)):
                saving = parts > 1 and number < parts - 1
                with codescent.accumulate(module) if saving else contextlib.nullcontext():
                    part = nn.functional.mse_loss(module(inputs), targets) / abs(parts)
                    part.backward()
                loss += part.detach()
            norm = 0.0
            if clip == "ours":
                norm = float(codescent.clip_(module, 0.5))
            elif clip == "torch":
                found = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
            optimizer.step()
            seen.append([ranks.mean(loss), norm])
            if len(seen) == steps:
                break
    return seen


def train(
    folder: str,
    kind: str = "odd",
    strategy: str = "",
    optimizer: str = "adamw",
    parts: int = 1,
    clip: str = "ours",
    replicas: int = 1,
    blocks: list[str] | None = None,
    bucket_bytes: int = 200,
) -> dict[str, Any]:
    """20 steps; without a strategy torch in one process, "torch": its DDP. `parts` < 0: accumulated, unsaid."""
    ranks = codescent.init(device="cpu")
    module = make(kind)
    rule = make_optimizer(optimizer, module)
    scheduler = torch.optim.lr_scheduler.StepLR(rule, 5, 0.5)
    if strategy == "torch":
        module = nn.parallel.DistributedDataParallel(module)
    elif strategy:
        if ranks.rank:  # what rank 0 has counts
            nn.init.zeros_(next(module.parameters()))
        chosen = None if blocks is None else [module.get_submodule(name) for name in blocks]
        codescent.distribute(module, rule, strategy, replicas=replicas, blocks=chosen, bucket_bytes=bucket_bytes)
    loader = torch.utils.data.DataLoader(data(), batch_sampler=codescent.sampler(data(), BATCH, seed=9))
    seen: list[list[float]] = []
    for _ in range(4):
        seen += walk(ranks, module, rule, loader, parts, clip, STEPS // 4)
        for _ in range(5):
            scheduler.step()
    module = getattr(module, "module", module)
    final = {name: whole(parameter) for name, parameter in module.named_parameters()}
    none = sorted(name for name, parameter in module.named_parameters() if parameter.grad is None)
    return {"seen": seen, "final": final, "none": none, "lr": rule.param_groups[0]["lr"]}


def held(folder: str, strategy: str) -> dict[str, int]:
    """Bytes of this rank after a backward pass and a step, with sizes that divide."""
    codescent.init(device="cpu")
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    rule = torch.optim.Adam(module.parameters())
    codescent.distribute(module, rule, strategy)
    module(torch.randn(2, 64)).sum().backward()
    rule.step()

    def size(tensors: Any) -> int:
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return sum(tensor.untyped_storage().nbytes() for tensor in local if tensor.dim())

    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return {
        "parameters": size(module.parameters()),
        "gradients": sum(gradient.nbytes for gradient in local),  # of ddp's, the bucket is the storage
        "optimizer": size(value for state in rule.state.values() for value in state.values()),
    }


def unused(folder: str) -> dict[str, Any]:
    """With ddp, a parameter that rank 0 alone uses, and one that nobody does."""
    ranks = codescent.init(device="cpu")
    module = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    rule = torch.optim.SGD(module.parameters(), lr=1.0)
    codescent.distribute(module, rule, "ddp", bucket_bytes=1)
    x = torch.ones(1, 2)
    (module[0](x) + (module[1](x) if ranks.is_first else 0)).sum().backward()
    return {name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()}


def earlier(folder: str) -> dict[str, Any]:
    """With ddp, gradients of two passes that add, of which the last one does not use the second layer."""
    codescent.init(device="cpu")
    module = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
    codescent.distribute(module, torch.optim.SGD(module.parameters()), "ddp")
    x = torch.ones(1, 2)
    with codescent.accumulate(module):
        (module[0](x) + module[1](x)).sum().backward()
    module[0](x).sum().backward()
    return {name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()}


def copies(folder: str) -> list[int]:
    """How many tensors a backward pass makes from Python numbers: with all gradients, with all but one on rank 1."""
    ranks = codescent.init(device="cpu")
    module = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
    rule = torch.optim.SGD(module.parameters(), lr=1.0)
    codescent.distribute(module, rule, "ddp")
    made, plain = [0], torch.tensor

    def counting(*numbers: Any, **options: Any) -> torch.Tensor:
        made[0] += 1
        return plain(*numbers, **options)

    found = []
    with patch.object(torch, "tensor", counting):
        for both in (True, True, ranks.is_first):
            rule.zero_grad()
            made[0], x = 0, torch.ones(1, 2)
            (module[0](x) + (module[1](x) if both else 0)).sum().backward()
            found.append(made[0])
            assert all(p.grad is not None for p in module.parameters())
    return found


def sums(folder: str) -> list[bool]:
    """Whether cuBLAS may sum bf16 and fp16 products in less than fp32, after `distribute`."""
    codescent.init(device="cpu")
    flags = torch.backends.cuda.matmul
    flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = True
    module = nn.Linear(2, 2)
    codescent.distribute(module, torch.optim.SGD(module.parameters(), lr=1.0), "ddp")
    return [flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction]


def forgotten(folder: str, strategy: str) -> list[bool]:
    """Whether nothing keeps a module, and its parameters, that the user has let go."""
    codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rule = torch.optim.Adam(module.parameters())
    codescent.distribute(module, rule, strategy)
    module(torch.ones(1, 4)).sum().backward()
    rule.step()
    left = [weakref.ref(module), weakref.ref(next(module.parameters())), weakref.ref(rule)]
    del module, rule
    gc.collect()
    return [one() is None for one in left]


def statistics(folder: str, strategy: str) -> dict[str, Any]:
    """Batch norm's running mean and variance, after a step; a constant stays the same object of the same values."""
    ranks = codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("constant", torch.full((3,), float(ranks.rank + 1)))
    rule = torch.optim.SGD(module.parameters(), lr=0.0)
    codescent.distribute(module, rule, strategy)
    own = []
    for step in range(2):
        module(torch.randn(8, 2, generator=torch.Generator().manual_seed(10 * ranks.rank + step))).sum().backward()
        own.append(module[1].running_mean.tolist())
        rule.step()
    return {"own": own, "now": module[1].running_mean.tolist(), "constant": module.constant.tolist()}


def keep(folder: str, kind: str, strategy: str, optimizer: str, replicas: int = 1) -> list[list[float]]:
    """10 steps, saved, 5 more, whose losses are returned."""
    ranks = codescent.init(device="cpu")
    module = make(kind)
    rule = make_optimizer(optimizer, module)
    codescent.distribute(module, rule, strategy, replicas=replicas)
    sampler = codescent.sampler(data(), BATCH, seed=9)
    loader = torch.utils.data.DataLoader(data(), batch_sampler=sampler)
    walk(ranks, module, rule, loader, 1, "ours", 8)
    for epoch in (1, 2):  # the second replaces the first
        codescent.save(Path(folder) / "kept", module, rule, epoch=epoch, note="a")
    return walk(ranks, module, rule, loader, 1, "ours", 5)


def go_on(folder: str, kind: str, strategy: str, optimizer: str, replicas: int = 1) -> Any:
    """What `keep` has saved, loaded into another layout, and 5 steps."""
    ranks = codescent.init(device="cpu")
    module = make(kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    rule = make_optimizer(optimizer, module)
    for group in rule.param_groups:
        group["lr"] = 77.0
    codescent.distribute(module, rule, strategy, replicas=replicas)
    extra = codescent.load(Path(folder) / "kept", module, rule)
    sampler = codescent.sampler(data(), BATCH, seed=9)
    sampler.set_epoch(extra["epoch"])
    loader = torch.utils.data.DataLoader(data(), batch_sampler=sampler)
    return {"extra": extra, "seen": walk(ranks, module, rule, loader, 1, "ours", 5)}


def diverge(folder: str, strategy: str, what: str, replicas: int = 1) -> tuple[str, ...]:
    """Two saves; why the second one was refused: before it rank 1 flips a bit of a parameter, its state or a buffer."""
    ranks = codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6))
    rule = torch.optim.Adam(module.parameters())
    codescent.distribute(module, rule, strategy, replicas=replicas)
    module(torch.ones(3, 6)).sum().backward()
    rule.step()
    codescent.save(Path(folder) / "kept", module, rule)
    if ranks.rank == 1:
        weight = module[2].weight
        values = {"weight": weight, "exp_avg": rule.state[weight]["exp_avg"], "buffer": module[1].running_mean}
        found: Any = values[what].detach()
        (found.to_local() if isinstance(found, DTensor) else found).view(-1).view(torch.uint8)[0] ^= 1
    try:
        codescent.save(Path(folder) / "kept", module, rule)
    except codescent.UserError as error:
        return error.problems
    return ()


def evaluate(folder: str, strategy: str) -> list[float]:
    """Losses without gradients between steps, and after loading the module alone."""
    codescent.init(device="cpu")
    module = make("sequences")
    rule = make_optimizer("sgd", module)
    codescent.distribute(module, rule, strategy)
    x, y = data().tensors
    losses = []
    for number in range(4):
        module.eval()
        with torch.no_grad():
            losses.append(float(nn.functional.mse_loss(module(x), y)))
        module.train()
        nn.functional.mse_loss(module(x), y)  # without backward: what is gathered now must not be used after the step
        nn.functional.mse_loss(module(x), y).backward()
        rule.step()
        rule.zero_grad()
        if number == 1:
            codescent.save(Path(folder) / strategy, module, rule)
    codescent.load(Path(folder) / strategy, module)
    with torch.no_grad():
        losses.append(float(nn.functional.mse_loss(module(x), y)))
    return losses


def refused(folder: str, what: str) -> list[str]:
    """The problems of a UserError."""
    ranks = codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rule = torch.optim.Adam(module.parameters())
    (Path(folder) / "file").write_text("")
    if what in ("file", "no json", "milestones", "complex", "nothing", "other"):
        codescent.distribute(module, rule)
    try:
        match what:
            case "strategy":
                codescent.distribute(module, rule, "zero4", replicas=3)
            case "hsdp":
                codescent.distribute(module, rule, "hsdp")
            case "optimizer":
                codescent.distribute(nn.Linear(2, 2), rule)
            case "twice":
                codescent.distribute(module, rule)
                codescent.distribute(module, rule)
            case "compiled twice":
                codescent.distribute(module, rule)
                codescent.distribute(torch.compile(module, backend="eager"), rule)  # type: ignore[arg-type]
            case "a part before":
                codescent.distribute(module[0], torch.optim.Adam(module[0].parameters()))
                codescent.distribute(module, rule)
            case "meta":
                meta = nn.Linear(2, 2, device="meta")
                codescent.distribute(meta, torch.optim.SGD(meta.parameters()))
            case "differ":
                own = nn.Linear(2, 2 + ranks.rank)
                codescent.distribute(own, torch.optim.SGD(own.parameters()))
            case "one rank":  # a problem of one rank is raised on all
                other = module if ranks.rank else nn.Linear(2, 2)
                codescent.distribute(other, rule)
            case "blocks":
                codescent.distribute(module, rule, "zero3", blocks=[module, nn.Linear(2, 2)])
            case "sparse":
                sparse = nn.Embedding(3, 2, sparse=True)
                codescent.distribute(sparse, torch.optim.SGD(sparse.parameters()))
            case "half":
                half = nn.Linear(2, 2).half()
                codescent.distribute(half, torch.optim.SGD(half.parameters()))
            case "complex parameter":
                module.turns = nn.Parameter(torch.ones(2, dtype=torch.complex64))
                codescent.distribute(module, torch.optim.Adam(module.parameters()))
            case "compiled before":
                codescent.distribute(torch.compile(module, backend="eager"), rule, "zero3")  # type: ignore[arg-type]
            case "whole":
                codescent.distribute(module, torch.optim.LBFGS(module.parameters()), "zero1")
            case "container":
                listed = nn.ModuleList(module)
                codescent.distribute(listed, rule, "zero3")
            case "container block":
                nested = nn.Sequential(nn.Linear(2, 2))
                nested.listed = nn.ModuleList(module)
                codescent.distribute(nested, torch.optim.Adam(nested.parameters()), "zero3", blocks=[nested.listed])
            case "wrapper":  # its hooks and ours would sum the same gradients: none arrived
                wrapped = nn.parallel.DistributedDataParallel(module)
                codescent.distribute(wrapped, rule)
            case "wrapper around":
                wrapped = nn.parallel.DistributedDataParallel(module)
                codescent.distribute(wrapped.module, rule)
            case "wrapper later" | "wrapper of another" | "wrapper of a part":
                codescent.distribute(module, rule, "zero3" if what == "wrapper of a part" else "ddp")
                other = {"later": module, "another": nn.Sequential(module), "part": module[0]}[what.split()[-1]]
                nn.parallel.DistributedDataParallel(other)
            case "asks":
                codescent.distribute(module, rule, "zero3" if ranks.rank else "ddp")
            case "replicas":
                codescent.distribute(module, rule, "zero3", replicas=1 + ranks.rank)
            case "wrong on one rank":
                codescent.distribute(module, rule, 3 if ranks.rank else "ddp")  # type: ignore[arg-type]
            case "three numbers on one rank":
                ranks.mean(torch.ones(1 + 2 * ranks.rank))
            case "save":
                codescent.save(Path(folder) / "kept", module, rule)
            case "load":
                codescent.load(Path(folder) / "kept", module, rule)
            case "clip_":
                codescent.clip_(module, 1.0)
            case "swapped":
                codescent.distribute(rule, module)  # type: ignore[arg-type]
            case "overlap":
                module.register_buffer("mask", torch.ones(1).expand(3))
                codescent.distribute(module, rule)
            case "accumulate":
                codescent.accumulate(module).__enter__()
            case "batch":
                codescent.sampler([0] * 10, 5)
            case "small":
                codescent.sampler([0] * 3, 4)
            case "file":
                codescent.save(Path(folder) / "file", module, rule)
            case "no json":
                codescent.save(Path(folder) / "kept", module, rule, what=object())
            case "milestones":
                scheduler = torch.optim.lr_scheduler.MultiStepLR(rule, [2, 4])
                codescent.save(Path(folder) / "kept", module, rule, scheduler=scheduler.state_dict())
            case "complex":
                module.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
                codescent.save(Path(folder) / "kept", module, rule)
            case "validation":
                codescent.validation_sampler([0] * 10, 5)
            case "fewer":
                codescent.validation_sampler([0], 4)
            case "one each":
                codescent.validation_sampler([0] * 5, 2)
            case "counts":
                ranks.mean(1.0, count=0)
            case "negative":
                ranks.mean(1.0, count=1 - 2 * ranks.rank)
            case "widths":
                ranks.gather(torch.zeros(2, 3 + ranks.rank))
            case "kinds":
                ranks.gather(torch.zeros(2, dtype=torch.float64 if ranks.rank else torch.float32))
            case "no tensor":
                ranks.gather([1, 2])
            case "nothing":
                codescent.load(Path(folder) / "nothing", module, rule)
            case "other":
                codescent.save(Path(folder) / "kept", module, rule)
                codescent.load(Path(folder) / "kept", module, torch.optim.SGD(module.parameters()))
            case "device":
                codescent.init(device="cuda")
    except codescent.UserError as error:
        return list(error.problems)
    return []


def changed(folder: str, strategy: str, what: str) -> list[list[str]]:
    """The problems of two steps, before and after a change of a distributed module."""
    codescent.init(device="cpu")
    torch.manual_seed(1)
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    for part in module[:4]:
        part.requires_grad_(False)
    rule = torch.optim.SGD(module.parameters() if what == "unfrozen" else module[4].parameters(), lr=0.1)
    old = torch.optim.SGD(module[:1].parameters())
    codescent.distribute(module, rule, strategy)
    rules, found = [rule], []
    for number in range(2):
        if number:
            match what:
                case "unfrozen":
                    module[:4].requires_grad_(True)
                case "unfrozen, another optimizer":
                    module[0].requires_grad_(True)
                    rules = [torch.optim.SGD([*module[0].parameters(), *module[4].parameters()])]
                case "added":
                    module.append(nn.Linear(2, 2))
                    rule.add_param_group({"params": module[5].parameters()})
                case "added, another optimizer":
                    module.append(nn.Linear(2, 2))
                    rules = [torch.optim.SGD(module[5].parameters()), rule]
                case "old optimizer":
                    rules = [old]
                case "replaced":
                    module[0] = nn.Linear(2, 2).requires_grad_(False)
        module(torch.ones(3, 2)).sum().backward()
        module(torch.ones(3, 2))  # its gathered weights must not be taken for others
        try:
            rules[0].step()
            found.append([])
        except codescent.UserError as error:
            found.append(list(error.problems))
    return found


def frozen(folder: str, strategy: str) -> list[Any]:
    """After each of four steps: all weights, and those of a layer that is frozen in the second and third."""
    codescent.init(device="cpu")
    module = make("sequences")
    rule = torch.optim.AdamW(module.parameters(), lr=0.01)
    codescent.distribute(module, rule, strategy)
    loader = torch.utils.data.DataLoader(data(), batch_sampler=codescent.sampler(data(), BATCH, seed=9))
    layer, seen, layers = module.inner.encoder.layers[0], [], []
    for number, (x, y) in enumerate(loader):
        layer.requires_grad_(number not in (1, 2))
        rule.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        codescent.clip_(module, 0.5)
        rule.step()
        seen.append([value for parameter in module.parameters() for value in whole(parameter)])
        layers.append(whole(layer.linear1.weight))
    return [seen, layers]


def unmet(folder: str) -> list[str]:
    """What each public name says to a script that has forgotten `codescent.init`; the last one ends it."""
    module = nn.Linear(2, 2)
    rule = torch.optim.SGD(module.parameters())
    calls = {
        "sampler": lambda: codescent.sampler(range(8), 4),
        "validation_sampler": lambda: codescent.validation_sampler(range(8), 4),
        "distribute": lambda: codescent.distribute(module, rule),
        "accumulate": lambda: codescent.accumulate(module).__enter__(),
        "clip_": lambda: codescent.clip_(module, 1.0),
        "save": lambda: codescent.save(Path(folder) / "kept", module, rule),
        "load": lambda: codescent.load(Path(folder) / "kept", module, rule),
        "load a module": lambda: codescent.load(Path(folder) / "kept", module),
        "Metrics": lambda: codescent.Metrics(Path(folder) / "numbers"),
        "profile": lambda: codescent.profile(Path(folder) / "traces").__enter__(),
    }
    said = []
    for name, call in calls.items():
        try:
            call()
            said.append(f"{name}: nothing")
        except codescent.UserError as error:
            said.append(str(error))
    return said


def left(folder: str, first: int) -> None:
    """One rank leaves, the other waits for it."""
    ranks = codescent.init(device="cpu")
    if ranks.rank == first:
        ranks.close()
        return
    try:
        for _ in range(2):
            dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter does


def other_calls(folder: str) -> int | None:
    """Rank 0 alone calls a sharded module once more, after a step: how each rank ends."""
    ranks = codescent.init(device="cpu", timeout_s=2)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rule = torch.optim.SGD(module.parameters(), lr=0.1)
    codescent.distribute(module, rule, "zero3")
    try:
        for step in range(4):
            module(torch.ones(1, 2)).sum().backward()
            rule.step()
            if step == 1 and ranks.is_first:
                with torch.no_grad():
                    module(torch.ones(1, 2))
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter does
        return 1
    return None


def killed(folder: str, **options: Any) -> int:
    """The exit code of a process that logs and is killed then (kill -9)."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        log(folder, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def log(folder: str, resumes: bool, before: bool = True, name: str = "run", saves_at: int = 2) -> None:
    """Steps with metrics, and a save after one of them. A run that resumes opens its metrics before or after `load`."""
    ranks = codescent.init(device="cpu")
    module = nn.Linear(2, 2)
    rule = torch.optim.SGD(module.parameters(), lr=0.1)
    codescent.distribute(module, rule)
    run, first = Path(folder) / name, 0
    metrics = codescent.Metrics(run) if before else None
    if resumes:
        extra = codescent.load(run / "last", module, rule, missing_ok=True)
        first = extra["step"] if extra else 0
    metrics = metrics or codescent.Metrics(run)
    for step in range(first, 5):  # numbered from 0
        module(torch.ones(1, 2)).sum().backward()
        rule.step()
        metrics.log(step=step, loss=ranks.mean(0.5), resumed=int(resumes))
        if step == saves_at:
            codescent.save(run / "last", module, rule, step=step + 1)


def epochs(folder: str) -> list[list[list[int]]]:
    """Three epochs of a sampler, and the rest of the second."""
    codescent.init(device="cpu")
    sampler = codescent.sampler(range(26), 8, seed=4)
    found = [list(sampler) for _ in range(3)]
    sampler.set_epoch(1, first_step=2)
    return [*found, list(sampler)]


def workers(folder: str) -> dict[str, Any]:
    """Two epochs as torch's DataLoader with a worker has them, and the rest of one; the same without workers."""
    codescent.init(device="cpu")
    found = {}
    for count in (0, 1):
        sampler = codescent.sampler(range(26), 8, seed=4)
        loader = torch.utils.data.DataLoader(range(26), batch_sampler=sampler, num_workers=count)  # type: ignore[arg-type, var-annotated]
        seen = [[batch.tolist() for batch in loader] for _ in range(2)]
        sampler.set_epoch(1, first_step=2)
        found[str(count)] = {"seen": [*seen, [batch.tolist() for batch in loader]], "epoch": sampler.epoch}
    return found


def validated(folder: str, samples: int, batch_size: int, strategy: str) -> dict[str, Any]:
    """What one rank reads of a validation, twice; all ranks' rows and numbers; the mean loss."""
    ranks = codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(1, 1, dtype=torch.float64))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    codescent.distribute(module, torch.optim.SGD(module.parameters()), strategy)
    x = torch.arange(samples, dtype=torch.float64)[:, None]
    sampler = codescent.validation_sampler(x, batch_size)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_sampler=sampler)
    losses, outputs = [], []
    module.eval()
    with torch.no_grad():
        for (inputs,) in loader:
            outputs.append(module(inputs))
            losses.append(ranks.mean(outputs[-1].mean(), count=len(inputs)))  # a collective in the loop
    mine = torch.cat(outputs)
    return {
        "batches": [list(batch) for batch in sampler],
        "length": len(sampler),
        "again": list(sampler) == list(sampler),
        "rows": ranks.gather(mine).tolist(),
        "steps": len(losses),
        "mean": ranks.mean(mine.mean(), count=len(mine)),
    }


def gathers(folder: str) -> dict[str, Any]:
    """Rows of several dtypes and shapes, more on each rank, none on rank 0; a number; a mean that leaves rank 0 out."""
    ranks = codescent.init(device="cpu")
    number = ranks.rank
    rows = torch.full((number, 2), number, requires_grad=True, dtype=torch.bfloat16)
    return {
        "rows": ranks.gather(rows).tolist(),
        "flags": ranks.gather(torch.full((number,), number == 1)).tolist(),
        "numbers": ranks.gather(torch.tensor(number)).tolist(),
        "complex": torch.view_as_real(ranks.gather(torch.full((1,), 1j * number))).tolist(),
        "strided": ranks.gather(torch.arange(6.0).view(2, 3).t() + 10 * number).tolist(),
        "empty": list(ranks.gather(torch.zeros(0, 3)).shape),
        "mean": ranks.mean(math.nan if number == 0 else number, count=number),
        "of ranks": ranks.mean(number),
        "grad": ranks.gather(rows).requires_grad,
    }


def steps(folder: str, strategy: str) -> list[str]:
    """Names of saves: after three steps of two accumulated passes; with no step between; of the run that goes on; of
    one that does not."""
    codescent.init(device="cpu")
    found = []

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Linear(2, 2)
        rule = torch.optim.SGD(module.parameters(), lr=0.1)
        codescent.distribute(module, rule, strategy)
        return module, rule

    def walk(module: nn.Module, rule: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            for last in (False, True):
                with contextlib.nullcontext() if last else codescent.accumulate(module):
                    module(torch.ones(1, 2)).sum().backward()
            rule.step()

    path = Path(folder) / "saves"
    module, rule = built()
    walk(module, rule, 3)
    for note in ("a", "b"):
        found.append(codescent.save(path, module, rule, note=note).name)
    module, rule = built()
    assert codescent.load(path, module, rule)["note"] == "b"
    assert codescent.load(next(path.iterdir()), module, rule)["note"] == "b"  # what `save` has returned
    walk(module, rule, 2)
    found.append(codescent.save(path, module, rule).name)
    module, rule = built()  # begins again, in the same folder
    walk(module, rule, 1)
    found.append(codescent.save(path, module, rule, note="c").name)
    assert codescent.load(path, module, rule)["note"] == "c"
    return [*found, *(one.name for one in path.iterdir())]


def ends(folder: str, what: str) -> int | None:
    """The exit code of a rank that an exception ends; its words are in said.txt."""
    try:
        try:
            if what == "init":
                codescent.init(device="gpu")
            if what == "forgotten":
                codescent.save(folder, nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))]))
            ranks = codescent.init(device="cpu")
            module = nn.Linear(2, 2)
            if what == "everywhere":
                codescent.distribute(module, torch.optim.SGD(module.parameters()), "zero4")
            elif what == "each":  # without communication
                codescent.sampler(range(10), 3)
            elif what == "different":
                codescent.sampler(range(10), 2 * ranks.rank + 3)
            elif what == "one rank" and ranks.rank == 1:
                codescent.sampler(range(10), 3)
            dist.all_reduce(torch.zeros(1))
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter does
    except SystemExit as end:
        return int(str(end.code))
    return None


def recomputed(folder: str, head: bool) -> list[dict[str, list[float]]]:
    """Gradients by torch's old way of recomputing and by the new one; of one pass, and of two that add."""
    ranks = codescent.init(device="cpu")
    found = []
    for reentrant in (True, False):
        torch.manual_seed(1)
        module = Recomputed(head)
        codescent.distribute(module, torch.optim.SGD(module.parameters()), bucket_bytes=1)
        for number in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + ranks.rank))
            with codescent.accumulate(module) if number == 1 else contextlib.nullcontext():
                module(x, reentrant).square().sum().backward()
        found.append({name: p.grad.flatten().tolist() for name, p in module.named_parameters() if p.grad is not None})
    return found


def failed(folder: str, again: bool) -> list[Any]:
    """A backward pass that ends halfway, then a whole one; and what a parameter says that gets two gradients."""
    codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    codescent.distribute(module, torch.optim.SGD(module.parameters()), bucket_bytes=1)
    x = torch.ones(1, 2)
    said = []
    good = module[1](torch.ones(1, 2)).sum() if again else None  # made before: the module is not called again
    for loss in (module[1](Fails.apply(module[0](x))).sum(), good):
        try:
            (module(x).sum() if loss is None else loss).backward()
        except (RuntimeError, codescent.UserError) as error:
            said.append(str(error))
    module.zero_grad()
    module[1](x).sum().backward()
    shared = Recomputed(True, shared=True)
    codescent.distribute(shared, torch.optim.SGD(shared.parameters()))
    try:
        shared(torch.ones(1, 4), True).sum().backward()
    except codescent.UserError as error:
        said.append(str(error))
    return [module[1].bias.grad.tolist(), said]


def compiled(folder: str) -> bool:
    """Whether a module is compiled in one piece, before and after it is distributed, and is known as distributed."""
    codescent.init(device="cpu")
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rule = torch.optim.SGD(module.parameters())
    codescent.distribute(module, rule)
    whole = torch.compile(module, backend="eager", fullgraph=True)
    with codescent.accumulate(whole):
        whole(torch.ones(1, 2)).sum().backward()
    whole(torch.ones(1, 2)).sum().backward()
    codescent.clip_(whole, 1.0)
    codescent.save(Path(folder) / "whole", whole, rule)
    inner = nn.Linear(2, 2)
    before: Any = torch.compile(inner, backend="eager", fullgraph=True)
    codescent.distribute(before, torch.optim.SGD(before.parameters()))
    with codescent.accumulate(inner):
        before(torch.ones(1, 2)).sum().backward()
    before(torch.ones(1, 2)).sum().backward()
    return module[0].weight.grad is not None and before.weight.grad is not None


def copied(folder: str) -> list[list[float]]:
    """A running mean of the weights in a copy of the module, as torch makes it, and the gradient of the copy."""
    ranks = codescent.init(device="cpu")
    module = nn.Linear(2, 2)
    nn.init.ones_(module.weight)
    rule = torch.optim.SGD(module.parameters(), lr=1.0)
    codescent.distribute(module, rule)
    means = torch.optim.swa_utils.AveragedModel(module)
    for _ in range(2):
        module(torch.full((1, 2), float(ranks.rank))).sum().backward()
        rule.step()
        rule.zero_grad()
        means.update_parameters(module)
    means(torch.full((1, 2), float(ranks.rank))).sum().backward()  # not averaged
    return [whole(means.module.weight), whole(means.module.weight.grad)]


def dtypes(folder: str) -> dict[str, Any]:
    """With ddp, a dtype that rank 0 alone uses; with zero2, a scalar that only the pass before the last uses."""
    ranks = codescent.init(device="cpu")
    torch.manual_seed(2)
    one, other, alone = Two(), Two(), Two()
    alone.load_state_dict(other.state_dict())
    for number in range(ranks.world_size):
        alone(torch.full((1, 2), float(number + 1)), True, True).sum().backward()
    codescent.distribute(one, torch.optim.SGD(one.parameters()), "ddp")
    one(torch.ones(1, 2), ranks.is_first, False).sum().backward()
    codescent.distribute(other, torch.optim.SGD(other.parameters()), "zero2")
    x = torch.full((1, 2), float(ranks.rank + 1))
    with codescent.accumulate(other):
        other(x, True, True).sum().backward()
    other(x, True, False).sum().backward()
    return {"b": one.b.bias.grad.tolist(), "scale": float(other.scale.grad), "sum": float(alone.scale.grad)}


def sliced(folder: str, strategy: str) -> dict[str, Any]:
    ranks = codescent.init(device="cpu")
    module = Sliced(ranks.rank)
    codescent.distribute(module, torch.optim.SGD(module.parameters()), strategy)
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def clipped(folder: str, strategy: str, dtype: str = "float32") -> list[Any]:
    """What `clip_` returns; the norm after a forward pass without backward, and after clipping once more."""
    codescent.init(device="cpu")
    kind = getattr(torch, dtype)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(kind)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    codescent.distribute(module, torch.optim.SGD(module.parameters()), strategy)
    module(torch.ones(1, 2, dtype=kind)).sum().backward()
    module(torch.ones(1, 2, dtype=kind))
    found = [codescent.clip_(module, 0.5), codescent.clip_(module, 0.5)]
    return [str(found[0].dtype), list(found[0].shape), *map(float, found)]


def aside(folder: str, strategy: str, hows: list[str], is_compiled: bool = False) -> list[list[float] | str]:
    """For each module with a loss beside its blocks' outputs: the losses of three steps, or a sentence."""
    ranks = codescent.init(device="cpu")
    found: list[list[float] | str] = []
    for how in hows:
        torch.manual_seed(4)
        module = HasAside(how)
        rule = torch.optim.AdamW(module.parameters(), lr=0.01)
        codescent.distribute(module, rule, strategy)
        x, losses = torch.randn(4, 6, generator=torch.Generator().manual_seed(ranks.rank)), []
        called: Any = torch.compile(module, backend="aot_eager") if is_compiled else module
        try:
            for _ in range(3):
                rule.zero_grad()
                result: Any = called(x)
                result = result.inner["all"][0] if how == "namespace" else getattr(result, "loss", result)
                result.backward()
                rule.step()
                losses.append(ranks.mean(result))
            found.append(losses)
        except RuntimeError as error:
            found.append(str(explained(error, error.__traceback__)))
    return found


def batches(folder: str, kind: str) -> list[str]:
    """Three steps with torch's own sampler, with that of codescent, or with the latter as sampler=: the problems."""
    ranks = codescent.init(device="cpu")
    torch.manual_seed(1)
    module, dataset = nn.Linear(6, 6).double(), data()
    rule = torch.optim.SGD(module.parameters(), lr=0.1)
    codescent.distribute(module, rule)
    options: dict[str, Any] = {"batch_size": 12, "shuffle": True}
    if kind == "given":
        options = {"batch_sampler": codescent.sampler(dataset, 12)}
    elif kind == "twice":
        options = {"sampler": codescent.sampler(dataset, 12), "batch_size": 12}
    try:
        if ranks.is_first:
            with torch.no_grad():
                module(torch.ones(1, 6).double())  # not a training batch; nobody waits
        for x, y in torch.utils.data.DataLoader(dataset, **options):
            nn.functional.mse_loss(module(x), y).backward()
            rule.step()
            ranks.mean(0.0)
    except codescent.UserError as error:
        return list(error.problems)
    return []


def tokens(folder: str, strategy: str, parts: int) -> list[float]:
    """The gradient of the mean over all labels, which are most on the last rank, by the recipe of the docs."""
    ranks = codescent.init(device="cpu")
    torch.manual_seed(6)
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)).double()
    x, y = torch.randn(8, 6, 4).double(), torch.randint(0, 5, (8, 6))
    y[:4, 1:] = -100
    y[5] = -100
    codescent.distribute(module, torch.optim.SGD(module.parameters(), lr=0.0), strategy)
    share = 8 // ranks.world_size
    mine = slice(share * ranks.rank, share * ranks.rank + share)
    batches = list(zip(x[mine].chunk(parts), y[mine].chunk(parts), strict=True))
    count = ranks.mean(sum(int((targets != -100).sum()) for _, targets in batches))
    for number, (inputs, targets) in enumerate(batches):
        with codescent.accumulate(module) if number < parts - 1 else contextlib.nullcontext():
            outputs = module(inputs).flatten(0, 1)
            (nn.functional.cross_entropy(outputs, targets.flatten(), reduction="sum") / count).backward()
    return [value for parameter in module.parameters() for value in whole(parameter.grad)]


def some_buffers(folder: str) -> list[list[float]]:
    """Buffers of which rank 0 alone changes one, and one whose shape is another on each rank."""
    ranks = codescent.init(device="cpu")
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3))
    module.register_buffer("own", torch.zeros(2))
    rule = torch.optim.SGD(module.parameters(), lr=0.0)
    codescent.distribute(module, rule)
    module.own = torch.full((ranks.rank + 1,), float(ranks.rank))
    if ranks.is_first:
        module[1].running_mean.fill_(4.0)
    rule.step()
    return [module[0].running_mean.tolist(), module[1].running_mean.tolist(), module.own.tolist()]


def measured(folder: str) -> dict[str, Any]:
    """A profile, and metrics beside it."""
    ranks = codescent.init(device="cpu")
    module = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    rule = torch.optim.SGD(module.parameters(), lr=0.1)
    codescent.distribute(module, rule)
    metrics = codescent.Metrics(Path(folder) / "numbers")
    with codescent.profile(Path(folder) / "traces") as profile:
        for step in range(3):
            loss = module(torch.randn(16, 128)).square().mean()
            loss.backward()
            rule.step()
            metrics.log(step=step, rank=ranks.mean(ranks.rank), loss=loss, later=None)
    return vars(profile)


def launched(place: Place) -> None:
    """Give this process the environment that our launcher gives a rank."""
    sizes = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": place.ranks, "LOCAL_WORLD_SIZE": place.ranks}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.listener.getsockname()[1]}
    os.environ.update({name: str(value) for name, value in {**sizes, **address}.items()})
    if place.rank == 0:
        os.environ["CODESCENT_STORE_FD"] = str(os.dup(place.listener.fileno()))
    place.listener.close()


def act(place: Place, job: str, options: dict[str, Any]) -> Any:
    """What one rank returns for a job."""
    launched(place)
    return globals()[job](str(place.folder), **options)
