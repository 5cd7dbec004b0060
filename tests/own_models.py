"""In: nothing. Out: the modules, optimizers and data that the jobs of own_ranks train.
Does not distribute anything (own_ranks does)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

SAMPLES = 48
KEPT: list[torch.Tensor] = []


class Odd(nn.Module):
    """Sizes that do not divide, a tied weight, a scalar, frozen and unused parameters, one used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(6, 7)
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.outward = nn.Linear(7, 6, bias=False)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.inward.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tied(x) + self.inward(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.outward(self.frozen(h)) * self.scale


class Mixed(nn.Module):
    """Two dtypes in the root and in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(2)])
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in self.blocks:  # type: ignore[misc]
            x = norm(linear(x).float()).double()
        return self.head(x)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(6, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, None, :].expand(-1, 3, -1), x[:, None, :])[:, 0]


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "odd":
        return Odd().double()
    if kind == "mixed":
        mixed = Mixed().double()
        for block in mixed.blocks:
            block[1].float()  # type: ignore[index]
        return mixed
    if kind == "sequences":
        return Sequences().double()
    body = [nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(8, 6)]
    module = nn.Sequential(nn.Unflatten(1, (1, 6)), *body).double()
    if kind == "channels last":
        for part in (module[1], module[4]):
            part.weight.data = part.weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    return module


def make_optimizer(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
    match kind:
        case "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        case "adagrad":  # has state before its first step
            return torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.1)
        case "adafactor":
            return torch.optim.Adafactor(parameters, lr=0.01)
    return torch.optim.AdamW(groups, lr=0.01)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.sin(3 * x))


class Recomputed(nn.Module):
    """A layer, others that are recomputed in backward, perhaps a head; one layer may be used twice."""

    def __init__(self, head: bool, shared: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.middle = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.h = nn.Linear(4, 4) if head else nn.Identity()
        self.shared = shared

    def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        x = self.a(x)
        for layer in self.middle:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        return self.middle[-1](self.h(x)) if self.shared else self.h(x)


@dataclass
class Result:
    loss: torch.Tensor


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Aside(nn.Module):
    """A block whose weights decide the loss by other tensors than the one it returns: `how` says by which.

    KEPT has the tensors that no module knows.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.route, self.filter = nn.Linear(6, 6), nn.Linear(6, 4), nn.Conv1d(1, 2, 3)
        self.gate = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "input in place":
            x *= 2
        y = x + torch.tanh(self.a(x))
        match self.how:
            case "attribute":
                self.aside = {"losses": [(x @ self.gate).logsumexp(-1).mean()]}
            case "penalty":
                self.aside = {"losses": [self.a.weight.square().sum()]}
            case "closure":
                KEPT.append(self.route(x).logsumexp(-1).mean())
            case "convolution":
                KEPT.append(self.filter(x[:, None]).square().mean())
            case "own weight":
                KEPT.append((x @ self.gate).logsumexp(-1).mean())
        return y[None] if self.how == "view" else y


class HasAside(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList([Aside(how) for _ in range(2)])
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        KEPT.clear()
        for block in self.layers:
            before, x = x, block(x * 1)
            if self.how == "view":
                x = x[0]
                x += 0.5 * before
        sides = [*KEPT, *(one for block in self.layers for one in getattr(block, "aside", {}).get("losses", []))]
        loss = self.out(x).square().mean() + 0.1 * sum(sides)
        results = {"object": Result, "slots": Slotted, "namespace": lambda one: SimpleNamespace(inner={"all": [one]})}
        return results.get(self.how, lambda one: one)(loss)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("on purpose")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2).double()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, b: bool, scale: bool) -> torch.Tensor:
        x = self.a(x) * self.scale if scale else self.a(x)
        return self.b(x.double()) if b else x


class Sliced(nn.Module):
    """Tensors whose elements do not follow each other in memory, and dtypes that backends do not send."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        start = 100 * rank
        self.gaps = nn.Parameter(torch.arange(start, start + 12.0).view(3, 4)[:, :2])
        self.turned = nn.Parameter(torch.arange(start, start + 6.0).view(2, 3).t())
        self.register_buffer("small", torch.arange(start, start + 6).to(torch.int16)[::2])
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("none", torch.empty(0))

    def forward(self) -> torch.Tensor:
        return self.gaps.sum() + self.turned.sum()
