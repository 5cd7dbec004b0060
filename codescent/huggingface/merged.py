"""In: a folder of weights, a folder of `peft` adapters. Out: boxes of the weights with the adapters added.
Does not check the settings of the adapters (peft_folder.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from codescent.base.errors import UserError
from codescent.base.reading import refuse_unreadable
from codescent.hub.cache import weights_place
from codescent.huggingface.correspond import TheirTensor
from codescent.huggingface.folder import Folder, open_folder
from codescent.huggingface.peft import PREFIX
from codescent.huggingface.peft_folder import PeftFolder, name_of, open_merged
from codescent.huggingface.read import box
from codescent.plan import ModelFacts, Parameter


@dataclass(frozen=True)
class Weights:
    """The weights with which a run begins: those of a folder, with adapters merged if `adapters` is not None."""

    folder: Folder
    adapters: PeftFolder | None = None
    _last: dict[str, torch.Tensor] = field(default_factory=dict)  # the parameter that was merged last
    _lock: Lock = field(default_factory=Lock)

    def has(self, parameter: Parameter) -> bool:
        """See `Folder.has`."""
        return self.folder.has(parameter)

    def box(self, name: str, slices: Sequence[slice]) -> torch.Tensor:
        """See `read.box`. A merged parameter is in fp32, or in fp64 if the folder is; the last one stays in memory."""
        if self.adapters is None or not any(map(self._changes, self.folder.parts[name])):
            return box(self.folder, name, slices)
        with self._lock:
            if name not in self._last:
                merged = self._merged(name)
                self._last.clear()
                self._last[name] = merged
            return self._last[name][tuple(slices)].clone()

    def identity(self) -> dict[str, Any]:
        """See `Folder.identity`."""
        found = self.folder.identity()
        return found if self.adapters is None else {**found, "adapters": self.adapters.fingerprint}

    def matches(self, identity: Mapping[str, Any]) -> bool:
        """See `Folder.matches`."""
        own = None if self.adapters is None else self.adapters.fingerprint
        return self.folder.matches(identity) and own == identity.get("adapters")

    def _changes(self, part: TheirTensor) -> bool:
        assert self.adapters is not None
        has_adapter = part.tensor.endswith(".weight") and name_of(part, "lora_A.weight") in self.adapters.tensors
        return has_adapter or PREFIX + part.tensor in self.adapters.tensors

    def _merged(self, name: str) -> torch.Tensor:
        """W + scale B A, with DoRA times m / |W + scale B A| (Liu et al. 2024, equation 5); or what replaces W."""
        parts = self.folder.parts[name]
        shape = parts[0].parameter.shape
        value = box(self.folder, name, [slice(0, size) for size in shape])
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        for part in filter(self._changes, parts):
            at = np.ix_(*(part.of_ours(dim) for dim in range(len(shape))))
            if part.rows:  # some rows of a tensor of theirs
                raise UserError(f"{part.tensor}: adapters of a part of a tensor cannot be merged")
            index = tuple(torch.from_numpy(one) for one in at)
            value[index] = _as_ours(part, self._of_part(part, _as_theirs(part, value[index]))).to(value.dtype)
        return value

    def _of_part(self, part: TheirTensor, value: torch.Tensor) -> torch.Tensor:
        """Their tensor, [outputs, inputs] or in the order in which they store it, with its adapter."""
        assert self.adapters is not None
        if PREFIX + part.tensor in self.adapters.tensors:
            return self._read(PREFIX + part.tensor, value.dtype)
        a_RI, b_OR = (self._read(name_of(part, matrix), value.dtype) for matrix in ("lora_A.weight", "lora_B.weight"))
        stands = tuple(value.shape) == (b_OR.shape[0], a_RI.shape[1])
        transposed = part.ours_of[0] > part.ours_of[-1]  # [inputs, outputs], as GPT-2 stores it
        rows = value.t() if transposed else value
        if (not stands and not transposed) or tuple(rows.shape) != (b_OR.shape[0], a_RI.shape[1]):
            raise UserError(f"{self.adapters.path}: {name_of(part, 'lora_B.weight')} does not fit {part.tensor}")
        rows = rows + self.adapters.scale * (b_OR @ a_RI)
        if self.adapters.dora:
            magnitude = self._read(name_of(part, "lora_magnitude_vector"), value.dtype)
            rows = rows * (magnitude.flatten() / rows.norm(dim=1))[:, None]
        return rows.t() if transposed else rows

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        assert self.adapters is not None
        refuse_unreadable(self.adapters.tensors[name].file)
        with safe_open(self.adapters.tensors[name].file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor.to(dtype)


def open_weights(model: ModelFacts) -> Weights:
    """The weights with which a run begins. Raises UserError: see `open_folder` and `merged_weights`."""
    assert model.weights is not None
    folder = open_folder(weights_place(model.weights), model)
    return merged_weights(folder, None if model.adapters is None else Path(model.adapters))


def merged_weights(folder: Folder, adapters: Path | None) -> Weights:
    """The weights of a folder, with a folder of adapters merged. Raises UserError: see `open_merged`."""
    return Weights(folder, None if adapters is None else open_merged(adapters, folder))


def _as_theirs(part: TheirTensor, ours: torch.Tensor) -> torch.Tensor:
    absent = [dim for dim in range(ours.ndim) if dim not in part.ours_of]
    return ours.permute(*absent, *part.ours_of).reshape(part.shape)


def _as_ours(part: TheirTensor, theirs: torch.Tensor) -> torch.Tensor:
    dims = len(part.parameter.shape)
    absent = [dim for dim in range(dims) if dim not in part.ours_of]
    order = [*absent, *part.ours_of]
    return theirs[(None,) * len(absent)].permute([order.index(dim) for dim in range(dims)])
