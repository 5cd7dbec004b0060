"""In: the dtype table of base/dtypes.py. Out: torch.dtype for each of our dtype names and each safetensors name.
Does not define a dtype (base/dtypes.py does)."""

from __future__ import annotations

import torch

from codescent.base.dtypes import NUMBER_FORMATS

TORCH_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, one.torch) for name, one in NUMBER_FORMATS.items()}
CODE_DTYPES: dict[str, torch.dtype] = {one.code: TORCH_DTYPE[name] for name, one in NUMBER_FORMATS.items()}
DTYPE_CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in CODE_DTYPES.items()}
