"""In: the table of number formats. Out: it agrees with torch, numpy and the safetensors library.
Does not test who reads the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from codescent.base.dtypes import FLOATS, NUMBER_FORMATS
from codescent.base.safetensors_header import encode_header, read_header
from codescent.base.torch_dtypes import CODE_DTYPES, TORCH_DTYPE


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_each_row_is_right_everywhere(name: str, tmp_path: Path) -> None:
    row, dtype = NUMBER_FORMATS[name], TORCH_DTYPE[name]
    assert dtype.itemsize == row.size_bytes
    assert row.wide in NUMBER_FORMATS
    if row.numpy:
        assert torch.from_numpy(np.zeros(1, row.numpy)).dtype == dtype
    save_file({"x": torch.ones(2, 3).to(dtype)}, tmp_path / "file")
    entries, first = read_header(tmp_path / "file")
    assert entries["x"]["dtype"] == row.code
    assert entries["x"]["shape"] == [2, 3]
    assert (tmp_path / "file").stat().st_size == first + 6 * row.size_bytes


@pytest.mark.parametrize("alignment", [8, 64])
def test_the_library_reads_the_header_that_we_write(tmp_path: Path, alignment: int) -> None:
    tensors = {name: torch.arange(6).reshape(2, 3).to(TORCH_DTYPE[name]) for name in FLOATS}
    named = [(name, NUMBER_FORMATS[name].code, tensor.shape) for name, tensor in tensors.items()]
    header, starts = encode_header(named, {"format": "pt"}, alignment)
    data = b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    (tmp_path / "file").write_bytes(header + data)
    assert len(header) == starts[0]
    assert starts[0] % alignment == 0
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    entries, first = read_header(tmp_path / "file")
    assert [first + entries[name]["data_offsets"][0] for name in tensors] == starts
    assert {CODE_DTYPES[entries[name]["dtype"]] for name in tensors} == {TORCH_DTYPE[name] for name in FLOATS}


def test_a_file_that_is_cut_short_is_no_safetensors_file(tmp_path: Path) -> None:
    header, _ = encode_header([("x", "F32", [4])], {})
    for content in (header + bytes(15), header + bytes(17), header[:20], b"", b"\xff" * 8 + b"{}"):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match=r"header"):
            read_header(tmp_path / "file")


def test_the_table_needs_no_torch() -> None:
    code = "import sys, codescent.base.dtypes, codescent.plan; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
