"""In: what is wrong with a request. Out: an exception, and the JSON body that OpenAI's clients read.
Does not send it: app.py does."""

from __future__ import annotations

from typing import Any

INVALID = "invalid_request_error"
"""OpenAI's `type` of an error that the client can mend."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's `code` of a text that the model cannot read as a whole."""


class RefusedRequest(Exception):
    """A request that is answered by an error.

    Attributes:
        status: of HTTP, 400 to 599.
        param: the field of the request that is wrong; None: no field is.
        code: a word for programs, such as "model_not_found"; None: there is none.
        retry_s: after how many seconds the same request may succeed; None: it will not.
        allow: methods that the path has, as the header of the same name; None: this is not what is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_s, self.allow = retry_s, allow

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        return _KINDS.get(self.status, INVALID if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, beside the usual ones."""
        given = {
            "retry-after": None if self.retry_s is None else str(self.retry_s),
            "allow": self.allow,
            "www-authenticate": "Bearer" if self.status == 401 else None,
        }
        return {name: value for name, value in given.items() if value is not None}


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
