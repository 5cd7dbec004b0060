"""In: a folder that is being made, another process that takes it away. Out: it is claimed anew, or not held.
Does not prepare anything (test_data_prepare does)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from codescent.data import prepared
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


def test_who_has_waited_for_a_folder_that_goes_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, is_claimed, is_waited_for = tmp_path / ".partial-x", threading.Event(), threading.Event()
    monkeypatch.setattr(prepared, "note", lambda said: is_waited_for.set())

    def fail_when_waited_for() -> None:
        with claimed(partial):
            is_claimed.set()
            assert is_waited_for.wait(60)

    other = threading.Thread(target=fail_when_waited_for)
    other.start()
    assert is_claimed.wait(60)
    with claimed(partial):
        (partial / "a").write_text("of who has waited")
    other.join()
    assert is_waited_for.is_set()


def test_what_another_has_built_while_one_waited_is_not_built_again(tmp_path: Path) -> None:
    target, made, is_claimed, may_build = tmp_path / "x", [], threading.Event(), threading.Event()

    def make(partial: Path) -> None:
        made.append(threading.current_thread().name)
        is_claimed.set()
        assert may_build.wait(60)
        (partial / prepared.DESCRIPTION).write_text("{}")

    def build() -> None:
        assert prepared.prepared(target, make, lambda _: None) == target

    others = [threading.Thread(target=build) for _ in range(2)]
    others[0].start()
    assert is_claimed.wait(60)
    others[1].start()
    time.sleep(0.2)  # it waits by now; if it does not, the folder is found at once, and nothing is lost
    may_build.set()
    for other in others:
        other.join(60)
    assert len(made) == 1
