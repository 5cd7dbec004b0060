"""In: executor, parts, coupling, loader of a rank. Out: `Trainer`, which holds them, and the tensors of a checkpoint.
Does not make them (assemble.py does) and does not take steps (loop.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from codescent.base.device_kinds import CPU
from codescent.checkpoint.box import Box
from codescent.coupling import Coupling
from codescent.data.loader import Loader
from codescent.train.ema import Ema
from codescent.train.execute import Executor
from codescent.train.optimize import Optimizer, copy


@dataclass(frozen=True)
class Trainer:
    """The objects with which one rank trains."""

    executor: Executor
    parts: list[nn.Module]
    coupling: Coupling
    loader: Loader | None
    ema: Ema

    @property
    def optimizer(self) -> Optimizer:
        """Of the weights that this rank updates."""
        return cast(Optimizer, self.coupling.optimizer)

    @property
    def why_unheld(self) -> str:
        """Why this rank's tensors are of no use in memory after the loss of another one; "": they are."""
        if self.executor.device.type != CPU:  # nobody waits for an exchange there before the update begins
            return "an update on a device may have read sums that a lost rank did not complete"
        if self.executor.gradients.state():
            return "compressed sums change what they keep before the weights change"
        return self.coupling.why_unheld

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """The tensors of a checkpoint, by name. Collective where replicas have different weights."""
        executor, weights = self.executor, {weight.name: weight for weight in self.optimizer.weights}
        found, rank = self.coupling.tensors(), executor.world.this_rank.rank
        for name, value in {**executor.gradients.state(), **self.coupling.state()}.items():
            _, of_parameter, parameter = name.partition(".model.")
            if of_parameter:  # ranks that hold the same part of the parameter have the same values
                found[name] = weights[parameter].named(value)
            else:
                found[f"rank{rank}.{name}"] = value
        return found

    @property
    def keeps_more(self) -> bool:
        """Whether `tensors` has what changes before the update of a step, such as residuals of compressed gradients."""
        return bool(self.executor.gradients.state() or self.coupling.state())

    @contextmanager
    def with_means(self) -> Iterator[None]:
        """Put the mean of the replicas into the weights for a while, where they have different weights. Collective."""
        means = self.coupling.means()
        if means is None:
            yield
            return
        places = [weight.tensor for weight in self.optimizer.weights]
        before = [place.detach().clone() for place in places]
        with torch.no_grad():
            copy(places, means)
        try:
            yield
        finally:
            with torch.no_grad():
                copy(places, before)

    def close(self) -> None:
        """Stop reading ahead and drop the references to process groups."""
        if self.loader is not None:
            self.loader.close()
        self.executor.close()
        self.optimizer.close()
