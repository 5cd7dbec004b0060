"""In: texts of many kinds. Out: threads give the tokens, order and errors of one thread, in bounded memory.
Does not measure speed (benchmarks/tokenizing.py does)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from codescent.base.errors import UserError
from codescent.data.text.chunks import TextChunk
from codescent.data.text.pool import encode_chunks
from codescent.data.tokenizers import bpe
from codescent.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

TEXTS = ["", "a", "\n\r\n\0", "é漢🎭", "many words " * 9000, "\u2028", "é" * 70_000]
ALPHABET = "".join(sorted(set("".join(TEXTS))))
MAKERS = {
    "char": lambda: CharTokenizer(ALPHABET, with_separator=True),
    "byte": ByteTokenizer,
    "bpe": lambda: bpe.train(iter(TEXTS), 300),
}


def chunks() -> Iterator[TextChunk]:
    for number in range(12):
        texts = [*TEXTS[number % 7 :], *TEXTS[: number % 7]]
        yield TextChunk("train", [(text, place % 3 > 0) for place, text in enumerate(texts)])
    yield TextChunk("validation", [])


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_tokens_are_those_of_one_thread(kind: str, separate: bool) -> None:
    tokenizer: Tokenizer = MAKERS[kind]()
    expected = list(encode_chunks(chunks(), tokenizer, separate, 1))
    found = list(encode_chunks(chunks(), tokenizer, separate, 3))
    assert [chunk for chunk, _ in found] == [chunk for chunk, _ in expected] == list(chunks())
    for (_, tokens), (_, others) in zip(found, expected, strict=True):
        assert (tokens.dtype, tokens.tolist()) == (others.dtype, others.tolist())


def test_a_text_that_is_refused_ends_the_work_with_its_error() -> None:
    """Catches: an error of a thread that is lost, or hangs the others."""
    bad, good = TextChunk("train", [("abc\n", True)]), TextChunk("train", [("ba", True)])
    encoded = encode_chunks([good, bad, *[good] * 20], CharTokenizer("ab", with_separator=False), False, 2)
    assert next(encoded)[1].tolist() == [1, 0]
    with pytest.raises(UserError, match="does not know"):
        list(encoded)


def test_no_more_than_two_chunks_for_each_thread_are_read() -> None:
    """Catches: a corpus that is read into memory, ahead of the threads; and one that is read on after a stop."""
    taken = 0

    def counted() -> Iterator[TextChunk]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield TextChunk("train", [("ab", True)])

    encoded = encode_chunks(counted(), CharTokenizer("ab", with_separator=False), False, 3)
    next(encoded)
    assert taken == 6
    encoded.close()
    assert taken == 6
