"""In: arrays in files, whole, and changed while they are read. Out: numpy's items, or a sentence; never a SIGBUS.
Does not know datasets."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.data.file_array import FileArray, Watched, open_npy
from codescent.data.prepared import write_array

DTYPES = [np.dtype("<u2"), np.dtype([("tokens", "<u2", (3,)), ("length", "<i4")]), np.dtype(("<f4", (2, 3)))]


def made(path: Path, array: np.ndarray) -> FileArray:
    write_array(path, array)
    return open_npy(path, hashlib.sha256(path.read_bytes()).hexdigest())


@given(data=st.data(), dtype=st.sampled_from(DTYPES), length=st.integers(1, 40))
def test_items_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: np.dtype, length: int
) -> None:
    array = np.frombuffer(np.random.default_rng(length).bytes(length * dtype.itemsize), "u1")
    whole = array.view(dtype.base).reshape(length, *dtype.shape)
    found = made(tmp_path_factory.mktemp("array") / "a.npy", whole)
    assert (len(found), found.shape, found.dtype) == (length, whole.shape, whole.dtype)
    numbers = np.array(data.draw(st.lists(st.integers(0, length - 1), max_size=6)), np.int64)
    assert found[numbers].tobytes() == whole[numbers].tobytes()
    first, stop = data.draw(st.integers(-length, length)), data.draw(st.integers(-length, 2 * length))
    assert found[first:stop].tobytes() == whole[first:stop].tobytes()
    assert found[:].shape == whole.shape
    count = data.draw(st.integers(0, length))
    firsts = np.arange(length - count + 1)
    expected = [whole[begin : begin + count].tobytes() for begin in firsts]
    assert found.windows(firsts, count).tobytes() == b"".join(expected)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.npy"


@pytest.fixture
def array(path: Path) -> FileArray:
    return made(path, np.arange(100_000, dtype="<u2"))


def test_a_file_that_is_cut_is_told(array: FileArray, path: Path) -> None:
    os.truncate(path, 5000)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"a\.npy: truncated while it was in use: ends at byte 5000, had 200128: restore the file$"
        ):
            array[90_000:90_010]


def test_a_file_that_is_cut_between_check_and_read_is_told(array: FileArray, path: Path) -> None:
    watched = Watched(path)
    os.truncate(path, 5000)
    with pytest.raises(UserError, match="truncated while it was in use: ends at byte 100000"):
        watched.read_into(memoryview(bytearray(10)), 100_000)


def test_other_bytes_are_told_and_the_same_bytes_are_not(array: FileArray, path: Path) -> None:
    os.utime(path)
    path.chmod(0o600)
    os.link(path, path.with_name("other name"))
    assert array[7:9].tolist() == [7, 8]
    whole, times = path.read_bytes(), path.stat()
    with path.open("r+b") as stream:
        stream.seek(100_000)
        stream.write(b"\0\0")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UserError, match=r"a\.npy: changed while it was in use"):
        array[7:9]
    path.write_bytes(whole)  # put back as it was
    assert array[7:9].tolist() == [7, 8]
    path.unlink()  # open, it is still there
    assert array[7:9].tolist() == [7, 8]


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Watched(tmp_path / "nothing")
