"""In: the checked fields of a request, an opened model. Out: ids of its prompts, and how each is continued.
Does not run the engine (engine_thread.py does)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from codescent.base.errors import UserError
from codescent.inference.grammar import Grammar, refuse
from codescent.inference.open import Opened
from codescent.inference.request import Sampling
from codescent.serving.engine_thread import Wanted
from codescent.serving.grammar_trial import try_grammar
from codescent.serving.refused import TOO_LONG, RefusedRequest
from codescent.serving.schemas import ChatRequest, CompletionRequest, ResponseFormat

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in completions. In chats it is what the context has room for."""
NO_TEMPLATE = "no_chat_template"


@dataclass(frozen=True)
class Prepared:
    """What a request asks of the model.

    Attributes:
        prompts: the ids of each prompt.
        each: texts that are generated for each prompt.
        sampling: of the first text of each prompt; empty: nothing is generated.
    """

    prompts: Sequence[Sequence[int]]
    each: int
    sampling: Sequence[Sampling]

    @property
    def wanted(self) -> list[Wanted]:
        """A prompt and its sampling for each text; text i of prompt p is at p * each + i."""
        return [
            (prompt, _numbered(sampling, number))
            for prompt, sampling in zip(self.prompts, self.sampling)
            for number in range(self.each)
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts."""
        return sum(map(len, self.prompts))


def completion(request: CompletionRequest, opened: Opened) -> Prepared:
    """Encode the prompts of a completion. Raises RefusedRequest: all that is wrong with prompts or sampling."""
    prompts = [_ids(prompt, opened) for prompt in request.prompt]
    tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if not tokens and not request.echo:
        raise RefusedRequest(400, "max_tokens: 0 needs echo: true", param="max_tokens")
    for number, prompt in enumerate(prompts):
        where = f"prompt {number + 1}: " if len(prompts) > 1 else ""
        _refuse_long(len(prompt), tokens, opened.seq_len, where, "prompt")
    samplings = [_sampling(request, tokens, request.logprobs)] * len(prompts) if tokens else []
    return Prepared(prompts, request.n or 1, samplings)


def chat(request: ChatRequest, opened: Opened) -> Prepared:
    """Write the messages with the model's template. Raises RefusedRequest: it has none, or refuses them, and so on."""
    if opened.chat is None:
        said = f"{opened.name} has no chat template: it continues texts; use /v1/completions"
        raise RefusedRequest(400, said, param="messages", code=NO_TEMPLATE)
    try:
        prompt = opened.chat.encode_turns(request.messages)
    except UserError as error:
        raise RefusedRequest(400, f"messages: {'; '.join(error.problems)}", param="messages") from error
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        said = "max_tokens, max_completion_tokens: both say how long the answer may be; give one of them"
        raise RefusedRequest(400, said, param="max_tokens")
    given = request.max_completion_tokens or request.max_tokens
    if request.max_tokens == 0:
        raise RefusedRequest(400, "max_tokens: must be at least 1", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise RefusedRequest(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
    _refuse_long(len(prompt), given or 1, opened.seq_len, "", "messages")
    tokens = given or opened.seq_len - len(prompt)
    return Prepared(
        [prompt],
        request.n or 1,
        [_sampling(request, tokens, (request.top_logprobs or 0) if request.logprobs else None)],
    )


def text_ids(text: str, opened: Opened) -> list[int]:
    """The ids of a text as it stands, without a template. Raises UserError: the tokenizer does not know a character."""
    if not text:
        return opened.prompts.encode(text)[1]
    return [*opened.tokenizer.opening, *opened.tokenizer.encode(text).tolist()]


def _ids(prompt: str | list[int], opened: Opened) -> list[int]:
    if isinstance(prompt, str):
        try:
            return text_ids(prompt, opened)
        except UserError as error:
            raise RefusedRequest(400, f"prompt: {'; '.join(error.problems)}", param="prompt") from error
    most = opened.tokenizer.vocab_size
    if wrong := next((one for one in prompt if not 0 <= one < most), None):
        raise RefusedRequest(400, f"prompt: the token {wrong}: ids are in [0, {most:,})", param="prompt")
    return prompt


def _refuse_long(prompt: int, tokens: int, seq_len: int, where: str, param: str) -> None:
    if prompt + tokens > seq_len:
        said = f"{where}{prompt:,} tokens and {tokens:,} new ones are more than the {seq_len:,} that the model reads"
        raise RefusedRequest(400, said, param=param, code=TOO_LONG)


def _sampling(request: CompletionRequest | ChatRequest, tokens: int, logprobs: int | None) -> Sampling:
    """How the texts of a request are generated. Without a seed it is a random one, as in OpenAI's API."""
    sampling = Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        max_new_tokens=tokens,
        stop=tuple(request.stop),
        logit_bias=request.logit_bias,
        grammar=_grammar(request.response_format),
        logprobs=logprobs,
    )
    if problems := list(sampling.problems()):
        raise RefusedRequest(400, "; ".join(problems), param=problems[0].split(maxsplit=1)[0].rstrip(":"))
    return sampling


def _numbered(sampling: Sampling, number: int) -> Sampling:
    return sampling if not number else replace(sampling, number=number)


def _grammar(form: ResponseFormat | None) -> Grammar | None:
    """What the text must be. Raises RefusedRequest: the part that the type needs is missing, or another is there."""
    if form is None or form.type == "text":
        return None
    parts = {"json_schema": form.json_schema, "regex": form.pattern, "lark": form.grammar}
    names = {"json_schema": "json_schema", "regex": "pattern", "lark": "grammar"}
    for kind, part in parts.items():
        if (part is not None) != (kind == form.type):
            what = "is needed with" if part is None else "has no effect with"
            said = f'response_format.{names[kind]}: {what} the type "{form.type}"'
            raise RefusedRequest(400, said, param="response_format")
    if form.type == "json_object":
        return Grammar("json")
    if form.type == "json_schema":
        assert form.json_schema is not None
        return _tried(Grammar("json_schema", json.dumps(form.json_schema.schema_ or {})))
    return _tried(Grammar(form.type, form.pattern or form.grammar or ""))


def _tried(grammar: Grammar) -> Grammar:
    """Raises RefusedRequest: it is too long or nested too deeply, or takes too much to compile."""
    try:
        refuse(grammar)
    except UserError as error:
        raise RefusedRequest(400, "; ".join(error.problems), param="response_format") from error
    try_grammar(grammar)
    return grammar
