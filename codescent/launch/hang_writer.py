"""In: on standard input the path of a run folder, texts and an event. Out: hang.txt, and the event in the run folder.
Does not watch ranks. A process of its own, because a disk that does not answer keeps who writes to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.record import RunFolder

HANG = "hang.txt"
ANSWER_S = 15.0
"""Seconds in which a disk answers, with the start of a process on a busy machine."""


def write_apart(folder: str, text: str, event: Mapping[str, Any]) -> bool | None:
    """Write from a process of its own. Returns whether it could; None: the disk does not answer.

    Args:
        folder: path of a run folder.
        text: for hang.txt; "": nothing.
        event: its kind and its fields; empty: none.
    """
    command = [sys.executable, "-P", "-m", __name__]  # -P: the user's folder may have files such as token.py
    asked = json.dumps({"folder": folder, "text": text, "event": dict(event)}).encode()
    with suppress(OSError):
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the launcher
        )
        with suppress(subprocess.TimeoutExpired):
            process.communicate(asked, ANSWER_S)
            return process.returncode == 0
        return None
    return False


def main() -> int:
    """Write what standard input says. Returns 0 if all is written."""
    asked = json.loads(sys.stdin.read())
    try:
        folder = RunFolder.open(asked["folder"])
        if asked["text"]:
            asked["event"]["path"] = str(folder.path / HANG)
            replace_file(folder.path / HANG, asked["text"])
        if asked["event"]:
            folder.event(**asked["event"])
    except (UserError, OSError):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
