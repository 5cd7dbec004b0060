"""In: the boxes of parameters that this rank holds. Out: the values with which a run begins, drawn or read.
Does not know layouts: the plan says which box a rank holds. An element's value does not depend on who holds it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from codescent.huggingface.folder import open_folder
from codescent.huggingface.read import box
from codescent.models.initialize import fill_, initial_values
from codescent.plan import Parameter

Held = tuple[Parameter, torch.Tensor, tuple[slice, ...]]
"""A parameter, the memory of this rank's box of it, and which box that is."""

_THREADS = 4


class Beginning:
    """The values with which a run begins: those of a folder of weights where it has the parameter, else drawn.

    Args:
        seed: of the run; drawn values follow from it.
        weights: a Hugging Face folder; None: every value is drawn.

    Raises:
        UserError: the folder cannot be used.
    """

    def __init__(self, seed: int, weights: Path | str | None) -> None:
        self.seed = seed
        self.folder = None if weights is None else open_folder(Path(weights))

    def box(self, parameter: Parameter, slices: tuple[slice, ...]) -> torch.Tensor:
        """A box of a parameter, in the number format of the folder; fp32 where it is drawn."""
        if self.folder is None or not self.folder.has(parameter):
            return initial_values(self.seed, parameter, slices)
        return box(self.folder, parameter.name, slices)

    def write_(self, held: Sequence[Held]) -> None:
        """Write the values into the memory of boxes."""
        absent = [one for one in held if self.folder is None or not self.folder.has(one[0])]
        fill_(self.seed, absent)
        read = [one for one in held if self.folder is not None and self.folder.has(one[0])]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._read, read))

    def _read(self, one: Held) -> None:
        parameter, tensor, slices = one
        if tensor.numel():
            with torch.no_grad():
                tensor.copy_(self.box(parameter, slices))


def begin_(seed: int, weights: Path | str | None, held: Sequence[Held], *, replaced: bool) -> None:
    """Write the values with which a run begins.

    Args:
        seed: see Beginning.
        weights: see Beginning. Where nothing is written, the folder need not exist any more.
        held: what this rank holds.
        replaced: a checkpoint will be loaded over everything that is trained: only the rest is written.

    Raises:
        UserError: the folder cannot be used.
    """
    wanted = [one for one in held if not (replaced and one[0].trained)]
    if wanted:
        Beginning(seed, weights).write_(wanted)
