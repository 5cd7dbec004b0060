"""In: corpora, real and made here. Out: that their shards hold the right tokens, whoever makes them; what is refused.
Does not kill or starve a preparation (test_data_resume.py does)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library

from codescent.base.errors import UserError
from codescent.data import progress
from codescent.data.prepared import DESCRIPTION
from codescent.data.text import chunks, corpora, shards
from codescent.data.text import prepare as preparing
from codescent.data.text.dataset import locate, open_dataset
from codescent.data.text.prepare import prepare


def tokens_of(folder: Path, split: str) -> np.ndarray:
    description = json.loads((folder / DESCRIPTION).read_text())
    parts = [np.fromfile(folder / shard["file"], "<u2") for shard in description["splits"][split]["shards"]]
    return np.concatenate(parts)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def refusal(*arguments: object, **options: object) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        prepare(*arguments, **options)  # type: ignore[arg-type]
    return caught.value.problems


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make chunks, shards and journal entries so small that a short text has many."""

    def set_sizes(chunk: int = 2000, shard: int = 3000, journal: int = 3) -> None:
        for name, size in (("CHUNK", chunk), ("SEARCH", chunk // 2), ("WINDOW", 100)):
            monkeypatch.setattr(chunks, f"{name}_CHARS", size)
        monkeypatch.setattr(shards, "SHARD_TOKENS", shard)
        monkeypatch.setattr(preparing, "JOURNAL_EVERY_CHUNKS", journal)

    return set_sizes


@pytest.mark.parametrize(
    ("tokenizer", "counts", "vocab_size"),
    [("char", (1_003_854, 111_540), 65), ("gpt2", (301_966, 36_059), 50_257), ("byte", (1_003_854, 111_540), 257)],
)
def test_shakespeare(
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: str,
    counts: tuple[int, int],
    vocab_size: int,
) -> None:
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    dataset = open_dataset(prepare("shakespeare", tokenizer, tmp_path))
    assert (dataset.train.num_tokens, dataset.validation.num_tokens) == counts
    assert dataset.vocab_size == vocab_size
    splits = dataset.description["splits"]
    assert [splits[split]["characters"] for split in ("train", "validation")] == [1_003_854, 111_540]
    path = data_dir / "tinyshakespeare" / "input.txt"
    assert dataset.description["corpus"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert dataset.tokenizer is not None
    decoded = [dataset.tokenizer.decode(tokens_of(dataset.path, split).tolist()) for split in ("train", "validation")]
    assert "".join(decoded) == path.read_text()
    dataset.verify()


def test_the_default_corpus_with_separators(tmp_path: Path) -> None:
    dataset = open_dataset(prepare("python-stdlib", None, tmp_path))
    assert dataset.tokenizer is not None
    end = dataset.tokenizer.separator
    assert end == dataset.vocab_size - 1
    tokens = np.concatenate([tokens_of(dataset.path, split) for split in ("train", "validation")])
    pieces = "".join(map(chr, tokens.tolist())).split(chr(end))
    sources = [source.path.read_bytes().decode() for source in corpora.resolve("python-stdlib").sources]
    expected = [text for text in sources if text]
    assert len(pieces) == len(expected) + 1
    assert pieces.pop() == ""
    for piece, text in list(zip(pieces, expected))[::50]:
        assert dataset.tokenizer.decode([ord(char) for char in piece]) == text
    assert dataset.description["corpus"]["documents"] == len(expected)
    assert len(dataset.description["corpus"]["empty_files"]) == len(sources) - len(expected)
    assert any("empty files were left out" in line for line in dataset.summary())


@pytest.mark.parametrize("tokenizer", ["char", "byte", "gpt2", "bpe:400", "file"])
def test_any_number_of_workers_makes_the_same_bytes(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Callable[..., None], tokenizer: str
) -> None:
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    small(chunk=20_000, shard=20_000)
    text = (data_dir / "prose" / "douglass-narrative.md").read_bytes()
    for number in range(3):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / f"{number}.txt").write_bytes(text[number * 60_000 : (number + 1) * 60_000 - 10])
    if tokenizer == "file":
        tokenizer = str(tmp_path / "words.json")
        inner = library.Tokenizer(
            library.models.Unigram([("▁", -1.0), *((chr(c), -5.0) for c in range(33, 127)), ("▁the", -2.0)], unk_id=0)
        )
        inner.pre_tokenizer = library.pre_tokenizers.Metaspace()
        inner.save(tokenizer)
    made = [prepare(str(tmp_path / "corpus"), tokenizer, tmp_path / f"by{n}", num_workers=n) for n in (1, 2, 3)]
    first = bytes_of(made[0])
    assert len(first) > 2
    assert all(bytes_of(folder) == first for folder in made[1:])
    assert len({folder.name for folder in made}) == 1


def test_gpt2_on_several_documents_is_each_by_itself_and_a_separator(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Callable[..., None]
) -> None:
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    small()
    folder = data_dir / "gpt2"
    reference = library.ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    prose = [path.read_bytes().decode()[3:30_000] for path in sorted((data_dir / "prose").glob("*"))]
    path = tmp_path / "prose.jsonl"
    path.write_text("\n".join(json.dumps({"body": text, "n": 1}) for text in prose))
    dataset = open_dataset(prepare(str(path), "gpt2", tmp_path, text_key="body", validation_fraction=0.25))
    border = int(sum(map(len, prose)) * 0.75)
    train: list[int] = []
    validation: list[int] = []
    for text in prose:
        head, tail = text[: max(border, 0)], text[max(border, 0) :]
        train += reference.encode(head).ids if head else []
        validation += reference.encode(tail).ids if tail else []
        (validation if tail else train).append(50256)
        border -= len(text)
    assert tokens_of(dataset.path, "train").tolist() == train
    assert tokens_of(dataset.path, "validation").tolist() == validation
    assert len(dataset.train.files) > 5


def test_a_vocabulary_beyond_16_bits(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(70_000)}
    inner = library.Tokenizer(library.models.WordLevel({**words, "[UNK]": 70_000}, unk_token="[UNK]"))
    inner.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("w1 w69999 w65536 nothing\n" * 100)
    dataset = open_dataset(prepare(str(tmp_path / "text.txt"), str(tmp_path / "words.json"), tmp_path))
    assert dataset.description["dtype"] == "uint32"
    assert dataset.train.read(np.array([0]), 3).tolist() == [[1, 69_999, 65_536, 70_000]]


def test_prepared_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some text\n" * 100)
    root = tmp_path / "datasets"
    assert locate(str(path), "byte", root) is None
    made = prepare(str(path), "byte", root)
    before = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
    assert locate(str(path), "byte", root) == prepare(str(path), "byte", root) == made
    assert {file.name: file.stat().st_mtime_ns for file in made.iterdir()} == before
    assert sorted(file.name for file in made.iterdir()) == sorted(
        ["description.json", "tokenizer.json", "train_000000.bin", "validation_000000.bin"]
    )
    for other in (
        locate(str(path), "char", root),
        locate(str(path), "byte", root, validation_fraction=0.2),
        locate(str(tmp_path / "other.txt"), "byte", root),
    ):
        assert other is None
    os.utime(path, ns=(1, 1))  # touched: the same text, so the same dataset
    assert locate(str(path), "byte", root) is None
    assert prepare(str(path), "byte", root) == made
    assert locate(str(path), "byte", root) == made
    path.write_text("another text\n" * 100)
    other = prepare(str(path), "byte", root)
    assert other != made
    assert locate(str(path), "byte", root) == other
    path.unlink()  # the text may go once it is prepared
    assert locate(str(path), "byte", root) == other
    assert sorted(root.iterdir()) == sorted([made, other])
    assert prepare(str(made), "char", root) == locate(str(made), "gpt2", root) == made  # shards are their own dataset


def test_a_tokenizer_file_that_changed_makes_another_dataset(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    made = []
    for size in (258, 260):
        folder = prepare(str(tmp_path / "text.txt"), None, tmp_path / "bpe", train_bpe=size)
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        made.append(prepare(str(tmp_path / "text.txt"), str(tmp_path / "tokenizer.json"), tmp_path))
    assert len(set(made)) == 2


def test_a_bpe_is_trained_on_the_train_split_alone(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("alpha beta " * 90 + "gamma delta " * 8)
    dataset = open_dataset(prepare(str(tmp_path / "text.txt"), "bpe:290", tmp_path))
    assert dataset.tokenizer is not None
    assert len(dataset.tokenizer.encode(" alpha")) == 1
    assert len(dataset.tokenizer.encode(" gamma")) > 3
    assert prepare(str(tmp_path / "text.txt"), None, tmp_path, train_bpe=290) == dataset.path


def test_neither_torch_nor_the_other_rooms_are_imported() -> None:
    code = (
        "import sys, codescent.data.text.prepare, codescent.data.text.dataset, codescent.data.text.pool;"
        "found = [name for name in sys.modules if name == 'torch' or name.startswith('codescent.')"
        " and not name.startswith(('codescent.data', 'codescent.base'))];"
        "print(found); sys.exit(bool(found))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


BAD_TEXT = {
    "latin.txt": (b"caf\xe9 " * 100, "byte 0xe9 at offset 3 (line 1)"),
    "empty.txt": (b"", "empty"),
    "mark.txt": (b"\xef\xbb\xbf", "empty"),
    "short.txt": (b"x", "too few"),
    "keys.jsonl": (b'{"text": "a"}\n{"txt": "b"}\n', 'line 2: no key "text"'),
    "blank.jsonl": (b"\n\n", "empty"),
    "broken.gz": (b"no gzip", "damaged"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_refused_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    data, told = BAD_TEXT[name]
    (tmp_path / name).write_bytes(data)
    (message,) = refusal(str(tmp_path / name), "char", tmp_path / "datasets")
    assert str(tmp_path / name) in message
    assert told in message
    assert list((tmp_path / "datasets").iterdir()) == []


def test_all_bad_files_of_a_folder_are_told_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"good{number}.txt").write_text("good")
    for name in ("bad one.txt", "bad two.txt"):
        (folder / name).write_bytes(b"\xff")
    problems = refusal(str(folder), "char", tmp_path / "datasets", num_workers=2)
    assert {problem.split(":")[0] for problem in problems} == {str(folder / f"bad {n}.txt") for n in ("one", "two")}
    for number in range(60):
        (folder / f"good{number}.txt").write_bytes(b"\xff")
    assert "there may be more" in refusal(str(folder), "char", tmp_path / "datasets")[-1]


def test_bad_arguments_are_told_at_once(tmp_path: Path) -> None:
    assert len(refusal("python-stdlib", "gtp2", tmp_path, validation_fraction=0.9)) == 2
    assert "did you mean gpt2?" in refusal("python-stdlib", "gtp2", tmp_path)[0]
    assert "at least 257" in refusal("python-stdlib", "bpe:100", tmp_path)[0]
    (problem,) = refusal("python-stdlib", "bpe:300", tmp_path, validation_fraction=1.0)  # nothing to train it on
    assert "is trained on the train split" in problem
    assert "one of the two" in refusal("python-stdlib", "gpt2", tmp_path, train_bpe=500)[0]
    assert "1 or more" in refusal("python-stdlib", "char", tmp_path, num_workers=0)[0]
    assert "did you mean shakespeare" in refusal("shakespere", "char", tmp_path)[0]
    assert list(tmp_path.iterdir()) == []


def test_gpt2_without_its_files_is_refused_before_the_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CODESCENT_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (message,) = refusal(str(tmp_path / "latin.txt"), "gpt2", tmp_path / "datasets")
    assert "$CODESCENT_DATA_DIR/gpt2/encoder.json" in message


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert str(tmp_path / "file") in refusal("python-stdlib", "char", tmp_path / "file" / "datasets")[0]


def test_two_processes_at_once_make_one_dataset(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words of a text\n" * 400_000)
    code = (
        "import sys; from pathlib import Path; from codescent.data.text.prepare import prepare;"
        "print(prepare(sys.argv[1], 'bpe:300', Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "text.txt"), str(tmp_path / "datasets")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {run.communicate(timeout=120)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert [str(path) for path in (tmp_path / "datasets").iterdir()] == list(paths)
    open_dataset(Path(paths.pop())).verify()


def test_the_progress_bar_goes_to_the_standard_error_alone(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words\n" * 1000)
    code = (
        "import pty, sys; sys.exit(pty.spawn([sys.executable, '-c', 'import sys; from pathlib import Path;"
        "from codescent.data.text.prepare import prepare;prepare(sys.argv[1], None, Path(sys.argv[2]), progress=True)',"
        " sys.argv[1], sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "text.txt"), str(tmp_path / "datasets")]
    on_terminal = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=True)
    assert b"tokenising text" in on_terminal.stdout
    prepare(str(tmp_path / "text.txt"), "byte", tmp_path / "datasets", progress=True)  # no terminal: nothing to see


def test_progress_counts_what_was_done_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.stage("tokenising", 4_000_000, True, done=1_000_000) as advance:
        advance(1_000_000)
        advance(2_000_000)
    said = capsys.readouterr().err.splitlines()
    assert said[:-1] == ["tokenising: 4 MB", "tokenising: 2 MB (50 %)", "tokenising: 4 MB (100 %)"]
    assert said[-1].startswith("tokenising: done in ")
    with progress.stage("little", 900_000, True) as advance:
        advance(900_000)
    assert "done" not in capsys.readouterr().err, "little work has no begin and no end"
