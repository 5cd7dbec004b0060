"""In: texts of many kinds. Out: worker processes give the tokens, and the errors, that this process would.
Does not kill workers (test_data_resume.py does)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.data.text.chunks import TextChunk
from codescent.data.text.pool import WorkerPool, encode_in_process
from codescent.data.tokenizers.tokenizer import CharTokenizer, Tokenizer, load

TEXTS = ["", "a", "\n\r\n\0", "é漢🎭", "many words " * 9000, "\u2028", "é" * 70_000]
ALPHABET = "".join(sorted(set("".join(TEXTS))))


def chunks() -> Iterator[TextChunk]:
    for number in range(12):
        texts = [*TEXTS[number % 7 :], *TEXTS[: number % 7]]
        yield TextChunk("train", [(text, place % 3 > 0) for place, text in enumerate(texts)])
    yield TextChunk("validation", [])


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", ["char", "byte"])
def test_tokens_are_those_of_this_process(tmp_path: Path, kind: str, separate: bool) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"codescent_tokenizer": "byte"}))
    tokenizer: Tokenizer = CharTokenizer(ALPHABET, with_separator=True) if kind == "char" else load(path)
    tokenizer.save(path)
    expected = list(encode_in_process(chunks(), tokenizer, separate))
    with closing(WorkerPool(path, separate, 2)) as pool:
        found = list(pool.encode(chunks()))
    assert [chunk for chunk, _ in found] == [chunk for chunk, _ in expected]
    for (_, tokens), (_, others) in zip(found, expected, strict=True):
        assert (tokens.dtype, tokens.tolist()) == (others.dtype, others.tolist())


def test_errors_are_those_of_this_process_and_a_worker_outlives_them(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "tokenizer.json", CharTokenizer("ab", with_separator=False)
    tokenizer.save(path)
    bad, good = TextChunk("train", [("abc\n", True)]), TextChunk("train", [("ba", True)])
    with pytest.raises(UserError) as expected:
        list(encode_in_process([bad], tokenizer, False))
    with closing(WorkerPool(path, False, 1)) as pool:
        with pytest.raises(UserError) as caught:
            list(pool.encode([bad]))
        assert caught.value.problems == expected.value.problems
        ((_, tokens),) = pool.encode([good])
        assert tokens.tolist() == [1, 0]


class Growing(list[tuple[str, bool]]):
    """Segments that become more while they are sent: a worker gets more ends than texts."""

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        self.append(("k", True))
        return super().__iter__()


def test_a_fault_of_our_own_is_raised_with_its_traceback(tmp_path: Path) -> None:
    CharTokenizer("kn", False).save(tmp_path / "letters.json")
    with closing(WorkerPool(tmp_path / "letters.json", False, 1)) as pool:
        with pytest.raises(RuntimeError, match=r"(?s)a tokenizer process failed:.*Traceback.*zip"):
            list(pool.encode([TextChunk("train", Growing())]))
        ((_, tokens),) = pool.encode([TextChunk("train", [("nk", True)])])
        assert tokens.tolist() == [1, 0]
