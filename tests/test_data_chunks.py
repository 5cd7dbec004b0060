"""In: texts in blocks of any size, cut into chunks of any size. Out: that no id and no border depends on the cutting.
Does not write shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.data.text import chunks
from codescent.data.text.chunks import TextChunk, cut_chunks, split_point
from codescent.data.text.records import DocumentPiece
from codescent.data.tokenizers import bpe
from codescent.data.tokenizers.tokenizer import Tokenizer, encode_segments


@pytest.fixture(scope="module")
def gpt2(data_dir: Path) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODESCENT_DATA_DIR", str(data_dir))
        return bpe.gpt2()


def sized(patch: pytest.MonkeyPatch, chunk: int, search: int, window: int, uncut: int = 1 << 30) -> None:
    for name, size in (("CHUNK", chunk), ("SEARCH", search), ("WINDOW", window), ("MAX_UNCUT", uncut)):
        patch.setattr(chunks, f"{name}_CHARS", size)


def blocks_of(documents: list[str], size: int) -> Iterator[DocumentPiece]:
    for text in documents:
        for start in range(0, len(text), size):
            yield DocumentPiece(text[start : start + size], False)
        yield DocumentPiece("", True)


def texts_of(found: list[TextChunk], split: str) -> list[str]:
    """The split's texts, joined up to each document's end."""
    out = [""]
    for chunk in found:
        for text, ends_document in chunk.segments if chunk.split == split else []:
            out[-1] += text
            if ends_document:
                out.append("")
    return out


def test_the_split_point_is_nanogpts() -> None:
    assert split_point(1_115_394, 0.1) == 1_003_854


@given(
    documents=st.lists(st.text("ab \n", min_size=1, max_size=120), min_size=1, max_size=6),
    block=st.integers(1, 50),
    fraction=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    context_free=st.booleans(),
)
def test_nothing_is_lost_and_the_border_is_exact(
    documents: list[str], block: int, fraction: float, context_free: bool
) -> None:
    whole = "".join(documents)
    border = split_point(len(whole), fraction)
    with pytest.MonkeyPatch.context() as patch:
        sized(patch, chunk=20, search=10, window=4, uncut=40)
        found = list(cut_chunks(blocks_of(documents, block), border, context_free, lambda left, right: True))
    train, validation = texts_of(found, "train"), texts_of(found, "validation")
    assert "".join(train) == whole[:border]
    assert "".join(validation) == whole[border:]
    joined = [*train[:-1], train[-1] + validation[0], *validation[1:]]
    assert joined in ([*documents, ""], [*documents, "", ""])
    assert sum(chunk.documents for chunk in found) == len(documents)
    assert [chunk.split for chunk in found] == sorted(chunk.split for chunk in found)  # train, then validation
    assert all(chunk.characters == sum(len(text) for text, _ in chunk.segments) for chunk in found)
    assert all(chunk.characters <= 20 + 120 for chunk in found)


def encoded(found: list[TextChunk], split: str, tokenizer: Tokenizer) -> list[int]:
    parts = [encode_segments(tokenizer, chunk.segments, False) for chunk in found if chunk.split == split]
    return [int(token) for part in parts for token in part]


@pytest.mark.parametrize("chunk", [300, 1000, 5000])
def test_chunks_give_the_ids_of_the_whole_on_real_text(gpt2: Tokenizer, data_dir: Path, chunk: int) -> None:
    names = [
        "tinyshakespeare/input.txt",
        "prose/twain-life-on-the-mississippi.pg245.txt",
        "prose/darwin-origin-of-species.md",
    ]
    for name in names:
        text = (data_dir / name).read_bytes().decode()[:150_000]
        border = split_point(len(text), 0.1)
        with pytest.MonkeyPatch.context() as patch:
            sized(patch, chunk, 200, 64)
            found = list(cut_chunks(blocks_of([text], 777), border, False, gpt2.cut_is_safe))
        assert len(found) > 100_000 // chunk // 2
        assert sum(chunk.forced_cuts for chunk in found) == 0
        assert encoded(found, "train", gpt2) == gpt2.encode(text[:border]).tolist()
        assert encoded(found, "validation", gpt2) == gpt2.encode(text[border:]).tolist()


@given(
    text=st.text(st.sampled_from("aab'st1!?  \n\r\t\u00a0é漢\x1c\u3000"), max_size=400),
    block=st.sampled_from([3, 50, 400]),
)
def test_chunks_give_the_ids_of_the_whole_on_odd_white_space(gpt2: Tokenizer, text: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sized(patch, chunk=30, search=20, window=12)
        found = list(cut_chunks(blocks_of([text], block), len(text), False, gpt2.cut_is_safe))
    assert encoded(found, "train", gpt2) == gpt2.encode(text).tolist()


def test_cuts_are_made_where_they_are_safe_only() -> None:
    text = "one two. three four. five six. seven"
    with pytest.MonkeyPatch.context() as patch:
        sized(patch, chunk=16, search=16, window=4)
        found = list(cut_chunks(blocks_of([text], 5), len(text), False, lambda left, right: left.endswith(".")))
    assert [chunk.segments[0][0] for chunk in found] == ["one two.", " three four.", " five six. seven"]


def test_text_without_any_safe_place_is_cut_by_force_and_counted() -> None:
    text = "x" * 1000
    with pytest.MonkeyPatch.context() as patch:
        sized(patch, chunk=50, search=16, window=4, uncut=200)
        found = list(cut_chunks(blocks_of([text], 64), len(text), False, lambda left, right: False))
        free = list(cut_chunks(blocks_of([text], 64), len(text), True, lambda left, right: False))
    assert [chunk.characters for chunk in found] == [200] * 4 + [200]
    assert sum(chunk.forced_cuts for chunk in found) == 4
    assert max(chunk.characters for chunk in free) <= 54
    assert not any(chunk.forced_cuts for chunk in free)


def test_small_documents_share_a_chunk() -> None:
    documents = [f"document {number}" for number in range(1000)]
    with pytest.MonkeyPatch.context() as patch:
        sized(patch, chunk=2000, search=100, window=10)
        found = list(cut_chunks(blocks_of(documents, 100), 1 << 20, False, lambda left, right: True))
    assert 5 < len(found) < 15
    assert np.sum([chunk.documents for chunk in found]) == 1000
