"""In: a trained model, an address. Out: the model answers requests there until a signal ends it.
Does not answer requests itself: the room serving/ does."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from codescent import models
from codescent.base.errors import UserError
from codescent.base.extra import library
from codescent.base.output import note, progress, tolerate_write_errors
from codescent.base.token import secret_of
from codescent.build import saved_plan
from codescent.record import PLAN, RunFolder

if TYPE_CHECKING:
    from codescent.serving.service import ModelService

TOKEN_FILE = Path("~/.codescent/serve_token")
"""Where the token is that clients of other machines must know, unless --token-file names another file."""
WHAT = "codescent serve"
INSTEAD = "name another file: --token-file FILE"
MOST_ROWS = 4096
"""The most texts at a time. Each has a row in every pass, and a list of pages."""
LIBRARIES = ("starlette", "uvicorn", "prometheus_client")


def main(arguments: Namespace) -> int:
    """Open the model, listen, and serve until SIGTERM or Ctrl-C."""
    if arguments.rows > MOST_ROWS:
        raise UserError(f"--rows {arguments.rows}: at most {MOST_ROWS:,}; more requests may wait: --waiting N")
    for name in LIBRARIES:
        library(name, WHAT, "serve")
    from codescent.serving import http_server

    listening = http_server.bound(arguments.host, arguments.port)
    with listening:
        token = _token(arguments, is_loopback=http_server.is_loopback(listening))
        service = _service(arguments)
        tolerate_write_errors()  # it goes on if nobody reads what it says
        url = http_server.url_of(listening)
        named = ", ".join(filter(None, [service.name, service.which]))
        say = [
            f"{named}: {', '.join(service.can)} at {url}/v1, a page at {url}",
            "SIGTERM or Ctrl-C: running requests end, new ones are refused",
        ]
        progress(say)
        asyncio.run(http_server.run(service, listening, token=token, host=arguments.host, grace_s=arguments.grace))
    return 0


def _token(arguments: Namespace, *, is_loopback: bool) -> str | None:
    """What clients must know; None: nothing, as only this machine's users reach the address."""
    if is_loopback and arguments.token_file is None:
        return None
    path = (arguments.token_file or TOKEN_FILE).expanduser()
    token = secret_of(path, f"{path}: the token of clients", INSTEAD)
    if len(token.split()) > 1:
        raise UserError(f"{path}: a token of clients is one word; {INSTEAD}")
    note(f"clients need the token in {path}: Authorization: Bearer TOKEN")
    if not is_loopback:
        note("without encryption others on the network can read tokens and texts: put a proxy with TLS before it")
    return token


def _is_encoder(path: Path) -> bool:
    """Whether a path is the folder of a run whose model gives embeddings."""
    if not (path / PLAN).is_file():
        return False
    return saved_plan(RunFolder.open(path)).model.kind in models.ENCODING


def _service(arguments: Namespace) -> ModelService:
    """Open the model. Raises UserError: it cannot be, or the log cannot."""
    from codescent.serving.request_log import RequestLog
    from codescent.serving.service import ModelService
    from codescent.serving.watch import Watch

    which = {"best": arguments.best, "step": arguments.step, "ema": arguments.ema}
    if _is_encoder(arguments.run):
        from codescent.serving.open_embedder import open_embedder

        if arguments.log is not None:
            raise UserError("--log: requests for embeddings are not logged; leave it out")
        embedder, name, said = open_embedder(arguments.run, **which, device=arguments.device)
        return ModelService(arguments.name or name, said, Watch(), embedder=embedder, most_waiting=arguments.waiting)
    from codescent.inference.open import open_engine
    from codescent.serving.engine_thread import EngineThread

    log = None if arguments.log is None else RequestLog(arguments.log)
    try:
        opened = open_engine(arguments.run, **which, device=arguments.device, rows=arguments.rows)
    except BaseException:
        if log is not None:
            log.undo()
        raise
    watch = Watch()
    thread = EngineThread(opened.engine, arguments.rows, arguments.waiting, watch)
    watch.add_engine(opened.engine, lambda: thread.open)
    name = arguments.name or opened.name
    return ModelService(name, opened.which, watch, opened, thread, log=log, most_waiting=arguments.waiting)
