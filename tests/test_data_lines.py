"""In: prepared texts. Out: their lines as samples: the tokens, the marks, the padding, the losses.
Does not train (test_pairs_runs does)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from questions import vocabulary

from codescent.base.errors import UserError
from codescent.data.text import shards
from codescent.data.text.dataset import open_dataset
from codescent.data.text.prepare import prepare
from codescent.data.text.split import Split
from codescent.data.tokenizers.tokenizer import CharTokenizer
from codescent.tasks.pairs import LineDataset, LineSource, line_ends

TEXT = "abc\n\nde\nfghijklm\n\n\nn" + "\no p" * 20


def dataset_of(folder: Path, text: str, tokenizer: str = "char", pairs: str = "reverse") -> LineDataset:
    (folder / "text.txt").write_text(text)
    path = prepare(str(folder / "text.txt"), tokenizer, folder, validation_fraction=0.3)
    return LineDataset(open_dataset(path), pairs)


def words(source: LineSource, dataset: LineDataset, numbers: np.ndarray) -> list[tuple[str, str, str]]:
    """Source, target as it is read, target as it is wanted: < and > are the marks, . is where nothing is wanted."""
    tokenizer = dataset.text.tokenizer
    assert tokenizer is not None

    def text(row: list[int]) -> str:
        marks = {source.begin: "<", source.end: ">", -1: "."}
        return "".join(marks.get(token) or tokenizer.decode([token]) for token in row)

    samples, length = source.read(numbers), source._source_len
    return [
        (text(x[:length].tolist()), text(x[length:].tolist()), text(y[length:].tolist()))
        for x, y in zip(samples.inputs, samples.targets)
    ]


@pytest.mark.parametrize("shard_tokens", [1 << 26, 7])
def test_a_sample_is_a_line_and_its_reverse(tmp_path: Path, shard_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", shard_tokens)
    dataset = dataset_of(tmp_path, TEXT)
    source = dataset.source("train", 9, 5)
    assert len(source._split.files) == (1 if shard_tokens > 7 else 10)
    assert words(source, dataset, np.array([2, 0, 1, 3, 4])) == [
        ("fghi", "<ihgf", "ihgf>"),  # the first four characters: what both hold
        ("abc>", "<cba>", "cba>."),
        ("de>>", "<ed>>", "ed>.."),
        ("n>>>", "<n>>>", "n>..."),
        ("o p>", "<p o>", "p o>."),
    ]
    samples = source.read(np.array([2, 0, 1]))
    assert samples.extras["source_lengths_B"].tolist() == [4, 3, 2]
    assert samples.extras["target_lengths_B"].tolist() == [5, 4, 3]
    assert source.losses(np.array([2, 0, 1])).tolist() == [5, 4, 3]
    assert (samples.targets[:, :4] == -1).all()
    assert ((samples.targets >= 0).sum(1) == source.losses(np.array([2, 0, 1]))).all()
    assert source.losses_per_sample is None
    with pytest.raises(IndexError):
        source.read(np.array([source.num_samples]))


def test_a_copy_and_a_short_target(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, TEXT, pairs="copy")
    source = dataset.source("train", 7, 3)
    assert words(source, dataset, np.array([0, 1])) == [("ab>>", "<ab", "ab>"), ("de>>", "<de", "de>")]
    with pytest.raises(UserError, match=r"model.target_len = 1: .* at least 2 positions"):
        dataset.source("train", 5, 1)


def test_the_vocabulary_has_two_marks_and_the_run_knows_what_was_made(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, TEXT)
    other = LineDataset(dataset.text, "copy")
    assert dataset.vocab_size == dataset.text.vocab_size + 2
    assert len({dataset.fingerprint, other.fingerprint, dataset.text.fingerprint}) == 3
    assert (dataset.description["pairs"], dataset.path) == ("reverse", dataset.text.path)
    assert dataset.source("validation", 9, 5).num_samples > 0


def test_the_fingerprint_is_of_the_tokenizer_too(tmp_path: Path) -> None:
    for name in ("train", "val"):
        np.arange(3, dtype="<u2").repeat(9).tofile(tmp_path / f"{name}.bin")
    prints = []
    for alphabet in ("\nab", "a\nb"):
        CharTokenizer(alphabet, with_separator=False).save(tmp_path / "tokenizer.json")
        prints.append(LineDataset(open_dataset(tmp_path), "copy").fingerprint)
    assert prints[0] != prints[1]


def test_lines_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_of(tmp_path, TEXT)
    scans = []
    whole = Split._pieces
    monkeypatch.setattr(Split, "_pieces", lambda split: [scans.append(split.name), *whole(split)][1:])
    sources = [dataset.source(split, 9, 5) for split in ("train", "validation", "validation", "train")]
    assert scans == ["train", "validation"]
    assert (sources[0], sources[1]) == (sources[3], sources[2])
    assert dataset.source("train", 9, 4) is not sources[0]
    ends = dataset.source("train", 9, 5)._split
    ends.vocab_size = 3
    with pytest.raises(UserError, match="is outside the vocabulary of 3"):
        ends.where(np.zeros(3, np.bool_))


def test_characters_are_put_into_a_table_once() -> None:
    tables = []

    class Alphabet(str):
        def __iter__(self) -> Iterator[str]:
            tables.append(1)
            return super().__iter__()

    tokenizer = CharTokenizer(Alphabet("".join(map(chr, range(5000)))), with_separator=True)
    assert np.flatnonzero(line_ends(tokenizer, 5001)).tolist() == [10]
    assert tokenizer.decode([65, 5000, 10]) == "A<|endoftext|>\n"
    assert sum(tables) <= 1


def test_a_tokenizer_that_drops_ends_of_lines_is_refused(tmp_path: Path) -> None:
    text = "the king of the city\n" * 300
    made = dataset_of(tmp_path, text, f"bert:{vocabulary(tmp_path)}")
    assert made.text.tokenizer is not None
    assert made.text.tokenizer.separator is not None
    with pytest.raises(UserError, match=r'drops the ends of lines.* "byte", "char", "gpt2" or "bpe:VOCAB"'):
        made.source("train", 20, 10)
    with pytest.raises(UserError, match="the text has no end of a line"):
        dataset_of(tmp_path, "one line " * 100).source("train", 20, 10)


def test_documents_end_lines_and_so_do_tokens_with_an_end_in_them(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"line {number}")
    path = prepare(str(tmp_path / "texts"), "char", tmp_path, validation_fraction=0.3)
    with pytest.raises(UserError, match=r"model.target_len"):
        LineDataset(open_dataset(path), "copy").source("train", 5, 1)
    source = LineDataset(open_dataset(path), "copy").source("train", 20, 10)
    assert source.num_samples == 2  # two whole documents and a piece of the third, or less
    made = dataset_of(tmp_path, "many workers\n\n\tone descent\n" * 200, "bpe:270")
    tokenizer = made.text.tokenizer
    assert tokenizer is not None
    ends = line_ends(tokenizer, made.text.vocab_size)
    assert all(
        ("\n" in tokenizer.decode([token])) == ends[token]
        for token in range(tokenizer.vocab_size)
        if token != tokenizer.separator
    )
    source = made.source("train", 60, 30)
    assert {text.rstrip(">") for text, _, _ in words(source, made, np.arange(10))} <= {"many workers", "\tone descent"}


def test_shards_of_others_without_a_tokenizer_have_no_lines(tmp_path: Path) -> None:
    for name in ("train", "val"):
        np.arange(100, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    (tmp_path / "meta.pkl").write_bytes(b"")
    with pytest.raises(UserError, match="it is needed to find lines"):
        LineDataset(open_dataset(tmp_path), "copy").source("train", 20, 10)
