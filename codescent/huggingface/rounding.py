"""In: the values of tensors before and after they are rounded to the dtype of a file. Out: which differ, and how far.
Does not round and does not write (write.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from codescent.base.counted import counted
from codescent.base.errors import UserError


@dataclass
class Rounding:
    """How far the tensors of an export are from the trained values.

    Attributes:
        dtype: of the files, as the user writes it.
        differences: by tensor, the norm of what rounding changes / the norm of the tensor; 0: nothing is changed.
        infinite: tensors with finite values that this dtype makes infinite.
    """

    dtype: str
    differences: dict[str, float] = field(default_factory=dict)
    infinite: list[str] = field(default_factory=list)
    _squares: tuple[float, float] = (0.0, 0.0)

    def add(self, trained: torch.Tensor, rounded: torch.Tensor) -> None:
        """Count a block of the tensor that `end` names."""
        if rounded.dtype == trained.dtype:
            return
        wide = trained.double()
        finite = wide.isfinite()
        changed = torch.where(finite, rounded.double() - wide, 0.0)
        values = torch.where(finite, wide, 0.0)
        change, size = self._squares
        self._squares = change + float(changed.square().sum()), size + float(values.square().sum())

    def end(self, tensor: str) -> None:
        """All blocks of this tensor were counted."""
        (change, size), self._squares = self._squares, (0.0, 0.0)
        if change == float("inf"):
            self.infinite.append(tensor)
        self.differences[tensor] = (change / size) ** 0.5 if size else 0.0

    def check(self) -> None:
        """Raise UserError: the dtype makes finite values infinite."""
        if self.infinite:
            names = ", ".join(self.infinite[:3]) + (", ..." if len(self.infinite) > 3 else "")
            raise UserError(
                f"--dtype {self.dtype}: {counted(len(self.infinite), 'tensor')} would have infinite values ({names}): "
                "they are too large for it; give --dtype bf16 or fp32"
            )

    def lines(self) -> Iterator[str]:
        """What the reader of an export must know, in a sentence."""
        found = {name: far for name, far in self.differences.items() if far}
        if not found:
            yield "every value is the trained one"
            return
        name = max(found, key=lambda one: found[one])
        of = f"{len(found)} of {counted(len(self.differences), 'tensor')}"
        yield f"{self.dtype} rounds {of}; most of all {name}, by {found[name]:.2g} of its norm"
