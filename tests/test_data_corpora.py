"""In: names, files, folders and globs. Out: that they become the same files in the same order, or a refusal that helps.
Does not touch a network beyond a server of its own on this machine."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.data.text import corpora, download
from codescent.data.text.corpora import resolve


def refusal(corpus: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(corpus)
    return str(caught.value)


def test_python_stdlib_is_there_without_tests_and_packages() -> None:
    corpus = resolve("python-stdlib")
    names = [source.name for source in corpus.sources]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not any({"test", "tests", "site-packages", "encodings"} & set(name.split("/")) for name in names)
    size_bytes = sum(source.path.stat().st_size for source in corpus.sources)
    assert 4e6 < size_bytes < 15e6
    assert names == [source.name for source in resolve("python-stdlib").sources]
    assert corpus.stamp == resolve("python-stdlib").stamp


def test_a_folder_comes_in_an_order_of_its_names_alone(tmp_path: Path) -> None:
    for root in (tmp_path / "one", tmp_path / "other"):
        (root / "sub").mkdir(parents=True)
        for name in (
            ("a.txt", "b.md", "sub/c.txt", "sub/d.txt")
            if root.name == "one"
            else ("sub/d.txt", "sub/c.txt", "b.md", "a.txt")
        ):
            (root / name).write_text(root.name)
        (root / ".hidden").write_text("no")
        (root / "sub" / "loop").symlink_to(root)
    one, other = resolve(str(tmp_path / "one")), resolve(str(tmp_path / "other"))
    assert [source.name for source in one.sources] == [source.name for source in other.sources]
    assert {source.name for source in one.sources} == {"a.txt", "b.md", "sub/c.txt", "sub/d.txt"}
    assert not one.is_single_file


def test_the_stamp_tells_of_changes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    before = resolve(str(tmp_path)).stamp
    assert resolve(str(tmp_path)).stamp == before
    os.utime(tmp_path / "a.txt", ns=(0, 1))
    touched = resolve(str(tmp_path)).stamp
    (tmp_path / "b.txt").write_text("b")
    assert len({before, touched, resolve(str(tmp_path)).stamp}) == 3


def test_file_and_glob(tmp_path: Path) -> None:
    for name in ("x/a.txt", "x/b.txt", "y/c.txt", "y/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    single = resolve(str(tmp_path / "x" / "a.txt"))
    assert (single.is_single_file, single.name) == (True, "a")
    found = resolve(str(tmp_path / "**" / "*.txt"))
    assert {source.name for source in found.sources} == {"x/a.txt", "x/b.txt", "y/c.txt"}
    assert corpora.pattern_files(str(tmp_path / "**" / "*.txt")) == 3
    assert corpora.pattern_files(str(tmp_path / "x" / "a.txt")) is None


def test_a_file_whose_name_is_a_pattern_is_the_file(tmp_path: Path) -> None:
    for name in ("a[1].txt", "a1.txt", "b*.txt", "b2.txt", "c[1]/d.txt", "c1/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for name in ("a[1].txt", "b*.txt", "c[1]"):
        found = resolve(str(tmp_path / name))
        assert [source.path.read_text() for source in found.sources] == [name if name != "c[1]" else "c[1]/d.txt"]
        assert corpora.pattern_files(str(tmp_path / name)) is None
    assert resolve(str(tmp_path / "a[1].txt")).name == "a-1"
    assert [source.path.parent.name for source in resolve(str(tmp_path / "c[1]" / "*.txt")).sources] == ["c[1]"]
    (tmp_path / "a[1].txt").unlink()
    assert [source.name for source in resolve(str(tmp_path / "a[1].txt")).sources] == ["a1.txt"]
    assert corpora.pattern_files(str(tmp_path / "a[1].txt")) == 1
    assert "no such file or folder, and no file matches it as a pattern" in refusal(str(tmp_path / "a[7].txt"))


@pytest.mark.parametrize(
    ("corpus", "told"),
    [
        ("shakespear", "did you mean shakespeare?"),
        ("python-stlib", "did you mean python-stdlib?"),
        ("somewhere/none.txt", "no such file or folder"),
        ("*.nothing", "no file matches"),
        ("/dev/null", "not a regular file"),
    ],
)
def test_what_is_not_there(corpus: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in refusal(corpus)


def test_a_misspelt_path_and_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "novels.txt").write_text("x")
    assert f"did you mean {tmp_path / 'novels.txt'}?" in refusal(str(tmp_path / "novel.txt"))
    (tmp_path / "empty").mkdir()
    assert "holds no file" in refusal(str(tmp_path / "empty"))


def test_what_is_no_regular_file_is_not_left_out_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a part of a corpus whose blob is gone, or whose folder may not be read, is left out, and nobody knows."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "c.txt").symlink_to("gone")
    os.mkfifo(tmp_path / "d.txt")
    for corpus in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(UserError) as caught:
            resolve(str(corpus))
        link, pipe = caught.value.problems
        assert link == f"{tmp_path / 'c.txt'}: a symbolic link that leads nowhere"
        assert pipe.startswith(f"{tmp_path / 'd.txt'}: a pipe, a socket or a device: it holds no text")
    assert len(resolve(str(tmp_path / "[ab].txt")).sources) == 2
    (tmp_path / "c.txt").unlink()
    (tmp_path / "d.txt").unlink()
    (tmp_path / "inner").mkdir()
    (tmp_path / "loop").symlink_to(".")  # links to folders are left out, as the docs say
    assert len(resolve(str(tmp_path)).sources) == 2
    scandir = os.scandir

    def refused(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path).name == "inner":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert refusal(str(tmp_path)) == f"{tmp_path / 'inner'}: cannot be read: Permission denied"


def test_openwebtext_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "OPENWEBTEXT", replace(download.OPENWEBTEXT, url="http://127.0.0.1:9/openwebtext"))
    monkeypatch.delenv("CODESCENT_DATA_DIR", raising=False)
    message = refusal("openwebtext")
    assert download.OPENWEBTEXT.sha256 in message
    assert "$CODESCENT_DATA_DIR/openwebtext/openwebtext.tar.xz" in message
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(tmp_path))
    (tmp_path / "openwebtext").mkdir()
    (tmp_path / "openwebtext" / "README").write_text("not text of the corpus")
    assert "cannot be downloaded" in refusal("openwebtext")
    (tmp_path / "openwebtext" / "subset_data.xz").write_bytes(b"")
    assert [source.name for source in resolve("openwebtext").sources] == ["subset_data.xz"]


def test_datasets_and_runs_inside_a_folder_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "datasets" / "d").mkdir(parents=True)
    (tmp_path / "datasets" / "d" / "description.json").write_text("{}")
    (tmp_path / "runs" / "r" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "plan.json").write_text("{}")
    assert [source.name for source in resolve(str(tmp_path)).sources] == ["a.txt"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server of the folder `published`; nothing is cached and no data folder is set."""
    (tmp_path / "published").mkdir()
    monkeypatch.delenv("CODESCENT_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "published")) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


def test_download_is_checked_and_kept(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"all the world's a stage\n" * 1000
    (tmp_path / "published" / "input.txt").write_bytes(text)
    good = download.Published("play/input.txt", len(text), hashlib.sha256(text).hexdigest(), f"{server}/input.txt")
    monkeypatch.setattr(download, "SHAKESPEARE", good)
    got: list[int] = []
    corpus = resolve("shakespeare", got.append)
    assert corpus.sources[0].path == tmp_path / "cache" / "codescent" / "play" / "input.txt"
    assert corpus.sources[0].path.read_bytes() == text
    assert sum(got) == len(text)
    (tmp_path / "published" / "input.txt").unlink()
    assert resolve("shakespeare").stamp == good.sha256  # from the cache now


def test_download_of_other_bytes_is_refused(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "published" / "input.txt").write_bytes(b"something else")
    wrong = replace(download.SHAKESPEARE, url=f"{server}/input.txt")
    monkeypatch.setattr(download, "SHAKESPEARE", wrong)
    message = refusal("shakespeare")
    assert f"expected {wrong.sha256}" in message
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    missing = replace(wrong, url=f"{server}/none.txt")
    monkeypatch.setattr(download, "SHAKESPEARE", missing)
    assert "File not found" in refusal("shakespeare")


def test_offline_says_what_to_put_where(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = replace(download.SHAKESPEARE, url="http://127.0.0.1:9/input.txt")
    monkeypatch.setattr(download, "SHAKESPEARE", closed)
    message = refusal("shakespeare")
    assert "$CODESCENT_DATA_DIR/tinyshakespeare/input.txt" in message
    assert closed.sha256 in message
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "data" / "tinyshakespeare").mkdir(parents=True)
    (tmp_path / "data" / "tinyshakespeare" / "input.txt").write_text("a changed play")
    assert str(tmp_path / "data") in refusal("shakespeare")
    assert corpora.is_present("shakespeare")


def test_a_glob_enters_no_links_to_folders_and_no_hidden_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links may form circles, of which there are as many paths as one likes."""
    monkeypatch.chdir(tmp_path)
    for folder in ("corpus/sub", "corpus/.hidden"):
        Path(folder).mkdir(parents=True)
        Path(folder, "a.txt").write_text("a")
    Path("corpus/b.txt").write_text("b")
    for name in ("up", "again"):
        Path("corpus/sub", name).symlink_to("..", target_is_directory=True)
    for pattern in ("corpus/**", "corpus/**/*.txt", str(tmp_path / "corpus/**/*.txt")):
        assert [source.name for source in resolve(pattern).sources] == ["sub/a.txt", "b.txt"]
    assert [source.name for source in resolve("corpus/*.txt").sources] == ["b.txt"]
    assert [source.name for source in resolve("corpus/.hid*/*").sources] == ["a.txt"]
