"""In: a JSON schema, a regular expression or a Lark grammar. Out: which tokens may follow, by the library llguidance.
Does not choose tokens (sampling.py does)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_DEPTH = 64
"""The deepest nesting of a schema. Compiling a deeper one would take a stack or time without bounds."""
MOST_GRAMMAR_BYTES = 1 << 18
"""The longest text of a grammar."""


@dataclass(frozen=True)
class Grammar:
    """What a generated text must be.

    Attributes:
        kind: "json": any JSON object; "json_schema": JSON of a schema; "regex"; "lark": a grammar of llguidance.
        text: the schema as JSON, the expression, or the grammar; "" for "json".
    """

    kind: Literal["json", "json_schema", "regex", "lark"]
    text: str = ""
