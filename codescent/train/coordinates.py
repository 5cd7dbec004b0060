"""In: a config. Out: how large activations and logits are in the first steps of its training.
Does not write a run folder, and does not compare widths (verbs/study_widths.py does).

The coordinate check of Yang et al. 2022, "Tensor Programs V" (arXiv 2203.03466), appendix D.1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import torch
from torch import Tensor, nn

from codescent.base.ending import ends_soon
from codescent.base.rank import Rank
from codescent.config.rate_schedules import learning_rate
from codescent.config.sections import Config
from codescent.models.part import Part
from codescent.operators import products
from codescent.operators.head import Vocabulary
from codescent.train.assemble import assemble
from codescent.train.open import connect, open_data
from codescent.train.references import refuse_without_run
from codescent.train.stop import STOPS, StopRequest

LOGITS, EMBEDDING = "logits", "embedding"

Sizes = dict[str, list[float]]
"""By place, in forward order: the mean absolute value in the forward pass of each step."""


def coordinates(config: Config) -> Sizes:
    """Take train.num_steps steps as one process, and measure what the forward pass of each step computes.

    One process is enough: every layout has the same trajectory. Places are the embedding, each block, and the logits.

    Raises:
        UserError: a run cannot begin with this config, data or machine.
    """
    with connect(config, Rank()) as world:
        config, plan, dataset, _ = open_data(config, world, None, resume=False)
        refuse_without_run(plan)
        with (
            StopRequest(alone=True, does=STOPS) as stop,
            closing(assemble(config, plan, world, dataset, 0, stop, "none")) as trainer,
            ends_soon(1),
        ):
            found: Sizes = {}
            observed = _Observed(cast(Part, trainer.parts[0]))
            for number in range(config.train.num_steps):
                trainer.executor.step(number, learning_rate(config.optimizer, config.train.num_steps, 1, number))
                for place, mean in observed.taken():
                    found.setdefault(place, []).append(mean)
            return found


class _Observed:
    """The mean absolute values of what a model computes, over the micro-batches of a step."""

    def __init__(self, part: Part) -> None:
        self._sums: dict[str, list[float]] = {}
        blocks = list(part.blocks.items())
        blocks[0][1].register_forward_pre_hook(lambda _module, inputs: self.see(EMBEDDING, inputs[0]))
        for name, block in blocks:
            block.register_forward_hook(self._hook(f"block {int(name) + 1}"))
        part.vocabulary = _ObservedVocabulary(self)

    def _hook(self, place: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self.see(place, output)

        return hook

    def see(self, place: str, values: Tensor) -> None:
        """Add what was computed at a place. Reads one number of the device."""
        with torch.no_grad():
            self._sums.setdefault(place, []).append(float(values.detach().double().abs().mean()))

    def taken(self) -> Iterator[tuple[str, float]]:
        """The mean of each place since the last call."""
        sums, self._sums = self._sums, {}
        yield from ((place, sum(means) / len(means)) for place, means in sums.items())


class _ObservedVocabulary(Vocabulary):
    """The vocabulary of one process, which also computes the logits to measure them."""

    def __init__(self, observed: _Observed) -> None:
        self.observed = observed

    def loss(self, x_BTD: Tensor, weight_VD: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """See `Vocabulary`."""
        self._see(x_BTD, weight_VD, None)
        return super().loss(x_BTD, weight_VD, *arguments, **options)

    def loss_of_rows(self, x_MD: Tensor, weight_VD: Tensor, bias_V: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """See `Vocabulary`."""
        self._see(x_MD, weight_VD, bias_V)
        loss: Tensor = super().loss_of_rows(x_MD, weight_VD, bias_V, *arguments, **options)
        return loss

    def every_logit(self, y_BTC: Tensor) -> Tensor:
        """See `Vocabulary`."""
        self.observed.see(LOGITS, y_BTC)
        return y_BTC

    def _see(self, x: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
        with torch.no_grad():
            logits = products.linear(x.detach(), weight_VD.detach())
            self.observed.see(LOGITS, logits if bias_V is None else logits + bias_V.detach())
