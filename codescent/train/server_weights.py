"""In: a plan with parameter servers, the number of a server. Out: its part of the weights, with initial values.
Does not update them (coupling/parameter_server.py does)."""

from __future__ import annotations

import torch

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.huggingface.initial import write_initial_values_
from codescent.plan import Plan
from codescent.train.optimize import Weight


def server_weights(plan: Plan, index: int, *, replaced: bool) -> list[Weight]:
    """The pieces of server `index`, with initial values. `replaced`: a checkpoint will overwrite them."""
    found, boxes = [], []
    for piece in plan.pieces[index]:
        tensor = plan.trained[piece.index]
        parameter = tensor.parameter
        rows = torch.empty((piece.stop - piece.first, *parameter.shape[1:]), dtype=TORCH_DTYPE[tensor.optimizer_dtype])
        offsets = (piece.first, *(0 for _ in parameter.shape[1:]))
        factor = tensor.rate_factor
        counted, by_sign = tensor.sign_rate is None, tensor.sign_rate
        of_whole = parameter.decay, parameter.shape, offsets, counted
        found.append(Weight(parameter.name, rows, rows, *of_whole, rate_factor=factor, sign_rate=by_sign))
        slices = (slice(piece.first, piece.stop), *(slice(0, size) for size in parameter.shape[1:]))
        boxes.append((parameter, rows, slices))
    write_initial_values_(plan.seed, plan.model, plan.work.precision, boxes, replaced=replaced)
    return found
