"""In: names, dtypes and shapes of tensors, or a safetensors file. Out: the file's header, encoded or decoded.
Does not write or read the bytes of the tensors, which follow the header."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from codescent.base.dtypes import DTYPE_BYTES, NAME_OF_CODE
from codescent.base.reading import open_regular

_MAX_BYTES = 100_000_000  # limit of the safetensors library


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str], alignment: int = 8
) -> tuple[bytes, list[int]]:
    """The header of a safetensors file (its README, "Format"), and the byte at which each tensor begins in the file.

    Args:
        tensors: name, dtype (as safetensors names it) and shape of each tensor, in the order of their bytes.
        alignment: the first tensor begins at a multiple of this many bytes.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, position = [], 0
    for name, code, shape in tensors:
        stop = position + math.prod(shape) * DTYPE_BYTES[NAME_OF_CODE[code]]
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, stop]}
        starts.append(position)
        position = stop
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The header entries of a file by tensor name, and the byte of the file from which `data_offsets` count.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError: not a complete safetensors file.
    """
    with open_regular(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        header_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_bytes <= min(_MAX_BYTES, size_bytes - 8):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {size_bytes}")
        header = json.loads(stream.read(header_bytes))
    first = 8 + header_bytes
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = first + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size_bytes != end:
        raise ValueError(f"ends at byte {size_bytes}, its header says {end}")
    return entries, first
