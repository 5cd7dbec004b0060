"""In: Parquet, Arrow, CSV, TSV and Zstandard files, good and bad. Out: their texts are read; bad ones are refused.
Does not tokenise. test_data_published.py prepares whole corpora of such files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from codescent.base.errors import UserError
from codescent.data.text import columnar
from codescent.data.text.records import Noticed, Reading
from codescent.data.text.sources import read_blocks

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

TEXTS = ["first document\n", "zweites Dokument: äöü €\r\n", "третий 🎭", 'a, b; c\t"d"\nline']
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def documents(path: Path, text_key: str | None = None, noticed: Noticed | None = None) -> list[str]:
    out, current = [], ""
    for text, ends_document in read_blocks(path, Reading(text_key, noticed=noticed or Noticed())):
        current += text
        if ends_document:
            out.append(current)
            current = ""
    assert current == "", "text after the last document's end"
    return out


def refusal(path: Path, text_key: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        documents(path, text_key)
    (problem,) = caught.value.problems
    return problem


def table(texts: Iterable[str | None], name: str = "text", **more: Any) -> Any:
    column = list(texts)
    return pa.table({"id": range(len(column)), name: pa.array(column, more.get("kind", pa.string()))})


def write_parquet(path: Path, rows: Any) -> None:
    parquet.write_table(rows, path, row_group_size=3, write_page_checksum=True)


def write_file(path: Path, rows: Any) -> None:
    with pa.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=3)


def write_stream(path: Path, rows: Any) -> None:
    with pa.ipc.new_stream(str(path), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=3)


WRITERS: dict[str, Callable[[Path, Any], None]] = {
    "a.parquet": write_parquet,
    "a.arrow": write_file,
    "b.arrow": write_stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_documents_in_the_order_of_the_file(name: str, tmp_path: Path) -> None:
    """Caught: rows out of order, a lost last batch, nulls or empty texts that become documents or are not counted."""
    texts = [*TEXTS, None, "", *(f"row {number}" for number in range(20)), None]
    WRITERS[name](tmp_path / name, table(texts))
    noticed = Noticed()
    assert documents(tmp_path / name, noticed=noticed) == [text for text in texts if text]
    assert (noticed.nulls, noticed.empty, noticed.columns) == (2, 1, set())


@pytest.mark.parametrize("name", WRITERS)
def test_a_long_text_comes_in_blocks(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, table(["ä" * 200_000, "b"]))
    blocks = list(read_blocks(tmp_path / name, Reading(None)))
    assert max(len(block.text) for block in blocks) <= 1 << 16
    assert documents(tmp_path / name) == ["ä" * 200_000, "b"]


@pytest.mark.parametrize("name", WRITERS)
def test_every_byte_is_watched_once_and_in_order(name: str, tmp_path: Path) -> None:
    """Caught: a dataset's hash that misses what pyarrow reads by itself."""
    WRITERS[name](tmp_path / name, table(TEXTS * 50))
    digest = hashlib.sha256()
    assert sum(block.ends_document for block in read_blocks(tmp_path / name, Reading(None), digest.update)) == 200
    assert digest.hexdigest() == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_kinds_of_strings(kind: Any, tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        write(tmp_path / name, table(["a", "b", "a"], "content", kind=kind))
        assert documents(tmp_path / name) == ["a", "b", "a"]


def test_the_column_of_the_text_is_given_or_found(tmp_path: Path) -> None:
    """Caught: another column is trained on, or a choice that nobody sees."""
    path, noticed = tmp_path / "a.parquet", Noticed()
    strings = {name: [f"in {name}"] for name in ("body", "content", "text")}
    parquet.write_table(pa.table({**strings, "id": [1]}), path)
    assert documents(path, noticed=noticed) == ["in text"]
    assert documents(path, "body") == ["in body"]
    assert not noticed.columns
    parquet.write_table(pa.table({"body": ["in body"], "content": ["in content"]}), path)
    assert documents(path, noticed=noticed) == ["in content"]
    parquet.write_table(pa.table({"body": ["in body"], "id": [1]}), path)
    assert documents(path, noticed=noticed) == ["in body"]
    assert noticed.columns == {"content", "body"}


@pytest.mark.parametrize(
    ("columns", "key", "told"),
    [
        ({"a": ["x"], "b": ["y"], "n": [1]}, None, "give data.text_key; its columns: a (text), b (text), n (int64)"),
        ({"n": [1], "list": [["x"]]}, None, "(no strings): give data.text_key; its columns: n (int64), list (list"),
        ({"text": [1]}, None, "which column is the text? (no strings)"),
        ({"a": ["x"], "n": [1]}, "n", 'column "n" (data.text_key) is int64, not text; its columns: a (text), n'),
        ({"a": ["x"]}, "body", 'no column "body" (data.text_key); its columns: a (text)'),
        ({"text": [b"x"]}, "text", 'column "text" (data.text_key) is binary, not text'),
    ],
)
def test_without_a_column_of_text_the_columns_are_listed(
    columns: dict[str, list[Any]], key: str | None, told: str, tmp_path: Path
) -> None:
    for name, write in WRITERS.items():
        write(tmp_path / name, pa.table(columns))
        message = refusal(tmp_path / name, key)
        assert message.startswith(f"{tmp_path / name}: ")
        assert told in message


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "a.arrow", pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"]))
    assert '2 columns are named "text"' in refusal(tmp_path / "a.arrow")


def test_json_lines_without_the_key_text(tmp_path: Path) -> None:
    """Caught: the key is found anew in each line, so that a line without a text gives another one."""
    path, noticed = tmp_path / "a.jsonl", Noticed()
    path.write_text('{"content": "a", "url": "b"}\n{"content": null}\n{"content": ""}\n{"content": "c"}\n')
    assert documents(path, noticed=noticed) == ["a", "c"]
    assert (noticed.columns, noticed.nulls, noticed.empty) == ({"content"}, 1, 1)
    path.write_text('{"body": "a", "id": 3}\n{"id": 4, "title": "t"}\n')
    assert 'line 2: no key "body" (data.text_key); its keys: id (int), title (text)' in refusal(path)
    path.write_text('{"a": "x", "b": "y"}\n')
    assert "line 1: which key is the text?" in refusal(path)


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t")])
def test_rows_of_csv_and_tsv(name: str, separator: str, tmp_path: Path) -> None:
    """Caught: line ends, quotes and separators in a quoted field that end it; cells above csv's limit of 128 KiB."""
    texts = [*TEXTS, "", "long " * 40_000]
    quoted = [text.replace('"', '""') for text in texts]
    rows = [f'{number}{separator}"{text}"' for number, text in enumerate(quoted)]
    (tmp_path / name).write_bytes(("\ufeff" + "\n".join([f"id{separator}text", *rows, ""])).encode())
    noticed = Noticed()
    assert documents(tmp_path / name, noticed=noticed) == [text for text in texts if text]
    assert noticed.empty == 1
    assert not noticed.forms


def test_a_table_of_one_column_needs_a_header_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\nfirst\n"second, third"\n')
    assert documents(path) == ["first", "second, third"]
    path.write_text("body\nfirst\nsecond\n")
    assert documents(path, "body") == ["first", "second"]
    assert "is CSV of one field in its first line" in refusal(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("id,text\n1,a\n2,b,c\n", "line 3: 3 fields, and the header has 2"),
        ("id,text\n1,a\n2\n", "line 3: 1 field, and the header has 2"),
        ('id,text\n1,"a\nb\n', "line 3: unexpected end of data"),
        ('id,text\n1,"a"b\n', "line 2: ',' expected after '\"'"),
        ("id,text\r1,a\n", "line 1: a carriage return"),
        ("text,text\na,b\n", "line 1: the header names text more than once"),
        ("id,label\n1,a\n", "line 1: which column is the text?"),
    ],
)
def test_bad_rows_are_named_by_their_line(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert refusal(tmp_path / "a.csv").startswith(f"{tmp_path / 'a.csv'}: {told}")


def test_bytes_that_are_not_utf8_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,a\n2,\xe4\n")
    assert "byte 0xe4 at offset 14 (line 3)" in refusal(tmp_path / "a.csv")
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xe4"]).buffers())
    for name, write in WRITERS.items():
        write(tmp_path / name, pa.table({"text": broken}))
        assert "1" in refusal(tmp_path / name)
        assert "UTF8" in refusal(tmp_path / name)


def zstd(*parts: bytes) -> bytes:
    """A frame for each part."""
    return b"".join(map(zstandard.ZstdCompressor().compress, parts))


def skipped(content: bytes) -> bytes:
    """A frame that decoders skip (RFC 8878, 3.1.2)."""
    return b"\x50\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content


def tar_of(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def test_zstandard(tmp_path: Path) -> None:
    """Caught: only the first frame is read; frames that decoders skip; a name that does not say so; archives."""
    half = len(LINES) // 2
    files = {
        "a.jsonl.zst": zstd(LINES[:half], LINES[half:]),
        "a.json.zst": skipped(b"x" * 9) + zstd(LINES),
        "a": zstd(LINES),
        "a.tar.zst": zstd(tar_of("a.jsonl", LINES)),
        "a.tzst": zstd(tar_of("a.json", LINES)),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        assert documents(tmp_path / name) == TEXTS, name
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"plain " * 100_000))
    assert documents(tmp_path / "a.txt.zst") == ["plain " * 100_000]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a"])
def test_damaged_zstandard_is_refused(name: str, tmp_path: Path) -> None:
    """Caught: a file that was cut short is read as a shorter one, as zstandard's own reader does."""
    data = zstd(LINES * 50)
    for wrong in (
        data[: len(data) // 2],
        data[:-1],
        data[:40] + b"\xff" * 20 + data[60:],
        data + b"rubbish at its end",
    ):
        (tmp_path / name).write_bytes(wrong)
        assert refusal(tmp_path / name).startswith(f"{tmp_path / name}: damaged or cut short: ")


def spoiled(data: bytes, place: int) -> bytes:
    return data[:place] + bytes(byte ^ 0xFF for byte in data[place : place + 8]) + data[place + 8 :]


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_tables_are_refused_by_place(name: str, tmp_path: Path) -> None:
    """Caught: a cut file is read as a shorter one; flipped bytes are trained on."""
    path = tmp_path / name
    WRITERS[name](path, table([f"{number} {hashlib.sha256(bytes([number])).hexdigest()}" for number in range(9)]))
    data = path.read_bytes()
    for wrong in (data[: len(data) // 2], data[:-4], data[:-1]):
        path.write_bytes(wrong)
        assert refusal(path).startswith(f"{path}: ")
    if name == "a.parquet":  # the pages of this file have checksums
        place = data.index(b"4 " + hashlib.sha256(bytes([4])).hexdigest()[:8].encode())
        path.write_bytes(spoiled(data, place))
        assert refusal(path).startswith(f"{path}: row group 2 of 3: damaged or cut short: ")
    else:
        offsets = data.index(b"".join(number.to_bytes(4, "little") for number in (0, 66, 132, 198)))
        path.write_bytes(data[:offsets] + b"\xff" * 16 + data[offsets + 16 :])
        assert refusal(path).startswith(f"{path}: record batch 1")


def test_no_more_than_a_few_rows_are_in_memory(tmp_path: Path) -> None:
    """Caught: pyarrow reads a row group ahead, which may have gigabytes (`pre_buffer`)."""
    texts = [hashlib.sha256(bytes([number])).hexdigest() * 1024 for number in range(250)]  # 16 MB in one row group
    as_pages = {"write_batch_size": 4, "data_page_size": 1 << 16, "use_dictionary": False}
    parquet.write_table(table(texts), tmp_path / "a.parquet", compression="none", **as_pages)
    del texts
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_blocks(tmp_path / "a.parquet", Reading(None)):
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 6 * columnar.BATCH_BYTES


@pytest.mark.parametrize(
    ("name", "package", "told"),
    [
        ("a.parquet", "pyarrow", 'Parquet needs pyarrow, which is not installed: pip install "codescent[parquet]"'),
        ("b.arrow", "pyarrow", 'Arrow needs pyarrow, which is not installed: pip install "codescent[parquet]"'),
        ("a.txt.zst", "zstandard", 'Zstandard needs zstandard, which is not installed: pip install "codescent[zstd]"'),
    ],
)
def test_a_missing_package_names_the_extra(
    name: str, package: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in WRITERS:
        WRITERS[name](tmp_path / name, table(TEXTS))
    else:
        (tmp_path / name).write_bytes(zstd(b"text"))
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(tmp_path / name) == told


def contradictions() -> Iterator[tuple[str, bytes, str]]:
    buffer = io.BytesIO()
    parquet.write_table(table(TEXTS), buffer)
    yield "a.jsonl", buffer.getvalue(), "is Parquet, and its name says JSON lines"
    yield "a.csv", buffer.getvalue(), "is Parquet, and its name says CSV"
    yield "a.arrow", buffer.getvalue(), "is Parquet, and its name says an Arrow file"
    yield "a.parquet", b"plain text\n", "is text, or damaged, and its name says Parquet"
    yield "a.parquet", b"", "is text, or damaged, and its name says Parquet"
    yield "a.parquet", LINES, "is JSON lines, and its name says Parquet"
    yield "a.jsonl", b"PK\x03\x04\x14" + bytes(60), "is a zip archive"
    yield "a.parquet.gz", gzip.compress(buffer.getvalue()), "is Parquet inside of another file"
    yield "a.tar", tar_of("a.parquet", buffer.getvalue()), "a.tar: a.parquet: is Parquet inside of another file"
    yield "a.zst", b"plain text\n", "damaged or cut short"


@pytest.mark.parametrize("number", range(10))
def test_a_content_that_does_not_fit_its_name_is_refused(number: int, tmp_path: Path) -> None:
    """Caught: a file is read as text because it happens to be UTF-8, or as JSON lines because of its name."""
    name, data, told = list(contradictions())[number]
    (tmp_path / name).write_bytes(data)
    assert told in refusal(tmp_path / name)


def test_a_file_without_a_name_that_says_so_is_what_its_content_is(tmp_path: Path) -> None:
    """The files of the hub's cache have no endings."""
    for write in WRITERS.values():
        write(tmp_path / "blob", table(TEXTS))
        assert documents(tmp_path / "blob") == TEXTS
    (tmp_path / "blob").write_bytes(b"id,text\n1,a\n2,b\n")
    noticed = Noticed()
    assert documents(tmp_path / "blob", noticed=noticed) == ["a", "b"]
    assert noticed.forms == {"CSV"}
