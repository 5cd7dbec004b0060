"""In: the JSON body of a request. Out: its checked fields, by OpenAI's names; or the error that answers it.
Does not tokenize, and knows no model: prompts.py and embeddings.py do."""

from __future__ import annotations

import asyncio
import difflib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails

from codescent.base.json_damage import json_problem
from codescent.serving.refused import RefusedRequest
from codescent.tasks.conversations.messages import HALF, half_a_character, wrong_message

MOST_CHOICES = 16
"""The largest `n`."""
MOST_PROMPTS = 256
"""The most prompts, or inputs, of one request."""
MOST_BIASES = 1024
"""The most tokens with a bias."""
LARGE_BYTES = 1 << 16
"""A larger body is read in another thread, so that other connections do not wait for it."""
MOST_MESSAGES = 4096
"""The most messages of a chat. Templates may take time with the square of their number."""
MOST_TOP_LOGPROBS = 20
"""The most alternatives of a token: OpenAI's limit for chats, and more than that for completions."""
MOST_SHOWN = 8
"""So many problems of a request are said; more are counted."""

NOT_USED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
"""Fields of OpenAI's API that change no answer here. The header UNUSED of the answer names them."""
REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}
"""Fields of OpenAI's API that are not supported, and the values with which they change nothing, beside null."""

UNUSED = "x-codescent-not-used"
"""Header of an answer: the fields of NOT_USED that the request has."""

Ids = list[int]
Request = TypeVar("Request", bound="_ApiRequest")


def _prompt(value: Any) -> list[str | Ids]:
    """One or more prompts, each a text or ids of tokens."""
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or (one and _are_ids(one)) for one in value):
        if len(value) > MOST_PROMPTS:
            raise ValueError(f"{len(value)} of them; at most {MOST_PROMPTS}")
        return value
    raise ValueError("a text, a list of texts, or ids of tokens as one list or as a list of lists")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _stops(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise ValueError("a text, or a list of texts")
    return texts


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a conversation. An answer may have no words: the model may have ended it at once."""
    if not isinstance(value, list) or not value:
        raise ValueError("a list with at least one message")
    if len(value) > MOST_MESSAGES:
        raise ValueError(f"{len(value):,} of them; at most {MOST_MESSAGES:,}")
    for number, message in enumerate(value):
        if problem := next(wrong_message(message, needs_words=False), None):
            raise ValueError(f"message {number + 1}: {problem}")
    return value


def _bias(value: Any) -> dict[int, float]:
    """The bias of tokens, whose ids are keys of JSON, and so texts."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError('an object from ids of tokens to numbers, such as {"50256": -100}')
    if len(value) > MOST_BIASES:
        raise ValueError(f"{len(value):,} of them; at most {MOST_BIASES:,}")
    found = {}
    for key, bias in value.items():
        if not key.isdecimal() or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"{json.dumps(key)}: {json.dumps(bias)}: an id of a token and a number are needed")
        found[int(key[:18])] = _number(bias)
    return found


def _number(value: float) -> float:
    """A finite number. JSON may have whole ones of more digits than any float."""
    with suppress(OverflowError):
        if math.isfinite(value):
            return float(value)
    raise ValueError("a finite number is needed")


def _finite(value: float | None) -> float | None:
    return None if value is None else _number(value)


Number = Annotated[float | None, AfterValidator(_finite)]


class _ApiRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(BaseModel):
    """A JSON schema, and its name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What an answer must be: text, any JSON object, JSON of a schema; beyond OpenAI's API a regex or a grammar."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    grammar: str | None = None


class _TextFields(_ApiRequest):
    """What completions and chats share. Null stands for a field that is left out, as in OpenAI's API."""

    temperature: Number = None
    top_p: Number = None
    top_k: int | None = None
    min_p: Number = None
    seed: int | None = None
    n: Annotated[int | None, Field(ge=1, le=MOST_CHOICES)] = None
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    stop: Annotated[list[str], PlainValidator(_stops)] = []
    logit_bias: Annotated[dict[int, float], PlainValidator(_bias)] = {}
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _refuse_useless(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: has an effect with stream: true alone; leave it out")
        return self

    @property
    def with_usage(self) -> bool:
        """Whether the last event of a stream has the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_TextFields):
    """The body of `POST /v1/completions`.

    `echo`: the answer begins with the prompt; with `logprobs`, the prompt's tokens have theirs, too.
    """

    prompt: Annotated[list[str | Ids], PlainValidator(_prompt)]
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP_LOGPROBS)] = None
    echo: bool | None = None


class ChatRequest(_TextFields):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], PlainValidator(_messages)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP_LOGPROBS)] = None


class EmbeddingRequest(_ApiRequest):
    """The body of `POST /v1/embeddings`. `encoding_format`: numbers, or base64 of little-endian fp32."""

    input: Annotated[list[str | Ids], PlainValidator(_prompt)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


async def read_request(body: bytes, form: type[Request]) -> tuple[Request, list[str]]:
    """See `parsed`."""
    return parsed(body, form) if len(body) < LARGE_BYTES else await asyncio.to_thread(parsed, body, form)


def parsed(body: bytes, form: type[Request]) -> tuple[Request, list[str]]:
    """The fields of a body, and the names of those that have no effect here (NOT_USED).

    Raises RefusedRequest: it is no JSON object, or fields are wrong, unknown or not supported: all of them at once.
    """
    fields = _object(body)
    unused = sorted(NOT_USED & fields.keys())
    problems = [
        (name, f"{name}: is not supported here; leave it out")
        for name, harmless in REFUSED_UNLESS.items()
        if name not in form.model_fields and fields.get(name) is not None and fields[name] not in harmless
    ]
    left = {name: value for name, value in fields.items() if name not in NOT_USED and name not in REFUSED_UNLESS}
    found = None
    try:
        found = form.model_validate(left)
    except ValidationError as error:
        problems += [_said(one, form) for one in error.errors(include_url=False, include_context=False)]
    if found is None or problems:
        _refuse(problems)
    return found, unused


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. NaN and Infinity are no JSON, though Python reads them."""
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, f"the body is not JSON: {json_problem(error)}") from error
    if not isinstance(fields, dict):
        raise RefusedRequest(400, "the body must be a JSON object")
    if half_a_character(fields):
        raise RefusedRequest(400, f"the body {HALF}")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _said(error: ErrorDetails, form: type[BaseModel]) -> tuple[str, str]:
    """The field that an error of pydantic is about, and a sentence."""
    place = ".".join(str(part) for part in error["loc"])
    said = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # of several fields
        return said.partition(":")[0], said
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, form.model_fields, n=1)
        meant = f"; did you mean {near[0]}?" if near and "." not in place else ""
        return name, f"{place[:100]}: there is no such field here{meant}"
    if error["type"] == "missing":
        return name, f"{place}: is missing"
    return name, f"{place[:100]}: {said[:1].lower()}{said[1:]}"


def _refuse(problems: list[tuple[str, str]]) -> NoReturn:
    more = f"; and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
    said = "; ".join(dict.fromkeys(sentence for _, sentence in problems[:MOST_SHOWN]))
    raise RefusedRequest(400, f"{said}{more}", param=problems[0][0])
