"""In: the options average_every, outer_* and wire of `distribute`. Out: ranks that train apart; means of their weights.
Does not count optimizer steps of its own accord (distribute.py has the hooks) and does not save (replicas.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.coupling.outer import Outer
from codescent.own import registry
from codescent.own.arguments import MODULE, public
from codescent.own.average import wide_name
from codescent.own.buffers import AveragedBuffers
from codescent.own.session import joined
from codescent.plan.wire import Wire
from codescent.strategies.collectives import all_reduce
from codescent.strategies.wire import WireSum

OUTER = ("none", "sgd", "nesterov")
"""What moves the weights after a round: their mean, or an outer optimizer."""
RATE, MOMENTUM = 0.7, 0.9
"""Of the outer optimizer, where none are given (Douillard et al. 2023, "DiLoCo", section 3.1)."""


@dataclass(frozen=True)
class Options:
    """How ranks that hold whole models exchange gradients or weights. Values are None where `distribute` got none.

    Attributes:
        average_every: optimizer steps of a round; None: gradients are averaged in each step.
        outer_optimizer: one of OUTER.
        wire: the text that `Wire.parse` reads.
    """

    average_every: int | None = None
    outer_optimizer: str = "none"
    outer_learning_rate: float | None = None
    outer_momentum: float | None = None
    wire: str = "none"

    def problems(self, shards: str | None) -> Iterator[str]:
        """What is wrong, a sentence each, with what would do. `shards`: the strategy, if it shards the model."""
        try:
            Wire.parse(self.wire)
        except ValueError as error:
            yield f"wire: {error}"
        given = {"average_every": self.average_every, "wire": None if self.wire == "none" else self.wire}
        for name, value in given.items():
            if value is not None and shards is not None:
                yield (
                    f'{name} = {value!r}: strategy "{shards}" shards what ranks would exchange whole: take "ddp", or '
                    f"leave {name} out"
                )
        if self.outer_optimizer not in OUTER:
            yield f'outer_optimizer "{self.outer_optimizer}": must be one of {", ".join(OUTER)}'
        elif self.outer_optimizer != "none" and self.average_every is None:
            yield f'outer_optimizer = "{self.outer_optimizer}": acts after a round: give average_every, too'
        for name in ("outer_learning_rate", "outer_momentum"):
            if getattr(self, name) is not None and self.outer_optimizer == "none":
                yield f'{name} = {getattr(self, name)}: give outer_optimizer = "sgd" or "nesterov", or leave it out'
        if self.outer_optimizer == "nesterov" and self.outer_momentum == 0:
            yield 'outer_optimizer = "nesterov": outer_momentum = 0 leaves plain SGD: take "sgd", or a momentum'

    def described(self) -> dict[str, Any]:
        """All options with their values, as JSON data. Two modules with equal values exchange alike."""
        rule = {"outer_learning_rate": RATE, "outer_momentum": MOMENTUM} if self.outer_optimizer != "none" else {}
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {**dict.fromkeys(asdict(self)), **rule, **given}

    @property
    def exchanges(self) -> bool:
        """Whether something else than all-reduced gradients is asked for."""
        return self.average_every is not None or self.wire != "none"


class Rounds:
    """The rounds of ranks that train apart. After the last step of a round the weights of all ranks are the same bits.

    Each rank counts alike: the mean has weight 1 / ranks for each (Stich 2019, "Local SGD converges fast"). Means and
    anchors have the wide dtype of the weights: fp32 for bf16. With one rank nothing is computed.

    Attributes:
        done: steps of this round.
        is_lent: whether the weights are means that will be replaced by those of this rank.
        outer: None if means are all that is needed.

    Args:
        module: with the same weights on all ranks. Its trained parameters are averaged.
        options: with average_every.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buffers, self.options = AveragedBuffers(module), options
        self.ranks, self.done, self.has_begun, self.is_lent = dist.get_world_size(), 0, False, False
        assert options.average_every is not None
        self.period, self.wire = options.average_every, Wire.parse(options.wire)
        kinds = [wide_name(weight.dtype) for weight in self.weights]
        self.indices = {kind: [n for n, one in enumerate(kinds) if one == kind] for kind in dict.fromkeys(kinds)}
        self.sums: dict[str, WireSum] = {}
        self.outer: Outer | None = None
        if self.ranks == 1:
            return
        if options.outer_optimizer != "none" or self.wire.lossy:
            rule = options.described()
            wide = [weight.detach().to(TORCH_DTYPE[kind]) for weight, kind in zip(self.weights, kinds, strict=True)]
            self.outer = Outer(wide, options.outer_optimizer, rule["outer_learning_rate"], rule["outer_momentum"])
        if self.wire.method != "none":
            self.sums = {kind: self._sum_of(kind) for kind in self.indices}

    def _sum_of(self, kind: str) -> WireSum:
        weights, world = [self.weights[index] for index in self.indices[kind]], dist.group.WORLD
        assert world is not None
        return WireSum(self.wire, [tuple(weight.shape) for weight in weights], world, weights[0].device, kind)

    def before_step(self) -> None:
        """Before a step of any optimizer of the weights. Raises UserError if they are lent."""
        if self.is_lent:
            raise UserError("codescent.averaged: an optimizer step inside it would be lost: end the `with` block first")
        self.begin()

    def begin(self) -> None:
        """Begin the first round with the weights that the module has now, unless it has begun."""
        if not self.has_begun and self.outer is not None:
            self.outer.begin(self.weights)
        self.has_begun = True

    def stepped(self) -> None:
        """After an optimizer step: if it is the last one of a round, average weights and buffers. Then collective."""
        if self.buffers.module() is None:  # the script has let it go
            return
        self.done = (self.done + 1) % self.period
        if self.done == 0 and self.ranks > 1:
            self._average()
            self.buffers.average()

    @torch.no_grad()
    def _average(self) -> None:
        for kind, indices in self.indices.items():
            weights = [self.weights[index] for index in indices]
            if self.outer is not None:
                changes = [self.outer.change(index, self.weights[index]) for index in indices]
                self._mean_(kind, changes)
                means = self.outer.step(indices, changes)
            elif kind in self.sums:
                means = [weight.detach().to(TORCH_DTYPE[kind], copy=True) for weight in weights]
                self._mean_(kind, means)
            else:
                means = mean_of_ranks(weights, TORCH_DTYPE[kind])
            for weight, mean in zip(weights, means, strict=True):
                weight.copy_(mean)
        if self.outer is not None and self.options.outer_optimizer == "none":
            self.outer.begin(self.weights)  # what rounding to bf16 cuts off is lost, as it is without anchors

    def _mean_(self, kind: str, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of the wide dtype `kind` by their means over ranks, in the format of the wire."""
        if kind in self.sums:
            self.sums[kind].sum_(tensors)
            torch._foreach_div_(list(tensors), float(self.ranks))
        else:
            for tensor, mean in zip(tensors, mean_of_ranks(tensors, TORCH_DTYPE[kind]), strict=True):
                tensor.copy_(mean)

    @contextmanager
    def lent(self) -> Iterator[dict[Tensor, Tensor]]:
        """While this context is open, weights and floating-point buffers are their means over ranks. Collective.

        Yields this rank's own values, by weight and buffer; nothing at the end of a round, when the ranks agree.
        """
        module = self.buffers.module()
        if self.is_lent or self.done == 0 or self.ranks == 1 or module is None:
            yield {}
            return
        floating = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        own = {tensor: tensor.detach().clone() for tensor in (*self.weights, *floating)}
        self.is_lent = True
        try:
            with torch.no_grad():
                for kind, indices in self.indices.items():
                    weights = [self.weights[index] for index in indices]
                    for weight, mean in zip(weights, mean_of_ranks(weights, TORCH_DTYPE[kind]), strict=True):
                        weight.copy_(mean)
            self.buffers.average()
            yield own
        finally:
            with torch.no_grad():
                for tensor, before in own.items():
                    tensor.copy_(before)
            self.is_lent = False

    def shared(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """State that all ranks hold alike, by name: anchors, outer momentum. `names`: of the parameters."""
        return {} if self.outer is None else dict(self.outer.state([names[weight] for weight in self.weights]))

    def own(self) -> dict[str, Tensor]:
        """State of this rank alone, by name: what the wire has not delivered."""
        return {f"wire.{kind}.{name}": value for kind, one in self.sums.items() for name, value in one.state().items()}

    def restart(self) -> None:
        """The next step is the first of a round, which begins with the weights of then. The momentum begins with 0."""
        self.done, self.has_begun = 0, False
        for buffer in self.outer.momentum if self.outer is not None else ():
            buffer.zero_()

    def close(self) -> None:
        """Drop the process group: its threads would crash at the end of the process."""
        for one in self.sums.values():
            one.close()


@public("codescent.averaged", module=MODULE)
@contextmanager
def averaged(module: nn.Module) -> Iterator[None]:
    """In this context the module has the mean weights and buffers of all ranks; afterwards each rank's own. Collective.

        with codescent.averaged(model):
            loss = validate(model)

    It is for modules with `average_every`, whose weights differ between ranks within a round. At the end of a round,
    with one rank and for all other modules it does nothing. All ranks must enter it after the same step.

    Raises:
        UserError: the module is not distributed; or, from `optimizer.step` and `codescent.save`: they are called in it.
    """
    joined("averaged")
    _, known = registry.find(module, "averaged")
    if known.rounds is None:
        yield
        return
    with known.rounds.lent():
        yield


def mean_of_ranks(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The means over all ranks, in `dtype`, by one all-reduce. The tensors stay as they are. Collective."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])
    all_reduce(flat, group=None)
    flat /= dist.get_world_size()
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
