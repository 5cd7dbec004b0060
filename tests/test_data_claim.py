"""In: a folder that is being made, another process that takes it away. Out: it is claimed anew, or not held.
Does not prepare anything (test_data_prepare does)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from codescent.data.prepared import _is_held, claimed


def test_a_folder_that_goes_while_it_is_looked_at_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tmp_path / ".partial-x"
    partial.mkdir()
    handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    assert _is_held(partial, handle)
    partial.rmdir()
    monkeypatch.setattr(Path, "exists", lambda _: True)  # it was there a moment ago
    assert not _is_held(partial, handle)
    partial.mkdir()
    assert not _is_held(partial, handle)  # another one of that name
    os.close(handle)


def test_a_folder_that_goes_while_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.mkdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == ".partial-x":
            calls.append(path)
            if len(calls) == 1:
                raise FileExistsError(path)  # the one who made it has let go of it by now
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with claimed(tmp_path / ".partial-x"):
        assert len(calls) == 2
        assert (tmp_path / ".partial-x").is_dir()
    assert not list(tmp_path.iterdir())
