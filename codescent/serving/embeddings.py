"""In: a request for embeddings, by HTTP. Out: the vectors, sent.
Does not compute them (embedder.py does)."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from torch import Tensor

from codescent.base.errors import UserError
from codescent.serving.embedder import Embedder
from codescent.serving.hang_up import body_of, until_hang_up
from codescent.serving.refused import TOO_LONG, RefusedRequest
from codescent.serving.schemas import UNUSED, EmbeddingRequest, read_request
from codescent.serving.service import MOST_BODY_BYTES, ModelService


class Embeddings:
    """`/v1/embeddings`, as an ASGI application. One request computes at a time; others wait."""

    def __init__(self, service: ModelService) -> None:
        self._service, self._open = service, 0
        self._thread = ThreadPoolExecutor(1, "embeddings")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises RefusedRequest, HungUp."""
        service, begin_s = self._service, time.monotonic()
        if service.embedder is None:
            said = f"{service.name} gives no embeddings: only models of the kind bert do"
            raise RefusedRequest(400, said, param="model", code="no_embeddings")
        body = await body_of(receive, Headers(scope=scope).get("content-length"), MOST_BODY_BYTES)
        request, unused = await read_request(body, EmbeddingRequest)
        service.refuse_other(request.model)
        if request.dimensions not in (None, service.embedder.dim):
            said = f"dimensions: the vectors have {service.embedder.dim} numbers; leave it out"
            raise RefusedRequest(400, said, param="dimensions")
        if self._open > service.most_waiting:
            said = f"{self._open} requests run or wait, and no more may; try again later"
            raise RefusedRequest(429, said, code="rate_limit_exceeded", retry_s=1)
        self._open += 1
        try:
            computed = asyncio.get_running_loop().run_in_executor(
                self._thread, _embedded, service.embedder, request.input
            )
            texts, vectors = await until_hang_up(receive, computed)
        finally:
            self._open -= 1
        tokens = sum(map(len, texts))
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": service.name, "usage": usage}
        headers = {UNUSED: ", ".join(unused)} if unused else {}
        await JSONResponse(answer, headers=headers)(scope, receive, send)
        service.watch.generated(time.monotonic() - begin_s, tokens)


def _embedded(embedder: Embedder, inputs: Sequence[str | list[int]]) -> tuple[list[list[int]], Tensor]:
    """The ids of the texts and their vectors. Raises RefusedRequest: a text cannot be read, or is too long."""
    texts = []
    for number, one in enumerate(inputs):
        where = f"input {number + 1}: " if len(inputs) > 1 else "input: "
        try:
            texts.append(embedder.ids(one))
        except UserError as error:
            said = f"{where}{'; '.join(error.problems)}"
            raise RefusedRequest(400, said, param="input", code=TOO_LONG) from error
    return texts, embedder.vectors(texts)


def _written(vector: Tensor, form: str | None) -> Any:
    """A vector as JSON has it: numbers, or base64 of little-endian fp32."""
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
