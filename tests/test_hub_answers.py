"""In: servers that are no hub, and addresses that are none. Out: one message each, with exit code 2.
Does not reach another host: every server is on loopback."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from runs import called, environment

ANSWERS = {
    "a page": b"<html>log in</html>",
    "a list": b"[1, 2]",
    "nothing": b"{}",
    "no commit": b'{"id": "a/b", "siblings": []}',
    "a file without a name": b'{"id": "a/b", "sha": "%s", "siblings": [{"size": 1}]}' % (b"a" * 40),
}


class Page(BaseHTTPRequestHandler):
    """Answers every request with `answer`."""

    answer = b""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)


@pytest.fixture
def server() -> Iterator[str]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def test_a_page_or_a_token_that_is_none_is_said(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page to log in, of a network or of a proxy, ends in a traceback; so does a token that is not ASCII."""
    monkeypatch.setattr(constants, "ENDPOINT", server)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for what, answer in ANSWERS.items():
        monkeypatch.setattr(Page, "answer", answer)
        done = called(tmp_path, "fetch", "hf://a/b")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), what
        assert f"hf://a/b: {server} cannot be asked, or it is no hub" in done.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_\u00fc")
    done = called(tmp_path, "fetch", "hf://a/b")
    assert done.returncode == 2
    assert "check HF_ENDPOINT, HTTPS_PROXY and HF_TOKEN" in done.stderr


def test_an_address_that_is_none_is_said(tmp_path: Path) -> None:
    """huggingface_hub reads it when it is imported: each command would end in a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "codescent", "fetch", "hf://a/b"],
        env=environment(HF_ENDPOINT="http://127.0.0.1:99999", XDG_CACHE_HOME=str(tmp_path)),
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: HF_ENDPOINT, or another variable HF_* of the environment, cannot be read: ")
