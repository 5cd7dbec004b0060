"""In: folders of corpora as they are published: of mixed forms, nested, and of Hugging Face. Out: the prepared tokens.
Does not read single files: test_data_tables.py and test_data_sources.py do."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from codescent.base.errors import UserError
from codescent.data.prepared import DESCRIPTION
from codescent.data.text import corpora, scan
from codescent.data.text.dataset import Dataset, locate, open_dataset
from codescent.data.text.prepare import prepare

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

DOCUMENTS = [f"document {number}: " + "äöü words and more words " * (number % 7) for number in range(60)]
INFO: dict[str, Any] = {"features": {"text": {"dtype": "string", "_type": "Value"}}, "splits": {}}


def lines(documents: Sequence[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text, "url": "u"}) + "\n" for text in documents).encode()


def stream(path: Path, documents: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pa.table({"text": list(documents)})
    with pa.ipc.new_stream(str(path), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=4)


def save_to_disk(folder: Path, documents: Sequence[str], shards: int = 2) -> None:
    """What `datasets.Dataset.save_to_disk` of version 5.2 writes."""
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        stream(folder / name, documents[number::shards])
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps(INFO))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """DOCUMENTS in files of every form, in nested folders."""
    root = tmp_path / "mixed"
    (root / "a" / "deep").mkdir(parents=True)
    parts = [DOCUMENTS[start : start + 10] for start in range(0, 60, 10)]
    (root / "c4.json.gz").write_bytes(gzip.compress(lines(parts[0])))
    (root / "dolma.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(parts[1])))
    parquet.write_table(pa.table({"id": range(10), "content": parts[2]}), root / "a" / "rows.parquet")
    rows = "".join(f'{number},"{text}"\n' for number, text in enumerate(parts[3]))
    (root / "a" / "deep" / "rows.csv").write_text(f"id,text\n{rows}")
    save_to_disk(root / "a" / "saved", parts[4])
    for number, text in enumerate(parts[5]):
        (root / "a" / f"{number}.txt").write_text(text)
    return root


def texts_of(dataset: Dataset) -> list[str]:
    """The documents of both splits, which bytes and their separator (256) give back."""
    tokens = [token for split in (dataset.train, dataset.validation) for token in split.span(0, split.num_tokens)]
    ends = [place for place, token in enumerate(tokens) if token == 256]
    begins = [0, *(end + 1 for end in ends)]
    return [bytes(tokens[begin:end]).decode() for begin, end in zip(begins, ends)]


def test_a_folder_of_every_form(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: a document that is lost or read twice, the syntax of a form that is trained on, an order that varies."""
    found = open_dataset(prepare(str(mixed), "byte", tmp_path / "out", validation_fraction=0.2))
    texts = texts_of(found)
    assert sorted(texts) == sorted(DOCUMENTS)
    corpus = found.description["corpus"]
    assert (corpus["documents"], corpus["columns"], corpus["json_lines"]) == (60, ["content"], ["c4.json.gz"])
    said = capsys.readouterr().err
    assert 'data.text_key = "auto": the text is content' in said
    assert "c4.json.gz: read as JSON lines, as the content is" in said
    again = prepare(str(mixed), "byte", tmp_path / "again", validation_fraction=0.2, num_workers=2)
    assert texts_of(open_dataset(again)) == texts
    moved = mixed.rename(tmp_path / "elsewhere")
    assert texts_of(open_dataset(prepare(str(moved), "byte", tmp_path / "moved", validation_fraction=0.2))) == texts


def test_the_rows_of_a_file_keep_their_order(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "a.parquet", row_group_size=7)
    assert texts_of(open_dataset(prepare(str(tmp_path / "a.parquet"), "byte", tmp_path / "out"))) == DOCUMENTS


def test_records_without_a_text_are_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*DOCUMENTS, None, "", None]
    parquet.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / "rows.parquet")
    found = open_dataset(prepare(str(tmp_path / "rows.parquet"), "byte", tmp_path / "out"))
    corpus = found.description["corpus"]
    assert (corpus["documents"], corpus["null_texts"], corpus["empty_texts"]) == (60, 2, 1)
    assert "2 records without a text (null) left out" in capsys.readouterr().err
    assert "records that were left out: 2 without a text (null), 1 with an empty text" in found.summary()
    parquet.write_table(pa.table({"text": pa.array([None, None], pa.string())}), tmp_path / "null.parquet")
    with pytest.raises(UserError, match="empty: there is no text to train on"):
        prepare(str(tmp_path / "null.parquet"), "byte", tmp_path / "out")


def test_a_changed_table_is_prepared_again_and_an_equal_one_is_found(tmp_path: Path) -> None:
    path, out = tmp_path / "a.parquet", tmp_path / "out"
    parquet.write_table(pa.table({"text": DOCUMENTS}), path)
    first = prepare(str(path), "byte", out)
    assert prepare(str(path), "byte", out) == first == locate(str(path), "byte", out)
    os.utime(path, ns=(1, 1))
    assert prepare(str(path), "byte", out) == first
    parquet.write_table(pa.table({"text": DOCUMENTS[1:]}), path)
    assert prepare(str(path), "byte", out) != first


def test_a_dataset_of_a_column_that_was_found_is_not_that_of_the_column_text(tmp_path: Path) -> None:
    """Caught: `data.text_key = "text"` trains on another column, because an earlier call found it."""
    path, out = tmp_path / "a.parquet", tmp_path / "out"
    parquet.write_table(pa.table({"content": DOCUMENTS}), path)
    found = prepare(str(path), "byte", out)
    assert locate(str(path), "byte", out) == found
    assert locate(str(path), "byte", out, text_key="text") is None
    with pytest.raises(UserError, match='no column "text"'):
        prepare(str(path), "byte", out, text_key="text")
    assert prepare(str(path), "byte", out, text_key="content") != found


def test_files_of_unknown_form_are_listed_at_once(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: one file is named, the next one only after it was removed; large files are read before that is said."""
    (mixed / "a" / "one.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(60))
    for number in range(30):
        (mixed / f"{number:02}.pdf").write_bytes(b"%PDF-1.4\nplain\n")
    (mixed / "log").write_text("begin\n" + '{"text": "a"}\n' * 9)
    monkeypatch.setattr(scan, "_scan_file", lambda *_: pytest.fail("a file was read"))
    with pytest.raises(UserError) as caught:
        prepare(str(mixed), "byte", tmp_path / "out")
    (pdf,) = [problem for problem in caught.value.problems if "PDF" in problem]
    assert len(caught.value.problems) == 3
    assert pdf.count(".pdf") == 20
    assert " and 10 more: is a PDF: extract its text; to read it as plain text, give data.as_text" in pdf
    assert any(f"{mixed / 'a' / 'one.png'}: is a PNG image" in problem for problem in caught.value.problems)
    assert not [*(tmp_path / "out").glob("[!.]*")]


def test_tokens_of_json_that_an_earlier_version_read_as_text_are_not_used_again(tmp_path: Path) -> None:
    """Earlier versions read a file that is JSON on most lines, and not on the first, as text."""
    path, out = tmp_path / "log.txt", tmp_path / "out"
    path.write_text("begin\n" + '{"text": "a"}\n' * 9)
    old = prepare(str(path), "byte", out, as_text=True)
    description = json.loads((old / DESCRIPTION).read_text())
    for name in ("tables", "columns", "null_texts", "empty_texts"):
        del description["corpus"][name]
    del description["request"]["as_text"], description["digest"]
    (old / DESCRIPTION).write_text(json.dumps(description))
    assert locate(str(path), "byte", out) is None
    path.write_text("begin\n" + "plain\n" * 9)
    description["stamp"] = corpora.resolve(str(path)).stamp
    (old / DESCRIPTION).write_text(json.dumps(description))
    assert locate(str(path), "byte", out) == old


def test_a_missing_package_is_said_once(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a message for each of a thousand files."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError) as caught:
        prepare(str(mixed), "byte", tmp_path / "out")
    told = sorted(caught.value.problems)
    assert [problem.rpartition(": pip")[0].rpartition(": ")[2] for problem in told] == [
        "Parquet needs pyarrow, which is not installed",
        "Arrow needs pyarrow, which is not installed",
        "Zstandard needs zstandard, which is not installed",
    ]
    assert all("as_text" not in problem for problem in told)
    assert told[1].count(".arrow") == 2


def names_of(corpus: Path | str) -> set[str]:
    return {source.name for source in corpora.resolve(str(corpus)).sources}


def test_a_saved_data_set_is_the_files_that_it_lists(tmp_path: Path) -> None:
    """Caught: results that `map` left beside them are trained on; descriptions are refused as JSON documents."""
    save_to_disk(tmp_path / "saved", DOCUMENTS, 3)
    stream(tmp_path / "saved" / "cache-0123456789abcdef.arrow", DOCUMENTS)
    assert names_of(tmp_path / "saved") == {f"data-0000{number}-of-00003.arrow" for number in range(3)}
    found = open_dataset(prepare(str(tmp_path / "saved"), "byte", tmp_path / "out"))
    assert sorted(texts_of(found)) == sorted(DOCUMENTS)


def spoil(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder / name)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            spoil("data-00001-of-00002.arrow", Path.unlink),
            "data-00001-of-00002.arrow: missing",
        ),
        (spoil("state.json", lambda file: file.write_text("{")), "state.json: cannot be read: "),
        (spoil("state.json", lambda file: file.write_text("[]")), "state.json: a JSON object is needed, found list"),
        (
            spoil("state.json", lambda file: file.write_text("{}")),
            "state.json: not the description of",
        ),
        (
            spoil("state.json", lambda file: file.write_text('{"_data_files": [], "_indices_data_files": [{}]}')),
            "its rows are chosen by a file of indices: save it again after `dataset.flatten_indices()`",
        ),
        (
            spoil("state.json", lambda file: file.write_text(file.read_text().replace("00001-of", "00000-of"))),
            "state.json: names data-00000-of-00002.arrow twice",
        ),
        (
            lambda folder: [
                (folder / "state.json").unlink(),
                (folder / "dataset_info.json").write_text('{"splits": 5}'),
            ],
            "dataset_info.json: not the description of a data set: splits is no JSON object",
        ),
    ],
)
def test_a_damaged_saved_data_set_is_refused(change: Callable[[Path], object], told: str, tmp_path: Path) -> None:
    save_to_disk(tmp_path / "saved", DOCUMENTS)
    change(tmp_path / "saved")
    with pytest.raises(UserError) as caught:
        corpora.resolve(str(tmp_path / "saved"))
    (problem,) = caught.value.problems
    assert problem.startswith(str(tmp_path / "saved"))
    assert told in problem


def test_several_splits_are_refused_with_what_gives_one(tmp_path: Path) -> None:
    """Caught: the test split is trained on."""
    for split in ("train", "test"):
        save_to_disk(tmp_path / "both" / split, DOCUMENTS)
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError) as caught:
        corpora.resolve(str(tmp_path))
    (problem,) = caught.value.problems
    assert f"{tmp_path / 'both'}: a data set with several splits (test, train)" in problem
    assert f'data.corpus = "{tmp_path / "both" / "train"}"' in problem
    assert len(names_of(tmp_path / "both" / "train")) == 2
    for file in (tmp_path / "both" / "test").iterdir():
        file.unlink()
    assert len(names_of(tmp_path / "both")) == 2


def test_the_cache_of_datasets(tmp_path: Path) -> None:
    """Caught: the cached results of `map` and locks are read; two splits are read as one."""
    folder = tmp_path / "json" / "default-0" / "0.0.0" / "hash"
    for name in ("my-set-train-00000-of-00002", "my-set-train-00001-of-00002", "cache-0123456789abcdef"):
        stream(folder / f"{name}.arrow", DOCUMENTS)
    (folder / "dataset_info.json").write_text(json.dumps({**INFO, "splits": {"train": {}, "test": {}}}))
    (folder / "hash_builder.lock").touch()
    assert names_of(folder) == {f"my-set-train-0000{number}-of-00002.arrow" for number in (0, 1)}
    stream(folder / "my-set-test.arrow", DOCUMENTS)
    with pytest.raises(UserError) as caught:
        corpora.resolve(str(folder))
    (problem,) = caught.value.problems
    pattern = problem.partition('data.corpus = "')[2].partition('"')[0]
    assert len(names_of(pattern)) == 2


def hub(tmp_path: Path, files: dict[str, bytes], revision: str = "0123abcd", main: str = "0123abcd") -> Path:
    """What huggingface_hub keeps of a data set: files that are links to blobs."""
    root = tmp_path / "hub" / "datasets--someone--corpus"
    for number, (name, data) in enumerate(files.items()):
        blob, link = root / "blobs" / f"{revision}{number}", root / "snapshots" / revision / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(main)
    return root


def test_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: the data card is trained on; blobs are read a second time beside their links; an old revision is read."""
    beside = {"README.md": b"# A data card\n", "LICENSE": b"Some rights\n", "corpus.py": b"import datasets\n"}
    root = hub(tmp_path, {"en/c4-train.00000-of-00002.json.gz": gzip.compress(lines(DOCUMENTS[:30])), **beside})
    hub(tmp_path, {"en/c4-train.00000-of-00002.json.gz": gzip.compress(lines(DOCUMENTS[30:]))}, "old")
    assert names_of(root) == names_of(root / "snapshots" / "0123abcd") == {"en/c4-train.00000-of-00002.json.gz"}
    assert sorted(texts_of(open_dataset(prepare(str(root), "byte", tmp_path / "out")))) == sorted(DOCUMENTS[:30])
    assert names_of(root.parent) == {f"{root.name}/snapshots/0123abcd/en/c4-train.00000-of-00002.json.gz"}
    monkeypatch.chdir(root / "snapshots")  # names of parents are not in the path
    assert names_of("0123abcd") == {"en/c4-train.00000-of-00002.json.gz"}
    (root / "refs" / "main").unlink()
    with pytest.raises(UserError, match=r"which snapshot\? give one of its folders in .*: 0123abcd, old"):
        corpora.resolve(str(root))


def test_a_commit_that_cannot_be_read_or_leads_elsewhere_is_none(tmp_path: Path) -> None:
    """Caught: a damaged name of the commit ends in a traceback, or is followed out of the snapshots."""
    root = hub(tmp_path, {"a.txt": b"text"})
    for wrong in (b"\xff", b"../..", b"."):
        (root / "refs" / "main").write_bytes(wrong)
        assert names_of(root) == {"a.txt"}


def test_the_splits_of_the_hub(tmp_path: Path) -> None:
    root = hub(tmp_path, {f"data/{split}-0-of-1.jsonl": lines(DOCUMENTS) for split in ("train", "validation")})
    with pytest.raises(UserError) as caught:
        corpora.resolve(str(root))
    (problem,) = caught.value.problems
    assert "a data set with several splits (train, validation)" in problem
    pattern = problem.partition('data.corpus = "')[2].partition('"')[0]
    assert names_of(pattern) == {"train-0-of-1.jsonl"}
