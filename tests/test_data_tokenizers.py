"""In: texts of every script and none. Out: that our ids are those of the tokenizers library, and text comes back.
Does not prepare a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.data.tokenizers import bpe, byte_pairs
from codescent.data.tokenizers.bpe import LibraryTokenizer
from codescent.data.tokenizers.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    encode_segments,
    load,
    token_dtype,
)

ODD_TEXT = (
    "It's  we'll\tthey'Re 'S a\u00a0\u00a0b \u2003c\x1cd\x85e\u3000f\r\n\r\n  g\n\n\nh   \n i²½Ⅻ٣ naïve Ελλάδα "
    "漢字かな e\u0301 👩‍👩‍👧 \U0001d54f <|endoftext|> x\u200by\ufeffz _a-b!? ...'t"
)
# Characters of every kind that GPT-2's pattern tells apart, so that hypothesis finds their borders.
odd_text = st.text(st.one_of(st.sampled_from(ODD_TEXT + "'stremvl  \n\n"), st.characters(codec="utf-8")), max_size=60)


@pytest.fixture(scope="module")
def gpt2(data_dir: Path) -> LibraryTokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODESCENT_DATA_DIR", str(data_dir))
        return bpe.gpt2()


@pytest.fixture(autouse=True, scope="module")
def _no_text_is_short() -> Iterator[None]:
    """tiktoken encodes the first text already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "SHORT_CHARS", -1)
        yield


@pytest.fixture(scope="module")
def reference(data_dir: Path) -> library.Tokenizer:
    """GPT-2's tokenizer, made by the library's own class for it."""
    folder = data_dir / "gpt2"
    made = library.ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    return library.Tokenizer.from_str(made.to_str())


def test_gpt2_known_ids(gpt2: LibraryTokenizer) -> None:
    assert gpt2.vocab_size == 50257
    assert gpt2.separator == 50256
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"
    assert 50256 not in gpt2.encode("<|endoftext|>").tolist()  # text is never a control token
    assert gpt2.encode("").tolist() == []
    with pytest.raises(ValueError, match="50257"):
        gpt2.decode([50257])


def test_gpt2_is_the_library_on_real_text(gpt2: LibraryTokenizer, reference: library.Tokenizer, data_dir: Path) -> None:
    texts = [ODD_TEXT, (data_dir / "tinyshakespeare" / "input.txt").read_text()[:300_000]]
    texts += [path.read_bytes().decode()[:100_000] for path in sorted((data_dir / "prose").glob("*"))]
    for text in texts:
        assert gpt2.encode(text).tolist() == reference.encode(text).ids
        assert gpt2.decode(gpt2.encode(text).tolist()) == text


@given(text=odd_text)
def test_gpt2_is_the_library_on_odd_text(gpt2: LibraryTokenizer, reference: library.Tokenizer, text: str) -> None:
    assert gpt2.encode(text).tolist() == reference.encode(text).ids


def test_every_character_is_of_the_kind_that_the_library_says(
    gpt2: LibraryTokenizer, reference: library.Tokenizer
) -> None:
    points = [point for point in range(0, 0x30000, 7) if not 0xD800 <= point < 0xE000]
    for first in range(0, len(points), 500):
        text = "".join(f"a{chr(point)} {chr(point)}1{chr(point)}!" for point in points[first : first + 500])
        assert gpt2.encode(text).tolist() == reference.encode(text).ids


def test_the_last_versions_of_unicode_are_known_to_both(gpt2: LibraryTokenizer) -> None:
    """Catches: characters that tiktoken classifies otherwise than the library."""
    assert gpt2._fast is not None
    kinds = {"letter": "\U00011bc0", "number": "\U00010d40", "other": "\U0001fac6"}  # new in Unicode 16
    together = {"a": "letter", "1": "number", "!": "other"}
    for near, kind in together.items():
        for other, character in kinds.items():
            text = near + character + near
            words = gpt2._inner.pre_tokenizer.pre_tokenize_str(text)
            whole = tiktoken.Encoding(
                "t",
                pat_str=byte_pairs.GPT2_WORDS,
                mergeable_ranks={**{bytes([byte]): byte for byte in range(256)}, text.encode(): 256},
                special_tokens={},
            )
            assert (len(words) == 1) == (whole.encode_ordinary(text) == [256]) == (kind == other)


WORDS = {
    "gpt2": library.pre_tokenizers.ByteLevel(add_prefix_space=False),
    **{
        name: library.pre_tokenizers.Sequence(
            [
                library.pre_tokenizers.Split(library.Regex(words), "isolated"),
                library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for name, words in (("llama3", byte_pairs.LLAMA3_WORDS), ("qwen2", byte_pairs.QWEN2_WORDS))
    },
}


@pytest.fixture(scope="module", params=WORDS)
def trained(request: pytest.FixtureRequest) -> LibraryTokenizer:
    """A BPE that is trained on odd text, with the words of a published tokenizer."""
    inner = bpe.byte_level(library.models.BPE())
    inner.pre_tokenizer = WORDS[request.param]
    trainer = library.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([ODD_TEXT, ODD_TEXT.upper(), PROSE, "1234 12345 cafe\u0301 \u212b"] * 3, trainer)
    inner.add_special_tokens(["<|endoftext|>"])
    if request.param == "qwen2":
        inner.normalizer = library.normalizers.NFC()
        inner.add_tokens([library.AddedToken("<think>", special=False, normalized=False)])
    return LibraryTokenizer(inner)


PROSE = Path(__file__).read_text(encoding="utf-8")


@given(text=odd_text)
def test_ids_of_tiktoken_are_the_library_s_for_every_way_to_split(trained: LibraryTokenizer, text: str) -> None:
    """Catches: a pattern, a normalizer or an added token that tiktoken applies otherwise."""
    assert trained._fast is not None
    expected = trained._inner.encode(text, add_special_tokens=False).ids
    assert trained.encode(text).tolist() == expected
    for marked in (f"{text}<think>{text}", f"{text}<think>\u0338"):  # of which NFC makes "<think≯"
        assert trained.encode(marked).tolist() == trained._inner.encode(marked, add_special_tokens=False).ids


@pytest.mark.parametrize("text", [" " * 3_000_000 + "a", byte_pairs.NO_TEXT * 2 + "a", "x" * 100_000, ""])
def test_what_tiktoken_gives_up_on_the_library_encodes(gpt2: LibraryTokenizer, text: str) -> None:
    """Catches: an error, or other ids, where a run of spaces is too long for the regular expression of tiktoken."""
    assert gpt2.encode(text).tolist() == gpt2._inner.encode(text, add_special_tokens=False).ids


def test_half_of_a_surrogate_pair_is_refused(gpt2: LibraryTokenizer) -> None:
    with pytest.raises(UserError, match="the tokenizer cannot encode the text"):
        gpt2.encode("a\ud800")


@pytest.mark.parametrize(
    ("merges", "ids"),
    [
        pytest.param([("b", "c"), ("a", "b"), ("ab", "c")], {"bc": 256, "ab": 257, "abc": 258}, id="not reached"),
        pytest.param([("a", "b"), ("b", "c")], {"bc": 256, "ab": 257}, id="another order"),
    ],
)
def test_where_ids_would_differ_the_library_is_used(merges: list[tuple[str, str]], ids: dict[str, int]) -> None:
    """Catches: tiktoken taken for a vocabulary for which it makes other merges; both cases are such."""
    vocabulary, text = {**byte_pairs.byte_of_character(), **ids}, "abc"
    tokenizer = LibraryTokenizer(bpe.byte_level(library.models.BPE(vocab=vocabulary, merges=merges)))
    ranks = {bytes(map(ord, token)): number for token, number in tokenizer.vocabulary.items() if token.isascii()}
    ranks = {**{bytes([byte]): byte for byte in range(256)}, **ranks}
    theirs = tiktoken.Encoding("t", pat_str=byte_pairs.GPT2_WORDS, mergeable_ranks=ranks, special_tokens={})
    ours = tokenizer.encode(text).tolist()
    assert ours == tokenizer._inner.encode(text).ids
    assert ours != theirs.encode_ordinary(text)


def test_trained_bpe_is_the_same_twice_and_round_trips(tmp_path: Path) -> None:
    texts = [f"the quick brown fox {number} jumps over the lazy dog\n" for number in range(300)]
    one, two = bpe.train(iter(texts), 300), bpe.train(iter(texts), 300)
    one.save(tmp_path / "one.json")
    two.save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert one.vocab_size == 300
    again = load(tmp_path / "one.json")
    for text in (*texts[:3], ODD_TEXT):
        ids = one.encode(text).tolist()
        assert ids == again.encode(text).tolist()
        assert again.decode(ids) == text
        assert again.separator not in ids
    assert len(one.encode(texts[0])) < len(texts[0]) // 2


def test_training_takes_a_text_apart_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "TRAINING_PIECE_CHARS", 10)
    text = "one two three " + "x" * 35 + " four"
    pieces = list(bpe._short(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == 10
    assert pieces[:2] == ["one two", " three"]


def metaspace() -> library.Tokenizer:
    """A tokenizer quite unlike GPT-2's: a mark before each word, a normaliser, unknown words, padding."""
    inner = library.Tokenizer(library.models.WordLevel({"[UNK]": 0, "▁a": 1, "▁b": 2, "</s>": 3}, unk_token="[UNK]"))
    inner.normalizer = library.normalizers.Lowercase()
    inner.pre_tokenizer = library.pre_tokenizers.Metaspace()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    return inner


def test_any_tokenizer_of_the_library(tmp_path: Path) -> None:
    metaspace().save(str(tmp_path / "t.json"))
    tokenizer = load(tmp_path / "t.json")
    assert tokenizer.encode("A b a what b").tolist() == [1, 2, 1, 0, 2]  # neither truncated nor padded
    assert tokenizer.separator == 3
    assert tokenizer.cut_is_safe("a b", " a")
    assert not tokenizer.cut_is_safe("a b", "b a")


def test_char(tmp_path: Path) -> None:
    tokenizer = CharTokenizer("\n abé🎭", with_separator=True)
    ids = tokenizer.encode("é🎭\na")
    assert ids.tolist() == [4, 5, 0, 2]
    assert ids.dtype == np.uint16
    assert tokenizer.vocab_size == 7
    assert tokenizer.decode([4, 5, 6, 0]) == "é🎭<|endoftext|>\n"
    assert CharTokenizer("ab", with_separator=False).separator is None
    tokenizer.save(tmp_path / "c.json")
    assert load(tmp_path / "c.json").encode("é🎭\na").tolist() == ids.tolist()
    with pytest.raises(UserError, match=r"'\$' \(U\+0024\), '🦊' \(U\+1F98A\)"):
        tokenizer.encode("a$🦊")
    with pytest.raises(UserError, match="U\\+DC80"):
        tokenizer.encode("a\udc80")
    with pytest.raises(ValueError, match="outside"):
        tokenizer.decode([7])


def test_a_char_vocabulary_that_needs_32_bits() -> None:
    alphabet = "".join(chr(point) for point in range(0x20000, 0x20000 + 70_000))
    tokenizer = CharTokenizer(alphabet, with_separator=False)
    assert tokenizer.encode(alphabet[-2:]).tolist() == [69_998, 69_999]
    assert tokenizer.encode(alphabet[-2:]).dtype == np.uint32
    assert [token_dtype(size).itemsize for size in (65_536, 65_537)] == [2, 4]


@given(text=st.text(st.characters(codec="utf-8")))
def test_byte(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_byte_decodes_what_is_not_utf8_and_the_end(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "b.json")
    tokenizer = load(tmp_path / "b.json")
    assert tokenizer.decode([97, 0xFF, 256, 98]) == "a\ufffd<|endoftext|>b"


@pytest.mark.parametrize("separate", [True, False])
def test_separators_go_after_documents(separate: bool) -> None:
    tokenizer: Tokenizer = CharTokenizer("ab", with_separator=True)
    ids = encode_segments(tokenizer, [("a", False), ("b", True), ("", True), ("a", False)], separate)
    assert ids.tolist() == ([0, 1, 2, 2, 0] if separate else [0, 1, 0])
    assert encode_segments(tokenizer, [], separate).dtype == np.uint16


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not JSON"),
        ("{}", "not a tokenizer"),
        ('{"codescent_tokenizer": "char"}', "not a tokenizer"),
        (json.dumps(json.loads(library.Tokenizer(library.models.BPE()).to_str())), "without a vocabulary"),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(UserError, match=told) as caught:
        load(path)
    assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="No such file"):
        load(tmp_path / "none.json")


def test_an_alphabet_with_half_a_character_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"codescent_tokenizer": "char", "characters": "a\ud800b", "separator": False}))
    with pytest.raises(UserError, match=r"a\.json: not a tokenizer: its alphabet has half of a surrogate pair"):
        load(path)


def test_json_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(UserError, match=r"a\.json: not a tokenizer: not JSON \(nested too deeply"):
        load(path)


def test_a_word_that_no_token_stands_for_is_refused() -> None:
    inner = library.Tokenizer(library.models.WordPiece({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(UserError, match=r"the tokenizer cannot encode the text: .*Missing \[UNK\]"):
        LibraryTokenizer(inner).encode("b")
