"""In: an opened model. Out: what the endpoints share: the model's name, its engine, figures, and whether it stops.
Does not answer requests: the endpoints do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from codescent.inference.open import Opened
from codescent.serving.embedder import Embedder
from codescent.serving.engine_thread import EngineThread
from codescent.serving.refused import RefusedRequest
from codescent.serving.request_log import RequestLog
from codescent.serving.watch import Watch

MOST_BODY_BYTES = 8 << 20
"""The longest body of a request: two million tokens of usual text."""


@dataclass(eq=False)
class ModelService:
    """What is served, and how it is.

    Attributes:
        name: of the model, as requests give it.
        which: what of the model is used, in words.
        opened, thread: the engine; None: the model generates no text.
        embedder: None: the model gives no embeddings.
        log: None: requests are not logged.
        most_waiting: requests that may wait for others.
        active: requests that are being answered.
        stopping: whether new requests are refused.
        on_idle: called when the last request ends while the service is stopping.
    """

    name: str
    which: str
    watch: Watch
    opened: Opened | None = None
    thread: EngineThread | None = None
    embedder: Embedder | None = None
    log: RequestLog | None = None
    most_waiting: int = 64
    created: int = field(default_factory=lambda: int(time.time()))
    active: int = 0
    stopping: bool = False
    on_idle: Callable[[], None] = lambda: None

    @property
    def seq_len(self) -> int:
        """Tokens of a text that the model reads at most."""
        if self.opened is not None:
            return self.opened.seq_len
        assert self.embedder is not None
        return self.embedder.seq_len

    @property
    def can(self) -> list[str]:
        """What the model does: completions, chats, embeddings."""
        found = {
            "completions": self.opened is not None,
            "chat": self.opened is not None and self.opened.chat is not None,
            "embeddings": self.embedder is not None,
        }
        return [name for name, is_there in found.items() if is_there]

    def facts(self) -> dict[str, Any]:
        """The model as `/v1/models` describes it; beyond OpenAI's fields how long its texts are and what it does."""
        own = {"max_model_len": self.seq_len, "can": self.can, "which": self.which}
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "codescent", **own}

    def refuse_other(self, model: str) -> None:
        """Raise RefusedRequest if a request is for another model."""
        if model != self.name:
            said = f"there is no model {model[:100]!r} here; there is {self.name!r}"
            raise RefusedRequest(404, said, param="model", code="model_not_found")

    def generator(self) -> tuple[Opened, EngineThread]:
        """What generates text. Raises RefusedRequest: the model does not."""
        if self.opened is None or self.thread is None:
            said = f"{self.name} generates no text; it has /v1/embeddings"
            raise RefusedRequest(400, said, param="model", code="no_generation")
        return self.opened, self.thread

    def begin(self) -> None:
        """A request begins. Raises RefusedRequest 503: the service is stopping."""
        if self.stopping:
            raise RefusedRequest(503, "this process is stopping, and takes no new requests", code="stopping", retry_s=5)
        self.active += 1

    def end(self) -> None:
        """A request that has begun has ended."""
        self.active -= 1
        if self.stopping and not self.active:
            self.on_idle()

    def stop(self) -> None:
        """From now on refuse new requests; those that run go on."""
        if not self.stopping:
            self.stopping = True
            if not self.active:
                self.on_idle()
