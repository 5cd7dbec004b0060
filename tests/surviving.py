"""In: a folder. Out: a run there with survive.on_loss, whose ranks can be killed in the middle of its steps.
Does not decide what is tested: the tests that import it do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import codescent, losses, make_project, start

from codescent.base.call import SURVIVES
from codescent.base.progress import PROGRESS_FD, Pages
from codescent.record import RunFolder

WORDS = ["run.toml", "train.num_steps=60", "checkpoint.every=5", "train.global_batch_size=12", "log.every=1",
         "train.eval_every=20", "model.hidden_dim=32"]  # fmt: skip
SLOW_STEPS = """
import time
from pathlib import Path

def slow(kind, data):
    if kind == "metrics" and not Path("fast").exists():
        time.sleep(0.05)
    if kind == "end":
        with Path("ends").open("a") as file:
            file.write(f"{data['problem']} {data['goes_on']}\\n")
"""


class Started:
    """A run with survive.on_loss, whose steps are slow enough to hit one of them."""

    def __init__(self, folder: Path, ranks: int, *words: str) -> None:
        make_project(folder)
        (folder / "own_logger.py").write_text(SLOW_STEPS)
        self.place, self.folder = folder, folder / "runs" / "a"
        survive = ["run.name=a", f"parallel.ranks={ranks}", "log.to=own_logger:slow", "survive.on_loss=restart"]
        self.process = start(folder, "train", *WORDS, *survive, *words)

    def rows(self) -> int:
        """The rows of metrics so far."""
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, while the run goes on."""
        while not holds():
            assert self.process.poll() is None, self.end()
            time.sleep(0.01)

    def children(self) -> list[int]:
        """The processes that the launcher has started, and that live."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "codescent train"], capture_output=True, text=True, check=False
        )
        return [*map(int, found.stdout.split())]

    def pid_of(self, rank: int) -> int:
        """The process that was started first as this rank."""
        for pid in self.children():
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            if {f"RANK={rank}", f"{SURVIVES}=0"} <= {*variables}:
                return pid
        raise AssertionError(f"no process of rank {rank}")

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.pid_of(rank), number)

    def pages(self) -> Pages:
        """What its ranks do, as the launcher sees it."""
        process = Path(f"/proc/{self.pid_of(0)}")
        variables = dict(one.partition("=")[::2] for one in (process / "environ").read_text().split("\0"))
        memory = os.open(process / "fd" / variables[PROGRESS_FD], os.O_RDWR)
        found = Pages.of({PROGRESS_FD: str(memory)})
        os.close(memory)
        assert found is not None
        return found

    def end(self) -> tuple[int, str]:
        """The exit code, and all that was printed."""
        (self.place / "fast").touch()
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out + err

    def is_like_a_run_alone(self, *words: str) -> None:
        """The run has ended well, with the losses of one that nobody disturbed, `alone`."""
        code, said = self.end()
        assert code == 0, said
        alone = codescent(self.place, "train", *WORDS, "run.name=alone", "parallel.ranks=1", *words)
        assert alone.returncode == 0, alone.stderr
        expected = losses(RunFolder.open(self.place / "runs" / "alone"))
        # In fp32 the number of ranks shows: step 14 has a norm of 84, and differs by 1.2e-5 between one rank and two.
        assert losses(RunFolder.open(self.folder)) == pytest.approx(expected, rel=1e-4), said

    def events(self, kind: str) -> list[dict[str, object]]:
        """The events of a kind."""
        return [dict(event) for event in RunFolder.open(self.folder).read_events() if event["kind"] == kind]
