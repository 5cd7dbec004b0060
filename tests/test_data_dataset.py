"""In: token shards, ours and of nanoGPT's and llm.c's making, whole and damaged. Out: samples, or what is wrong where.
Does not prepare text but to have shards."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.data.prepared import DESCRIPTION
from codescent.data.samples import in_range
from codescent.data.text import dataset, shards
from codescent.data.text.dataset import locate, open_dataset
from codescent.data.text.foreign import ShardFile
from codescent.data.text.prepare import prepare
from codescent.data.text.request import make_request
from codescent.data.text.split import Split
from codescent.data.tokenizers import bpe


def split_of(tmp_path: Path, lengths: list[int], vocab_size: int = 1 << 16) -> tuple[Split, np.ndarray]:
    """A split of shards of these lengths, and all its tokens."""
    tokens = np.arange(sum(lengths), dtype="<u2")
    files, first = [], 0
    for number, length in enumerate(lengths):
        path = tmp_path / f"{number}.bin"
        header = b"\0" * 1024 * (number % 2)
        path.write_bytes(header + tokens[first : first + length].tobytes())
        files.append(ShardFile(path, len(header), length, np.dtype("<u2")))
        first += length
    return Split("train", tuple(files), vocab_size), tokens


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), seq_len=st.integers(1, 30), data=st.data())
def test_samples_are_the_tokens_wherever_shards_end(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    split, tokens = split_of(tmp_path_factory.mktemp("split"), lengths)
    assert split.num_tokens == len(tokens)
    count = split.num_samples(seq_len)
    assert count == max(0, (len(tokens) - 1) // seq_len)
    samples = data.draw(st.lists(st.integers(0, count - 1), max_size=8)) if count else []
    read = split.read(np.array(samples, np.int64), seq_len)
    assert read.dtype == np.int64
    assert read.shape == (len(samples), seq_len + 1)
    for row, sample in zip(read.tolist(), samples):
        assert row == tokens[sample * seq_len : sample * seq_len + seq_len + 1].tolist()
    for outside in (-1, count):
        with pytest.raises(IndexError):
            split.read(np.array([outside]), seq_len)


def test_a_token_outside_the_vocabulary_is_told_by_file_and_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, _ = split_of(tmp_path, [100, 100, 100], vocab_size=151)
    told = f"{tmp_path / '1.bin'}: token 151 at byte {1024 + 51 * 2} is outside the vocabulary of 151"
    assert split.problem() == told
    assert split.read(np.array([0, 1]), 70).max() == 140
    with pytest.raises(UserError) as caught:
        split.read(np.array([0, 2]), 70)
    assert caught.value.problems == (told,)
    monkeypatch.setattr("codescent.data.text.split.SCAN_TOKENS", 7)
    assert split.problem() == told
    assert split.largest() == 299


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 400)
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    return prepare(str(tmp_path / "text.txt"), "char", tmp_path / "datasets")


def refusal(path: Path) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        open_dataset(path)
    return caught.value.problems


def test_our_shards_that_are_truncated_or_missing(ours: Path, tmp_path: Path) -> None:
    damaged = ours / "train_000001.bin"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    (ours / "validation_000000.bin").unlink()
    problems = refusal(ours)
    assert problems[0] == f"{damaged}: truncated: ends at byte 797, expected 800"
    assert problems[1] == f"{ours / 'validation_000000.bin'}: missing"
    assert "prepare it again" in problems[2]
    for again in (locate, prepare):  # nothing is repaired behind the user's back
        with pytest.raises(UserError, match="truncated"):
            again(str(tmp_path / "text.txt"), "char", tmp_path / "datasets")


def test_our_shards_with_other_tokens(ours: Path) -> None:
    path = ours / "train_000001.bin"
    tokens = np.fromfile(path, "<u2")
    opened = open_dataset(ours)
    opened.verify()
    tokens[7] = 0 if tokens[7] else 1
    path.write_bytes(tokens.tobytes())  # inside the vocabulary: the sha256 alone tells
    assert f"{path}: changed: sha256" in refusal(ours)[0]
    with pytest.raises(UserError, match=f"{path.name}: changed"):
        opened.verify()


def test_large_datasets_of_others_are_checked_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.bin", "val.bin"):
        np.full(400, 65535, "<u2").tofile(tmp_path / name)
    monkeypatch.setattr(dataset, "CHECKED_BYTES", 10)
    opened = open_dataset(tmp_path)
    with pytest.raises(UserError, match="token 65535 at byte 0"):
        opened.train.read(np.array([0]), 8)


def test_descriptions_that_are_not_ours(ours: Path, tmp_path: Path) -> None:
    text = (ours / "description.json").read_text()
    (ours / "description.json").write_text(text[:50])
    assert "not JSON" in refusal(ours)[0]
    assert locate(str(tmp_path / "text.txt"), "char", tmp_path / "datasets") is None
    (ours / "description.json").write_text(text.replace("codescent tokens 3", "codescent tokens 9"))
    assert "codescent tokens 9" in refusal(ours)[0]
    (ours / "description.json").write_text("[]")
    assert "description.json: damaged" in refusal(ours)[0]
    assert "no token shards in this folder" in refusal(tmp_path)[0]
    assert "no token shards in this folder" in refusal(tmp_path / "nowhere")[0]


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        (("tokenizer", "vocab_size"), "65", "tokenizer.vocab_size: Input should be a valid integer"),
        (("dtype",), "float32", "dtype: Input should be 'uint16' or 'uint32'"),
        (("splits", "train", "shards", 0, "tokens"), -1, "splits.train.shards.0.tokens"),
        (("splits", "train", "shards", 0, "file"), "../outside.bin", "splits.train.shards.0.file"),
        (("splits", "validation"), None, "splits.validation"),
    ],
)
def test_descriptions_with_a_wrong_field(
    ours: Path, where: tuple[str | int, ...], value: object, expected: str
) -> None:
    description = json.loads((ours / "description.json").read_text())
    part = description
    for step in where[:-1]:
        part = part[step]
    part[where[-1]] = value
    (ours / "description.json").write_text(json.dumps(description))
    problem = refusal(ours)[0]
    assert expected in problem
    assert problem.endswith("delete this folder and prepare it again")


def test_a_description_has_its_own_hash_where_this_version_wrote_it(ours: Path, tmp_path: Path) -> None:
    path = ours / "description.json"
    whole = path.read_text()
    path.write_text(whole.replace('"vocab_size": 8', '"vocab_size": 9'))
    assert refusal(ours) == (f"{path}: changed since it was written: delete this folder and prepare it again",)
    fields = json.loads(whole)
    del fields["digest"]
    path.write_text(json.dumps(fields))  # as an earlier version wrote it
    assert open_dataset(ours).vocab_size == 8
    (tmp_path / "text.txt").touch()  # another stamp is noted, and sealed
    assert prepare(str(tmp_path / "text.txt"), "char", tmp_path / "datasets") == ours
    assert json.loads(path.read_text())["stamp"] != fields["stamp"]
    assert "digest" in json.loads(path.read_text())
    open_dataset(ours).verify()


def test_a_tokenizer_that_was_changed_or_lost(ours: Path) -> None:
    path = ours / "tokenizer.json"
    path.write_text(path.read_text().replace("{", "{ ", 1))
    assert "tokenizer.json: changed" in refusal(ours)[0]
    path.unlink()
    assert "tokenizer.json: missing" in refusal(ours)[0]


def test_numbers_of_samples_are_in_their_range() -> None:
    found = in_range(np.array([0, 4], np.uint8), 5, "train")
    assert (found.tolist(), found.dtype) == ([0, 4], np.dtype("int64"))
    assert in_range(np.empty(0, np.int32), 0, "train").tolist() == []
    for wrong in ([5], [0, -1], [2, 1 << 40]):
        with pytest.raises(IndexError, match=r"samples of the validation split lie in \[0, 5\)"):
            in_range(np.array(wrong), 5, "validation")


def test_the_fingerprint_is_of_the_tokens(tmp_path: Path, ours: Path) -> None:
    (tmp_path / "same.txt").write_text("some text\n" * 100)
    (tmp_path / "other.txt").write_text("some texT\n" * 100)
    same, other = (prepare(str(tmp_path / name), "char", tmp_path / "datasets") for name in ("same.txt", "other.txt"))
    prints = [open_dataset(path).fingerprint for path in (ours, same, other)]
    assert prints[0] == prints[1] != prints[2]


class Trap:
    """Makes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_nanogpt_shards(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    ids = bpe.gpt2().encode("To be, or not to be: that is the question. " * 10)
    ids[:90].tofile(tmp_path / "train.bin")
    ids[90:].tofile(tmp_path / "val.bin")
    opened = open_dataset(tmp_path)
    assert (opened.vocab_size, opened.train.num_tokens, opened.validation.num_tokens) == (50257, 90, len(ids) - 90)
    assert opened.tokenizer is not None
    assert opened.tokenizer.decode(opened.train.read(np.array([0]), 5)[0].tolist()) == "To be, or not to"
    assert opened.description["format"] == "nanoGPT"
    assert "train: 90 tokens in 1 shard" in opened.summary()
    before = opened.fingerprint
    ids[1:91].tofile(tmp_path / "train.bin")
    assert open_dataset(tmp_path).fingerprint != before
    assert open_dataset(tmp_path / "train.bin").path == tmp_path
    assert locate(str(tmp_path), "char", tmp_path / "none") == tmp_path


def test_nanogpt_characters_are_read_without_their_pickle(tmp_path: Path) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    np.arange(65, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(10, dtype="<u2").tofile(tmp_path / "val.bin")
    opened = open_dataset(tmp_path)
    assert opened.vocab_size == 65
    assert opened.tokenizer is None
    assert not (tmp_path / "trapped").exists()


def headed(path: Path, tokens: np.ndarray, magic: int = 20240520, version: int = 1) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def test_llmc_shards(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype="<u2")
    headed(tmp_path / "fineweb_val_000000.bin", tokens[:50])
    headed(tmp_path / "fineweb_train_000001.bin", tokens[:300])
    headed(tmp_path / "fineweb_train_000002.bin", tokens[300:])
    opened = open_dataset(tmp_path)
    assert opened.description["format"] == "llm.c"
    assert opened.vocab_size == 50257
    assert opened.validation.num_tokens == 50
    assert opened.train.read(np.array([2]), 149).tolist() == [list(range(298, 448))]
    opened.verify()
    headed(tmp_path / "tiny_shakespeare_train.bin", tokens[:20])
    headed(tmp_path / "tiny_shakespeare_val.bin", tokens[:10])
    assert "several sets" in refusal(tmp_path)[0]
    assert open_dataset(tmp_path / "tiny_shakespeare_train.bin").train.num_tokens == 20
    assert open_dataset(tmp_path / "fineweb_train_000002.bin").train.num_tokens == 1000
    assert "name the folder" in refusal(tmp_path / "fineweb_val_000000.bin")[0]


def test_llmc_shards_of_llama3(tmp_path: Path) -> None:
    for name in ("x_train.bin", "x_val.bin"):
        headed(tmp_path / name, np.array([1, 128_255, 3], "<u4"), 20240801, 7)
    opened = open_dataset(tmp_path)
    assert opened.vocab_size == 128_256
    assert opened.train.read(np.array([0]), 2).tolist() == [[1, 128_255, 3]]


def test_damaged_shards_of_others(tmp_path: Path) -> None:
    tokens = np.arange(100, dtype="<u2")
    headed(tmp_path / "train.bin", tokens)
    assert "no validation shard val*.bin" in refusal(tmp_path)[0]
    headed(tmp_path / "val.bin", tokens)
    whole = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin").write_bytes(whole[:-10])
    assert refusal(tmp_path) == (
        f"{tmp_path / 'train.bin'}: truncated: its header says 100 tokens, which end at byte 1224, "
        "but the file ends at byte 1214",
    )
    (tmp_path / "train.bin").write_bytes(whole + b"xx")
    assert "too long" in refusal(tmp_path)[0]
    headed(tmp_path / "train.bin", tokens, version=2)
    assert "version 2" in refusal(tmp_path)[0]
    tokens.tofile(tmp_path / "train.bin")
    assert "different formats" in refusal(tmp_path)[0]
    (tmp_path / "train.bin").write_bytes(b"abc")
    assert "truncated: 3 bytes" in refusal(tmp_path)[0]
    np.array([1, 60_000, 2], "<u2").tofile(tmp_path / "train.bin")
    tokens.tofile(tmp_path / "val.bin")
    assert f"{tmp_path / 'train.bin'}: token 60000 at byte 2 is outside the vocabulary of 50257" in refusal(tmp_path)[0]


def test_a_tokenizer_beside_foreign_shards_is_theirs(tmp_path: Path, ours: Path) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        np.array([1, 2, 3], "<u2").tofile(folder / name)
    (folder / "tokenizer.json").write_bytes((ours / "tokenizer.json").read_bytes())
    opened = open_dataset(folder)
    assert opened.vocab_size == len(set("some text\n"))
    assert json.loads((folder / "tokenizer.json").read_text())["codescent_tokenizer"] == "char"
    assert opened.tokenizer is not None
    assert opened.tokenizer.decode([1, 2]) == " e"


def test_tokens_of_json_syntax_from_an_earlier_version_are_not_used_again(tmp_path: Path) -> None:
    """Earlier versions read JSON lines as text if the name did not end in .jsonl, and recorded no `json_lines`."""
    for name, text in (("lines.json", '{"text": "first"}\n{"text": "second"}\n'), ("plain.txt", "plain text\n" * 9)):
        (tmp_path / name).write_text(text)
        corpus, root = str(tmp_path / name), tmp_path / name.replace(".", "_")
        wrong = prepare(corpus, "byte", root, as_text=True)
        description = json.loads((wrong / DESCRIPTION).read_text())
        assert len(open_dataset(wrong).train.span(0, 9)) == 9
        del description["request"]["as_text"], description["corpus"]["json_lines"], description["digest"]
        request, sha256 = make_request(corpus, "byte", 0.1, "text", None), description["corpus"]["sha256"]
        old = request.folder(root, name.split(".")[0], sha256)
        wrong.rename(old)
        (old / DESCRIPTION).write_text(json.dumps(description))
        found = prepare(corpus, "byte", root)
        assert (found == old) == (name == "plain.txt")
        assert locate(corpus, "byte", root) == found
        again = open_dataset(found)
        assert again.description["corpus"]["characters"] == (len("firstsecond") if name == "lines.json" else len(text))
        assert again.description["corpus"]["documents"] == (2 if name == "lines.json" else 1)
        assert again.summary()[3:] == (["read as JSON lines by their content: lines.json"] * (name == "lines.json"))
        assert prepare(corpus, "byte", root, as_text=True) not in (found, old)
