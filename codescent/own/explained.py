"""In: an error that torch raises in a sharded module. Out: one sentence with the block, and what to do; None: another.
Does not print it or end the process (failure.py does)."""

from __future__ import annotations

from traceback import walk_tb
from types import TracebackType

from torch import nn
from torch.distributed.fsdp import FSDPModule

from codescent.base.errors import UserError
from codescent.own import registry
from codescent.strategies.fully_shard import class_name, not_gathered

FREED = "storage of size 0"
"""In torch's words, where backward reads a weight that is not gathered."""
IN_PLACE = "RegisterPostBackwardFunction"
"""In torch's words, where a block writes into its input. Its input is an output of this function."""


def explained(error: BaseException, trace: TracebackType | None) -> UserError | None:
    """The error in the words of the user's module, if `distribute` is its cause."""
    if not isinstance(error, RuntimeError):
        return None
    said = str(error)
    for module, known in registry.everything():
        if FREED in said and (units := list(not_gathered(module))):
            return UserError(f"codescent.distribute: {known.strategy}: {_too_early(units)}")
        if IN_PLACE in said and "inplace" in said:
            return UserError(
                f"codescent.distribute: {known.strategy}: {_of(module, trace)} changes its input in place: write "
                "`x = x + y` instead of `x += y`"
            )
    return None


def _too_early(units: list[tuple[str, bool]]) -> str:
    """What was not gathered in time, and the remedy. Weights of submodules are, unless torch.compile hides them."""
    names = [name for name, own in units if own] or [name for name, _ in units]
    return (
        f"backward reached the weights of {' or '.join(names)} before they were gathered: the loss uses a tensor that "
        "the block neither returns nor keeps as its attribute: return it, or compute it in a submodule that has the "
        'weights, or take "zero2"; with torch.compile, return no other objects than tuples, lists and dicts'
    )


def _of(module: nn.Module, trace: TracebackType | None) -> str:
    """The innermost block whose forward was running."""
    running = [frame.f_locals.get("self") for frame, _ in walk_tb(trace)]
    blocks = [one for one in running if isinstance(one, FSDPModule)]
    names = {id(part): name for name, part in module.named_modules()}
    return (names.get(id(blocks[-1])) or class_name(module)) if blocks else "a block"
