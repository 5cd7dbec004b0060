"""In: parameters, and which slices this rank holds. Out: initial values, random or from a Hugging Face folder.
Does not choose the slices (the plan does). The value of an element is the same in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch

from codescent import models
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.huggingface.folder import Folder
from codescent.huggingface.merged import open_weights
from codescent.huggingface.peft_folder import PeftFolder, open_start
from codescent.huggingface.read import box
from codescent.models.initialize import fill_, initial_values
from codescent.models.lora.declare import is_magnitude, matrix_name
from codescent.operators.nf4 import rounded
from codescent.plan import ModelFacts, Parameter

BoxToFill = tuple[Parameter, torch.Tensor, tuple[slice, ...]]
"""A parameter, the memory of this rank's box of it, and the slices of the box."""

_THREADS = 4
_ROWS = 64
"""Rows of a matrix that are measured together."""


class InitialValues:
    """The values with which a run begins: read from a folder of weights if it has the parameter, otherwise random.

    Args:
        seed: of the run; it determines the random values.
        model: of the run, with its folder of weights, if it has one; else every value is random.
        precision: of the weights, whose rounded rows DoRA measures.

    Raises:
        UserError: the folder cannot be used.
    """

    def __init__(self, seed: int, model: ModelFacts, precision: str) -> None:
        self.seed, self._model, self._dtype = seed, model, TORCH_DTYPE[precision]
        self._rounded: tuple[str, torch.Tensor] = ("", torch.empty(0))  # the quantized matrix that was read last
        self.weights = None if model.weights is None else open_weights(model)

    def box(self, parameter: Parameter, slices: tuple[slice, ...]) -> torch.Tensor:
        """The values of a box of a parameter: in the folder's dtype if they are read, fp32 if they are random."""
        if self._starts(parameter) and self._start is not None:
            return box(self._start, parameter.name, slices)
        if is_magnitude(parameter):
            return self._lengths(parameter, slices)
        if self.weights is None or not self.weights.has(parameter):
            return initial_values(self.seed, parameter, slices)
        return self.weights.box(parameter.name, slices)

    def _is_random(self, parameter: Parameter) -> bool:
        if self._starts(parameter) or is_magnitude(parameter):
            return False
        return self.weights is None or not self.weights.has(parameter)

    def _starts(self, parameter: Parameter) -> bool:
        """Whether a folder of adapters has the parameter. Only trained parameters are asked for: it is opened then."""
        return parameter.trained and self._start is not None and parameter.name in self._start.parts

    @cached_property
    def _start(self) -> PeftFolder | None:
        return None if self.weights is None else start_of(self._model, self.weights.folder)

    def held(self, parameter: Parameter, slices: tuple[slice, ...]) -> torch.Tensor:
        """The values of a box of a frozen parameter as a run computes with them: in its precision, or quantized."""
        if not parameter.quantized:
            return self.box(parameter, slices).to(self._dtype)
        if self._rounded[0] != parameter.name:  # blocks and groups are those of the whole matrix
            every = tuple(slice(0, size) for size in parameter.shape)
            values = rounded(self.box(parameter, every).to(self._dtype), parameter.alternating)
            self._rounded = parameter.name, values
        return self._rounded[1][slices].clone()

    @cached_property
    def _matrices(self) -> dict[str, Parameter]:
        """The parameters of the model, by name."""
        own = models.parameters_of(self._model.kind, models.shape_of_facts(self._model), self._model.lora)
        return {parameter.name: parameter for parameter in own}

    def _lengths(self, magnitude: Parameter, slices: tuple[slice, ...]) -> torch.Tensor:
        """The lengths of rows of a matrix, with which DoRA begins (Liu et al. 2024, "DoRA", section 4.1).

        Rows are measured in blocks that begin at multiples of their size: so every rank rounds in the same way.
        """
        matrix = self._matrices[matrix_name(magnitude.name)]
        first, stop = slices[0].start // _ROWS * _ROWS, min(-(-slices[0].stop // _ROWS) * _ROWS, matrix.shape[0])
        values = self.held(matrix, (slice(first, stop), *(slice(0, size) for size in matrix.shape[1:])))
        lengths = torch.cat([rows.double().square().sum(-1).sqrt() for rows in torch.split(values.contiguous(), _ROWS)])
        return lengths[slices[0].start - first : slices[0].stop - first][(slice(None), *slices[1:])]

    def write_(self, boxes: Sequence[BoxToFill]) -> list[str]:
        """Write the values into the memory of `boxes`. Returns the parameters whose values in the folder are wrong.

        A wrong value is NaN or infinite.
        """
        read = [one for one in boxes if not self._is_random(one[0])]
        fill_(self.seed, [one for one in boxes if self._is_random(one[0])])
        # Lengths of rows are sums: they are computed in one thread, because ranks must round alike.
        summed, read = [one for one in read if is_magnitude(one[0])], [one for one in read if not is_magnitude(one[0])]
        with ThreadPoolExecutor(_THREADS) as pool:
            finite = [*pool.map(self._read, read), *map(self._read, summed)]
        return [parameter.name for (parameter, _, _), good in zip((*read, *summed), finite, strict=True) if not good]

    def _read(self, one: BoxToFill) -> bool:
        """Whether all values are finite."""
        parameter, tensor, slices = one
        if not tensor.numel():
            return True
        with torch.no_grad():
            values = self.box(parameter, slices)
            tensor.copy_(values)
        return is_finite(values)


def start_of(model: ModelFacts, folder: Folder) -> PeftFolder | None:
    """The adapters with which a run begins, given the folder of its weights; None: they are new. Raises UserError: see
    `open_start`."""
    lora = model.lora
    return None if lora is None or lora.start is None else open_start(Path(lora.start), folder, lora)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return bool(values.isfinite().all())


def write_initial_values_(
    seed: int, model: ModelFacts, precision: str, boxes: Sequence[BoxToFill], *, replaced: bool
) -> list[str]:
    """Write the values with which a run begins into the memory of `boxes`. Returns what `InitialValues.write_` does.

    Args:
        seed: see InitialValues.
        precision: see InitialValues.
        model: see InitialValues. The folder is opened only if there is a value to write.
        boxes: all boxes of this rank.
        replaced: a checkpoint will overwrite the trained parameters, so only frozen parameters are written.

    Raises:
        UserError: the folder cannot be used.
    """
    wanted = [one for one in boxes if not (replaced and one[0].trained)]
    return InitialValues(seed, model, precision).write_(wanted) if wanted else []
