"""In: how a training loop averages its loss over labels, or which loaders it has. Out: what one rank of it said.
Does not assert anything (test_own_labels does) and starts no process (rank_server does)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from own_ranks import launched
from rank_server import Place
from torch import Tensor, nn

import codescent
from codescent.own import batches, labels

STEPS = 6
"""The calls 1, 2 and 4 are compared. The last steps give slow messages time."""


class Tagger(nn.Module):
    """Logits of 5 classes; with labels, a loss of its own, as modules of other libraries compute it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, images = how, how == "images"
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 1) if images else nn.Linear(4, 4), nn.ReLU())
        self.out = nn.Conv2d(4, 5, 1) if images else nn.Linear(4, 5)

    def forward(self, x: Tensor, targets: Tensor | None = None, count: float | None = None) -> Any:
        logits = self.out(self.layers(x))
        if targets is None:
            return logits
        how = "mean" if count is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=how) / (count or 1)
        return loss if self.how.startswith("inside") else {"loss": loss, "logits": logits}


def batch(how: str, ranks: Any, call: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels. Rank 0 has 4 labels, the others have 24 each, in calls of which a test asks for it."""
    draw = torch.Generator().manual_seed(10 * call + ranks.rank)
    x, y = torch.randn(4, 6, 4, generator=draw), torch.randint(0, 5, (4, 6), generator=draw)
    if ranks.is_first and how != "equal" and (how != "later" or call >= 4):
        y[:, 1:] = -100
    if how == "images":
        x, y = x.mT[:, :, :, None].expand(4, 4, 6, 2), y[:, :, None].expand(4, 6, 2)
    return (x.bfloat16() if how == "bf16" else x), y


def loss_of(how: str, ranks: Any, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of one call, by the recipe of the docs or against it."""
    mine = int((y != -100).sum())
    mean = ranks.mean(mine) if how.endswith(("recipe", "scaled", "sum")) else 1
    if how in ("inside", "inside, scaled"):
        loss: Tensor = module(x, y)
        return loss * (mine / mean if how == "inside, scaled" else 1)
    if how in ("inside, sum", "beside", "beside, sum"):
        result = module(x, y, None if how == "beside" else mean)
        return result if how == "inside, sum" else result["loss"]
    logits = module(x)
    if how == "regression":
        return logits[y != -100].square().mean()
    logits, y = (logits, y) if how == "images" else (logits.flatten(0, 1), y.flatten())
    if how == "recipe":
        return nn.functional.cross_entropy(logits, y, reduction="sum") / mean
    loss = nn.functional.cross_entropy(logits, y)
    return loss * mine / mean if how == "scaled" else loss


def said_of(hows: list[str], strategy: str) -> list[list[str]]:
    """What is said for each way to average the loss."""
    ranks, found = codescent.init(device="cpu"), []
    for how in hows:
        words: list[str] = []
        labels.warn = words.append  # type: ignore[assignment]
        torch.manual_seed(3)
        module = Tagger(how).to(torch.bfloat16 if how == "bf16" else torch.float32)
        rule = torch.optim.SGD(module.parameters(), lr=0.01)
        codescent.distribute(module, rule, strategy, average_every=2 if how == "apart" else None)
        parts = 2 if how == "parts" else 1
        for step in range(STEPS):
            for part in range(parts):
                with codescent.accumulate(module) if part < parts - 1 else contextlib.nullcontext():
                    (loss_of(how, ranks, module, *batch(how, ranks, step * parts + part + 1)) / parts).backward()
            rule.step()
            ranks.mean(0.0)
        found.append(words)
    return found


def loaders(kinds: list[str]) -> list[str]:
    """Loops over loaders, one after the other, or by turns where all are in one string: what is said of the batches."""
    ranks = codescent.init(device="cpu")
    words: list[str] = []
    batches.warn = words.append  # type: ignore[assignment]
    module = nn.Linear(4, 1)
    rule = torch.optim.SGD(module.parameters(), lr=0.01)
    codescent.distribute(module, rule)

    def loader(kind: str) -> Any:
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(ord(kind)))
        data: Any = torch.utils.data.TensorDataset(x)
        if kind.isupper():
            return torch.utils.data.DataLoader(data, batch_sampler=codescent.sampler(data, 8))
        return torch.utils.data.DataLoader(data, batch_size=8)

    for kind in kinds:
        for turn in zip(*map(loader, kind), strict=True):
            for (x,) in turn:
                module(x).square().mean().backward()
                rule.step()
                ranks.mean(0.0)
    return words


def act(place: Place, job: str, options: dict[str, Any]) -> Any:
    """What one rank returns for a job."""
    launched(place)
    return globals()[job](**options)
