"""In: files that are changed and swapped, notes that are damaged. Out: a file's sha256 is never that of old bytes.
Does not open datasets (test_data_damage.py does)."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path

import pytest

from codescent.base.cache import cache_folder
from codescent.base.home import expanded
from codescent.base.sealed import read_sealed
from codescent.data import verified
from codescent.data.verified import hashes

FILES = dict.fromkeys(("a.bin", "b.bin"))


def truth(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


def settle() -> None:
    """Wait until files written so far are noted when they are read."""
    time.sleep(verified.SETTLED_NS / 1e9 + 0.05)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "SETTLED_NS", 100_000_000)
    made = tmp_path / "data"
    made.mkdir()
    for name in FILES:
        (made / name).write_bytes(random.Random(name).randbytes(3_000_000))
    return made


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read, in any order."""
    names: list[str] = []
    real = verified._read

    def noting(path: Path, advance: verified.Advance) -> object:
        names.append(path.name)
        return real(path, advance)

    monkeypatch.setattr(verified, "_read", noting)
    return names


def note() -> Path:
    (found,) = (cache_folder() / verified.NOTES).glob("*.json")
    return found


def test_a_file_is_read_once_until_it_changes_whatever_its_times_are_set_to(folder: Path, read: list[str]) -> None:
    settle()
    assert hashes(folder, FILES) == (truth(folder), {})
    assert sorted(read) == ["a.bin", "b.bin"]
    assert hashes(folder, FILES) == (truth(folder), {})
    assert len(read) == 2
    times = (folder / "a.bin").stat()
    with (folder / "a.bin").open("r+b") as stream:
        stream.write(b"other")
    os.utime(folder / "a.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (folder / "a.bin").stat().st_mtime_ns == times.st_mtime_ns
    assert hashes(folder, FILES) == (truth(folder), {})
    assert read[2:] == ["a.bin"]
    assert hashes(folder, FILES, again=True) == (truth(folder), {})
    assert sorted(read[3:]) == ["a.bin", "b.bin"]


def test_files_that_changed_places_are_read_again(folder: Path) -> None:
    settle()
    before, _ = hashes(folder, FILES)
    for old, new in (("a.bin", "c"), ("b.bin", "a.bin"), ("c", "b.bin")):
        (folder / old).rename(folder / new)
    assert hashes(folder, FILES)[0] == {"a.bin": before["b.bin"], "b.bin": before["a.bin"]}


def test_what_was_just_written_is_not_noted(folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second change in the same tick of the clock would have the same times."""
    monkeypatch.setattr(verified, "SETTLED_NS", 3600 * 10**9)
    for _ in range(2):
        assert hashes(folder, FILES)[0] == truth(folder)
    assert len(read) == 4
    assert not (cache_folder() / verified.NOTES).exists()


def test_a_note_of_another_sha256_than_expected_does_not_count(folder: Path, read: list[str]) -> None:
    """What was read wrongly once, perhaps by bad memory, is read again."""
    settle()
    hashes(folder, FILES)
    assert hashes(folder, {"a.bin": "0" * 64})[0] == {"a.bin": truth(folder)["a.bin"]}
    assert read[2:] == ["a.bin"]


def test_a_damaged_note_does_not_count(folder: Path) -> None:
    settle()
    hashes(folder, FILES)
    rng, whole = random.Random(3), note().read_bytes()
    with (folder / "a.bin").open("r+b") as stream:
        stream.write(b"other")
    expected = truth(folder)
    for _ in range(60):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        note().write_bytes(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
        assert hashes(folder, FILES)[0] == expected
    note().write_bytes(whole)  # another process of long ago
    assert hashes(folder, FILES)[0] == expected
    settle()
    hashes(folder, FILES)
    found = read_sealed(note())
    assert found is not None
    assert {name: entry["sha256"] for name, entry in found["files"].items()} == expected


def test_a_process_relies_on_no_note_of_what_it_has_read_itself(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a rank that meets the others anew after a loss reads the whole corpus again."""
    monkeypatch.setattr(verified, "_from_notes", {})  # of other tests of this process
    settle()
    hashes(folder, FILES)
    hashes(folder, FILES)
    assert (len(read), verified.relied_on()) == (2, {})
    monkeypatch.setattr(verified, "_own", {})  # as in another process
    hashes(folder, FILES)
    assert {*verified.relied_on()} == {folder / name for name in FILES}


@pytest.mark.parametrize("how", ["missing", "damaged", "of another file"])
def test_blocks_are_unknown_if_their_checksums_are_missing_or_damaged(
    how: str, folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle()
    hashes(folder, FILES)
    of_a, of_b = (verified._place_of_sums(note(), name) for name in FILES)
    match how:
        case "missing":
            of_a.unlink()
        case "damaged":
            of_a.write_bytes(b"\1" + of_a.read_bytes()[1:])
        case _:
            of_a.write_bytes(of_b.read_bytes())
    monkeypatch.setattr(verified, "_sums", {})  # as in another process
    monkeypatch.setattr(verified, "_from_notes", {})
    monkeypatch.setattr(verified, "_own", {})
    sha256 = hashes(folder, FILES)[0]["a.bin"]
    assert verified.sums_of(folder / "a.bin", sha256) is None
    assert verified.unsummed() == {folder / "a.bin": 3_000_000}
    with verified.without_notes(verified.unsummed()):
        hashes(folder, FILES)
    assert read[2:] == ["a.bin"]
    assert verified.unsummed() == {}
    monkeypatch.setattr(verified, "_sums", {})
    assert verified.sums_of(folder / "a.bin", sha256) is not None, "another rank knows them, too"


def test_without_a_place_for_notes_every_file_is_read(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle()
    (folder.parent / "cache").write_text("no folder")
    for _ in range(2):
        assert hashes(folder, FILES) == (truth(folder), {})
    assert len(read) == 4
    assert capsys.readouterr().err == ""  # so little is read at once
    monkeypatch.setattr(verified, "LONG_BYTES", 1_000_000)
    hashes(folder, FILES)
    assert "cannot be written (Not a directory)" in capsys.readouterr().err
    monkeypatch.setattr(verified, "cache_folder", lambda: expanded("~nobody-of-this-name/x"))
    assert hashes(folder, FILES) == (truth(folder), {})
    assert "there is no home folder" in capsys.readouterr().err


def test_files_that_cannot_be_read_are_told_by_name(folder: Path) -> None:
    (folder / "a.bin").unlink()
    found, problems = hashes(folder, FILES)
    assert found == {"b.bin": truth_of(folder / "b.bin")}
    assert problems == {"a.bin": f"{folder / 'a.bin'}: cannot be read: No such file or directory"}


def truth_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
