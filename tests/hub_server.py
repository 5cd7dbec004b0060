"""In: folders of files, as repositories. Out: a hub of Hugging Face on loopback, as huggingface_hub asks it.
Does not know codescent. It counts requests, and can refuse, break off and damage what it sends."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_BYTES = 2048
"""Files of at least this size are in LFS, so the hub knows their sha256."""


def commit_of(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


@dataclass
class Repository:
    """Commits by hash, and branches and tags by name. `gated`: only `token` may read its files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def push(self, files: dict[str, bytes], ref: str = "main") -> str:
        commit = commit_of(json.dumps(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items())))
        self.commits[commit], self.refs[ref] = files, commit
        return commit

    def at(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Hub:
    """What a test can change while the server runs.

    `breaks`: files whose content ends too early at their next request, and after how many bytes.
    `damages`: one byte of every large file is sent wrong. `refused`: files that nobody may read.
    """

    url: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_of_the_test"
    breaks: dict[str, int] = field(default_factory=dict)
    damages: bool = False
    refused: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def asked(self, method: str, part: str) -> list[tuple[str, str, str]]:
        """The requests of a method whose path has a part: (method, path, range)."""
        return [one for one in self.requests if one[0] == method and part in one[1]]

    def counts(self) -> Counter[str]:
        return Counter(method for method, _, _ in self.requests)


def is_lfs(data: bytes) -> bool:
    return len(data) >= LFS_BYTES


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sibling(name: str, data: bytes) -> dict[str, Any]:
    """A file in the answer about a repository."""
    lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return {"rfilename": name, "size": len(data), "blobId": git_hash(data), **({"lfs": lfs} if is_lfs(data) else {})}


class Server(ThreadingHTTPServer):
    """A server, with what a test can change of it."""

    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub


class Handler(BaseHTTPRequestHandler):
    """Answers one request, as `Hub` says."""

    protocol_version = "HTTP/1.1"
    server: Server

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        split = urlsplit(self.path)
        self.hub.requests.append((self.command, unquote(split.path), self.headers.get("Range", "")))
        words = [unquote(word) for word in split.path.strip("/").split("/")]
        if words[0] == "api" and words[1] in ("models", "datasets"):
            self.about(words[1], words[2:], parse_qs(split.query))
        else:
            is_dataset = words[0] == "datasets"
            kind, words = ("datasets", words[1:]) if is_dataset else ("models", words)
            if words[2:3] == ["resolve"]:
                self.file(kind, "/".join(words[:2]), words[3], "/".join(words[4:]))
            else:  # huggingface_hub asks for lists of its own, too
                self.refuse(404, "", "there is no such page")

    def about(self, kind: str, words: list[str], query: dict[str, list[str]]) -> None:
        repositories: dict[str, Repository] = getattr(self.hub, kind)
        if not words:
            owner = query.get("author", [""])[0]
            self.json([{"id": name} for name in repositories if name.startswith(f"{owner}/")])
            return
        repository = repositories.get("/".join(words[:2]))
        if repository is None:
            self.refuse(401, "RepoNotFound", "Repository not found")
        elif words[2:3] == ["refs"]:
            refs = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": at} for name, at in repository.refs.items()
            ]
            self.json({"branches": refs, "converts": [], "tags": [], "pullRequests": []})
        elif (commit := repository.at(words[3] if words[2:3] == ["revision"] else "main")) is None:
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
        else:
            files = [sibling(name, data) for name, data in repository.commits[commit].items()]
            self.json({"id": "/".join(words[:2]), "sha": commit, "siblings": files, "private": False, "tags": []})

    def file(self, kind: str, name: str, revision: str, path: str) -> None:
        repository: Repository | None = getattr(self.hub, kind).get(name)
        commit = None if repository is None else repository.at(revision)
        if repository is None:
            self.refuse(401, "RepoNotFound", "Repository not found")
        elif repository.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.refuse(401, "GatedRepo", "Access to model is restricted. You must be authenticated to access it.")
        elif commit is None:
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
        elif path not in repository.commits[commit]:
            self.refuse(404, "EntryNotFound", "Entry not found", commit)
        elif path in self.hub.refused:
            self.refuse(403, "", "not for you", commit)
        else:
            self.content(repository.commits[commit][path], commit, path)

    def content(self, data: bytes, commit: str, path: str) -> None:
        etag = hashlib.sha256(data).hexdigest() if is_lfs(data) else git_hash(data)
        size = len(data)
        if is_lfs(data) and self.hub.damages:
            data = bytes([data[0] ^ 1]) + data[1:]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if is_lfs(data):
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("X-Linked-Size", str(size))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - first))
        self.end_headers()
        if self.command == "HEAD":
            return
        if path in self.hub.breaks:
            self.wfile.write(data[first : first + self.hub.breaks.pop(path)])
            self.close_connection = True
            self.connection.shutdown(1)
            return
        self.wfile.write(data[first:])

    def json(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text if self.command == "GET" else b"")

    def refuse(self, status: int, code: str, said: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", said)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    server = Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
