"""In: nothing. Out: a table of all dtypes: bytes per element, master dtype, names in torch, safetensors and numpy.
Does not import torch (torch_dtypes.py does): a plan is computed without torch."""

from __future__ import annotations

from typing import NamedTuple


class NumberFormat(NamedTuple):
    """One dtype, little-endian as in safetensors.

    Attributes:
        size_bytes: bytes per element.
        wide: dtype of master weights, of optimizer state and of gradients summed over micro-batches.
        torch: its name in `torch` and in a Hugging Face config.json.
        code: its name in a safetensors header.
        numpy: its type string in numpy; "" if numpy lacks this dtype.
    """

    size_bytes: int
    wide: str
    torch: str
    code: str
    numpy: str


NUMBER_FORMATS: dict[str, NumberFormat] = {
    "fp64": NumberFormat(8, "fp64", "float64", "F64", "<f8"),
    "fp32": NumberFormat(4, "fp32", "float32", "F32", "<f4"),
    "bf16": NumberFormat(2, "fp32", "bfloat16", "BF16", ""),
    "fp16": NumberFormat(2, "fp32", "float16", "F16", "<f2"),
    "int64": NumberFormat(8, "int64", "int64", "I64", "<i8"),
    "int32": NumberFormat(4, "int32", "int32", "I32", "<i4"),
    "int16": NumberFormat(2, "int16", "int16", "I16", "<i2"),
    "int8": NumberFormat(1, "int8", "int8", "I8", "|i1"),
    "uint8": NumberFormat(1, "uint8", "uint8", "U8", "|u1"),
    "bool": NumberFormat(1, "bool", "bool", "BOOL", "|b1"),
}
TRAINED = ("fp64", "fp32", "bf16")
"""Dtypes that `train.precision` accepts."""

FLOATS = (*TRAINED, "fp16")
"""Floating-point dtypes that files of weights or tensors may have."""

DTYPE_BYTES = {name: one.size_bytes for name, one in NUMBER_FORMATS.items()}
WIDE = {name: one.wide for name, one in NUMBER_FORMATS.items()}
NAME_OF_CODE = {one.code: name for name, one in NUMBER_FORMATS.items()}
