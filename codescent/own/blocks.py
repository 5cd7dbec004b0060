"""In: any torch module. Out: its blocks: the submodules whose sharded weights are gathered and freed one at a time.
Does not shard anything (divide.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from codescent.base.counted import a_type
from codescent.base.errors import UserError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def choose_blocks(module: nn.Module) -> list[nn.Module]:
    """Choose as blocks the submodules of one class in a list, such as the layers of torch.nn.Transformer.

    A list is a ModuleList, Sequential or ModuleDict. Lists inside a chosen block are not searched.
    """
    return _unshared(module, list(_repeated(module)))


def check_blocks(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Check the user's blocks, and return each once.

    Raises:
        UserError: a block is not in the module, has no forward, is inside another block, or shares a parameter with a
            module outside of it.
    """
    names = {part: name for name, part in module.named_modules()}
    problems = []
    for number, block in enumerate(blocks):
        if block is module or block not in names:
            problems.append(f"blocks[{number}] ({type(block).__name__}): must be a submodule of the module")
        elif only_holds(block):
            problems.append(f"blocks[{number}] ({names[block]}): {a_type(block)} has no forward: give its submodules")
        elif outer := [other for other in blocks if other is not block and block in set(other.modules())]:
            problems.append(
                f"blocks[{number}] ({names[block]}): is inside {names.get(outer[0], 'another block')}: give one of both"
            )
    if not problems:
        shared = [block for block in blocks if block not in set(_unshared(module, blocks))]
        problems = [f"blocks: {names[b]} shares a parameter with a module outside of it: leave it out" for b in shared]
    if problems:
        raise UserError(*(f"codescent.distribute: {problem}" for problem in problems))
    return list(dict.fromkeys(blocks))


def only_holds(module: nn.Module) -> bool:
    """Whether a module has no forward of its own: a list, a dict, or a class whose submodules are called instead."""
    return type(module).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = list(dict.fromkeys(child for child in module.children() if any(True for _ in child.parameters())))
    kinds = Counter(type(child) for child in children)
    for child in children:
        if isinstance(module, CONTAINERS) and kinds[type(child)] > 1 and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from _repeated(child)


def _unshared(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with the outside; other blocks are gathered with the whole module."""
    holders = _holders(module)
    return [
        block for block in dict.fromkeys(blocks) if all(holders[p] == count for p, count in _holders(block).items())
    ]


def _holders(module: nn.Module) -> Counter[nn.Parameter]:
    """For each parameter, the number of submodules that hold it directly."""
    return Counter(parameter for part in module.modules() for parameter in set(part.parameters(recurse=False)))
