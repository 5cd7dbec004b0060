"""In: a config, the boxes of parameters that this rank holds. Out: their initial values in place: drawn, or read.
Does not know layouts: a box is the plan's to say; a value is that of its element, whoever holds it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from codescent.huggingface.folder import Folder, open_folder
from codescent.huggingface.read import box
from codescent.models.initialize import draw_, initial_values
from codescent.plan import Parameter

if TYPE_CHECKING:
    from codescent.config.sections import Config

Held = tuple[Parameter, torch.Tensor, tuple[slice, ...]]
"""A parameter, the memory of this rank's box of it, and which box that is."""

_THREADS = 4


def begin_(config: Config, held: Sequence[Held], *, replaced: bool) -> None:
    """Write initial values: those of `model.weights` where that folder has the parameter, else drawn from `run.seed`.

    Args:
        config: of the run.
        held: what this rank holds.
        replaced: a checkpoint will be loaded over what is trained: that is left as it is. Where this is everything, the
            folder need not be there any more.

    Raises:
        UserError: the folder cannot be used.
    """
    wanted = [one for one in held if not (replaced and one[0].trained)]
    if not wanted:
        return
    folder = _folder(config)
    absent = {part.name for part, _, _ in wanted if folder is None or not folder.has(part)}
    draw_(config.run.seed, [one for one in wanted if one[0].name in absent])
    if folder is None:
        return

    def read(one: Held) -> None:
        parameter, tensor, slices = one
        if tensor.numel():
            with torch.no_grad():
                tensor.copy_(box(folder, parameter.name, slices))

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(read, [one for one in wanted if one[0].name not in absent]))


class Beginning:
    """The values with which a run begins, box by box, by whoever asks.

    Args:
        config: of the run.

    Raises:
        UserError: `model.weights` cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self.seed, self.folder = config.run.seed, _folder(config)

    def box(self, parameter: Parameter, slices: tuple[slice, ...]) -> torch.Tensor:
        """A box of a parameter, in the number format that the folder has it in; fp32 where it is drawn."""
        if self.folder is None or not self.folder.has(parameter):
            return initial_values(self.seed, parameter, slices)
        return box(self.folder, parameter.name, slices)


def _folder(config: Config) -> Folder | None:
    return None if config.model.weights is None else open_folder(config.model.weights)
