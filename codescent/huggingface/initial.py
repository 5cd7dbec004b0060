"""In: parameters, and which slices this rank holds. Out: initial values, random or from a Hugging Face folder.
Does not choose the slices (the plan does). The value of an element is the same in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from codescent.hub.cache import weights_place
from codescent.huggingface.folder import open_folder
from codescent.huggingface.read import box
from codescent.models.initialize import fill_, initial_values
from codescent.plan import ModelFacts, Parameter

BoxToFill = tuple[Parameter, torch.Tensor, tuple[slice, ...]]
"""A parameter, the memory of this rank's box of it, and the slices of the box."""

_THREADS = 4


class InitialValues:
    """The values with which a run begins: read from a folder of weights if it has the parameter, otherwise random.

    Args:
        seed: of the run; it determines the random values.
        model: of the run, with its folder of weights, if it has one; else every value is random.

    Raises:
        UserError: the folder cannot be used.
    """

    def __init__(self, seed: int, model: ModelFacts) -> None:
        self.seed = seed
        self.folder = None if model.weights is None else open_folder(weights_place(model.weights), model)

    def box(self, parameter: Parameter, slices: tuple[slice, ...]) -> torch.Tensor:
        """The values of a box of a parameter: in the folder's dtype if they are read, fp32 if they are random."""
        if self.folder is None or not self.folder.has(parameter):
            return initial_values(self.seed, parameter, slices)
        return box(self.folder, parameter.name, slices)

    def write_(self, boxes: Sequence[BoxToFill]) -> list[str]:
        """Write the values into the memory of `boxes`. Returns the parameters whose values in the folder are wrong.

        A wrong value is NaN or infinite.
        """
        absent = [one for one in boxes if self.folder is None or not self.folder.has(one[0])]
        fill_(self.seed, absent)
        read = [one for one in boxes if self.folder is not None and self.folder.has(one[0])]
        with ThreadPoolExecutor(_THREADS) as pool:
            finite = list(pool.map(self._read, read))
        return [parameter.name for (parameter, _, _), good in zip(read, finite, strict=True) if not good]

    def _read(self, one: BoxToFill) -> bool:
        """Whether all values are finite."""
        parameter, tensor, slices = one
        if not tensor.numel():
            return True
        with torch.no_grad():
            values = self.box(parameter, slices)
            tensor.copy_(values)
        return is_finite(values)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return bool(values.isfinite().all())


def write_initial_values_(seed: int, model: ModelFacts, boxes: Sequence[BoxToFill], *, replaced: bool) -> list[str]:
    """Write the values with which a run begins into the memory of `boxes`. Returns what `InitialValues.write_` does.

    Args:
        seed: see InitialValues.
        model: see InitialValues. The folder is opened only if there is a value to write.
        boxes: all boxes of this rank.
        replaced: a checkpoint will overwrite the trained parameters, so only frozen parameters are written.

    Raises:
        UserError: the folder cannot be used.
    """
    wanted = [one for one in boxes if not (replaced and one[0].trained)]
    return InitialValues(seed, model).write_(wanted) if wanted else []
