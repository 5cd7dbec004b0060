"""In: control characters and unknown home folders in what users, files and models give. Out: sentences that are safe.
Does not test what is refused: the tests of each verb do."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from runs import make_project

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.visible import visible
from codescent.config.load import load
from codescent.verbs.cli import run

ESCAPES = "\x1b]0;x\x07\x9b31m\x7f\u202e"
NOBODY = "~nosuchuser/x"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_control_character_is_shown_and_no_other() -> None:
    shown = {chr(code): visible(chr(code)) for code in range(0x3000)}
    changed = {character for character, text in shown.items() if text != character}
    controls = {chr(code) for code in (*range(32), *range(127, 160))} - {"\n", "\t"}
    assert changed - controls == {chr(code) for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A))}
    assert controls <= changed
    assert all(text.isprintable() for text in (shown[character] for character in changed))
    assert visible("\x1b[1m\u202e tschüß 日本\t\n") == "\\x1b[1m\\u202e tschüß 日本\t\n"


WORDS = {
    "a config's name": ["plan", ESCAPES],
    "a config's keys": ["config", "keys.toml"],
    "a config's base": ["config", "base.toml"],
    "a config's place": ["config", f"good{ESCAPES}.toml"],
    "a key": ["plan", "run.toml", f"train.{ESCAPES}=1"],
    "a value": ["plan", "run.toml", f"run.folder={ESCAPES}"],
    "no key": ["plan", "run.toml", f"{ESCAPES}=x"],
    "a word": ["sample", "runs/x", f"--{ESCAPES}"],
    "a number": ["plan", "run.toml", "--ranks", ESCAPES],
    "a corpus": ["data", ESCAPES],
    "a corpus's text": ["data", f"bad{ESCAPES}.txt"],
    "a key of lines": ["data", "lines.jsonl", "--text-key", ESCAPES],
    "a tokenizer": ["data", "corpus.txt", "--tokenizer", ESCAPES],
    "a folder that is printed": ["data", "corpus.txt", "--folder", ESCAPES],
    "weights": ["import", "weights", "runs/new"],
    "a run": ["sample", ESCAPES],
    "a run to draw": ["plot", ESCAPES, "--out", "a.png"],
    "a run to report": ["report", ESCAPES],
    "a report": ["report", "runs/x", "--out", f"{ESCAPES}.pdf"],
    "a folder of figures": ["report", "runs/x", "--figures", f"{ESCAPES}/x/y"],
    "a picture": ["plot", "runs/x", "--out", f"{ESCAPES}.pdf"],
    "layouts": ["prove", "run.toml", "--layouts", ESCAPES],
}


@pytest.mark.parametrize("what", WORDS)
def test_no_terminal_obeys_what_is_printed(project: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    (project / "keys.toml").write_text('"\\u001b[1m" = 1\n["\\u001b[31m"]\n[train]\n"\\u009b31m" = 1\n')
    (project / "base.toml").write_text('base = "\\u001b[31m.toml"\n')
    (project / f"good{ESCAPES}.toml").write_text((project / "run.toml").read_text())
    (project / f"bad{ESCAPES}.txt").write_bytes(b"\xff")
    (project / "lines.jsonl").write_text('{"\\u001b[31m": 1}\n')
    (project / "weights").mkdir()
    (project / "weights" / "config.json").write_text(json.dumps({"model_type": ESCAPES}))
    with suppress(SystemExit):  # of argparse
        run(WORDS[what])
    said = "".join(capsys.readouterr())
    assert "\\x1b" in said or "\\u001b" in said or "\\x9b" in said
    assert visible(said) == said


def test_the_environment_is_printed_as_safely(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", ESCAPES)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["train", "run.toml"]) == 2
    said = capsys.readouterr().err
    assert "\\x1b" in said
    assert visible(said) == said


HOMES = {
    "a config": ["config", NOBODY],
    "a base": ["config", "base.toml"],
    "run.folder": ["train", "run.toml", f"run.folder={NOBODY}"],
    "data.corpus": ["train", "run.toml", f"data.corpus={NOBODY}"],
    "data.folder": ["train", "run.toml", f"data.folder={NOBODY}"],
    "data.tokenizer": ["train", "run.toml", f"data.tokenizer={NOBODY}"],
    "a vocabulary": ["train", "run.toml", f"data.tokenizer=bert:{NOBODY}"],
    "model.weights": ["train", "run.toml", f"model.weights={NOBODY}"],
    "data.chat_template": ["train", "run.toml", "data.task=sft", f"data.chat_template={NOBODY}"],
    "data": ["data", NOBODY],
    "--tokenizer": ["data", "corpus.txt", "--tokenizer", NOBODY],
    "--folder": ["data", "corpus.txt", "--folder", NOBODY],
    "RUN": ["sample", NOBODY],
    "DIR": ["export", "runs/x", NOBODY],
    "--timeline": ["plan", "run.toml", "--timeline", f"{NOBODY}.png"],
    "--out": ["plot", "runs/x", "--out", f"{NOBODY}.png"],
}


@pytest.mark.parametrize("what", HOMES)
def test_an_unknown_home_is_refused_and_no_folder_of_its_name_made(
    project: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    (project / "base.toml").write_text(f'base = "{NOBODY}"\n')
    with suppress(SystemExit):
        assert run(HOMES[what]) == 2
    said = capsys.readouterr().err
    assert "~nosuchuser is a home folder, and there is no user nosuchuser on this machine" in said
    assert not list(project.rglob("~*"))


def test_a_home_is_found_wherever_a_path_is_given(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(project / "home"))
    (project / "home").mkdir()
    (project / "run.toml").rename(project / "home" / "run.toml")
    (project / "child.toml").write_text('base = "~/run.toml"\n')
    assert expanded("~/x") == project / "home" / "x"
    assert load("child.toml").config.model.num_layers == 2
    assert run(["data", "corpus.txt", "--folder", "~/prepared"]) == 0
    assert len(list((project / "home" / "prepared").iterdir())) == 1
    assert not list(project.rglob("~*"))


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 123_456_789)  # as in a container that runs as any user
    with pytest.raises(UserError, match=r"~/x: ~ is a home folder, and this user has none: HOME is not set"):
        expanded("~/x")
