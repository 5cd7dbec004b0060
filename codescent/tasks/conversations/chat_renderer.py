"""In: chat templates and the variables that they read. Out: texts, within limits of time and memory.
A process of its own renders (`serve`), so that it can be ended whatever a template asks for.
Does not compile or render in this process: chat_jinja.py does, in the other one."""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from jinja2 import Template

from codescent.base.errors import UserError
from codescent.tasks.conversations.chat_files import ChatFiles
from codescent.tasks.conversations.chat_jinja import compiled, rendered

LIMIT_S = 20.0
"""Seconds for one conversation. Usual templates take less than a millisecond."""

START_S = 300.0
"""Seconds in which the process must have started: on a slow disk it takes long to import Python's modules."""
READY = b"ready"

LIMIT_BYTES = 1 << 30
"""Memory of the process, besides what it has at the start."""


class Renderer:
    """The process that renders, as its parent sees it. It ends when its parent closes the connection, or ends."""

    def __init__(self) -> None:
        """Start the process and wait for it. Raises UserError: it does not start."""
        root = str(Path(__file__).resolve().parents[3])  # the process imports the same codescent
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.parent = os.getpid()
        self.connection, theirs = Pipe()
        with theirs:  # the process inherits a copy
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    f"import {__name__} as it; it.serve({theirs.fileno()})",
                ],  # -P: not the working directory's modules
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent
            )
        self._await_start()

    def _await_start(self) -> None:
        why = f"does not start within {START_S:.0f} s"
        try:
            if self.connection.poll(START_S) and self.connection.recv_bytes() == READY:
                return
        except (EOFError, OSError):
            why = "ended while it started; perhaps memory ran out"
        except BaseException:  # Ctrl-C
            self.close()
            raise
        self.close()
        raise UserError(f"data.chat_template: the process that renders chat templates {why}")

    def ask(self, files: ChatFiles, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """See `ask`. Raises EOFError or OSError: the process ended; TimeoutError: no answer within LIMIT_S."""
        self.connection.send_bytes(json.dumps([asdict(files), variables]).encode())
        if not self.connection.poll(LIMIT_S):
            raise TimeoutError
        answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return answer

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        if self.parent == os.getpid():
            self.process.kill()
            self.process.wait()


ENDED = "the process that renders it ended; perhaps memory ran out"
_one: list[Renderer] = []
_greedy: dict[str, list[str]] = {}  # templates that exceeded a limit: to try them for every conversation takes hours
_lock = threading.Lock()


def ask(files: ChatFiles, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Compile a template, and render it if there are variables.

    Args:
        files: the template.
        variables: JSON data; None: only compile it.

    Returns:
        {"text"}, or, if it is only compiled: {"variables": names that it reads, "day": its date or None}.

    Raises:
        UserError: the template is not Jinja, raises an error, or needs more than LIMIT_S or LIMIT_BYTES.
    """
    with _lock:
        if files.text in _greedy:
            raise UserError(*_greedy[files.text])
        if not _one or _one[0].parent != os.getpid():  # a forked process needs its own
            _one[:] = [Renderer()]
        try:
            answer = _one[0].ask(files, variables)
        except (EOFError, OSError) as error:
            end_renderer()
            slow = isinstance(error, TimeoutError)
            why = f"takes more than {LIMIT_S:.0f} s for one conversation" if slow else ENDED
            _greedy[files.text] = [f"{files.name}: {why}"]
            raise UserError(*_greedy[files.text]) from error
        except BaseException:  # Ctrl-C: an answer that nobody took would be the next one's
            end_renderer()
            raise
        if "greedy" in answer:
            _greedy[files.text] = answer["greedy"]
            raise UserError(*answer["greedy"])
    if "refused" in answer:
        raise UserError(*answer["refused"])
    return answer


def end_renderer() -> None:
    """End the process, if there is one; the next question starts another."""
    while _one:
        _one.pop().close()


atexit.register(end_renderer)


@lru_cache(maxsize=16)
def _compiled(name: str, text: str, day: str | None) -> tuple[Template, dict[str, Any]]:
    template, variables, found = compiled(ChatFiles(name, text, {}, day))
    return template, {"variables": sorted(variables), "day": None if found is None else found.isoformat()}


def _answer(request: bytes) -> dict[str, Any]:
    files, variables = json.loads(request)
    try:
        template, facts = _compiled(files["name"], files["text"], files["day"])
        return facts if variables is None else {"text": rendered(template, files["name"], variables)}
    except UserError as error:
        return {"greedy" if isinstance(error.__cause__, MemoryError) else "refused": error.problems}


def serve(handle: int) -> None:
    """Answer requests until the parent ends the connection.

    While it computes, the end of the parent ends this process: Linux then sends a signal. Elsewhere a request that
    takes far too long ends it.
    """
    connection = Connection(handle)
    with suppress(OSError, ValueError):  # not everywhere; the limit of time remains
        now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now_bytes + LIMIT_BYTES,) * 2)
    with suppress(EOFError, OSError):  # the parent is gone
        connection.send_bytes(READY)
        while True:
            request = connection.recv_bytes()
            signal.alarm(2 * math.ceil(LIMIT_S))  # the parent ends it earlier, if there is one
            _signals_end(handle, True)
            if connection.poll(0):  # the parent has ended meanwhile
                return
            answer = _answer(request)
            _signals_end(handle, False)
            if "greedy" in answer:
                gc.collect()  # an error holds what the template made: the next one would lack this memory
            connection.send_bytes(json.dumps(answer).encode())
            signal.alarm(0)


def _signals_end(handle: int, wanted: bool) -> None:
    """Whether the kernel sends SIGIO, which ends this process, when the other end of a connection is closed.

    A thread could not look for the parent: a filter of a template may hold the interpreter's lock for minutes.
    """
    if sys.platform == "linux":  # elsewhere a process ignores SIGIO
        fcntl.fcntl(handle, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_ASYNC
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | (os.O_ASYNC if wanted else 0))
