"""In: weights of a replica that trains apart, at the begin and the end of a round. Out: the weights of the next round.
Does not sum over replicas and does not decide when (averaging.py and own/rounds.py do)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Outer:
    """The weights at the begin of a round (anchors), and the optimizer that moves them after it.

    Its gradient is the mean change of the replicas, anchor - weights (Reddi et al. 2021, "Adaptive federated
    optimization", algorithm 1; Douillard et al. 2023, "DiLoCo", algorithm 1).

    Args:
        weights: at the begin of the first round. Anchors are copies of them.
        kind: "none" (plain means, which are SGD at rate 1), "sgd" or "nesterov".
        learning_rate, momentum: of "sgd" and "nesterov".
    """

    def __init__(self, weights: Sequence[Tensor], kind: str, learning_rate: float, momentum: float) -> None:
        rate, momentum = (1.0, 0.0) if kind == "none" else (learning_rate, momentum)
        self.anchors = [weight.detach().clone() for weight in weights]
        self.optimizer = torch.optim.SGD(self.anchors, lr=rate, momentum=momentum, nesterov=kind == "nesterov")
        self.momentum = [torch.zeros_like(anchor) for anchor in self.anchors] if momentum else []
        for anchor, buffer in zip(self.anchors, self.momentum):
            self.optimizer.state[anchor]["momentum_buffer"] = buffer

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Begin a round with these weights. The momentum stays."""
        for anchor, weight in zip(self.anchors, weights, strict=True):
            anchor.copy_(weight)

    def change(self, index: int, weight: Tensor) -> Tensor:
        """Begin minus end of the round, in the anchor's dtype, of the tensor with this index.

        A round of bf16 weights began with the anchor's rounding: what it cut off is no change.
        """
        anchor = self.anchors[index]
        return anchor.to(weight.dtype).to(anchor.dtype) - weight

    def mean(self, index: int, change: Tensor) -> Tensor:
        """The mean weights of the replicas, from their mean change."""
        return self.anchors[index] - change

    def step(self, indices: Sequence[int], changes: Sequence[Tensor]) -> list[Tensor]:
        """The outer optimizer's step by the mean changes. Returns the anchors: the weights of the next round."""
        chosen = [self.anchors[index] for index in indices]
        for anchor, change in zip(chosen, changes, strict=True):
            anchor.grad = change
        self.optimizer.step()
        for anchor in chosen:
            anchor.grad = None
        return chosen

    def state(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """What a resumed run needs, by name. To load it, copy into these tensors."""
        found = {f"outer.anchor.model.{name}": anchor for name, anchor in zip(names, self.anchors, strict=True)}
        for name, buffer in zip(names, self.momentum):
            found[f"outer.momentum.model.{name}"] = buffer
        return found
