"""In: a folder that is being published, and what can go wrong meanwhile. Out: it is there whole, or nothing of it is.
Does not test what is published (test_record, test_checkpoint_faults, test_interchange, test_data_* do)."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from syncs import noted

from codescent.base.durable import replace_file, write_synced
from codescent.base.errors import UserError
from codescent.base.published import in_words, published

PUBLISH = """
import sys
from pathlib import Path
from codescent.base.durable import write_synced
from codescent.base.published import published
{before}
with published(Path(sys.argv[1])) as making:
    (making / "inner").mkdir()
    write_synced(making / "inner" / "a", bytes(100_000))
    write_synced(making / "b", "text")
"""

KILL = """
import os
seen = 0
def hook(event, arguments):
    global seen
    if event in ("os.mkdir", "os.rename") or (event == "open" and isinstance(arguments[2], int) and arguments[2] & 3):
        seen += 1
        if seen == {count}:
            os.kill(os.getpid(), 9)
sys.addaudithook(hook)
"""


def publish(path: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PUBLISH.format(before=before), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def is_whole(path: Path) -> bool:
    return len((path / "inner" / "a").read_bytes()) == 100_000 and (path / "b").read_text() == "text"


def test_it_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "above" / "new"
    with published(path) as making:
        write_synced(making / "a", "1")
        assert not path.exists()
        assert making.parent == path.parent
        assert making.name.startswith(".new.")
    assert (path / "a").read_text() == "1"
    assert list(path.parent.iterdir()) == [path]


def test_what_appears_is_on_the_disk_before_and_its_name_after(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with noted() as steps, published(path) as making:
        write_synced(making / "a", bytes(100_000))
        write_synced(making / "b", [b"te", b"xt"])
    at = steps.at(path)
    assert all(steps.is_synced(one, before=at) for one in (path / "a", path / "b", path))
    assert steps.is_synced(tmp_path, after=at)


def test_a_file_is_on_the_disk_before_it_replaces_another_and_its_name_after(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with noted() as steps:
        replace_file(path, "the new one")
    at = steps.at(path)
    assert steps.is_synced(path, before=at)
    assert steps.is_synced(tmp_path, after=at)


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new"
    path.mkdir()
    with published(path) as making:
        write_synced(making / "a", "1")
    assert (path / "a").read_text() == "1"


@pytest.mark.parametrize("error", [ValueError("ours"), UserError("the user's"), KeyboardInterrupt()])
def test_what_is_raised_inside_comes_out_and_nothing_is_left(tmp_path: Path, error: BaseException) -> None:
    def fill(making: Path) -> None:
        write_synced(making / "a", "1")
        raise error

    with pytest.raises(type(error)) as caught, published(tmp_path / "new") as making:
        fill(making)
    assert caught.value is error
    assert not list(tmp_path.iterdir())


def test_killed_at_each_point_it_is_whole_or_the_name_is_free(tmp_path: Path) -> None:
    for count in range(1, 20):
        path = tmp_path / str(count) / "new"
        done = publish(path, KILL.format(count=count))
        if path.exists():
            assert is_whole(path)
        else:
            assert done.returncode == -9
            assert publish(path).returncode == 0  # what the kill has left is in nobody's way
            assert is_whole(path)
        if done.returncode == 0:
            assert count > 5
            return
    pytest.fail("it never ended")


def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    done = publish(tmp_path / "new", limit)
    assert f"UserError: {tmp_path / 'new'}: File too large: nothing was saved" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_in_words(tmp_path: Path, number: int) -> None:
    def fill() -> None:
        with published(tmp_path / "new") as making:
            write_synced(making / "a", "1")
            raise OSError(number, os.strerror(number), str(making / "b"))

    with pytest.raises(UserError, match=r"new: no space left on the disk: nothing was saved$"):
        fill()
    assert not list(tmp_path.iterdir())


def test_nothing_is_begun_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4999))
    with (
        pytest.raises(UserError, match=r"no space left on the disk: it needs 5,000 bytes, 4,999 are free"),
        published(tmp_path / "new", 5000),
    ):
        pytest.fail("it was begun")
    assert not list(tmp_path.iterdir())
    with published(tmp_path / "new", 4999):
        pass
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_another_process_made_meanwhile_stays(tmp_path: Path, what: str) -> None:
    path = tmp_path / "new"

    def fill() -> None:
        with published(path, taken="is theirs") as making:
            write_synced(making / "a", "ours")
            theirs = path / "a" if what == "folder" else path
            theirs.parent.mkdir(exist_ok=True)
            theirs.write_text("theirs")

    with pytest.raises(UserError, match=r"new: is theirs$"):
        fill()
    assert (path / "a" if what == "folder" else path).read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_a_parent_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"file/new: (Not a directory|File exists)"),
        published(tmp_path / "file" / "new"),
    ):
        pytest.fail("it was begun")


def test_words_of_other_refusals_are_the_systems() -> None:
    assert in_words(PermissionError(errno.EACCES, "Permission denied", "x")) == "Permission denied"
    assert in_words(OSError(errno.ENOSPC, "8 bytes more are needed")) == (
        "no space left on the disk: 8 bytes more are needed"
    )
