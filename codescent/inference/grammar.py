"""In: a JSON schema, a regular expression or a Lark grammar. Out: which tokens may follow, by the library llguidance.
Does not choose tokens (sampling.py does)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from codescent.base.errors import UserError
from codescent.base.extra import library
from codescent.base.json_damage import json_problem
from codescent.data.tokenizers.bpe import LibraryTokenizer
from codescent.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer

KINDS = ("json", "json_schema", "regex", "lark")
MOST_DEPTH = 64
"""The deepest nesting of a grammar. Libraries read each level by a call of its own, so a deeper one may need a stack
without bounds."""
MOST_GRAMMAR_BYTES = 1 << 18
"""The longest text of a grammar."""
_KEPT = 32
"""Compiled grammars that are kept for later requests: a server's users send the same ones again."""
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class Grammar:
    """What a generated text must be.

    Attributes:
        kind: "json": any JSON object; "json_schema": JSON of a schema; "regex"; "lark": a grammar of llguidance.
        text: the schema as JSON, the expression, or the grammar; "" for "json".
    """

    kind: Literal["json", "json_schema", "regex", "lark"]
    text: str = ""


class GrammarState:
    """Where a text is in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Tensor:
        """bool [V]: the tokens that may follow; those that end a text, if it may end here."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))

    def accept(self, token: int) -> None:
        """Add a token, which is allowed."""
        self._matcher.consume_token(token)

    @property
    def ended(self) -> bool:
        """Whether nothing may follow: the text is whole, or the library has reached its limits."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiles grammars for a tokenizer.

    Args:
        tokenizer: of the model.
        stops: tokens that end a text.
        vocab_size: ids that the model can choose lie below it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[int], vocab_size: int) -> None:
        self._tokenizer, self._stops, self._vocab_size = tokenizer, list(stops), vocab_size
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def begin(self, grammar: Grammar) -> GrammarState:
        """The beginning of a text. Raises UserError: the grammar cannot be used, or llguidance is not installed."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
        else:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return GrammarState(self._compiled[grammar].deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        refuse(grammar)
        guidance, tokens = self._library, self._tokens
        matcher = guidance.LLMatcher
        try:
            if grammar.kind in ("json", "json_schema"):
                schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
                source = matcher.grammar_from_json_schema(schema)
            elif grammar.kind == "regex":
                source = matcher.grammar_from_regex(grammar.text)
            else:
                source = matcher.grammar_from_lark(grammar.text)
        except ValueError as error:
            raise UserError(f"grammar: {error}") from error
        limits = guidance.LLParserLimits(verbose_errors=False)
        compiled = matcher(tokens, source, log_level=0, limits=limits)
        if compiled.is_error():
            raise UserError(f"grammar: {' '.join(compiled.get_error().split())}")
        return compiled

    @property
    def _library(self) -> Any:
        return library("llguidance", "a grammar", "grammar")

    @cached_property
    def _tokens(self) -> Any:
        """llguidance's table of the tokens. A model without an end token gets one that it cannot choose."""
        tokenizer = self._tokenizer
        size = tokenizer.vocab_size
        ends = self._stops or [size]
        size = max(size, *(end + 1 for end in ends))
        if isinstance(tokenizer, LibraryTokenizer):
            return self._library.LLTokenizer(tokenizer.library_text, n_vocab=size, eos_token=ends)
        wrapped = self._library.TokenizerWrapper(_Tokens(tokenizer, ends, size))
        return self._library.LLTokenizer(wrapped, n_vocab=size, eos_token=ends)


class _Tokens:
    """A tokenizer of bytes or characters, as llguidance asks one."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], size: int) -> None:
        self._tokenizer, self.eos_token_id, self.special_token_ids = tokenizer, ends[0], list(ends)
        of_bytes = isinstance(tokenizer, ByteTokenizer)
        self.tokens = [
            bytes((token,)) if of_bytes and token < 256
            # An end token, and an id without a token, are no text.
            else f"\xff<{token}>".encode("latin-1") if token in ends or token >= tokenizer.vocab_size
            else tokenizer.decode([token]).encode()
            for token in range(size)
        ]  # fmt: skip

    def __call__(self, text: str) -> list[int]:
        try:
            return list(map(int, self._tokenizer.encode(text)))
        except UserError:  # an alphabet without one of the characters
            return []


def refuse(grammar: Grammar) -> None:
    """Raise UserError: the text of a grammar is too long, nested too deeply, or not JSON where it must be."""
    problems = []
    if grammar.kind not in KINDS:
        problems.append(f"grammar {grammar.kind!r}: must be one of {', '.join(KINDS)}")
    if (size := len(grammar.text.encode(errors="replace"))) > MOST_GRAMMAR_BYTES:
        problems.append(f"grammar: {size:,} bytes; at most {MOST_GRAMMAR_BYTES:,}")
    elif (depth := _depth(grammar.text)) > MOST_DEPTH:
        problems.append(f"grammar: nested {depth:,} levels deep; at most {MOST_DEPTH}")
    elif grammar.kind == "json_schema":
        try:
            if not isinstance(json.loads(grammar.text), dict | bool):
                problems.append("grammar: a JSON schema must be an object")
        except (ValueError, RecursionError) as error:
            problems.append(f"grammar: not JSON ({json_problem(error)})")
    if problems:
        raise UserError(*problems)


def _depth(text: str) -> int:
    """How deep brackets are nested, those in texts and behind a backslash included."""
    depth = most = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            most = max(most, depth)
        elif character in _CLOSING:
            depth -= 1
    return most
