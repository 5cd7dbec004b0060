"""In: prepared data of every kind, and shards of others, damaged at random. Out: no run trains on it, or scores on it.
Does not damage a preparation that is not complete (test_data_resume.py does)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forker import Forker
from questions import files as squad_files
from questions import vocabulary
from runs import called, codescent, losses, make_project, start

from codescent import tasks
from codescent.base.errors import UserError
from codescent.build import task_request
from codescent.config.sections import Config
from codescent.data import verified
from codescent.data.file_array import FileArray, Watched
from codescent.data.samples import AnyDataset
from codescent.data.text import chunks, shards
from codescent.data.text.dataset import open_dataset
from codescent.tasks.pairs import LineDataset
from codescent.train.verification import verify_again

GPT = {"num_layers": 1, "num_heads": 1, "hidden_dim": 8, "seq_len": 32}
BERT = {"kind": "bert", **GPT, "seq_len": 64}
TENSORS: dict[str, Any] = {"kind": "transformer", "embedding": "none", "num_encoder_layers": 1, "num_decoder_layers": 1}
TENSORS |= {"num_heads": 1, "hidden_dim": 8, "source_len": 2, "target_len": 3}
DAMAGES = 30
WORDS = ["many", "workers", "one", "descent", "loss", "gradient", "step", "rank", "sum", "mean"]


def words_of(count: int) -> str:
    rng = random.Random(7)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def text(folder: Path) -> dict[str, Any]:
    (folder / "text.txt").write_text(words_of(3000))
    return {"corpus": str(folder / "text.txt"), "tokenizer": "byte"}


def foreign(folder: Path, tokens: int = 150_000) -> dict[str, Any]:
    made = folder / "foreign"
    made.mkdir()
    for name, seed in (("train.bin", 1), ("val.bin", 2)):
        np.random.default_rng(seed).integers(0, 50_000, tokens).astype("<u2").tofile(made / name)
    return {"corpus": str(made)}


def responses(folder: Path) -> dict[str, Any]:
    lines = [{"prompt": words_of(3 + n % 5), "response": f"it is {n}"} for n in range(200)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = str(folder / "pairs.jsonl")
    return {"task": "sft", "corpus": corpus, "tokenizer": "byte", "template": "{prompt}|{response}"}


def questions(folder: Path) -> dict[str, Any]:
    train, validation = squad_files(folder)
    keys = {"tokenizer": f"bert:{vocabulary(folder)}", "stride": 16, "question_len": 16}
    return {"task": "qa", "corpus": str(train), "validation": str(validation), **keys}


def tensors(storage: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"corpus": "synthetic:200:1", "format": storage}


KINDS: dict[str, tuple[dict[str, Any], Callable[[Path], dict[str, Any]]]] = {
    "text": (GPT, text),
    "foreign": (GPT, foreign),
    "sft": (GPT, responses),
    "qa": (BERT, questions),
    **{storage: (TENSORS, tensors(storage)) for storage in ("safetensors", "hdf5", "pt")},
}


def samples_of(dataset: AnyDataset, model: dict[str, Any]) -> str:
    """A hash of all samples."""
    wanted = model.get("target_len", model.get("seq_len"))
    found = hashlib.sha256(str(dataset.vocab_size).encode())
    for split in ("train", "validation"):
        source = dataset.source(split, model.get("seq_len", wanted + model.get("source_len", 0)), wanted)
        numbers = np.arange(source.num_samples)
        samples = source.read(numbers)
        for array in (samples.inputs, samples.targets, *samples.extras.values(), source.losses(numbers)):
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def damage(rng: random.Random, path: Path) -> str:
    """Damage a file in one of the ways in which disks, copies and people do; half of them set mtime back."""
    how, times, data = rng.choice(["flip", "flip", "zeros", "cut", "other"]), path.stat(), bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    match how:
        case "flip":
            data[place] ^= 1 << rng.randrange(8)
        case "zeros":
            data[place : place + 512] = bytes(len(data[place : place + 512]))
        case "cut":
            del data[place:]
        case "other":
            data = bytearray(rng.randbytes(len(data)))
    path.write_bytes(data)
    if rng.random() < 0.5:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"{how} at byte {place} of {path.name}"


@pytest.mark.parametrize("kind", KINDS)
def test_damage_anywhere_is_refused_before_a_sample_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "SETTLED_NS", 50_000_000)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 4000)
    monkeypatch.setattr(chunks, "CHUNK_CHARS", 1 << 12)
    monkeypatch.setattr(chunks, "SEARCH_CHARS", 1 << 10)
    model, keys = KINDS[kind]
    data = {"folder": tmp_path / "datasets", **keys(tmp_path)}
    request = task_request(Config.model_validate({"model": model, "data": data}))
    path = tasks.prepare(request, progress=False)
    time.sleep(0.1)
    whole = tasks.prepare_and_open(request, progress=False)
    expected, rng = samples_of(whole, model), random.Random(kind)
    refused = 0
    for _ in range(DAMAGES):
        file = rng.choice(sorted(path.iterdir()))
        before = file.read_bytes()
        what = damage(rng, file)
        try:
            found = tasks.prepare_and_open(request, progress=False)
            assert found.fingerprint != whole.fingerprint or samples_of(found, model) == expected, what
            refused += found.fingerprint != whole.fingerprint  # a checkpoint is not resumed on it
        except UserError:
            refused += 1
        file.write_bytes(before)
    assert refused >= DAMAGES - 3  # a few zeros are written over zeros
    assert samples_of(tasks.prepare_and_open(request, progress=False), model) == expected


def test_two_shards_that_changed_places_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 4000)
    request = task_request(Config.model_validate({"model": GPT, "data": {"folder": tmp_path, **text(tmp_path)}}))
    path = tasks.prepare(request, progress=False)
    for old, new in (("train_000000.bin", "x"), ("train_000001.bin", "train_000000.bin"), ("x", "train_000001.bin")):
        (path / old).rename(path / new)
    with pytest.raises(UserError) as caught:
        tasks.prepare_and_open(request, progress=False)
    assert [problem.split(": ")[:2] for problem in caught.value.problems[:2]] == [
        [str(path / name), "changed"] for name in ("train_000000.bin", "train_000001.bin")
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    make_project(folder)
    foreign(folder)
    return folder


def test_a_zeroed_shard_is_neither_resumed_nor_scored(project: Path, forker: Forker) -> None:
    forker.train(project, "zeroed", 1, "train.num_steps=4", "optimizer.decay_steps=8")
    (shard,) = (project / "datasets").glob("*/train_000000.bin")
    whole, times = shard.read_bytes(), shard.stat()
    shard.write_bytes(bytes(len(whole)))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    words = ("train.num_steps=8", "optimizer.decay_steps=8")
    for command in (("train", "run.toml", "run.name=zeroed", *words, "--resume"), ("evaluate", "runs/zeroed")):
        done = called(project, *command)
        assert done.returncode == 2, done.stderr
        assert f"{shard.name}: changed: sha256" in done.stderr
        assert "delete this folder and prepare it again" in done.stderr
        assert "Traceback" not in done.stderr
    shard.write_bytes(whole)
    forker.train(project, "zeroed", 1, *words, resume=True)


FOREIGN = ("data.corpus=foreign", "train.eval_every=0", "model.vocab_size=50257", "optimizer.decay_steps=8")


def test_shards_of_others_are_those_that_the_run_began_with(project: Path, forker: Forker) -> None:
    forker.train(project, "theirs", 1, *FOREIGN, "train.num_steps=4")
    shard = project / "foreign" / "train.bin"
    data = bytearray(shard.read_bytes())
    data[150_000] ^= 1  # far from both ends
    shard.write_bytes(data)
    done = forker.run(project, 1, ["run.name=theirs", *FOREIGN, "train.num_steps=8"], resume=True)
    assert done.codes == [2]
    assert "not the tokens that the run in runs/theirs was trained on" in done.said
    done = called(project, "evaluate", "runs/theirs")
    assert done.returncode == 2
    assert "not what the run in runs/theirs was trained on" in done.stderr
    data[150_000] ^= 1
    shard.write_bytes(data)
    forker.train(project, "theirs", 1, *FOREIGN, "train.num_steps=8", resume=True)


def test_a_run_of_an_earlier_version_goes_on_with_shards_of_others(project: Path, forker: Forker) -> None:
    """Its checkpoint has the fingerprint of sizes, first and last bytes."""
    expected = forker.train(project, "whole", 1, *FOREIGN, "train.num_steps=8")
    forker.train(project, "earlier", 1, *FOREIGN, "train.num_steps=4", fault="earlier_fingerprint")
    run = forker.train(project, "earlier", 1, *FOREIGN, "train.num_steps=8", resume=True)
    assert losses(run) == losses(expected)


def test_the_earlier_fingerprint_is_of_sizes_and_ends(project: Path, tmp_path: Path) -> None:
    folder = project / "foreign"
    found = hashlib.sha256()
    for name in ("train.bin", "val.bin"):
        data = (folder / name).read_bytes()
        found.update(f"{name} {len(data) // 2}\n".encode() + data[: 1 << 16] + data[-(1 << 16) :])
    dataset = open_dataset(folder)
    assert dataset.earlier == found.hexdigest() != dataset.fingerprint
    lines = LineDataset(dataset, "copy")
    before = LineDataset(replace(dataset, fingerprint=found.hexdigest(), earlier=None), "copy")
    assert (lines.earlier, before.earlier) == (before.fingerprint, None)
    keys = {"folder": tmp_path, **text(tmp_path)}
    ours = tasks.prepare_and_open(task_request(Config.model_validate({"model": GPT, "data": keys})), progress=False)
    assert ours.earlier is None


def test_one_rank_of_a_machine_reads_for_all(tmp_path: Path, forker: Forker) -> None:
    make_project(tmp_path)
    forker.train(tmp_path, "first", 1, "train.num_steps=1")
    time.sleep(verified.SETTLED_NS / 1e9 + 0.1)
    shard = next((tmp_path / "datasets").glob("*/train_000000.bin"))
    os.utime(shard)
    time.sleep(verified.SETTLED_NS / 1e9 + 0.1)
    forker.train(tmp_path, "both", 2, "train.num_steps=2", fault="reads_no_file_whole")
    shard.write_bytes(bytes(shard.stat().st_size))
    done = forker.run(tmp_path, 2, ["run.name=zeroed"], fault="reads_no_file_whole")
    assert done.codes == [2, 2], done.said
    assert done.said.count("train_000000.bin: changed: sha256") == 2


def test_a_shard_that_is_cut_under_a_run_ends_it_with_a_sentence(tmp_path: Path) -> None:
    make_project(tmp_path)
    words = ("run.name=cut", "train.num_steps=1000000", "train.eval_every=0", "checkpoint.every=50")
    run = start(tmp_path, "train", "run.toml", *words)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "runs").glob("cut/checkpoints/step_*")):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shard = next((tmp_path / "datasets").glob("*/train_000000.bin"))
    os.truncate(shard, 4096)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 2, said
    assert f"{shard.name}: truncated while it was in use: ends at byte 4096" in said
    folder = shard.parent.relative_to(tmp_path)
    again = f"restore the file, or delete {folder} and prepare it again"
    assert f"{again}; then continue the run: codescent train --resume runs/cut\n" in said
    assert "Traceback" not in said


def turn_a_bit(file: Path) -> None:
    """Turn a bit as a disk does: size and times are then those of the note, and so is the sha256 in it."""
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    place, known = verified._read_cache(file.parent)
    note = {"sha256": sha256, "stamp": verified.stamp_of(file.stat())}
    verified._write_cache(place, file.parent, {**known, file.name: note}, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bit_that_turned_on_the_disk_itself_is_found(ranks: int, project: Path, forker: Forker) -> None:
    words = (f"data.folder=turned{ranks}", "train.num_steps=2", f"parallel.dp_replicate={ranks}")
    forker.train(project, f"turned{ranks}", ranks, *words)
    (shard,) = (project / f"turned{ranks}").glob("*/train_000000.bin")
    turn_a_bit(shard)
    trusting = forker.run(project, ranks, [*words, f"run.name=trusts{ranks}", "data.verify=changed"])
    assert trusting.codes == [0] * ranks, "the note hides the change: this test would find nothing"
    for verify in ("auto", "always"):  # auto: the data is small
        done = forker.run(project, ranks, [*words, f"run.name={verify}{ranks}", f"data.verify={verify}"])
        assert done.codes == [2] * ranks, done.said
        assert f"{shard.relative_to(project)}: changed: sha256 " in done.said
        assert not (project / "runs" / f"{verify}{ranks}").exists()


@pytest.mark.slow
def test_data_is_trusted_aloud_if_nobody_knows_its_blocks(project: Path, forker: Forker) -> None:
    """Large data with checksums is compared as it is read. Without them it is not, and the user is told."""
    words = ("data.folder=unsummed", "train.num_steps=2")
    forker.train(project, "unsummed", 1, *words)
    (shard,) = (project / "unsummed").glob("*/train_000000.bin")
    time.sleep(verified.SETTLED_NS / 1e9 + 0.1)
    assert called(project, "data", str(shard.parent), "--verify").returncode == 0
    place, _ = verified._read_cache(shard.parent)
    assert place is not None
    for sums in place.parent.glob(f"{place.stem}-*.crc32"):
        sums.unlink()
    done = forker.run(project, 1, [*words, "run.name=large"], fault="all_data_is_large")
    assert done.codes == [0], done.said
    assert "GB are not read again, as size and times of the files are those of an earlier reading" in done.said
    scored = called(project, "evaluate", "runs/unsummed")
    assert scored.returncode == 0
    reads = f"; codescent data {shard.parent.relative_to(project)} --verify reads them"
    assert reads in scored.stderr
    assert called(project, "data", str(shard.parent), "--verify").returncode == 0
    # A process of its own: this one relies on files of other tests, too.
    assert "not read again" not in codescent(project, "evaluate", "runs/unsummed").stderr
    done = forker.run(project, 1, [*words, "run.name=again"], fault="all_data_is_large")
    assert "not read again" not in done.said


def test_a_bit_that_turns_after_the_start_is_found_as_it_is_read(tmp_path: Path, forker: Forker) -> None:
    """As for data that is too large to be read twice: nothing reads the whole file, and a step reads the block."""
    make_project(tmp_path)
    words = ("data.folder=d", "train.num_steps=2", "train.eval_every=0")
    forker.train(tmp_path, "first", 1, *words)
    (shard,) = (tmp_path / "d").glob("*/train_000000.bin")
    (sha256,) = verified.hashes(shard.parent, {shard.name: None})[0].values()
    array = FileArray(Watched(shard, sha256), "<u2", 0, shard.stat().st_size // 2)
    right = np.fromfile(shard, "<u2")
    for first, stop in ((0, len(right)), (3, 5), (2047, 2050), (len(right) - 1, len(right))):
        assert np.array_equal(array[first:stop], right[first:stop])
    data = bytearray(shard.read_bytes())
    data[4096 + 7] ^= 1
    with shard.open("r+b") as file:
        file.write(data)
    # A stamp is taken when a file is opened: that of the changed file, as on a disk that turns a bit.
    changed = FileArray(Watched(shard, sha256), "<u2", 0, len(right))
    assert np.array_equal(changed[0:2048], right[0:2048]), "the other blocks are right"
    with pytest.raises(UserError, match="the 4096 bytes from byte 4096 on are not those that were verified") as caught:
        changed[2048:2060]
    assert str(caught.value).endswith(f": restore the file, or delete {shard.parent} and prepare it again")
    verified.compare_reads(False)
    try:
        assert len(FileArray(Watched(shard, sha256), "<u2", 0, len(right))[0:4096]) == 4096, 'data.verify = "changed"'
    finally:
        verified.compare_reads(True)


def test_a_bit_that_turned_in_shards_of_others_and_in_tensors_is_found(tmp_path: Path, forker: Forker) -> None:
    """Nobody knows their right sha256: what the note says is compared with what is read."""
    make_project(tmp_path)
    foreign(tmp_path, 3000)
    words = ["data.corpus=foreign", "data.tokenizer=gpt2", "train.num_steps=1"]
    forker.train(tmp_path, "first", 1, *words)
    turn_a_bit(tmp_path / "foreign" / "train.bin")
    done = forker.run(tmp_path, 1, [*words, "run.name=second"])
    assert done.codes == [2], done.said
    assert "foreign: changed on the disk, although size and times are the same" in done.said


def test_large_data_is_read_again_only_if_the_run_is_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    world: Any = SimpleNamespace(
        this_rank=SimpleNamespace(rank=0, world_size=8),
        leaders=[0],
        is_first=True,
        device=SimpleNamespace(type="cuda"),
        in_turn=lambda work, name: work(),
    )
    plan: Any = SimpleNamespace(flops=lambda: SimpleNamespace(total_flops=8e15))  # a second of each device
    dataset: Any = SimpleNamespace(fingerprint="same", path="data")

    def reopen() -> Any:
        opened.append("again")
        return dataset

    bytes_of_notes = {Path("shard"): 10**9}  # 5 s of a slow file system
    monkeypatch.setattr(verified, "relied_on", lambda: bytes_of_notes)
    for steps, verify, again in (
        (100, None, False),
        (1000, None, True),
        (100, "always", True),
        (1000, "changed", False),
    ):
        opened.clear()
        verify_again(verify, plan, steps, dataset, world, reopen)
        said = capsys.readouterr().err
        assert opened == ["again"] * again
        assert ("1.0 GB are not read again" in said) == (not again and verify is None)
    monkeypatch.setattr(verified, "unsummed", lambda: {Path("shard"): 10**8})  # half a second
    opened.clear()
    verify_again(None, plan, 100, dataset, world, reopen)
    assert opened == ["again"], "the file without checksums is small enough"
    assert "not read again" not in capsys.readouterr().err
    monkeypatch.setattr(verified, "unsummed", dict)
    bytes_of_notes.clear()
    opened.clear()
    verify_again("always", plan, 1, dataset, world, reopen)
    assert opened == []  # all was read now: no second pass
