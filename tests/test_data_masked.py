"""In: token shards of BERT's. Out: that samples hide what BERT hides, as often, and the same for the same numbers.
Does not train."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from questions import vocabulary

from codescent.base.errors import UserError
from codescent.data.samples import AnyDataset
from codescent.data.text.dataset import Dataset, open_dataset
from codescent.data.text.prepare import prepare
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.tasks import masked_tokens as masked
from codescent.tasks.masked_tokens import MASKINGS, MaskedDataset, MaskedSource


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("masked")
    (folder / "texts").mkdir()
    for number in range(20):
        text = " ".join(f"the king of city {number} walked {i} times to the sea." for i in range(50))
        (folder / "texts" / f"{number}.txt").write_text(text)
    return open_dataset(prepare(str(folder / "texts"), f"bert:{vocabulary(folder)}", folder / "datasets"))


@pytest.fixture(scope="module")
def tokenizer(dataset: Dataset) -> WordPiece:
    assert isinstance(dataset.tokenizer, WordPiece)
    return dataset.tokenizer


def masked_source(dataset: Dataset, split: str, seq_len: int, seed: int) -> MaskedSource:
    found: AnyDataset = MaskedDataset(dataset, seed)
    return cast(MaskedSource, found.source(split, seq_len, seq_len))


@pytest.mark.parametrize(("seq_len", "hidden"), [(3, 1), (16, 2), (66, 10), (128, 19)])
def test_a_sample_is_its_text_with_some_tokens_hidden(
    dataset: Dataset, tokenizer: WordPiece, seq_len: int, hidden: int
) -> None:
    source = masked_source(dataset, "validation", seq_len, 1)
    assert (source.name, source.losses_per_sample) == ("validation", hidden)
    numbers = np.arange(source.num_samples)
    samples = source.read(numbers)
    told = samples.targets >= 0
    assert (told.sum(1) == hidden).all()
    assert (samples.targets[~told] == -1).all()
    assert (samples.inputs[:, 0] == tokenizer.begin).all()
    assert (samples.inputs[:, -1] == tokenizer.end).all()
    assert not told[:, [0, -1]].any()
    text = np.where(told, samples.targets, samples.inputs)[:, 1:-1]
    assert (text == dataset.validation.read(numbers, seq_len - 2)[:, :-1]).all()
    assert (samples.extras["segments_BT"] == 0).all()
    assert samples.extras["lengths_B"].tolist() == [seq_len] * len(numbers)
    assert source.losses(numbers[:3]).tolist() == [hidden] * 3
    arrays = (samples.inputs, samples.targets, *samples.extras.values())
    assert {array.dtype for array in arrays} == {np.dtype("int64")}


def test_a_sample_depends_on_its_number_alone(dataset: Dataset) -> None:
    source = masked_source(dataset, "train", 32, 7)
    numbers = np.array([5, 0, source.num_samples - 1, 5])
    together = source.read(numbers)
    for place, number in enumerate(numbers):
        alone = masked_source(dataset, "train", 32, 7).read(np.array([number]))
        assert (alone.inputs[0] == together.inputs[place]).all()
        assert (alone.targets[0] == together.targets[place]).all()
    assert (masked_source(dataset, "train", 32, 8).read(numbers).targets != together.targets).any()
    for wrong in (-1, source.num_samples):
        with pytest.raises(IndexError):
            source.read(np.array([wrong]))
    assert source.read(np.empty(0, np.int64)).inputs.shape == (0, 32)


def test_a_piece_of_text_comes_with_other_tokens_hidden(dataset: Dataset) -> None:
    source = masked_source(dataset, "train", 66, 7)
    assert source.num_samples == MASKINGS * source.num_pieces
    samples = source.read(3 + source.num_pieces * np.arange(MASKINGS))
    told = samples.targets >= 0
    texts = np.where(told, samples.targets, samples.inputs)
    assert (texts == texts[0]).all()
    assert len({row.tobytes() for row in told}) == MASKINGS
    assert masked_source(dataset, "validation", 66, 7).num_samples == dataset.validation.num_samples(64)


def test_tokens_are_hidden_as_often_as_in_bert(dataset: Dataset, tokenizer: WordPiece) -> None:
    source = MaskedSource(dataset.train, tokenizer, 42, 3, 100)
    samples = source.read(np.arange(source.num_samples))
    told = samples.targets >= 0
    seen, wanted = samples.inputs[told], samples.targets[told]
    count = told.sum()
    assert count > 100_000
    assert abs((seen == tokenizer.mask).mean() - 0.8) < 0.005
    assert abs((seen == wanted).mean() - 0.1) < 0.005  # kept, and the few random ones that are the same
    drawn = seen[(seen != tokenizer.mask) & (seen != wanted)]
    counts = np.bincount(drawn, minlength=tokenizer.vocab_size)
    expected = 0.1 * count / tokenizer.vocab_size
    assert np.delete(counts, tokenizer.mask).max() < expected + 6 * expected**0.5
    # Every place is as likely: but for the documents' ends.
    ends = (np.where(told, samples.targets, samples.inputs)[:, 1:-1] == tokenizer.end).any(0)
    places = told[:, 1:-1].mean(0)[~ends]
    assert abs(places - 6 / 40).max() < 6 * (0.15 * 0.85 / len(told)) ** 0.5


def test_ends_of_documents_are_hidden_only_where_nothing_else_is(dataset: Dataset, tokenizer: WordPiece) -> None:
    source = masked_source(dataset, "train", 32, 7)
    assert (source.read(np.arange(source.num_samples)).targets != tokenizer.end).all()
    short = masked_source(dataset, "train", 3, 7)
    targets = short.read(np.arange(short.num_pieces)).targets
    assert ((targets >= 0).sum(1) == 1).all()
    assert (targets == tokenizer.end).any()


def test_it_is_a_dataset_like_the_one_that_it_is_made_of(dataset: Dataset) -> None:
    found = MaskedDataset(dataset, 1)
    for name in ("path", "vocab_size", "description", "tokenizer_text"):
        assert getattr(found, name) == getattr(dataset, name)


def test_the_fingerprint_is_of_tokens_tokenizer_and_masking(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = [dataset.fingerprint, MaskedDataset(dataset, 1).fingerprint]
    assert MaskedDataset(open_dataset(dataset.path), 1).fingerprint == prints[1]
    for name, value in (("MASKINGS", 5), ("SHARE", 0.3), ("MASKED", 0.5), ("RANDOM", 0.2), ("VERSION", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(masked, name, value)
            prints.append(MaskedDataset(dataset, 1).fingerprint)
    text = dataset.tokenizer_text
    assert text is not None
    (tmp_path / "tokenizer.json").write_text(text)
    for name in ("train", "val"):  # shards of others do not protect the tokenizer beside them
        dataset.train.span(0, 1000).astype("<u2").tofile(tmp_path / f"{name}.bin")
    prints.append(MaskedDataset(open_dataset(tmp_path), 1).fingerprint)
    (tmp_path / "tokenizer.json").write_text(text.replace('"lowercase":true', '"lowercase":false'))
    assert (tmp_path / "tokenizer.json").read_text() != text
    prints.append(MaskedDataset(open_dataset(tmp_path), 1).fingerprint)
    assert len(set(prints)) == len(prints) == 9


def test_what_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="3 positions or more"):
        masked_source(dataset, "train", 2, 1)
    (tmp_path / "text.txt").write_text("text " * 1000)
    with pytest.raises(UserError, match='= "bert", "bert-cased"'):
        masked_source(open_dataset(prepare(str(tmp_path / "text.txt"), "byte", tmp_path / "datasets")), "train", 8, 1)
