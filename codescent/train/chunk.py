"""In: a divided part of the model, gradients of its outputs. Out: its backward passes, and the tensors between them.
Does not run forward passes, send or reduce (execute.py does)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from codescent.models.part import Part
from codescent.operators.linear import Deferred
from codescent.train.messages import Message


@dataclass
class InFlight:
    """The tensors of one micro-batch in one chunk, from the receive of its inputs to the end of its backward pass.

    Attributes:
        message: the activation or gradient that is being received for the next computation.
        inputs: activations of the chunk before; None if the chunk has the embedding.
        outputs: activations, or the loss if the chunk has the head.
        output_gradient: gradient of `outputs`; None for the loss.
        input_gradient: gradient of `inputs`.
        adapter_keys: the keys of its dropout in adapters, for blocks that backward computes again.
        deferred: what BACKWARD_WEIGHT needs: a list of (weight, gradient) pairs, and a list of (weight, function)
            pairs, where the function computes the gradient from its arguments.
    """

    message: Message | None = None
    inputs: torch.Tensor | None = None
    outputs: torch.Tensor | None = None
    output_gradient: torch.Tensor | None = None
    input_gradient: torch.Tensor | None = None
    adapter_keys: torch.Tensor | None = None
    deferred: tuple[list[tuple[torch.Tensor, torch.Tensor]], Deferred] | None = None

    def tensors(self) -> Iterator[torch.Tensor | None]:
        """The tensors, to count their memory."""
        yield from (self.inputs, self.outputs, self.output_gradient, self.input_gradient)
        yield None if self.message is None else self.message.memory
        ready, deferred = self.deferred or ((), ())
        yield from (gradient for _, gradient in ready)
        yield from (tensor for _, compute in deferred for tensor in compute.args)


class Chunk:
    """A chunk of the model on this rank.

    `in_flight`: the tensors of each micro-batch, by its number. A field is None before and after its use.
    """

    def __init__(self, part: torch.nn.Module) -> None:
        self.part = cast(Part, part)
        self.in_flight: defaultdict[int, InFlight] = defaultdict(InFlight)

    def backward(self, one: InFlight) -> None:
        """Compute all gradients of a micro-batch. Autograd's hooks hand those of weights to the reducer."""
        outputs, gradient, inputs = self._take(one)
        torch.autograd.backward(outputs, gradient)
        if inputs is not None:
            one.input_gradient = inputs.grad

    def backward_input(self, one: InFlight) -> None:
        """Compute the gradient of the inputs. Linear layers defer the gradients of their weights."""
        weights: list[torch.Tensor] = [weight for weight in self.part.parameters() if weight.requires_grad]
        outputs, gradient, inputs = self._take(one)
        wanted = weights if inputs is None else [inputs, *weights]
        found: list[torch.Tensor | None] = []
        if wanted:
            found += torch.autograd.grad(outputs, wanted, gradient, allow_unused=True)
        else:  # nothing to train in this stage; backward still runs its collectives
            torch.autograd.backward(outputs, gradient)
        if inputs is not None:
            one.input_gradient = found.pop(0)
        ready = [(weight, gradient) for weight, gradient in zip(weights, found, strict=True) if gradient is not None]
        assert self.part.deferred is not None
        deferred = list(self.part.deferred)
        assert all(isinstance(weight, torch.nn.Parameter) for weight, _ in deferred), "a gradient of no parameter"
        one.deferred = ready, deferred
        self.part.deferred.clear()

    def backward_weight(self, one: InFlight) -> None:
        """Compute the weight gradients that `backward_input` left. Autograd's hooks hand them to the reducer."""
        assert one.deferred is not None
        (ready, deferred), one.deferred = one.deferred, None
        if ready:
            torch.autograd.backward([weight for weight, _ in ready], [gradient for _, gradient in ready])
        for weight, compute in deferred:  # one by one: a full bucket is sent while the next gradient is computed
            torch.autograd.backward([weight], [compute()])

    def _take(self, one: InFlight) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return outputs, their gradient and inputs, and remove them from `one`, so that their memory can be freed."""
        assert one.outputs is not None
        if one.adapter_keys is not None:  # other micro-batches went forward meanwhile
            self.part.give_adapters(one.adapter_keys)
        taken = one.outputs, one.output_gradient, one.inputs
        one.outputs = one.output_gradient = one.inputs = one.adapter_keys = None
        return taken
