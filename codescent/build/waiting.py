"""In: the tensors of a plan, what its model keeps. Out: gradients of weights that wait where others are deferred.
Does not declare what a deferred product reads (models and operators do)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from codescent.plan import TensorPlan
from codescent.plan.activations import SavedTensor
from codescent.plan.divided import Dim

_BLOCK = re.compile(r"blocks\.\d+\.")


def gradients_that_wait(tensors: Iterable[TensorPlan], declared: Iterable[SavedTensor]) -> Iterator[SavedTensor]:
    """The gradients that the input part of a backward pass computes at once: of biases, norms and embeddings.

    They wait with those that are deferred, and are added to the sums of all micro-batches after them. `declared`: what
    the model keeps. A matrix whose product waits, or whose gradient is one of these tensors, is not among the result.
    """
    products = {(tensor.product, depth) for tensor in declared if tensor.product for depth in range(*tensor.depths)}
    found: dict[tuple[object, ...], SavedTensor] = {}
    for tensor in tensors:
        parameter = tensor.parameter
        name = _BLOCK.sub("", parameter.name)
        layer, _, of_layer = name.rpartition(".")
        for depth in parameter.depths if parameter.trained else ():
            if of_layer == "weight" and (layer, depth) in products:
                continue
            shape, dtype, placement = parameter.shape, tensor.weight_dtype, tensor.gradients
            before = found.get(key := (name, shape, dtype, tuple(placement.shards.items()), depth))
            first = before.depths[0] if before is not None else depth
            if before is not None:
                del found[key]
            found[*key[:-1], depth + 1] = SavedTensor(
                f"{name} gradient", shape, (Dim.WHOLE,) * len(shape), dtype, (first, depth + 1), placement
            )
    return iter(found.values())
