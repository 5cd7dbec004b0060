"""In: words of a command, in a project. Out: what a server of its run answers, and whether it ended as it should.
Does not damage anything: tests/fuzz does."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import psutil

from codescent.inference.open import open_engine
from codescent.serving.app import make_app
from codescent.serving.engine_thread import EngineThread
from codescent.serving.service import ModelService
from codescent.serving.watch import Watch
from codescent.verbs import cli

RUN = Path("runs/one")


def served_body(words: list[str]) -> int:
    """Send the file words[1] to the path words[0] of the run's server. Returns 0: answered; 2: refused by 4xx."""
    opened, watch = open_engine(RUN, rows=4), Watch()
    thread = EngineThread(opened.engine, 4, 8, watch)
    app = make_app(ModelService("one", opened.which, watch, opened, thread))
    body, sent = Path(words[1]).read_bytes(), list[dict[str, object]]()

    async def ask() -> None:
        thread.start()
        arrived = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, object]:
            if arrived:
                return arrived.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        scope = {"type": "http", "method": "POST", "path": words[0], "headers": head, "query_string": b""}
        await app(scope, receive, send)  # type: ignore[arg-type]
        await thread.close()

    asyncio.run(ask())
    status = int(sent[0]["status"])  # type: ignore[call-overload]
    print(status, [message.get("body") for message in sent[1:]])
    return 0 if status == 200 else 2 if 400 <= status < 500 else status


def briefly(words: list[str]) -> int:
    """Run `codescent`; a server gets SIGTERM as soon as it listens and waits."""
    if words[0] == "serve":
        threading.Thread(target=_end, daemon=True).start()
    return cli.run(words)


def _end() -> None:
    """Send SIGTERM when the signal has the server's handler, and it listens."""
    while not psutil.Process().net_connections() or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
