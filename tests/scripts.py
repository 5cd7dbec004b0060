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
if name == "python3" and sys.argv[3] == "codescent.jobs.address":
    print("10.0.0.1")
    sys.exit()
if name == "python3" and sys.argv[3] == "codescent.jobs.grace":
    print(os.environ.get("GRACE", "60"))
    sys.exit()
marks = ("CODESCENT_", "MASTER_", "TMPDIR", "GLOO_", "WORLD_SIZE", "PET_", "OMPI_MCA", "PRTE_MCA")
env = {{key: text for key, text in os.environ.items() if key.startswith(marks)}}
with open({log!r}, "a") as file:
    file.write(json.dumps([name, sys.argv[1:], env]) + "\\n")
print(os.environ.get("SAYS_" + name, ""))
if sys.argv[1:2] != ["mkdir"] and (code := os.environ.get("STOPS_" + name)):  # as a run that is asked to stop
    open(os.environ["CODESCENT_EXIT_FILE"], "w").write(code + "\\n")
sys.exit(int(os.environ.get("CODE_OF_" + name, "0")))
"""
PROGRAMS = (
    "srun", "scontrol", "sbatch", "squeue", "sacct", "scancel", "qsub", "qstat", "qdel", "mpiexec", "mpirun",
    "torchrun", "python3", "module", "apptainer",
)  # fmt: skip

CONFIG = ("gpt2_124m", "data.corpus=corpus.txt", "train.global_batch_size=24", "train.microbatch_size=1")
COMMAND = ["codescent", "train", *CONFIG, "--resume=auto"]
"""Of a rank."""
SLURM = ("--to", "slurm", "--nodes", "2", "--devices", "4", "site.time=04:00:00")
GPUS = "site.devices=--gpus-per-node={n}"
PBS = ("--to", "pbs", "--nodes", "2", "--devices", "4", "site.time=1-00:00:00", "site.devices=ngpus={n}")
TARGETS = {
    "local": ("--to", "local", "--devices", "2"),
    "ssh": ("--to", "ssh", "--hosts", "a:2,b:1"),
    "torchrun": ("--to", "torchrun", "--hosts", "a:2,b:2"),
    "uneven torchrun": ("--to", "torchrun", "--hosts", "a:2,b:1"),
    "one torchrun": ("--to", "torchrun", "--devices", "2"),
    "elastic": ("--to", "torchrun", "--nodes", "1:4", "--hosts", "a", "--devices", "2", "--max-restarts", "3"),
    "openmpi": ("--to", "mpirun", "--hosts", "a:2,b:1", "site.mpi=openmpi"),
    "mpich": ("--to", "mpirun", "--hosts", "a:2,b:1", "site.mpi=mpich"),
    "intelmpi": ("--to", "mpirun", "--hosts", "a:2,b:1", "site.mpi=intelmpi"),
    "slurm": (*SLURM, GPUS),
    "pbs": PBS,
}


@dataclass(frozen=True)
class Started:
    """A program that a script has started."""

    name: str
    words: list[str]
    env: dict[str, str]


def starts(found: Sequence[Started], name: str) -> Started:
    """The program of this name, which was started once."""
    (one,) = [one for one in found if one.name == name]
    return one


def script_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `codescent launch` prints, with no virtual environment."""
    code = cli.run(["launch", *words[:1], "site.environment=none", *words[1:]])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def programs_in(folder: Path) -> Path:
    """A folder with programs that write down how they were started, and an empty log."""
    log, programs = folder / "started.jsonl", folder / "programs"
    log.write_text("")
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        (programs / name).write_text(STUB.format(python=sys.executable, log=str(log)))
        (programs / name).chmod(0o755)
    return programs


def started_in(folder: Path) -> list[Started]:
    """The programs that were started."""
    return [Started(*json.loads(line)) for line in (folder / "started.jsonl").read_text().splitlines()]


def run_script(text: str, folder: Path, *arguments: str, **env: str) -> tuple[int, list[Started]]:
    """Run a script with programs that write down how they were started. Returns its exit code and these programs."""
    programs = programs_in(folder)
    (folder / "script").write_text(text)
    done = subprocess.run(
        ["bash", str(folder / "script"), *arguments], check=False, capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **env}, timeout=60,
    )  # fmt: skip
    (folder / "said").write_text(done.stdout)
    assert done.stderr == "", done.stderr
    assert list(folder.glob(".exit-*")) == []  # nothing is left behind
    return done.returncode, started_in(folder)
