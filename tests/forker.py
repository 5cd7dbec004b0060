"""In: runs and functions that tests want on ranks. Out: how the ranks ended and what they found.
Does not fork ranks itself: the program rank_server does, which imports torch once for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.record import RunFolder

TESTS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Done:
    """How the ranks of a run ended (0, a UserError's code, 1 for anything else, None: it hung), and what they said."""

    codes: list[int | None]
    said: str


class Forker:
    """A process that forks ranks; it starts with the first run."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.number = 0

    def call(self, function: str, folder: Path, ranks: int = 1, **options: Any) -> list[Any]:
        """Call `module:name` with a Place and the options on so many ranks, which must end well; each rank's result."""
        codes, found, said = self._ask(function, folder, ranks, options)
        assert codes == [0] * ranks, f"{codes}\n{said}"
        return found

    def run(self, folder: Path, ranks: int, words: Sequence[str], *, resume: bool = False, fault: str = "") -> Done:
        """`codescent train run.toml WORDS` in `folder`, as so many ranks. `fault`: of layout_ranks.FAULTS."""
        options = {"words": list(words), "resume": resume, "fault": fault}
        codes, _, said = self._ask("layout_ranks:run", folder, ranks, options)
        return Done(codes, said)

    def train(
        self, folder: Path, name: str, ranks: int, *words: str, resume: bool = False, fault: str = ""
    ) -> RunFolder:
        """A run of that name, which must end well."""
        done = self.run(folder, ranks, [f"run.name={name}", *words], resume=resume, fault=fault)
        assert done.codes == [0] * ranks, f"{done.codes}\n{done.said}"
        return RunFolder.open(folder / "runs" / name)

    def train_on_cpus(self, folder: Path, name: str, ranks: int, *words: str, resume: bool = False) -> RunFolder:
        """A run of a layout that needs CUDA: here each rank's device and its host are the CPU. It must end well."""
        words = (f"run.name={name}", "train.device=auto", *words)
        options = {"words": words, "resume": resume, "any_device": True}
        self.call("layout_ranks:run", folder, ranks, **options)
        return RunFolder.open(folder / "runs" / name)

    def _ask(
        self, function: str, folder: Path, ranks: int, options: dict[str, Any]
    ) -> tuple[list[int | None], list[Any], str]:
        self.process = self.process or _start()
        self.number += 1
        request = {"function": function, "folder": str(folder), "ranks": ranks, "options": options}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([self.number, request]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            number, codes, found, said = json.loads(line)
            if number == self.number:  # an earlier one is of a test that pytest has given up
                return codes, found, said
        code, self.process = self.process.wait(), None  # the next run starts another one
        raise AssertionError(f"the process that forks ranks ended with {code}")

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.communicate()


class Prepared(Forker):
    """The ranks of another Forker, each of which calls `module:name` before anything else."""

    def __init__(self, forker: Forker, first: str) -> None:
        super().__init__()
        self.forker, self.first = forker, first

    def _ask(
        self, function: str, folder: Path, ranks: int, options: dict[str, Any]
    ) -> tuple[list[int | None], list[Any], str]:
        asked = {"first": self.first, "function": function, "options": options}
        return self.forker._ask("rank_server:act_after", folder, ranks, asked)


class Runs:
    """Runs of one project, each under a name of its own; those of one process, to compare with, done once.

    Args:
        project: where `make_project` has been.
        sizes: words that all of them have.
        whole: what those of one process have beside.
    """

    def __init__(self, project: Path, forker: Forker, sizes: Sequence[str], whole: Sequence[str]) -> None:
        self.project, self.forker = project, forker
        self._sizes, self._whole = sizes, whole
        self._alone: dict[tuple[str, ...], RunFolder] = {}
        self._number = 0

    def start(self, ranks: int, *words: str, fault: str = "") -> Done:
        """A run under a new name, however it ends."""
        self._number += 1
        words = (*self._sizes, *words, f"run.name=run{self._number}")
        return self.forker.run(self.project, ranks, words, fault=fault)

    def last(self) -> RunFolder:
        """The run of the last `start` or `run`."""
        return RunFolder.open(self.project / "runs" / f"run{self._number}")

    def run(self, ranks: int, *words: str, resume: bool = False, fault: str = "") -> RunFolder:
        """One that must end well; with `resume` the last one goes on."""
        self._number += not resume
        name = f"run{self._number}"
        return self.forker.train(self.project, name, ranks, *self._sizes, *words, resume=resume, fault=fault)

    def of_one(self, *words: str) -> RunFolder:
        """That of one process; where fewer steps are walked these are the first of them."""
        if words not in self._alone:
            self._alone[words] = self.run(1, *words, *self._whole)
        return self._alone[words]


def _start() -> subprocess.Popen[str]:
    python_path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",
        "PYTHONPATH": python_path,
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", "import rank_server; rank_server.serve()"]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
