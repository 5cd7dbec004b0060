"""In: which products of a block are kept. Out: contexts for torch's checkpoint that keep their results, and those of
attention; the rest of the block is computed again in backward.
Does not choose the products: strategies/recompute.py does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # in torch's documentation, in spite of its name
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "codescent.wide_product.default")
"""The operators that compute the product of a linear layer. Products inside of attention are others (bmm)."""
ATTENTION = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._flash_attention_forward.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "codescent.block_attention.default",
    "codescent.wide_attention.default",
)
"""Kernels that compute attention as a whole. Attention with our dropout has none; that over a divided sequence has one
for each part (`in_parts`)."""
_keeping, _in_parts = False, False
_note: Callable[[Tensor], object] | None = None


def keeping() -> bool:
    """Whether a block computes whose products may be kept: then no operator may overwrite the result of another one,
    and attention is one operator."""
    return _keeping


@contextmanager
def in_parts() -> Iterator[None]:
    """A block that merges the attention to several ranks' keys in place. The parts are not kept: backward reads the
    whole alone, and computes it again."""
    global _in_parts
    before, _in_parts = _in_parts, True
    try:
        yield
    finally:
        _in_parts = before


@contextmanager
def noted(note: Callable[[Tensor], object]) -> Iterator[None]:
    """A block in which `note` is called with each result that is kept. Autograd's hooks do not see these results.

    What compiled code keeps is saved by autograd.
    """
    global _note
    before, _note = _note, note
    try:
        yield
    finally:
        _note = before


class _Policy:
    """Keeps attention, and the products that are True in `kept`, in the order in which the block computes them."""

    def __init__(self, kept: Sequence[bool]) -> None:
        self.kept, self.counts = kept, {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name, keeps = str(operator), False
        if name in PRODUCTS:
            number = self.counts[context.is_recompute]
            self.counts[context.is_recompute] += 1
            keeps = number < len(self.kept) and self.kept[number]
        keeps = keeps or (name in ATTENTION and not _in_parts)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class _Noting(TorchDispatchMode):
    """Calls `note` with the results that a policy keeps."""

    def __init__(self, kept: Sequence[bool], note: Callable[[Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy, self.note = _Policy(kept), note
        self.context = SelectiveCheckpointContext(is_recompute=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.policy(self.context, func) is CheckpointPolicy.MUST_SAVE:
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor):
                    self.note(tensor)
        return out


class _Keeping:
    """A context of torch's, in which `keeping()` is true."""

    def __init__(self, *contexts: Any) -> None:
        self.contexts = contexts

    def __enter__(self) -> Self:
        global _keeping
        self.before, _keeping = _keeping, True
        self.stack = ExitStack()
        for context in self.contexts:
            self.stack.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> Any:
        global _keeping
        _keeping = self.before
        return self.stack.__exit__(*error)


def without_warning() -> None:
    """Keep torch's warning of kept results off the terminal: in-place operators would spoil them.

    A user could do nothing about it. The compiler has no in-place operators left when it chooses what is kept.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def compiled_contexts(kept: tuple[bool, ...]) -> tuple[Any, Any]:
    """The contexts of forward and of the second computation, for a block that torch.compile compiles."""
    forward, again = create_selective_checkpoint_contexts(_Policy(kept))  # type: ignore[no-untyped-call]
    return forward, again


def contexts(kept: tuple[bool, ...]) -> tuple[Any, Any]:
    """The contexts of forward and of the second computation."""
    forward, again = compiled_contexts(kept)
    noting = [] if _note is None else [_Noting(kept, _note)]  # first, so that it sees what the next one computes
    return _Keeping(*noting, forward), _Keeping(again)
