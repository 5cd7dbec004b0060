"""In: checkpoints with bytes flipped, cut, deleted, swapped or forged. Out: whether each is refused, by name, in time.
Does not test what a kill leaves: test_checkpoint_faults does."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import make_tensors

from codescent.checkpoint import parts as checkpoint_parts
from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints, Saved, read_tensors
from codescent.checkpoint.manifest import _fills, read_manifest

TRIALS = 80
SENTINEL = 77


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    """Steps 1 and 2, several files each."""
    monkeypatch.setattr(checkpoint_parts, "PART_BYTES", 256 << 10)
    made = Checkpoints(tmp_path / "checkpoints", 2, keep_best=True)
    for step in (1, 2):
        made.save(step, make_tensors(step), {"step": step}, 1.0 / step)
    return made


def newest_of(checkpoints: Checkpoints) -> Saved:
    saved = checkpoints.latest()
    assert saved is not None
    assert saved.step == 2
    return saved


def refused(checkpoints: Checkpoints, saved: Saved, file: Path, words: str) -> str:
    """Loading must fail, name the file, say the words, and leave every tensor as it was. Returns the message."""
    found = {name: torch.full_like(tensor, SENTINEL) for name, tensor in make_tensors(2).items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(saved, found)
    message = str(caught.value)
    assert str(file) in message
    assert re.search(words, message), message
    assert all(bool((tensor == SENTINEL).all()) for tensor in found.values())
    return message


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def loads(checkpoints: Checkpoints) -> bool:
    found = {name: torch.full_like(tensor, SENTINEL) for name, tensor in make_tensors(2).items()}
    checkpoints.load(newest_of(checkpoints), found)
    return all(torch.equal(tensor, make_tensors(2)[name]) for name, tensor in found.items())


@pytest.mark.parametrize("kind", ["header", "data", "manifest"])
def test_one_flipped_bit_anywhere_is_found(checkpoints: Checkpoints, kind: str) -> None:
    rng = random.Random(kind)
    saved = newest_of(checkpoints)
    for _ in range(TRIALS):
        if kind == "manifest":
            file = saved.path / "manifest.json"
            start, stop = 0, file.stat().st_size
        else:
            file = rng.choice(sorted(saved.path.glob("*.safetensors")))
            header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            start, stop = (0, header_bytes) if kind == "header" else (header_bytes, file.stat().st_size)
        bit = rng.randrange(8 * start, 8 * stop)
        flip(file, bit)
        refused(checkpoints, saved, file, "its bytes were changed")
        flip(file, bit)
    assert loads(checkpoints)


def test_every_third_bit_of_a_manifest(tmp_path: Path) -> None:
    """Not a sample: every byte of it is changed, most of them in three ways."""
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    path = checkpoints.save(1, {"t": torch.zeros(2)}, {"a": 1}, 1.0)
    manifest = path / "manifest.json"
    original = manifest.read_bytes()
    for bit in range(0, 8 * len(original), 3):
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"manifest\.json: its bytes were changed"):
            read_manifest(path)
    manifest.write_bytes(original)
    assert read_manifest(path).state == {"a": 1}


@pytest.mark.parametrize("change", ["truncated", "lengthened", "emptied", "deleted"])
def test_truncation_and_deletion_of_each_file(checkpoints: Checkpoints, change: str) -> None:
    saved = newest_of(checkpoints)
    files = sorted(saved.path.iterdir())
    assert len(files) > 3
    for file in files:
        data = file.read_bytes()
        if change == "deleted":
            file.unlink()
        else:
            file.write_bytes({"truncated": data[:-1], "lengthened": data + b"\0", "emptied": b""}[change])
        manifest = "missing" if change == "deleted" else "its bytes were changed"
        shard = {"deleted": "missing", "lengthened": "too long"}.get(change, "truncated")
        refused(checkpoints, saved, file, manifest if file.name == "manifest.json" else shard)
        file.write_bytes(data)
    assert loads(checkpoints)


def test_a_shard_of_another_step_is_found_and_its_step_named(checkpoints: Checkpoints) -> None:
    saved = newest_of(checkpoints)
    for file in sorted(saved.path.glob("*.safetensors")):
        data = file.read_bytes()
        shutil.copy(saved.path.with_name("step_00000001") / file.name, file)
        assert file.stat().st_size == len(data)
        refused(checkpoints, saved, file, r"belongs to another save, of step 1; this checkpoint is of step 2")
        file.write_bytes(data)
    assert loads(checkpoints)


def test_two_saves_of_the_same_step_do_not_mix(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A run repeated from the same step writes the same names with other bytes."""
    saved = newest_of(checkpoints)
    again = Checkpoints(tmp_path / "again", 1, keep_best=True).save(2, make_tensors(2, variant=1), {"step": 2}, 0.5)
    file = saved.path / "rank_00000_part_000.safetensors"
    shutil.copy(again / file.name, file)
    refused(checkpoints, saved, file, "belongs to another save, of step 2")


def test_a_folder_under_the_name_of_another_step_is_refused(checkpoints: Checkpoints) -> None:
    saved = newest_of(checkpoints)
    shutil.rmtree(saved.path)
    shutil.copytree(saved.path.with_name("step_00000001"), saved.path)
    with pytest.raises(CheckpointError, match=r"manifest\.json: belongs to step 1, not to step 2"):
        checkpoints.latest()
    refused(checkpoints, saved, saved.path / "manifest.json", "belongs to step 1, not to step 2")


def test_a_damaged_newest_one_is_not_passed_over_and_the_way_back_is_said(checkpoints: Checkpoints) -> None:
    saved = newest_of(checkpoints)
    flip(saved.path / "manifest.json", 4000)
    with pytest.raises(CheckpointError, match="delete that folder to go back to step 1"):
        checkpoints.latest()
    older = checkpoints.latest(before=2)
    assert older is not None
    assert older.step == 1
    with pytest.warns(RuntimeWarning, match="not deleted"):
        checkpoints.save(3, make_tensors(3), {}, 2.0)
    assert saved.path.is_dir()
    flip(saved.path / "manifest.json", 4000)
    file = saved.path / "rank_00000_part_001.safetensors"
    flip(file, 8000)
    assert "delete that folder to go back to step 1" in refused(checkpoints, saved, file, "changed")


def test_read_tensors_finds_damage_too(checkpoints: Checkpoints) -> None:
    saved = newest_of(checkpoints)
    file = next(saved.path.glob("*.safetensors"))
    flip(file, 8 * file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{file.name}: its bytes were changed"):
        read_tensors(saved.path)


class Malicious:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def test_a_malicious_pickle_in_every_file_runs_nothing(checkpoints: Checkpoints, tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    payload = pickle.dumps(Malicious(marker))
    saved = newest_of(checkpoints)
    names = [file.name for file in saved.path.iterdir()] + [
        ".metadata",
        "__0_0.distcp",
        "model.safetensors",
        "state.pt",
    ]
    zipped = tmp_path / "zipped.pt"
    torch.save(Malicious(marker), zipped)
    for name in names:
        file = saved.path / name
        data = file.read_bytes() if file.exists() else None
        for bad in (payload, payload.ljust(len(data or b""), b"\0"), zipped.read_bytes()):
            file.write_bytes(bad)
            if data is not None:
                refused(checkpoints, saved, file, "changed|truncated|too long")
                with pytest.raises(CheckpointError):
                    read_tensors(saved.path)
            else:
                assert loads(checkpoints)  # a file that the manifest does not name is never opened
            assert not marker.exists()
        if data is not None:
            file.write_bytes(data)
    as_tensor = {"payload": torch.frombuffer(bytearray(payload), dtype=torch.uint8)}
    checkpoints.save(3, as_tensor, {"payload": payload.decode("latin-1")}, None)
    newest = checkpoints.latest()
    assert newest is not None
    checkpoints.load(newest, {"payload": torch.zeros_like(as_tensor["payload"])})
    assert not marker.exists()
    pickle.loads(payload)  # noqa: S301 (it would have run)
    assert marker.exists()


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and give it a valid checksum: what an attacker can do, and an accident cannot."""
    manifest = path / "manifest.json"
    data = json.loads(manifest.read_bytes())
    del data["sha256"]
    body = b" " + (change(data) or json.dumps(data)).encode()[1:] + b"\n"
    manifest.write_bytes(b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body)


def set_in(data: Any, keys: list[Any], value: Any) -> None:
    for key in keys[:-1]:
        data = data[key]
    data[keys[-1]] = value


CHUNK = ["tensors", "t", "chunks", 0]
ROW = {"file": "rank_00000_part_000.safetensors", "start_bytes": 0, "stop_bytes": 12, "sizes": [1, 3]}


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["format"], "another"),
        (["version"], 1),
        (["step"], -1),
        (["step"], True),
        (["step"], "1"),
        (["validation_loss"], 10**400),
        (["validation_loss"], []),
        (["validation_loss"], "1.0"),
        (["state"], "text"),
        (["files"], []),
        (["files", "../outside"], {"size_bytes": 1, "sha256": ""}),
        (["files", "/etc/passwd"], {"size_bytes": 1, "sha256": ""}),
        (["files", "rank_00000_part_000.safetensors", "size_bytes"], 10),
        (["tensors"], None),
        (["tensors", "t", "dtype"], "F33"),
        (["tensors", "t", "dtype"], ["F32"]),
        (["tensors", "t", "shape"], [5]),
        (["tensors", "t", "shape"], [10**30, 0]),
        (["tensors", "t", "shape"], [-2, -3]),
        (["tensors", "empty"], {"dtype": "F32", "shape": [0, 2**52, 2**52], "chunks": []}),
        (["tensors", "t", "chunks"], []),
        (["tensors", "t", "chunks"], [ROW | {"offsets": [0, 0]}, ROW | {"offsets": [0, 0]}]),  # the sum of sizes fits
        (["state"], {"a": json.loads("[" * 120 + "]" * 120)}),
        ([*CHUNK, "file"], "nowhere"),
        ([*CHUNK, "start_bytes"], -4),
        ([*CHUNK, "stop_bytes"], 10**12),
        ([*CHUNK, "offsets"], [1, 0]),
        ([*CHUNK, "offsets"], [0]),
        ([*CHUNK, "sizes"], [2, 2]),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, keys: list[Any], value: Any) -> None:
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    path = checkpoints.save(1, {"t": torch.ones(2, 3)}, {}, None)
    forge(path, lambda data: set_in(data, keys, value))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoints.latest()


def test_a_chunk_that_ends_behind_its_file_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    path = checkpoints.save(1, {"t": torch.ones(2, 3)}, {}, None)

    def change(data: dict[str, Any]) -> None:
        size_bytes = data["files"][ROW["file"]]["size_bytes"]
        data["tensors"]["t"]["chunks"][0] |= {"start_bytes": size_bytes - 4, "stop_bytes": size_bytes + 20}

    forge(path, change)
    with pytest.raises(CheckpointError, match="a chunk of 't' ends after its file"):
        checkpoints.latest()


def test_chunks_must_cover_each_element_once() -> None:
    """Against counting, on boxes that are cut at random, some of them exchanged for others."""
    rng = random.Random(0)
    seen = Counter[bool]()
    for _ in range(3000):
        shape = tuple(rng.randint(0, 3) for _ in range(rng.randint(0, 3)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(rng.randint(0, 5) if shape else 0):
            offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
            dim = rng.randrange(len(shape))
            first = rng.randint(0, sizes[dim])
            for start, size in ((0, first), (first, sizes[dim] - first)):
                moved = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
                boxes.append((moved, (*sizes[:dim], size, *sizes[dim + 1 :])))
        if rng.random() < 0.9:
            offsets = tuple(rng.randint(0, size) for size in shape)
            other = offsets, tuple(rng.randint(0, size - offset) for size, offset in zip(shape, offsets))
            boxes[rng.randrange(len(boxes))] = other
        count = torch.zeros(shape)
        for offsets, sizes in boxes:
            count[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))] += 1
        expected = bool((count == 1).all())
        assert _fills(shape, boxes) == expected, (shape, boxes)
        seen[expected] += 1
    assert min(seen.values()) > 500


def test_many_chunks_are_checked_in_linear_time() -> None:
    """Among 100,000 boxes, of a size that nobody could count, one that lies over its neighbour is found."""
    width, rows = 1 << 40, 100_000
    boxes = [((7 * row, 0), (7, width)) for row in range(rows)]
    assert _fills((7 * rows, width), boxes)
    boxes[500] = boxes[501]
    assert not _fills((7 * rows, width), boxes)
    assert not _fills((2,) * 60, [((0,) * 60, (1,) * 60)] * 3)


@pytest.mark.parametrize("depth", [98, 200, 1100])
def test_a_state_is_only_saved_if_it_can_be_read_again(tmp_path: Path, depth: int) -> None:
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    state: Any = 1
    for _ in range(depth):
        state = [state]
    if depth < 100:
        assert read_manifest(checkpoints.save(1, {}, {"a": state})).state == {"a": state}
        return
    with pytest.raises((CheckpointError, RuntimeError), match=r"nested|recursion"):
        checkpoints.save(1, {}, {"a": state})
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, 1, keep_best=True).save(1, {}, {}, None)
    forge(path, lambda data: '{"state": ' + "[" * 200_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json: not the manifest"):
        read_manifest(path)


def test_no_file_of_the_package_unpickles_or_evaluates() -> None:
    """The static half of the rule. Collectives of objects, those of DCP among them, open the pickles of other ranks. A
    user's file of tensors may be a .pt: it is read with torch's own refusal of everything but tensors."""
    package = Path(checkpoint_parts.__file__).parent.parent
    forbidden = re.compile(
        r"\b(pickle\.loads?|Unpickler|marshal\.loads?|shelve\.|torch\.load\(|yaml\.load|weights_only=False|eval\(|exec\("
        r"|(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\b|torch\.distributed\.checkpoint)"
    )
    files = sorted(package.rglob("*.py"))
    assert len(files) > 20
    found = [
        f"{file.relative_to(package)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1)
        if forbidden.search(line) and not re.search(r"\.eval\(\)|torch\.load\(.*weights_only=True", line)
    ]
    assert found == []
