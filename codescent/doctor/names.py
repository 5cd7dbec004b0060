"""In: names of hosts. Out: the addresses that this host finds for them, within a time limit.
Does not judge them (judge_names.py does)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

MOST_S = 3.0
"""Nobody waits longer for the answer to a name."""


def resolved(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By name: "addresses", "error" ("": none) and "seconds"."""
    found: dict[str, dict[str, Any]] = {}
    begin_s = time.monotonic()
    threads = [threading.Thread(target=_resolve, args=(name, found), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begin_s + MOST_S - time.monotonic()))
    silent = {"addresses": [], "error": f"no answer within {MOST_S:g} s", "seconds": MOST_S}
    return {name: dict(found.get(name, silent)) for name in names}


def _resolve(name: str, found: dict[str, dict[str, Any]]) -> None:
    begin_s, addresses, problem = time.monotonic(), list[str](), ""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    except (OSError, UnicodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    found[name] = {"addresses": addresses, "error": problem, "seconds": time.monotonic() - begin_s}
