"""In: synthetic tensors, users' files of tensors. Out: the same numbers in every format; what is wrong is named.
Does not train (test_tensors_runs does)."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import resource
import threading
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy
import torch
from disks import small_disk
from forker import Forker
from rank_server import Place

from codescent.base.errors import UserError
from codescent.data.file_array import open_npy
from codescent.data.prepared import write_array
from codescent.data.samples import Samples
from codescent.tasks.tensors import files as tensor_files
from codescent.tasks.tensors import prepare as tensor_prepare
from codescent.tasks.tensors.dataset import TensorDataset, in_memory, open_file, open_prepared
from codescent.tasks.tensors.files import FORMATS, SUFFIX
from codescent.tasks.tensors.prepare import prepare_synthetic
from codescent.tasks.tensors.synthetic import Sizes, Synthetic, parse
from codescent.verbs.cli import run

RECIPE = Synthetic(300, 30, Sizes(2, 3, 5), seed=7)  # more than a block
Written = dict[str, np.ndarray]


def everything(dataset: TensorDataset, split: str) -> np.ndarray:
    source = dataset.source(split, 5, 3)
    read: Samples = source.read(np.arange(source.num_samples))
    assert np.array_equal(read.inputs, read.targets)
    return read.inputs


def test_numbers_are_uniform_and_a_function_of_their_place() -> None:
    whole = RECIPE.whole("train", "target")
    assert whole.dtype == np.float32
    assert whole.shape == (300, 3, 5)
    assert 0.0 <= whole.min() < 0.01 < 0.99 < whole.max() < 1.0
    assert abs(whole.mean() - 0.5) < 0.02
    shorter = Synthetic(280, 30, RECIPE.sizes, seed=7).whole("train", "target")
    assert np.array_equal(shorter, whole[:280])
    others = [RECIPE.whole("train", "source")[0], Synthetic(300, 30, Sizes(2, 3, 5), 8).whole("train", "target")[0]]
    assert not any(np.isin(other, whole).all() for other in others)
    # Pinned: a run that is continued elsewhere, or years later, must find the same.
    assert [float(x) for x in whole[299, 2, :2] * 2**24] == PINNED


PINNED = [5359603.0, 10677890.0]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("storage", FORMATS)
def test_every_format_has_the_same_numbers(storage: str, whole: bool, tmp_path: Path) -> None:
    path = prepare_synthetic(RECIPE, storage, tmp_path)
    found, expected = open_prepared(path, whole=whole), in_memory(RECIPE, "synthetic:300:7")
    assert found.fingerprint == expected.fingerprint
    assert found.description["synthetic"] is expected.description["synthetic"] is True
    for split in ("train", "validation"):
        assert np.array_equal(everything(found, split), everything(expected, split))
    numbers = np.array([299, 0, 17, 17])
    assert np.array_equal(found.train.read(numbers).inputs, everything(expected, "train")[numbers])
    with pytest.raises(IndexError):
        found.train.read(np.array([300]))
    assert prepare_synthetic(RECIPE, storage, tmp_path) == path


@pytest.mark.parametrize("storage", FORMATS)
def test_other_libraries_read_what_we_write(storage: str, tmp_path: Path) -> None:
    path = prepare_synthetic(RECIPE, storage, tmp_path) / f"train{SUFFIX[storage]}"
    if storage == "hdf5":
        with h5py.File(path) as file:
            target = file["target"][:]
    elif storage == "pt":
        target = torch.load(path, weights_only=True)["target"].numpy()
    else:
        target = safetensors.numpy.load_file(path)["target"]
    assert np.array_equal(target, RECIPE.whole("train", "target"))


def test_a_full_disk_leaves_nothing_and_a_kill_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setitem(tensor_prepare._WRITE, "pt", full)  # type: ignore[index]
        with pytest.raises(UserError, match="nothing was saved"):
            prepare_synthetic(RECIPE, "pt", tmp_path)
    assert not list(tmp_path.iterdir())
    left = tmp_path / f".partial-{tensor_prepare.folder_of(RECIPE, 'pt', tmp_path).name}"
    left.mkdir()
    (left / "train.pt").write_bytes(b"half")
    (left / "other").write_bytes(b"of another version")
    path = prepare_synthetic(RECIPE, "pt", tmp_path)
    assert sorted(file.name for file in path.iterdir()) == ["description.json", "train.pt", "validation.pt"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("free_bytes", [0, pytest.param(100_000, marks=pytest.mark.slow), 620_000])
@pytest.mark.parametrize("storage", FORMATS)
def test_a_disk_that_is_full_is_told_in_words(storage: str, free_bytes: int, tmp_path: Path, forker: Forker) -> None:
    """The whole verb, in a process of its own: a full disk could end it in a segmentation fault."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "folder").mkdir()
        (disk / "other").write_bytes(bytes((1 << 20) - free_bytes))
        code, said = write_small(forker, disk / "folder", storage, tmp_path)
        assert (code, said.count("\n")) == (2, 1), said
        assert "no space left on the disk (No space left on device" in said
        assert list((disk / "folder").iterdir()) == []


@pytest.mark.parametrize("storage", FORMATS)
def test_a_file_that_may_not_grow_is_told_in_words(storage: str, tmp_path: Path, forker: Forker) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for limit_bytes in (1000, 102_400):
        code, said = write_small(forker, folder, storage, tmp_path, limit_bytes)
        assert (code, said.count("\n")) == (2, 1), said
        assert "no space left on the disk (File too large): nothing was saved" in said
        assert list(folder.iterdir()) == []
    code, said = write_small(forker, folder, storage, tmp_path)
    assert code == 0, said


def write_small(
    forker: Forker, folder: Path, storage: str, cwd: Path, limit_bytes: int | None = None
) -> tuple[int, str]:
    """`codescent data --synthetic` into `folder`, in a forked process: its exit code and standard error."""
    words = ["data", "--synthetic", "400", "--source", "1x64", "--target", "5x64", "--format", storage]
    words += ["--folder", str(folder)]
    (found,) = forker.call(f"{__name__}:run_limited", cwd, words=words, limit_bytes=limit_bytes)
    return found[0], found[1]


def run_limited(place: Place, words: list[str], limit_bytes: int | None) -> tuple[int, str]:
    """The command line in this process, whose files may not become larger."""
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    err = io.StringIO()
    with redirect_stderr(err):
        code = run(words)
    return code, err.getvalue()


def test_torch_that_cannot_write_for_another_reason_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the writer broke\nmore")

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(UserError, match=r"train.pt: torch.save: the writer broke$"):
        prepare_synthetic(RECIPE, "pt", tmp_path)
    assert not list(tmp_path.iterdir())


def test_damage_is_named(tmp_path: Path) -> None:
    path = prepare_synthetic(RECIPE, "safetensors", tmp_path)
    description = json.loads((path / "description.json").read_text())
    with (path / "train.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    with pytest.raises(UserError, match=r"train.safetensors: changed: sha256"):
        open_prepared(path).verify()
    os.truncate(path / "train.safetensors", 1000)
    (path / "validation.safetensors").unlink()
    with pytest.raises(UserError, match=r"truncated: ends at byte 1000, expected .*\n.*validation.*missing") as told:
        open_prepared(path)
    assert "prepare it again" in str(told.value)
    (path / "description.json").write_text(json.dumps(description | {"recipe": {}, "synthetic": 1}))
    with pytest.raises(UserError, match=r"recipe.train.*synthetic|synthetic.*recipe.train"):
        open_prepared(path)


def write(path: Path, tensors: Written) -> Path:
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for name, value in tensors.items():
                file[name] = value
    elif path.suffix == ".pt":
        torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, path)
    else:
        safetensors.numpy.save_file(tensors, path)
    return path


def tensors(samples: int = 20, dtype: str = "float32") -> Written:
    rng = np.random.default_rng(1)
    return {"source": rng.random((samples, 2, 5)).astype(dtype), "target": rng.random((samples, 3, 5)).astype(dtype)}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("suffix", SUFFIX.values())
def test_a_users_file_is_read(suffix: str, dtype: str, tmp_path: Path) -> None:
    given = tensors(dtype=dtype)
    path = write(tmp_path / f"mine{suffix}", given | {"beside": np.zeros(3, "float32")})
    dataset = open_file(path, 0.1)
    assert (dataset.train.num_samples, dataset.validation.num_samples) == (18, 2)
    both = np.concatenate([given["source"], given["target"]], axis=1).astype(np.float32)
    assert np.array_equal(everything(dataset, "train"), both[:18])
    assert np.array_equal(everything(dataset, "validation"), both[18:])
    assert np.array_equal(everything(open_file(path, 0.1, whole=True), "validation"), both[18:])
    assert dataset.description["synthetic"] is False
    given["target"][19, 2, 4] += 1
    assert open_file(write(tmp_path / f"changed{suffix}", given), 0.1).fingerprint != dataset.fingerprint


WRONG: dict[str, tuple[Callable[[Written], Any], list[str]]] = {
    "missing": (lambda t: t.pop("target"), ['has no "target"', "source"]),
    "dims": (lambda t: t.update(source=t["source"][:, 0]), ['"source" is [20, 5]', "[samples, vectors"]),
    "dtype": (lambda t: t.update(target=t["target"].astype("int32")), ['"target" is of int32', "must be float32"]),
    "samples": (lambda t: t.update(target=t["target"][:7]), ['"source" has 20 samples, "target" 7']),
    "width": (lambda t: t.update(target=t["target"][:, :, :4]), ['5 numbers, those of "target" 4']),
    "none": (lambda t: t.update(source=t["source"][:0], target=t["target"][:0]), ["[0, 2, 5]", "[0, 3, 5]"]),
    "both": (lambda t: t.update(target=t["target"][:7, :, :2]), ["20 samples", "5 numbers"]),
}


@pytest.mark.parametrize("suffix", SUFFIX.values())
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_file_is_named(what: str, suffix: str, tmp_path: Path) -> None:
    change, words = WRONG[what]
    given = tensors()
    change(given)
    given = {name: np.ascontiguousarray(value) for name, value in given.items()}
    if what == "dtype" and suffix == ".safetensors":
        words = ['"target" is of I32', "must be float32"]
    with pytest.raises(UserError) as told:
        open_file(write(tmp_path / f"mine{suffix}", given), 0.1)
    for word in [*words, f"mine{suffix}: "]:
        assert word in str(told.value)


def test_an_hdf5_file_with_a_damaged_name_or_type_is_refused(tmp_path: Path) -> None:
    """The library raises KeyError or ValueError then, and not OSError."""
    path = write(tmp_path / "mine.h5", tensors())
    with h5py.File(path) as file:
        header = h5py.h5o.get_info(file["source"].id).addr
    data = path.read_bytes()
    path.write_bytes(data[:header] + b"\x09" + data[header + 1 :])  # the version of the header
    with pytest.raises(UserError, match=r"mine.h5: not HDF5, or cut short: .*bad object header version number"):
        open_file(path, 0.1)
    mantissa = bytes([0x11, 0x20, 0x1F, 0, 4, 0, 0, 0])  # a float of 4 bytes: the begin of its description
    assert data.count(mantissa) == 2
    path.write_bytes(data.replace(mantissa, mantissa[:4] + bytes([0x1F, 0, 0, 0])))
    with pytest.raises(UserError, match=r"mine.h5: "):
        open_file(path, 0.1)


@pytest.mark.parametrize("suffix", SUFFIX.values())
def test_a_file_that_is_cut_short_or_another_thing(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"mine{suffix}", tensors())
    size_bytes = path.stat().st_size
    for left in (size_bytes - 900, 100, 3, 0):
        os.truncate(path, left)
        with pytest.raises(UserError, match="cut short"):
            open_file(path, 0.1)
    path.write_text("a text\n" * 500)
    with pytest.raises(UserError, match="cut short"):
        open_file(path, 0.1)
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        open_file(path, 0.1)


def test_other_names_in_a_file_are_told(tmp_path: Path) -> None:
    torch.save({"source": torch.zeros(4, 2, 2), 1: 3}, tmp_path / "mine.pt")
    with pytest.raises(UserError, match='has no "target"; it holds: 1, source'):
        open_file(tmp_path / "mine.pt", 0.5)


@pytest.mark.parametrize("offsets", [[-16, 80], [-96, 0], [96, 0]])
def test_a_tensor_before_its_files_numbers_is_refused(offsets: list[int], tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4, 2, 3], "data_offsets": [0, 96]}
    header = json.dumps({"source": entry | {"data_offsets": offsets}, "target": entry}).encode()
    (tmp_path / "mine.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(96))
    with pytest.raises(UserError, match=r'"source" lies in bytes \[-?\d+, \d+\)'):
        open_file(tmp_path / "mine.safetensors", 0.5)


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    class Running:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was_run"),)

    torch.save({"source": Running(), "target": torch.zeros(2, 2, 2)}, tmp_path / "mine.pt")
    with pytest.raises(UserError, match="tensors alone"):
        open_file(tmp_path / "mine.pt", 0.5)
    (tmp_path / "other.pt").write_bytes(pickle.dumps(Running()))
    with pytest.raises(UserError):
        open_file(tmp_path / "other.pt", 0.5)
    assert not (tmp_path / "was_run").exists()
    torch.save([torch.zeros(2)], tmp_path / "mine.pt")
    with pytest.raises(UserError, match="holds a list, must be a dict"):
        open_file(tmp_path / "mine.pt", 0.5)
    torch.save(
        {name: torch.zeros(4, 2, 2, dtype=torch.bfloat16) for name in ("source", "target")}, tmp_path / "mine.pt"
    )
    with pytest.raises(UserError, match=r'"source" is of torch.bfloat16'):
        open_file(tmp_path / "mine.pt", 0.5)


@pytest.mark.parametrize("storage", FORMATS)
def test_threads_and_forks_open_it_themselves(storage: str, tmp_path: Path) -> None:
    dataset = open_prepared(prepare_synthetic(RECIPE, storage, tmp_path))
    expected = everything(dataset, "train")
    same: list[bool] = []
    threads = [
        threading.Thread(target=lambda: same.append(np.array_equal(everything(dataset, "train"), expected)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 4
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if np.array_equal(everything(dataset, "train"), expected) else 1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]


@pytest.mark.parametrize("corpus", ["synthetic:", "synthetic:0", "synthetic:x", "synthetic:4:-1", "synthetic:4:1:1"])
def test_a_synthetic_corpus_of_another_form_is_refused(corpus: str) -> None:
    with pytest.raises(UserError, match="must be synthetic:SAMPLES"):
        parse(corpus)


def test_the_verb_writes_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "--synthetic", "12", "--source", "2x5", "--target", "3x5", "--format", "pt", "--seed", "7"]
    assert run([*words, "--folder", str(tmp_path), "--verify"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("synthetic: random numbers, for speed measurements; pt, source 2x5, target 3x5")
    assert said[1:4] == [
        "train: 12 samples",
        "validation: 1 sample",
        "verified: all stored hashes match",
    ]
    assert run(["data", said[-1]]) == 0
    assert run(["data", str(write(tmp_path / "mine.h5", tensors()))]) == 0
    assert "tensors; hdf5, source 2x5, target 3x5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a corpus, a config, or --synthetic"),
        (["shakespeare", "--synthetic", "4"], "give a corpus, a config, or --synthetic"),
        (["shakespeare", "--format", "pt"], "--format: for --synthetic only"),
        (["--synthetic", "4", "--tokenizer", "char"], "--tokenizer: for text only, not for tensors"),
        (["--synthetic", "4", "--source", "1", "--target", "0x3"], "--source 1: must be"),
        (["--synthetic", "4", "--source", "1x4", "--target", "2x3"], "vectors of one width"),
        (["--synthetic", "4", "--seed", "-1"], "seed: -1"),
        (["--synthetic", "4", "--validation-fraction", "0.9"], "0.9 is not in (0, 0.5]"),
    ],
)
def test_the_verb_refuses(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["data", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_h5py_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(UserError, match=r"codescent\[hdf5\]"):
        prepare_synthetic(RECIPE, "hdf5", tmp_path)
    assert not list(tmp_path.iterdir())


def repacked(path: Path, compression: int, change: Callable[[str, bytes], bytes] = lambda name, data: data) -> Path:
    """A .pt file whose records are written again by another program, as `change` gives them."""
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(path.with_name("again.pt"), "w", compression) as after:
        for record in before.infolist():
            after.writestr(record.filename, change(record.filename, before.read(record)))
    return path.with_name("again.pt")


def swapped(name: str, data: bytes) -> bytes:
    """A record as a machine with the other byte order writes it."""
    if name.endswith("byteorder"):
        return b"big"
    return np.frombuffer(data, "<f4").astype(">f4").tobytes() if "/data/" in name else data


def test_a_pt_file_gives_its_numbers_however_it_was_written(tmp_path: Path) -> None:
    """Compressed records, records of another byte order, tensors that are views with strides and offsets."""
    given = tensors()
    both = np.concatenate([given["source"], given["target"]], axis=1)
    source, target = (torch.from_numpy(array) for array in given.values())
    wide = torch.cat([torch.zeros(20, 1, 5), source], 1)[:, 1:]
    views = {"source": wide.transpose(0, 2).contiguous().transpose(0, 2), "target": target.flip(0).flip(0)[:]}
    torch.save({"source": source, "target": target}, tmp_path / "plain.pt")
    torch.save(views | {"beside": torch.zeros(1).expand(9)}, tmp_path / "views.pt")
    for path in (
        repacked(tmp_path / "plain.pt", zipfile.ZIP_DEFLATED),
        repacked(tmp_path / "plain.pt", zipfile.ZIP_STORED),
        repacked(tmp_path / "plain.pt", zipfile.ZIP_STORED, swapped),
        repacked(tmp_path / "plain.pt", zipfile.ZIP_DEFLATED, swapped),
        tmp_path / "views.pt",
    ):
        for whole in (False, True):
            dataset = open_file(path, 0.1, whole=whole)
            assert np.array_equal(everything(dataset, "train"), both[:18])
            numbers = np.array([17, 0, 3])
            assert np.array_equal(dataset.train.read(numbers).inputs, both[numbers])


def test_a_pt_file_whose_records_are_not_its_tensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({name: torch.from_numpy(array) for name, array in tensors().items()}, tmp_path / "plain.pt")
    cut = lambda name, data: data[:40] if name.endswith("data/0") else data  # noqa: E731
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with pytest.raises(UserError, match=r'no record has the 800 bytes of "source"|record size \(40 bytes\)'):
            open_file(repacked(tmp_path / "plain.pt", compression, cut), 0.1)
    with (
        zipfile.ZipFile(repacked(tmp_path / "plain.pt", zipfile.ZIP_STORED), "a") as archive,
        pytest.warns(UserWarning, match="Duplicate name"),
    ):
        archive.writestr(next(name for name in archive.namelist() if name.endswith("data/0")), bytes(800))
    with pytest.raises(UserError, match="two records have one name"):
        open_file(tmp_path / "again.pt", 0.1)
    monkeypatch.setattr(tensor_files, "MOST_UNPACKED_BYTES", 1000)
    with pytest.raises(UserError, match="its records are compressed, and have more than"):
        open_file(repacked(tmp_path / "plain.pt", zipfile.ZIP_DEFLATED), 0.1)


@pytest.mark.parametrize(
    ("shape", "offsets", "told"),
    [
        ([4, 2, 3], [0, 96], "tensors overlap"),
        ([4, 2, 3], [100, 196], "leave a gap, at byte"),
        ([-4, -2, 3], [96, 192], r'"target" has the shape \[-4, -2, 3\]'),
        ([1 << 32, 1 << 32, 1], [96, 96], '"target" of .* has 0 bytes'),  # the product is 0 in 64 bits
    ],
)
def test_a_safetensors_header_that_would_map_other_numbers(
    shape: list[int], offsets: list[int], told: str, tmp_path: Path
) -> None:
    entry = {"dtype": "F32", "shape": [4, 2, 3], "data_offsets": [0, 96]}
    header = json.dumps({"source": entry, "target": entry | {"shape": shape, "data_offsets": offsets}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(max(96, offsets[1]))
    (tmp_path / "mine.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=told):
        open_file(tmp_path / "mine.safetensors", 0.5)


def test_hdf5_of_another_byte_order_and_compressed(tmp_path: Path) -> None:
    given = tensors()
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        file.create_dataset("source", data=given["source"].astype(">f4"), dtype=">f4", chunks=(7, 1, 3))
        file.create_dataset("target", data=given["target"].astype(">f8"), dtype=">f8", compression="gzip")
    both = np.concatenate([given["source"], given["target"]], axis=1)
    assert np.array_equal(everything(open_file(tmp_path / "mine.h5", 0.1), "train"), both[:18])


def test_our_own_arrays_are_written_row_by_row(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    write_array(tmp_path / "a.npy", array)
    assert np.array_equal(np.load(tmp_path / "a.npy"), array)
    assert np.array_equal(open_npy(tmp_path / "a.npy", "")[0:4], array)
    np.save(tmp_path / "b.npy", array)
    with pytest.raises(UserError, match="columns follow each other"):
        open_npy(tmp_path / "b.npy", "")
