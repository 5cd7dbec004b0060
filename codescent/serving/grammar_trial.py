"""In: a grammar of a stranger. Out: nothing, or the refusal of one that takes too much time or memory to compile.
The engine compiles it between two steps of all requests, so another process does it first (compile_grammar.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from codescent.base.extra import is_installed
from codescent.inference.grammar import Grammar
from codescent.serving.compile_grammar import CPU_S, MEMORY_BYTES
from codescent.serving.refused import RefusedRequest

PROGRAM = Path(__file__).with_name("compile_grammar.py")
WALL_S = 60.0
"""Seconds in which the process must have ended, on a machine that does other work."""


def try_grammar(grammar: Grammar) -> None:
    """Raise RefusedRequest: the grammar takes more than CPU_S or MEMORY_BYTES to compile. Blocks its thread."""
    if grammar.text and is_installed("llguidance") and not _compiles(grammar):
        said = f"the grammar takes more than {CPU_S} s or {MEMORY_BYTES >> 30} GiB to compile; give a simpler one"
        raise RefusedRequest(400, f"response_format: {said}", param="response_format")


@lru_cache(maxsize=256)
def _compiles(grammar: Grammar) -> bool:
    """Whether it can be compiled within the limits. Clients send the same grammars again."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(PROGRAM)],
            input=json.dumps([grammar.kind, grammar.text]).encode(),
            capture_output=True,
            timeout=WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
