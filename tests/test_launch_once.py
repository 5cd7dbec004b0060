"""In: ranks that one process starts, each with the same error before they have met. Out: one of them prints it.
Ranks that have met: test_first_cause.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment, make_project

SHELL = """
export WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29400
start() { for rank in 0 1 2; do RANK=$rank LOCAL_RANK=$rank "$@" & ranks="$ranks $!"; done; wait $ranks; ranks=; }
start "$@"
echo again >&2
start "$@"
"""


TRAIN = ("-m", "codescent", "train")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*TRAIN, "run.toml", "train.nosuch=1"), "train.nosuch: unknown key"),
        ((*TRAIN, "run.toml", "--nosuch"), "unrecognized arguments: --nosuch"),
        ((*TRAIN, "absent.toml"), "absent.toml"),
        (("-c", "import codescent; codescent.init('nosuch')"), "nosuch"),
    ],
)
def test_an_error_of_all_ranks_is_printed_once_before_they_meet(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    """The same shell may start the same ranks again: it is printed then, too."""
    make_project(tmp_path)
    (tmp_path / "tmp").mkdir()
    command = ["bash", "-c", SHELL, "bash", sys.executable, *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(TMPDIR=str(tmp_path / "tmp")), text=True, capture_output=True,
        timeout=170, check=False,
    )  # fmt: skip
    first, second = done.stderr.split("again\n")
    for part in (first, second):
        assert part.count(f"error: {says}" if says.startswith("unrec") else says) == 1, part


def test_a_link_of_a_stranger_hides_no_error(tmp_path: Path) -> None:
    """Nothing is written through it, and the error is printed."""
    make_project(tmp_path)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "victim").write_text("1.\n")
    text = f"""
import os, sys
from pathlib import Path
from codescent.launch import once
env = {{"RANK": "0", "WORLD_SIZE": "2"}}
path = once._mark(["a"], env)
path.symlink_to({str(tmp_path / "victim")!r})
once.PRINTED_S = 0.1
once.say_once(["a"], env)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment(TMPDIR=str(tmp_path / "tmp")), text=True, capture_output=True,
        timeout=170, check=False,
    )  # fmt: skip
    assert done.stderr == "a\n"
    assert (tmp_path / "victim").read_text() == "1.\n"
