"""In: a grammar, as JSON on the standard input. Out: it is compiled within limits of processor time and memory, or not.
A program of its own, which grammar_trial.py starts. It imports nothing of this package: torch alone takes seconds."""

from __future__ import annotations

import json
import resource
import sys
from importlib import import_module
from typing import Any

CPU_S, MEMORY_BYTES = 2, 2 << 30


class _Bytes:
    """A tokenizer of bytes: the time that is limited here does not depend on the vocabulary."""

    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    tokens = (*(bytes((byte,)) for byte in range(256)), b"\xff<256>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    """Compile it. A grammar that is wrong is no fault here: the engine says what is wrong with it."""
    kind, text = json.loads(sys.stdin.read())
    guidance: Any = import_module("llguidance")
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    matcher = guidance.LLMatcher
    sources = {"regex": matcher.grammar_from_regex, "lark": matcher.grammar_from_lark}
    try:
        source = sources.get(kind, matcher.grammar_from_json_schema)(text)
        tokens = guidance.LLTokenizer(guidance.TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=[256])
        matcher(tokens, source, log_level=0, limits=guidance.LLParserLimits(verbose_errors=False))
    except ValueError:
        return


if __name__ == "__main__":
    main()
