"""In: what a set of ranks is to do. Out: the same as a file, for the ranks; and each rank's lines of what it found.
Does not start ranks (survey.py does), does not import torch, and is no part of a run folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FP32, BF16 = "fp32", "bf16"
GROUP = "group"
"""Name of the first thing that a set of ranks tries: to make the process group."""
PROBE, TIME, EXPLAIN = "probe", "time", "explain"
YES, NO, WRONG, HANGS, CRASHES = "yes", "no", "wrong", "hangs", "crashes"

TASK = "task.json"


@dataclass(frozen=True)
class Task:
    """What a set of ranks does.

    Attributes:
        does: PROBE, TIME or EXPLAIN.
        backend: of torch.distributed, such as gloo.
        device: cpu, or the kind of GPU: cuda, xpu.
        limit_s: seconds after which a call is ended.
        calls: PROBE: names in `calls.CALLS`.
        size_bytes: TIME: of the tensor, in fp32.
        rounds: TIME: largest number of rounds.
        budget_s: TIME: no round begins after this many seconds of measuring.
    """

    does: str
    backend: str = "gloo"
    device: str = "cpu"
    limit_s: float = 30.0
    calls: tuple[str, ...] = ()
    size_bytes: int = 0
    rounds: int = 0
    budget_s: float = 0.0

    def write(self, folder: Path) -> None:
        """Write the task for the ranks."""
        (folder / TASK).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Inverse of `write`."""
        fields = json.loads((folder / TASK).read_text(encoding="utf-8"))
        return cls(**{**fields, "calls": tuple(fields["calls"])})


@dataclass(frozen=True)
class Line:
    """What one rank found.

    Attributes:
        name: what was tried: GROUP, TIME, EXPLAIN, or a call and a dtype, by `name_of`.
        state: YES, NO, WRONG or HANGS.
        why: torch's reason, or what is wrong; "" for YES.
        seconds: from the begin, at which all ranks were together, to the end.
        found: JSON data of TIME and EXPLAIN.
    """

    name: str
    state: str
    why: str = ""
    seconds: float = 0.0
    found: Any = None

    def append(self, file: Path) -> None:
        """Write the line at the end of the rank's file."""
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(self)) + "\n")


def name_of(call: str, dtype: str) -> str:
    """The name of a call in a dtype."""
    return f"{call} {dtype}"


def file_of(folder: Path, rank: int) -> Path:
    """The file with the lines of a rank."""
    return folder / f"rank-{rank}.jsonl"


def lines(folder: Path, rank: int) -> Iterator[Line]:
    """The lines of a rank; none if it has not come so far. A line that a killed rank has not ended is left out."""
    file = file_of(folder, rank)
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield Line(**json.loads(line))
