"""In: preparations killed with kill -9, starved of disk, or interrupted. Out: the next one makes the same bytes.
Does not use stand-ins: real processes, real signals, a real full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from syncs import noted

from codescent.base.errors import UserError
from codescent.data.text import chunks, shards
from codescent.data.text import prepare as preparing
from codescent.data.text.dataset import open_dataset
from codescent.data.text.prepare import prepare

SIZES = {"chunks.CHUNK_CHARS": 1 << 14, "chunks.SEARCH_CHARS": 1 << 12, "shards.SHARD_TOKENS": 20_000}
PREPARE = """
import os, signal, sys
from pathlib import Path
from codescent.data.text import chunks
from codescent.data.text import prepare as preparing
from codescent.data.text import shards
chunks.CHUNK_CHARS, chunks.SEARCH_CHARS, shards.SHARD_TOKENS = {chunk}, {search}, {shard}
preparing.JOURNAL_EVERY_CHUNKS = {journal}
{before}
preparing.prepare(sys.argv[1], sys.argv[2], Path(sys.argv[3]), num_workers=int(sys.argv[4]))
"""
# Sent by the kernel in the middle of the n-th fsync: between any two steps of the journal.
KILL_AT_FSYNC = """
real, count = os.fsync, 0
def fsync(handle):
    global count
    count += 1
    if count == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle)
os.fsync = fsync
"""
LIMIT_FILE_SIZE = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
"""


def command(text: Path, tokenizer: str, root: Path, workers: int = 1, before: str = "", journal: int = 3) -> list[str]:
    sizes = dict(zip(("chunk", "search", "shard"), SIZES.values()))
    code = PREPARE.format(before=before, journal=journal, **sizes)
    return [sys.executable, "-c", code, str(text), tokenizer, str(root), str(workers)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr({"chunks": chunks, "shards": shards}[name.split(".")[0]], name.split(".")[1], size)
    monkeypatch.setattr(preparing, "JOURNAL_EVERY_CHUNKS", 3)


@pytest.fixture(scope="module")
def text(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes((data_dir / "prose" / "thoreau-walden.md").read_bytes())
    return path


def test_tokens_are_on_the_disk_before_the_journal_says_so(tmp_path: Path) -> None:
    writer = shards.ShardWriter(tmp_path, np.dtype("<u2"), "tokenizer")
    for split in writer.splits.values():
        split.write(np.arange(25_000))  # one whole shard, and one that is open
    with noted() as steps:
        writer.journal()
    at = steps.at(tmp_path / "progress.json")
    opened = [tmp_path / f"{split}_000001.bin" for split in writer.splits]
    assert all(steps.is_synced(path, before=at) for path in (*opened, tmp_path, tmp_path / "progress.json"))
    assert steps.is_synced(tmp_path, after=at)
    with noted() as steps:
        writer.finish()
    assert all(steps.is_synced(path) for path in (*opened, tmp_path))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def only(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


@pytest.mark.parametrize("tokenizer", ["char", pytest.param("bpe:300", marks=pytest.mark.slow)])
def test_killed_at_any_step_and_made_again(tmp_path: Path, text: Path, tokenizer: str) -> None:
    expected = files_of(prepare(str(text), tokenizer, tmp_path / "whole"))
    assert len(expected) > 20
    continued = 0
    for number in (1, 2, 3, 6, 12, 20, 31, 40, 50):
        root = tmp_path / f"killed{number}"
        run = subprocess.run(command(text, tokenizer, root, before=KILL_AT_FSYNC.format(number=number)), timeout=60)
        assert run.returncode == -signal.SIGKILL
        partial = only(root)
        assert partial.name.startswith(".partial-")  # nothing under the dataset's name
        journal = partial / shards.JOURNAL
        continued += journal.exists() and json.loads(journal.read_text())["chunks_done"] > 0
        made = prepare(str(text), tokenizer, root)
        assert files_of(made) == expected
        assert only(root) == made
    assert continued >= 5


def test_what_a_kill_left_half_written_does_not_stay(tmp_path: Path, text: Path) -> None:
    root = tmp_path / "datasets"
    subprocess.run(command(text, "char", root, before=KILL_AT_FSYNC.format(number=40)), timeout=60)
    for name in (".progress.json.partial", ".scan.json.partial", "tokenizer.new"):
        (only(root) / name).write_text("{")
    assert files_of(prepare(str(text), "char", root)) == files_of(prepare(str(text), "char", tmp_path / "whole"))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a shard that was closed": ("train_000001.bin", flipped, "changed: sha256"),
    "one that is gone": ("train_000001.bin", Path.unlink, "cannot be read: No such file"),
    "the open shard": ("the last shard", flipped, "changed: sha256"),
    "the open shard, cut": ("the last shard", cut, "changed: sha256"),
    "the open shard, gone": ("the last shard", Path.unlink, "missing"),
    "the journal": (shards.JOURNAL, flipped, "damaged, or of an earlier version"),
    "the first reading": ("scan.json", flipped, "damaged, or of an earlier version"),
    "the first reading, cut": ("scan.json", cut, "damaged, or of an earlier version"),
    "the tokenizer": ("tokenizer.json", flipped, "changed since it was written: it is built again"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_a_kill_left_and_damage_changed_is_made_again(
    tmp_path: Path, text: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer is given by its name: the damaged file of it was taken over, and hashed as right."""
    root, (name, damage, told) = tmp_path / "datasets", DAMAGES[what]
    tokenizer = "bpe:300" if what == "the tokenizer" else "byte"
    subprocess.run(command(text, tokenizer, root, before=KILL_AT_FSYNC.format(number=45)), timeout=60)
    partial = only(root)
    journal = json.loads((partial / shards.JOURNAL).read_text())
    closed = len(journal["train"]["shards"])
    assert closed > 5
    assert 0 < journal["train"]["open_tokens"] < shards.SHARD_TOKENS
    name = f"train_{closed:06d}.bin" if name == "the last shard" else name
    damage(partial / name)
    made = prepare(str(text), tokenizer, root)
    said = capsys.readouterr().err
    assert said.startswith(f"{partial / name}: ")
    assert told in said
    assert said.count("\n") == 1
    assert files_of(made) == files_of(prepare(str(text), tokenizer, tmp_path / "whole"))
    open_dataset(made).verify()


def test_killed_again_and_again_with_several_threads(tmp_path: Path, text: Path) -> None:
    whole = prepare(str(text), "bpe:300", tmp_path / "whole")
    root = tmp_path / "datasets"
    for wanted in (2, 8, 14):
        run = subprocess.Popen(command(text, "bpe:300", root, workers=2, journal=1))
        wait_for_chunks(run, root, wanted)
        run.kill()
        assert run.wait() == -signal.SIGKILL
    assert files_of(prepare(str(text), "bpe:300", root, num_workers=2)) == files_of(whole)


def wait_for_chunks(run: subprocess.Popen[Any], root: Path, wanted: int) -> None:
    """Return once the journal tells of so many chunks."""
    while run.poll() is None:
        for journal in root.glob(f".partial-*/{shards.JOURNAL}"):
            if json.loads(journal.read_text())["chunks_done"] >= wanted:
                return
        time.sleep(0.001)
    raise AssertionError("the preparation ended before it could be killed")


def test_what_is_done_is_not_done_again(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, encoded = preparing.encode_chunks, []

    def noted(*arguments: Any) -> Iterator[Any]:
        for pair in original(*arguments):
            encoded.append(pair)
            yield pair

    monkeypatch.setattr(preparing, "encode_chunks", noted)
    prepare(str(text), "char", tmp_path / "whole")
    total = len(encoded)
    encoded.clear()
    root = tmp_path / "datasets"
    subprocess.run(command(text, "char", root, before=KILL_AT_FSYNC.format(number=40)), timeout=60)
    done = json.loads((only(root) / shards.JOURNAL).read_text())["chunks_done"]
    prepare(str(text), "char", root)
    assert done > 10
    assert len(encoded) == total - done


def test_a_text_that_changed_after_the_kill_is_read_anew(tmp_path: Path, text: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_bytes(text.read_bytes())
    root = tmp_path / "datasets"
    subprocess.run(command(mine, "char", root, before=KILL_AT_FSYNC.format(number=40)), timeout=60)
    assert (only(root) / shards.JOURNAL).exists()
    mine.write_text(text.read_bytes().decode().upper()[1000:])
    dataset = open_dataset(prepare(str(mine), "char", root))
    dataset.verify()
    assert dataset.tokenizer is not None
    decoded = [dataset.tokenizer.decode(tokens) for tokens in dataset.train.read(np.arange(300), 64)[:, :-1].tolist()]
    assert "".join(decoded) == mine.read_bytes().decode()[: 300 * 64]


def test_a_file_size_limit_is_told_and_nothing_half_made_has_the_name(tmp_path: Path, text: Path) -> None:
    for limit, kept in ((1000, False), (36_000, True)):  # less than the first chunk; less than the first shard
        root = tmp_path / f"limit{limit}"
        limited = command(text, "char", root, before=LIMIT_FILE_SIZE.format(limit=limit), journal=1)
        run = subprocess.run(limited, capture_output=True, text=True, timeout=60)
        assert run.returncode == 1
        assert "UserError: " in run.stderr
        assert "no space left on the disk" in run.stderr
        assert ("the finished part is saved" in run.stderr) == kept
        assert [path.name.startswith(".partial-") for path in root.iterdir()] == [True] * kept
        assert files_of(prepare(str(text), "char", root)) == files_of(prepare(str(text), "char", tmp_path / "whole"))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_keeps_what_is_done_and_goes_on_when_there_is_room(
    tmp_path: Path, text: Path, tiny_disk: Path
) -> None:
    with pytest.raises(UserError, match="no space left on the disk") as caught:
        prepare(str(text), "bpe:300", tiny_disk)
    assert "bytes were written of about" in str(caught.value)
    assert "the finished part is saved" in str(caught.value)
    partial = only(tiny_disk)
    assert json.loads((partial / shards.JOURNAL).read_text())["chunks_done"] > 5
    subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True)
    assert files_of(prepare(str(text), "bpe:300", tiny_disk)) == files_of(prepare(str(text), "bpe:300", tmp_path / "w"))


def test_a_disk_that_is_too_small_is_refused_before_it_is_full(text: Path, tiny_disk: Path) -> None:
    with pytest.raises(UserError, match="bytes more are needed"):
        prepare(str(text), "byte", tiny_disk)
    assert list(tiny_disk.iterdir()) == []


def test_ctrl_c_keeps_what_was_done(tmp_path: Path, text: Path) -> None:
    root = tmp_path / "datasets"
    run = subprocess.Popen(command(text, "bpe:300", root, workers=2, journal=1), stderr=subprocess.PIPE, text=True)
    wait_for_chunks(run, root, 3)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert errors.count("KeyboardInterrupt") == 1
    assert json.loads((only(root) / shards.JOURNAL).read_text())["chunks_done"] >= 3
    assert files_of(prepare(str(text), "bpe:300", root)) == files_of(prepare(str(text), "bpe:300", tmp_path / "whole"))


@pytest.mark.parametrize(
    ("tokenizer", "kind"),
    [
        ("byte", "txt"),
        ("char", "jsonl"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("byte", "jsonl"), ("char", "txt"))),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_does_not_grow_with_the_text(tmp_path: Path, tokenizer: str, kind: str) -> None:
    line = "All work and no play makes Jack a dull boy — café, кафе, 漢字, 🎭.\n" * 20
    if kind == "jsonl":
        line = json.dumps({"text": line}, ensure_ascii=False) + "\n"
    peaks = []
    for megabytes in (8, 80):
        path = tmp_path / f"{megabytes}.{kind}"
        path.write_text(line * (megabytes * 1_000_000 // len(line.encode())))
        code = (
            "import sys; from pathlib import Path; from codescent.data.text.prepare import prepare;"
            "prepare(sys.argv[1], sys.argv[2], Path(sys.argv[3]));"
            "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
        )
        arguments = [sys.executable, "-c", code, str(path), tokenizer, str(tmp_path / "datasets")]
        peaks.append(int(subprocess.run(arguments, capture_output=True, check=True, timeout=100).stdout))
    assert peaks[1] < 150_000, f"KiB: {peaks}"
    assert peaks[1] - peaks[0] < 15_000, f"KiB at 8 and 80 MB of text: {peaks}"
