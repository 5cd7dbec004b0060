"""In: what a user asks of a generation. Out: `Sampling`, how tokens are chosen; `Output`, what a step gives of it.
Does not choose tokens (sampling.py does) or compile grammars (grammar.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from codescent.inference.grammar import Grammar

MOST_LOGPROBS = 100
"""The most alternatives that a request may ask for: each is sent with every token."""
MOST_STOPS = 64
"""The most stop strings of a request: all are looked for in the text after each token."""
MOST_BIAS = 1e4
"""The largest logit bias. Beyond it, sums of logits and biases would lose the logits' digits."""


@dataclass(frozen=True)
class Sampling:
    """How the next tokens of a request are chosen, and when they end.

    The order is: logits + `logit_bias`, tokens that `grammar` allows, / `temperature`, `top_k`, `top_p`, `min_p`.

    Attributes:
        temperature: divides the logits; 0: always the likeliest token.
        top_k: only the k likeliest tokens; None: all.
        top_p: only the likeliest tokens that together have this share of the probability of those k, in (0, 1]; None:
            all (Holtzman et al. 2020, "nucleus sampling").
        min_p: only tokens at least so many times as likely as the likeliest, in [0, 1]; None: all (Nguyen et al. 2024).
        seed: of the random numbers, in [0, 2^63).
        number: which of several texts with this seed this is, in [0, 2^63). The random number of a token depends on the
            seed, this number, and the place of the token alone.
        max_new_tokens: the request ends after so many new tokens.
        stop: texts that end the request. They are not part of its text.
        logit_bias: what is added to the logit of a token; -inf: the token is never chosen.
        grammar: what the text must be, such as JSON; None: anything.
        logprobs: how many alternatives of each token are reported; 0: the token's own alone; None: nothing.
        slides: whether the oldest quarter of the tokens is dropped where the model's context is full. If not, the
            request ends there, and a prompt that is longer than the context is refused.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    number: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    grammar: Grammar | None = None
    logprobs: int | None = None
    slides: bool = False

    def problems(self) -> Iterator[str]:
        """One sentence for each value that is out of range; each begins with the name of its attribute."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            yield f"temperature {self.temperature}: must be 0 (the likeliest token) or a finite positive number"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k {self.top_k}: must be at least 1"
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            yield f"top_p {self.top_p}: must be in (0, 1]"
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            yield f"min_p {self.min_p}: must be in [0, 1]"
        for name in ("seed", "number"):
            if not 0 <= (value := getattr(self, name)) < 1 << 63:
                yield f"{name} {value}: must be in [0, 2^63)"
        if self.max_new_tokens < 1:
            yield f"max_new_tokens {self.max_new_tokens}: must be at least 1"
        if len(self.stop) > MOST_STOPS:
            yield f"stop: {len(self.stop)} texts; at most {MOST_STOPS}"
        if "" in self.stop:
            yield "stop: an empty text would end every request"
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            yield f"logprobs {self.logprobs}: must be in [0, {MOST_LOGPROBS}]"
        for token, bias in self.logit_bias.items():
            if not (bias == -math.inf or abs(bias) <= MOST_BIAS):
                yield f"logit_bias {bias} of token {token}: must be in [-{MOST_BIAS:g}, {MOST_BIAS:g}], or -inf"


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """The model ended the text, a stop text was found, or the grammar allows nothing more."""
    LENGTH = "length"
    """`max_new_tokens`, or the model's context is full."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """The logits are not finite: the model has diverged."""


@dataclass(frozen=True)
class TokenLogprob:
    """The natural logarithm of a token's probability by the model, before temperature, bias and grammar.

    `top`: the likeliest tokens with theirs, best first; as many as `Sampling.logprobs` says.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step gives of one request.

    Attributes:
        request: the id that `Engine.add` returned.
        token: the new token; None: the request ended without one.
        text: the text that is complete and certain now: no part of a character, and of no stop text. May be "".
        logprob: of the token, if the request asked for it.
        finished: why the request ended; None: it goes on.
        error: with `Finish.ERROR`: what is wrong, as a sentence.
    """

    request: int
    token: int | None
    text: str = ""
    logprob: TokenLogprob | None = None
    finished: Finish | None = None
    error: str = ""
