"""In: a run folder whose model writes Python. Out: how many lines of its samples are Python, over several seeds.
Does not train, and does not judge what the code means: a line counts if Python's own parser accepts it."""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import finish, positive, say, write_json
from measure import parser as parser_of

from codescent.verbs.sample import sample_run

LONGEST = 12
"""Most lines of a statement. A longer one, such as a long string, would hide lines that are no Python."""

BODIES = {
    "elif": "if x:\n pass\n{}",
    "else": "if x:\n pass\n{}",
    "except": "try:\n pass\n{}",
    "finally": "try:\n pass\n{}",
    "case": "match x:\n{}",
}
"""What must stand before a clause, by its first word."""


@dataclass(frozen=True)
class Counts:
    """Lines of a text: `code` lines, and how many of them belong to a statement that Python's parser accepts.

    `prose`: comments and lines of strings that are statements (docstrings). They prove nothing, so they do not count.
    `distinct`: different code lines. A model that repeats itself has few.
    """

    code: int
    valid: int
    prose: int
    distinct: int


def counts(text: str) -> Counts:
    """Count the lines of a text. Its last line may be cut off, so it is left out, as are empty lines."""
    lines = [line.rstrip() for line in text.splitlines()[:-1] if line.strip()]
    code, valid, prose, at = [], 0, 0, 0
    while at < len(lines):
        length, is_prose = _statement(lines[at:])
        taken = lines[at : at + max(1, length)]
        if is_prose:
            prose += len(taken)
        else:
            code += [line.strip() for line in taken]
            valid += length
        at += len(taken)
    return Counts(len(code), valid, prose, len(set(code)))


def _statement(lines: list[str]) -> tuple[int, bool]:
    """The number of lines of the statement or comment at the start, 0 if there is none; whether it is prose."""
    if lines[0].lstrip().startswith("#"):
        return 1, True
    for count in range(1, min(LONGEST, len(lines)) + 1):
        tree = _parsed("\n".join(lines[:count]))
        if tree is not None:
            constant = tree.value if isinstance(tree, ast.Expr) else None
            return count, isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    return 0, False


def _parsed(text: str) -> ast.stmt | None:
    """The last statement of a text without its indentation, with an empty body if it is a header; None: no Python."""
    text = textwrap.dedent(text).lstrip()
    word = text.split(maxsplit=1)[0].rstrip(":")
    whole = BODIES.get(word, "{}").format(textwrap.indent(text, " ") if word == "case" else text)
    opens = text.rstrip().endswith(":") or text.startswith("@")
    if text.startswith("@"):
        whole += "\ndef f(): pass"
    elif opens:
        whole += "\n  pass"
    try:
        return ast.parse(whole).body[-1]
    except (SyntaxError, ValueError):
        return None


def sampled(run: Path, prompt: str, seeds: int, tokens: int, choice: dict[str, Any]) -> list[str]:
    """Texts of a run's newest checkpoint that continue a prompt, one for each seed."""
    return [
        sample_run(run, [prompt], tokens, seed=seed, device="cpu", out=io.StringIO(), **choice)[0]
        for seed in range(seeds)
    ]


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser_of("Count the lines of a model's samples that are Python.")
    parsed.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    parsed.add_argument("--prompt", default="def ", help="text that every sample continues")
    parsed.add_argument("--seeds", type=positive, default=20, help="texts of each run")
    parsed.add_argument("--tokens", type=positive, default=300, help="tokens of each text")
    parsed.add_argument("--temperature", type=float, default=0.8)
    parsed.add_argument("--top-k", type=positive)
    parsed.add_argument("--top-p", type=float)
    parsed.add_argument("--show", type=int, default=0, metavar="N", help="print the first N texts")
    return parsed.parse_args()


def main() -> int:
    """Sample, count and print."""
    arguments = arguments_of()
    warnings.simplefilter("ignore", SyntaxWarning)
    choice = {"temperature": arguments.temperature, "top_k": arguments.top_k, "top_p": arguments.top_p}
    entries = []
    for run in arguments.runs:
        texts = sampled(run, arguments.prompt, arguments.seeds, arguments.tokens, choice)
        found = [counts(text) for text in texts]
        shares = [one.valid / one.code for one in found if one.code]
        code, valid, prose = (sum(getattr(one, name) for one in found) for name in ("code", "valid", "prose"))
        distinct = sum(one.distinct for one in found)
        spread = statistics.stdev(shares) if len(shares) > 1 else 0.0
        say(
            f"{run}: {valid / max(1, code):.1%} of {code} code lines are Python (by text {spread:.1%} around it); "
            f"{distinct / max(1, code):.0%} of them differ; {prose} lines of comments and docstrings are not counted"
        )
        print(*(f"--- {n} ---\n{text}\n" for n, text in enumerate(texts[: arguments.show])), sep="\n")
        entries.append({"run": str(run), "code": code, "valid": valid, "prose": prose, "distinct": distinct})
    write_json(arguments.json, {"benchmark": "python_samples", "choice": choice, "runs": entries})
    return 0


if __name__ == "__main__":
    sys.exit(finish(main))
