"""In: sizes of a model of `transformers`, a forward pass. Out: what it keeps for backward on a CPU, tensor by tensor.
Does not know the model's layers: autograd is asked what it saves, on fake tensors, which have no memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.models.lora.declare import adapted
from codescent.models.lora.module import adapt_
from codescent.models.transformers.declare import TransformersShape, parameters
from codescent.models.transformers.module import Transformers
from codescent.models.transformers.observed import faked
from codescent.operators.saved_tensors import ForwardPass
from codescent.plan.activations import CPU, SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.model import Lora

_RECOMPUTES = ("none", "full")
"""Values of parallel.recompute that this kind has."""
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPE.items()} | {torch.int64: "int64", torch.bool: "bool"}
_Tensors = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each tensor that a depth keeps."""


def kept(shape: TransformersShape, forward: ForwardPass, lora: Lora | None) -> Iterator[SavedTensor]:
    """What each depth keeps, by the value of parallel.recompute. Raises UserError: forward fails in this precision."""
    for recompute in _RECOMPUTES:
        for number, (depths, tensors) in enumerate(_alike(_observed(shape, forward, lora, recompute))):
            for at, (sizes, dtype) in enumerate(tensors):
                name, dims = f"{recompute} {number}.{at}", (Dim.WHOLE,) * len(sizes)
                yield SavedTensor(name, sizes, dims, dtype, depths, on=CPU, under=(recompute,))


def _alike(depths: tuple[_Tensors, ...]) -> Iterator[tuple[tuple[int, int], _Tensors]]:
    """Depths [first, end) in a row that keep the same, with what they keep."""
    first = 0
    for depth in range(1, len(depths) + 1):
        if depth == len(depths) or depths[depth] != depths[first]:
            yield (first, depth), depths[first]
            first = depth


@lru_cache(maxsize=64)
def _observed(
    shape: TransformersShape, forward: ForwardPass, lora: Lora | None, recompute: str
) -> tuple[_Tensors, ...]:
    part = Transformers(shape, forward.chunk_tokens)
    if lora is not None:
        adapt_(part, adapted(tuple(parameters(shape)), lora), lora)
    part.to(TORCH_DTYPE[forward.precision])
    part.objective = forward.objective
    with faked(part) as mode:
        saves = _Saves(part, mode, again=recompute == "full")
        inputs = torch.zeros(forward.samples, forward.positions, dtype=torch.long)
        rows = torch.zeros(forward.head_tokens, dtype=torch.long)
        if shape.head == "mlm":  # whose positions depend on the targets, and whose number does not
            part._rows = lambda _targets: (rows, rows.clone(), None)  # type: ignore[method-assign,assignment]
        lengths = {"lengths_B": torch.ones(forward.samples, dtype=torch.long)} if forward.padded else {}
        try:
            with torch.autograd.graph.saved_tensors_hooks(saves.pack, lambda tensor: tensor):
                part(inputs, inputs, loss_scale=0.5, **lengths)
        except UserError:
            raise
        except Exception as error:  # of torch or of the model, such as buffers of another dtype
            raise UserError(f"the model cannot be computed in {forward.precision}: {error}") from error
        return saves.found()


class _Saves:
    """Collects what autograd saves, by depth. Parameters and buffers are no activations."""

    def __init__(self, part: Transformers, mode: FakeTensorMode, *, again: bool) -> None:
        self.depth = 0
        # They are held: what is freed leaves its memory, and so its key, to a tensor that is kept.
        # autograd saves a buffer as it is, or as the fake tensor that an operator before has made of it.
        self._held = [*part.parameters(), *part.buffers(), *map(mode.from_tensor, part.buffers())]
        self.weights = set(map(_key, self._held))
        self.by_depth: list[dict[int, torch.Tensor]] = [{} for _ in range(len(part.blocks) + 2)]
        self.seen: set[int] = set()
        for number, block in enumerate(part.blocks.values()):
            if again:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            block.register_forward_pre_hook(partial(self._enter, number + 1, again), with_kwargs=True)
            block.register_forward_hook(partial(self._leave, number == len(part.blocks) - 1))

    def _enter(self, depth: int, again: bool, _block: nn.Module, inputs: Any, options: Any) -> None:
        self.depth = depth
        for tensor in tree_leaves((inputs, options)) if again else ():  # the checkpoint keeps what it is called with
            if isinstance(tensor, torch.Tensor):
                self.pack(tensor)

    def _leave(self, last: bool, *_: object) -> None:
        self.depth += last

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor, once for each memory. It is held, so that no other gets its memory."""
        key = _key(tensor)
        if key not in self.weights and key not in self.seen:
            self.seen.add(key)
            self.by_depth[self.depth][key] = tensor
        return tensor

    def found(self) -> tuple[_Tensors, ...]:
        """Of each depth what is kept. A view keeps the whole memory."""
        return tuple(tuple(map(_sizes, tensors.values())) for tensors in self.by_depth)


def _key(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def _sizes(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a memory: those of the tensor if it fills it. A dtype that plans have not counts as bytes."""
    found, size = tensor.untyped_storage().nbytes(), tensor.element_size()
    if tensor.dtype not in _DTYPE_NAMES:
        return (found,), "uint8"
    shape, elements = tuple(tensor.shape), found // size
    return (shape if shape and tensor.numel() == elements else (elements,)), _DTYPE_NAMES[tensor.dtype]
