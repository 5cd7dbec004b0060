"""In: files of every kind, good and bad. Out: that their text comes out whole, and that bad ones are refused by place.
Does not tokenise."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.data.text import sources
from codescent.data.text.sources import read_blocks

TEXTS = ["first document\n", "zweites Dokument: äöü €\r\n", "третий 🎭"]


def documents(path: Path, text_key: str = "text") -> list[str]:
    out, current = [], ""
    for text, ends_document in read_blocks(path, text_key):
        current += text
        if ends_document:
            out.append(current)
            current = ""
    assert current == "", "text after the last document's end"
    return out


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def test_text_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffa\r\nb\rc\n\u2028d\x00".encode())
    assert documents(path) == ["a\r\nb\rc\n\u2028d\x00"]  # line ends kept, byte order mark gone


@given(text=st.text(max_size=200), block_bytes=st.integers(1, 9))
def test_blocks_of_any_size_give_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int
) -> None:
    text = text.encode(errors="ignore").decode().removeprefix("\ufeff")
    path = tmp_path_factory.mktemp("blocks") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK_BYTES", block_bytes)
        assert documents(path) == ([text] if text else [])


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_compressed_text_and_json_lines(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(TEXTS[1].encode()))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack("\n".join(json.dumps({"text": text}) for text in TEXTS).encode()))
    assert documents(tmp_path / f"a.txt{suffix}") == [TEXTS[1]]
    assert documents(tmp_path / f"a.jsonl{suffix}") == TEXTS


def test_tar_of_compressed_tars_as_openwebtext_is_published(tmp_path: Path) -> None:
    subsets = [
        lzma.compress(tar_of({f"./{name}.txt": text.encode() for name, text in part}))
        for part in (list(zip("ab", TEXTS)), list(zip("c", TEXTS[2:])))
    ]
    outer = {f"openwebtext/urlsf_subset0{number}_data.xz": data for number, data in enumerate(subsets)}
    outer["openwebtext/.hidden.txt"] = b"not read"
    outer["openwebtext/empty.txt"] = b""
    for name, data in {
        "a.tar": tar_of(outer),
        "a.tar.xz": lzma.compress(tar_of(outer)),
        "a_data.xz": subsets[0],
    }.items():
        (tmp_path / name).write_bytes(data)
    assert documents(tmp_path / "a.tar") == TEXTS
    assert documents(tmp_path / "a.tar.xz") == TEXTS
    assert documents(tmp_path / "a_data.xz") == TEXTS[:2]


def test_every_byte_is_watched_once_even_past_what_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar_of({"a.txt": b"text"}) + b"\0" * 100_000))
    digest = hashlib.sha256()
    assert "".join(block.text for block in read_blocks(path, "text", digest.update)) == "text"
    assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_long_json_text_comes_in_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 7)
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"text": "x" * 21}) + "\n\n" + json.dumps({"text": ""}) + "\n" + json.dumps({"text": "y"})
    )
    assert [tuple(block) for block in read_blocks(path, "text")] == [
        *[("x" * 7, last) for last in (False, False, True)],
        ("y", True),
    ]


def refusal(path: Path, text_key: str = "text") -> str:
    with pytest.raises(UserError) as caught:
        list(read_blocks(path, text_key))
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


def test_bytes_that_are_not_utf8_are_told_by_offset_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("eins\nzwei ä\n".encode() + b"drei \xe4 vier")
    for block_bytes in (1, 2, 3, 5, 1 << 20):
        monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
        message = refusal(path)
        assert str(path) in message
        assert "byte 0xe4 at offset 18 (line 3)" in message


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("abc ä".encode()[:-1], "offset 4 (line 1)"),  # cut short within a character
        ("text".encode("utf-16"), "UTF-16"),
    ],
)
def test_other_text_that_is_not_utf8(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert told in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"body": "x"}', 'no key "text"'),
        (b'{"text": 3}', '"text" is int'),
        (b'["text"]', "found list"),
        (b'{"text": "x"', "not JSON"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_bad_json_lines_are_told_by_file_and_line(tmp_path: Path, line: bytes, told: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    message = refusal(path)
    assert f"{path}: line 3: " in message
    assert told in message
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n')
    assert "offset 27 (line 2)" in refusal(tmp_path / "b.jsonl")


def test_a_json_line_too_long_to_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 50)
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n' + json.dumps({"text": "x" * 60}))
    assert "line 2: longer than 50 bytes" in refusal(tmp_path / "a.jsonl")


def tar_of_text(data: bytes) -> bytes:
    return tar_of({"a.txt": data})


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.txt.gz", gzip.compress), ("a.txt.xz", lzma.compress), ("a.txt.bz2", bz2.compress), ("a.tar", tar_of_text)],
)
def test_damaged_archives_are_refused(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    data = pack(b"some text " * 1000)
    (tmp_path / name).write_bytes(data[: len(data) // 3])
    assert str(tmp_path / name) in refusal(tmp_path / name)
    (tmp_path / name).write_bytes(b"this is no archive at all")
    assert str(tmp_path / name) in refusal(tmp_path / name)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.txt")
