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
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.data.text import lines, records, sources
from codescent.data.text.compressed import OPENERS, READ_BYTES
from codescent.data.text.records import Reading
from codescent.data.text.sources import read_blocks

TEXTS = ["first document\n", "zweites Dokument: äöü €\r\n", "третий 🎭"]


def documents(path: Path, text_key: str = "text", *, as_text: bool = False) -> list[str]:
    out, current = [], ""
    for text, ends_document in read_blocks(path, Reading(text_key, as_text)):
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
        assert documents(path, as_text=True) == ([text] if text else [])


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
    assert "".join(block.text for block in read_blocks(path, Reading("text"), digest.update)) == "text"
    assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_long_json_text_comes_in_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", 7)
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"text": "x" * 21}) + "\n\n" + json.dumps({"text": ""}) + "\n" + json.dumps({"text": "y"})
    )
    assert [tuple(block) for block in read_blocks(path, Reading("text"))] == [
        *[("x" * 7, last) for last in (False, False, True)],
        ("y", True),
    ]


def refusal(path: Path, text_key: str = "text") -> str:
    with pytest.raises(UserError) as caught:
        list(read_blocks(path, Reading(text_key)))
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
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 50)
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


LINES = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS).encode()
LONG_LINE = json.dumps({"text": "long " * 40_000}).encode()
FORMS = {
    "lines": (LINES, TEXTS),
    "one line": (b'\xef\xbb\xbf{"text": "a"}', ["a"]),
    "a line longer than what is looked at": (LONG_LINE + b"\n" + LONG_LINE, ["long " * 40_000] * 2),
    "gzip": (gzip.compress(LINES), TEXTS),
    "xz in bzip2": (bz2.compress(lzma.compress(b"plain")), ["plain"]),
    "a tar": (tar_of({"a.dat": LINES}), TEXTS),
    "code": (b"{\n  int a;\n}\n", ["{\n  int a;\n}\n"]),
    "a footnote": (b"[1] See there.\n[2] And there.\n", ["[1] See there.\n[2] And there.\n"]),
    "a verse": (b"Roses are red,\nViolets are blue,\n", ["Roses are red,\nViolets are blue,\n"]),
    "a list of words": (b"one, two\nthree, four\nfive, six\n", ["one, two\nthree, four\nfive, six\n"]),
    "a saying": (b'"Well," he said.\n"No."\n', ['"Well," he said.\n"No."\n']),
    "braces": (b"{}\nHello\n", ["{}\nHello\n"]),
    "another line is no JSON": (b'{"text": "a"}\nHello\n', "line 2: not JSON"),
    "another key": (b'{"body": "a"}\n', 'line 1: no key "text" (data.text_key); its keys: body'),
    "broken JSON": (b'{"text": "a\n', "line 1: not JSON"),
    "a document": (b'{\n "text": ["a"]\n}\n', "is one JSON document"),
    "an array": (b'[{"text": "a"},\n{"text": "b"}]\n', "is a JSON array"),
    "deep": (b"[" * 60_000, "is one JSON document"),
    "csv": (b'id,text,label\n0,"a, b",1\n1,"c\nd",2\n', ["a, b", "c\nd"]),
    "csv of Excel": (b"id;text\r\n0;a\r\n1;b\r\n", ["a", "b"]),
    "tsv": (b"id\ttext\n0\ta\n1\tb\n", ["a", "b"]),
    "a long csv": (b"id,text\n" + b'1,"a word, another"\n' * 9_000, ["a word, another"] * 9_000),
    "csv without the column": (b"id,label\n0,a\n1,b\n", 'line 1: no column "text" (data.text_key); its columns: id'),
    "JSON on most lines": (b"# C4\n" + LINES, "is JSON on most lines, and not on the first"),
    "what Python prints": (b"{'text': 'a'}\n" * 3, "is JSON on most lines"),
    "less JSON than prose": (b"Say:\n" * 4 + LINES, ["Say:\n" * 4 + LINES.decode()]),
    "encrypted parquet": (b"PARE\x15\x04\x15\x10" + bytes(60) + b"PARE", "is encrypted Parquet"),
    "zip": (b"PK\x03\x04\x14" + bytes(60), "is a zip archive"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(60), "is a PNG image"),
    "jpeg": (b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(60), "is a JPEG image"),
    "pdf": (b"%PDF-1.4\nplain\n", "is a PDF"),
    "UTF-16 without a mark": ("some text ".encode("utf-16-le") * 9, "is binary, or UTF-16"),
}

NO_TEXT = ("encrypted parquet", "zip", "png", "jpeg")
"""Forms of FORMS that are never text: there is nothing to read as text."""


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a"])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_what_its_content_is_under_any_name(form: str, name: str, tmp_path: Path) -> None:
    data, expected = FORMS[form]
    (tmp_path / name).write_bytes(data)
    if isinstance(expected, list):
        assert documents(tmp_path / name) == expected
    else:
        message = refusal(tmp_path / name)
        assert expected in message
        hint = "to read it as plain text, give data.as_text = true (`codescent data`: --as-text)"
        assert message.endswith(hint) is (form not in NO_TEXT)


def test_a_name_alone_shows_a_table_and_as_text_reads_every_form(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1 and 2\n3 and 4\n")
    assert f"{path}: is CSV of one field" in refusal(path)
    for name, text in (("a.csv", "1,2\n3,4\n"), ("a.jsonl", '{"text": 1}\n'), ("a.json", "[{}]")):
        (tmp_path / name).write_text(text)
        assert documents(tmp_path / name, as_text=True) == [text]


def test_a_file_that_unpacks_to_itself_ends(tmp_path: Path) -> None:
    data = b"text"
    for _ in range(sources.MOST_PACKED + 1):
        data = gzip.compress(data)
    (tmp_path / "a").write_bytes(data)
    assert "compressed more than 4 times" in refusal(tmp_path / "a")


PACKS: dict[str, Callable[[bytes], bytes]] = {
    "a.txt.gz": gzip.compress,
    "a.txt.xz": lzma.compress,
    "a.txt.bz2": bz2.compress,
    "a.txt.zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("name", PACKS)
def test_what_follows_a_compressed_stream_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """Caught: Python's xz and bzip2 drop in silence what follows a stream: the rest of a file of pixz or pbzip2 whose
    second stream is damaged, and an xz stream behind padding. An empty file is taken as an empty text."""
    path, pack = tmp_path / name, PACKS[name]
    first, second = pack(b"one " * 999), pack(b"two " * 999)
    for middle in (b"", b"\0" * 4, b"\0" * 10_000):
        path.write_bytes(first + middle + second + middle)
        assert documents(path) == ["one " * 999 + "two " * 999]
    for wrong in (
        first + b"X" + second[1:],
        first + second[:-9],
        first + second[:3],
        first + b"rubbish",
        b"",
        b"\0" * 8,
    ):
        path.write_bytes(wrong)
        assert refusal(path).startswith(f"{path}: damaged or cut short: ")


def test_an_archive_is_read_to_its_end_or_refused(tmp_path: Path) -> None:
    """Caught: tarfile ends in silence at a damaged header, where an archive was cut between two members, and before a
    second archive."""
    path = tmp_path / "a.tar"
    whole = tar_of({f"{number}.txt": text.encode() for number, text in enumerate(TEXTS)})
    path.write_bytes(whole + whole)
    assert documents(path) == TEXTS * 2
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # blocks of zeros follow
    assert documents_of(path, whole[: end + 512] + b"\0" * 100) == TEXTS
    spoiled = whole[:1024] + b"X" * 8 + whole[1032:]  # the name of the second member: its checksum does not fit
    for wrong in (spoiled, whole[:1024], whole[:1200], whole[:end]):
        path.write_bytes(wrong)
        assert refusal(path).startswith(f"{path}: damaged or cut short: at byte "), wrong


def documents_of(path: Path, data: bytes) -> list[str]:
    path.write_bytes(data)
    return documents(path)


def test_a_number_of_thousands_of_digits_is_refused_by_its_line(tmp_path: Path) -> None:
    """Caught: Python's limit of digits ends in a traceback, where the form of a file is looked for."""
    path = tmp_path / "a.json"
    path.write_text('{"text": "a", "id": ' + "9" * 5000 + "}\n")
    assert refusal(path).startswith(f"{path}: line 1: not JSON: ")


@pytest.mark.parametrize("name", ["a.xz", "a.bz2"])
def test_a_stream_gives_pieces_of_bounded_size(name: str) -> None:
    """80 bytes of bzip2 unpack to 64 MiB: read as a whole, a small file takes all memory of the machine."""
    size, pack = 1 << 26, {"a.xz": lzma.compress, "a.bz2": bz2.compress}[name]
    stream = OPENERS[Path(name).suffix](io.BytesIO(pack(bytes(size)) + pack(b"end")))
    found, most, last = 0, 0, b""
    while data := stream.read(1 << 24):
        found, most, last = found + len(data), max(most, len(data)), data
    assert (found, last[-3:]) == (size + 3, b"end")
    assert most <= READ_BYTES
