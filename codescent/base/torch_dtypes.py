"""In: the table of number formats. Out: the same as torch.dtype, by our names and by the names of safetensors.
Does not add a format: `base/dtypes.py` does."""

from __future__ import annotations

import torch

from codescent.base.dtypes import NUMBER_FORMATS

TORCH_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, one.torch) for name, one in NUMBER_FORMATS.items()}
CODE_DTYPES: dict[str, torch.dtype] = {one.code: TORCH_DTYPE[name] for name, one in NUMBER_FORMATS.items()}
DTYPE_CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in CODE_DTYPES.items()}
