"""In: command lines that are not finished, as a shell gives them. Out: the words that could come next.
Does not start a shell: argcomplete prints the words for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

from codescent.config.load import shipped
from codescent.config.words import KEYS
from codescent.verbs import completion
from codescent.verbs.arguments import VERBS

ASK = """
import io, json, os, sys
import argcomplete
from codescent.verbs.completion import parser_with_words
found = []
for line in json.loads(sys.argv[1]):
    os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    out, finder = io.StringIO(), argcomplete.CompletionFinder()
    finder(parser_with_words(), always_complete_options="long", exit_method=lambda code: None, output_stream=out)
    found.append([word.rstrip() for word in out.getvalue().split(os.environ["_ARGCOMPLETE_IFS"]) if word])
print(json.dumps(found))
"""
"""In a process of its own: argcomplete takes descriptor 9 for itself."""


def asked(line: str = "") -> dict[str, str]:
    """The environment of a process that a shell asks for words."""
    wanted = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    return {**environment(), **wanted, "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><;|&(:"}


def test_each_place_of_a_command_line_has_its_words(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete", reason="argcomplete is not installed: completion is not tried")
    (tmp_path / "mine.toml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "runs").mkdir()
    lines = ["co", "", "train ", "train default train.num_s", "train train.num_s", "plan default --cluster h2"]
    lines += ["launch default --to sl", "plot ru", "train default train.precision="]
    words = json.dumps([f"codescent {line}" for line in lines])
    command = [sys.executable, "-c", ASK, words]
    done = subprocess.run(command, cwd=tmp_path, env=asked(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(zip(lines, json.loads(done.stdout), strict=True))
    assert found["co"] == ["collectives", "config", "compare"]
    assert {name for name, _, _ in VERBS} <= set(found[""])
    assert {*shipped(), "mine.toml", "--resume"} <= set(found["train "])
    assert "notes.txt" not in found["train "]
    assert found["train default train.num_s"] == found["train train.num_s"] == ["train.num_steps="]
    assert found["plan default --cluster h2"] == ["h200-sxm"]
    assert found["launch default --to sl"] == ["slurm"]
    assert found["plot ru"] == ["runs/"]
    assert [word.rpartition("=")[2] for word in found["train default train.precision="]] == ["fp64", "fp32", "bf16"]


def test_keys_have_the_words_of_their_values() -> None:
    assert completion.overrides("train.") == [f"{key}=" for key in KEYS]
    assert completion.overrides("model.kind=x") == [
        f"model.kind={word}" for word in ("gpt2", "llama", "transformer", "bert", "transformers", "auto")
    ]
    assert completion.overrides("data.as_text=") == ["data.as_text=true", "data.as_text=false"]
    assert completion.overrides("parallel.servers=") == ["parallel.servers=workers"]
    assert completion.overrides("train.nothing=") == []


def test_an_answer_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    """A shell waits for each answer."""
    pytest.importorskip("argcomplete", reason="argcomplete is not installed: completion is not tried")
    out = tmp_path / "out"
    command = [sys.executable, "-X", "importtime", "-m", "codescent"]
    env = {**asked("codescent train default train."), "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert len(out.read_text().splitlines()) >= 20
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argcomplete" in loaded
    assert not {"torch", "numpy", "matplotlib"} & loaded
