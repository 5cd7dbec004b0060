"""In: texts, BERT's vocabulary and others. Out: that our ids and offsets are those of transformers; bad vocabularies.
Does not cut windows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from questions import vocabulary
from transformers import BertTokenizerFast

from codescent.base.errors import UserError
from codescent.data.text import download
from codescent.data.text.dataset import open_dataset
from codescent.data.text.prepare import prepare
from codescent.data.tokenizers import wordpiece
from codescent.data.tokenizers.tokenizer import load
from codescent.data.tokenizers.wordpiece import WordPiece, bert, split_name

ODD = "Ünïcödé naïve ﬁne 漢字かな e\u0301 👩‍👧 x\u200by\ufeffz\u00a0\u3000 [MASK] [SEP] ##ing don't 1,990s—“q” \x00 İ ß"
odd_text = st.text(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=60)
Maker = Callable[[str], WordPiece]


@pytest.fixture(scope="module")
def uncased(data_dir: Path) -> WordPiece:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODESCENT_DATA_DIR", str(data_dir))
        return bert("bert")


@pytest.fixture(scope="module")
def reference(data_dir: Path) -> BertTokenizerFast:
    return BertTokenizerFast(str(data_dir / "bert-base-uncased" / "vocab.txt"))


def test_known_ids(uncased: WordPiece) -> None:
    assert uncased.vocab_size == 30_522
    assert (uncased.pad, uncased.unknown, uncased.begin, uncased.end, uncased.mask) == (0, 100, 101, 102, 103)
    assert uncased.separator == 102
    assert uncased.encode("Hello world").tolist() == [7592, 2088]
    assert uncased.decode(uncased.encode("unaffable").tolist()) == "unaffable"
    assert uncased.encode("[MASK]").tolist() == uncased.encode("[ mask ]").tolist()  # text is never a control token
    pieces = uncased.pieces(["Zoë's unaffable"])[0]
    assert [("Zoë's unaffable"[a:b]) for a, b in pieces.characters] == ["Zoë", "'", "s", "una", "ffa", "ble"]


@given(text=odd_text)
@example(text=ODD)
def test_it_is_that_of_transformers(uncased: WordPiece, reference: BertTokenizerFast, text: str) -> None:
    expected = reference(text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True)
    [found] = uncased.pieces([text])
    assert found.ids.tolist() == expected["input_ids"]
    assert found.characters.tolist() == [list(pair) for pair in expected["offset_mapping"]]
    assert uncased.encode(text).tolist() == expected["input_ids"]


def test_saved_and_loaded_it_is_the_same(uncased: WordPiece, tmp_path: Path) -> None:
    uncased.save(tmp_path / "t.json")
    again = load(tmp_path / "t.json")
    assert isinstance(again, WordPiece)
    assert again.text == uncased.text == (tmp_path / "t.json").read_text()
    assert again.pieces([ODD])[0].ids.tolist() == uncased.pieces([ODD])[0].ids.tolist()
    assert again.mask == uncased.mask


def test_a_vocabulary_of_ones_own_cased_and_uncased(tmp_path: Path) -> None:
    path = vocabulary(tmp_path)
    lower, cased = bert(f"bert:{path}"), bert(f"bert-cased:{path}")
    assert lower.decode(lower.encode("The KING walked").tolist()) == "the king walked"
    assert lower.unknown not in lower.encode("Éa").tolist()
    assert cased.encode("The king").tolist()[0] == cased.unknown
    assert cased.encode("king").tolist() == lower.encode("King").tolist()


def test_names() -> None:
    assert split_name("bert") == ("bert", "")
    assert split_name("bert-cased:a:b") == ("bert-cased", "a:b")
    assert [split_name(name) for name in ("gpt2", "bert:", "bertx", "")] == [None] * 4
    assert {kind: published.name for kind, published in wordpiece.KINDS.items()} == {
        "bert": "bert-base-uncased/vocab.txt",
        "bert-cased": "bert-base-cased/vocab.txt",
    }


def test_every_problem_of_a_vocabulary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\na\n\na\n[SEP]\n")
    with pytest.raises(UserError) as caught:
        bert(f"bert:{path}")
    assert [problem.removeprefix(f"{path}: ") for problem in caught.value.problems] == [
        "line 4: empty: a vocabulary has a token on each line",
        "line 5: 'a' is on line 3 already",
        "no token [CLS]: BERT needs [PAD], [UNK], [CLS], [SEP], [MASK]",
        "no token [MASK]: BERT needs [PAD], [UNK], [CLS], [SEP], [MASK]",
    ]
    path.write_bytes(b"[PAD]\n\xff\n")
    with pytest.raises(UserError, match="not UTF-8 text: byte 0xff at 6"):
        bert(f"bert:{path}")
    with pytest.raises(UserError, match=r"none\.txt: this vocabulary cannot be read: No such file"):
        bert(f"bert:{tmp_path / 'none.txt'}")


def test_offline_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CODESCENT_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(UserError) as caught:
        bert("bert-cased")
    assert "$CODESCENT_DATA_DIR/bert-base-cased/vocab.txt" in str(caught.value)
    assert download.BERT_CASED.sha256 in str(caught.value)


def test_plain_text_is_prepared_with_it(tmp_path: Path) -> None:
    path = vocabulary(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"The king {number} walked to the sea.\n" * 50)
    dataset = open_dataset(prepare(str(tmp_path / "texts"), f"bert:{path}", tmp_path / "datasets"))
    tokenizer = dataset.tokenizer
    assert isinstance(tokenizer, WordPiece)
    tokens = dataset.train.read(np.arange(3), 8)[0].tolist()
    assert tokenizer.decode(tokens).startswith("the king")
    assert dataset.description["tokenizer"] == {
        "kind": "bert",
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.end,
        "sha256": dataset.description["tokenizer"]["sha256"],
    }
    again = prepare(str(tmp_path / "texts"), f"bert:{path}", tmp_path / "datasets")
    assert again == dataset.path
    path.write_text(path.read_text() + "sea.\n")
    assert prepare(str(tmp_path / "texts"), f"bert:{path}", tmp_path / "datasets") != again
    with pytest.raises(UserError, match="tokenizer bert:nowhere: nowhere: this vocabulary cannot be read"):
        prepare(str(tmp_path / "texts"), "bert:nowhere", tmp_path / "datasets")


def test_a_wordpiece_without_control_tokens_is_a_plain_one(tmp_path: Path) -> None:
    fields = json.loads(bert(f"bert:{vocabulary(tmp_path)}").text)
    del fields["model"]["vocab"]["[MASK]"]
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] != "[MASK]"]
    (tmp_path / "t.json").write_text(json.dumps(fields))
    found = load(tmp_path / "t.json")
    assert not isinstance(found, WordPiece)
    assert found.encode("king").tolist()
