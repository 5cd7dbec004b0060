"""In: a service. Out: the ASGI application: OpenAI's endpoints, health, metrics, and the page to chat.
Does not listen (http_server.py does) or check who asks (guard.py does)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from codescent.base.reading import read_text
from codescent.serving.embeddings import Embeddings
from codescent.serving.generate import chats, completions
from codescent.serving.guard import Guard
from codescent.serving.refused import RefusedRequest
from codescent.serving.service import ModelService

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
POLICY = (
    "default-src 'none'; img-src data:; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from elsewhere, runs no script in its text, and is in no frame of another page."""
PAGE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
}


def make_app(service: ModelService, *, token: str | None = None, hosts: Collection[str] | None = None) -> ASGIApp:
    """The application. `token`, `hosts`: see `Guard`."""
    posts: dict[str, ASGIApp] = {
        "/v1/completions": completions(service),
        "/v1/chat/completions": chats(service),
        "/v1/embeddings": Embeddings(service),
    }
    ours = _Ours(service)
    gets = {"/health": ours.health, "/metrics": ours.metrics, "/v1/models": ours.models}
    routes = [
        *(Route(path, _PostOnly(endpoint)) for path, endpoint in posts.items()),
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        Route("/v1/models/{name:path}", ours.model, methods=["GET"]),
        *(Route(path, _PageFile(*file), methods=["GET"]) for path, file in PAGE_FILES.items()),
    ]
    router = Router(routes, redirect_slashes=False)  # no `Starlette`: it would answer errors before the guard does
    return Guard(router, service, {*posts, *gets, *PAGE_FILES}, token, hosts)


class _PostOnly:
    """An ASGI application that other methods than POST do not reach."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise RefusedRequest(405, f"{scope['path']} takes POST, not {scope['method']}", allow="POST")
        await self._app(scope, receive, send)


class _PageFile:
    """A file of the page to chat."""

    def __init__(self, name: str, kind: str) -> None:
        self._text, self._kind = read_text(Path(__file__).with_name(name)), kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": self._kind,
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        await Response(self._text, headers=headers)(scope, receive, send)


class _Ours:
    """The endpoints that read the service alone."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """200: requests are answered. 503: the process stops, or its engine has failed."""
        service = self._service
        failure = service.thread.failure if service.thread is not None else ""
        state = "failed" if failure else "stopping" if service.stopping else "ok"
        facts = {"status": state, "model": service.name, **({"failure": failure} if failure else {})}
        return JSONResponse(facts, 200 if state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        """The figures of the service in the text format of Prometheus."""
        return Response(self._service.watch.text(), headers={"content-type": PROMETHEUS})

    async def models(self, request: Request) -> Response:
        """The model that is here."""
        return JSONResponse({"object": "list", "data": [self._service.facts()]})

    async def model(self, request: Request) -> Response:
        """A model by its name. Raises RefusedRequest: it is not here."""
        self._service.refuse_other(request.path_params["name"])
        return JSONResponse(self._service.facts())
