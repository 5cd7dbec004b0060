"""In: words of `codescent launch`. Out: the script that it prints; what programs the script starts, with which words.
Does not start ranks: programs with the names of launchers write down how they were started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from codescent.verbs import cli

STUB = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
if name == "python3" and sys.argv[1] == "-c":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if name == "python3" and sys.argv[2] == "codescent.jobs.address":
    print("10.0.0.1")
    sys.exit()
env = {{key: text for key, text in os.environ.items() if key.startswith(("CODESCENT_", "MASTER_", "TMPDIR", "GLOO_"))}}
with open({log!r}, "a") as file:
    file.write(json.dumps([name, sys.argv[1:], env]) + "\\n")
sys.exit(int(os.environ.get("CODE_OF_" + name, "0")))
"""
PROGRAMS = ("srun", "scontrol", "qsub", "mpiexec", "mpirun", "torchrun", "python3", "module")


@dataclass(frozen=True)
class Started:
    """A program that a script has started."""

    name: str
    words: list[str]
    env: dict[str, str]


def script_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `codescent launch` prints, with no virtual environment."""
    code = cli.run(["launch", *words[:1], "site.environment=none", *words[1:]])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def run_script(text: str, folder: Path, *arguments: str, **env: str) -> tuple[int, list[Started]]:
    """Run a script with programs that write down how they were started. Returns its exit code and these programs."""
    log = folder / "started.jsonl"
    log.write_text("")
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        (programs / name).write_text(STUB.format(python=sys.executable, log=str(log)))
        (programs / name).chmod(0o755)
    (folder / "script").write_text(text)
    done = subprocess.run(
        ["bash", str(folder / "script"), *arguments], check=False, capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **env}, timeout=60,
    )  # fmt: skip
    assert done.stderr == "", done.stderr
    return done.returncode, [Started(*json.loads(line)) for line in log.read_text().splitlines()]
