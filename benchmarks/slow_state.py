"""In: a folder, keys of runs. Out: what earlier calls measured, so that a table of hours continues where it stopped.
Does not run anything. A key has everything that decides a run's numbers, but not the code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from measure import SystemFailed, say

FILE = "measured.jsonl"


class State:
    """Results by kind and key, one JSON object a line. A line is written in one piece, so several calls may append.

    A line that is no JSON was cut by a kill. It is named and ignored: its run is made again.

    Args:
        folder: where the file is or will be.
        machine: facts that must be equal for results to belong together.

    Raises:
        SystemFailed: the file has a line of another machine, or one that is not of this benchmark.
    """

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        self._path, self._machine = folder / FILE, machine
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        if self._path.exists():
            for number, line in enumerate(self._path.read_bytes().splitlines(), 1):
                self._read(f"{self._path}, line {number}", line)

    def _read(self, where: str, line: bytes) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            say(f"{where}: cut off; its run is made again")
            return
        try:
            kind, key, machine, result = (entry[name] for name in ("kind", "key", "machine", "result"))
        except (KeyError, TypeError):
            raise SystemFailed(f"{where}: not a result of this benchmark; give another --state") from None
        if machine != self._machine:
            raise SystemFailed(f"{where}: measured on {machine}, this is {self._machine}; give another --state")
        self._found[kind, key] = result

    def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """An earlier result; None if there is none."""
        return self._found.get((kind, key))

    def put(self, kind: str, key: str, result: dict[str, Any], words: str) -> None:
        """Keep a result. `words` describe it for people."""
        entry = {"kind": kind, "key": key, "words": words, "machine": self._machine, "result": result}
        with self._path.open("a+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            cut = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(b"\n" * cut + json.dumps(entry).encode() + b"\n")
        self._found[kind, key] = result
