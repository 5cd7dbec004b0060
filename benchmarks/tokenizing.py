"""In: prose, GPT-2's vocabulary. Out: the speed of ids from tiktoken and from the tokenizers library, in turns.
Does not prepare a corpus: texts are encoded in memory. Every id of both is compared."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as library
from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json

sys.path.insert(0, str(ROOT))

from codescent.base.reading import read_text
from codescent.data.text.chunks import CHUNK_CHARS
from codescent.data.tokenizers import bpe

NOTES = """Million characters per second of wall time, the median of {rounds} rounds in turns. {characters:,} characters
of {files} files. All ids are equal."""
OURS, ALONE = "codescent", "tokenizers"


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time GPT-2's tokenizer by tiktoken, and by the tokenizers library alone; compare all ids.")
    parsed.add_argument("texts", type=Path, nargs="+", help="text files")
    parsed.add_argument("--rounds", type=positive, default=3, help="number of turns of each")
    parsed.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="numbers of threads")
    return parsed.parse_args()


def pieces_of(paths: list[Path]) -> list[str]:
    """The texts of the files, in pieces of the size that a preparation encodes at once."""
    texts = [read_text(path) for path in paths]
    size = CHUNK_CHARS // 2
    return [text[start : start + size] for text in texts for start in range(0, len(text), size)]


def main() -> int:
    """Time both in turns, and print the table."""
    arguments = arguments_of()
    pieces, ours = pieces_of(arguments.texts), bpe.gpt2()
    theirs = library.Tokenizer.from_str(ours.library_text)
    theirs.encode_special_tokens = True

    def alone(text: str) -> Any:
        return np.array(theirs.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.uint16)

    expected = [alone(piece) for piece in pieces]
    differ = [piece for piece, ids in zip(pieces, expected, strict=True) if not np.array_equal(ours.encode(piece), ids)]
    if differ:
        say(f"tokenizing.py: other ids for {len(differ)} pieces; the first begins with {differ[0][:40]!r}")
        return 1
    characters = sum(map(len, pieces))
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for name, encode in ((OURS, ours.encode), (ALONE, alone)):
            for number in arguments.threads:
                with ThreadPoolExecutor(number) as threads:
                    begin = time.perf_counter()
                    list(threads.map(encode, pieces))
                    speeds.setdefault((name, number), []).append(characters / (time.perf_counter() - begin))
    entries: list[dict[str, Any]] = [
        {"tokenizer": name, "threads": number, "chars_per_s": statistics.median(found), "rounds": found}
        for (name, number), found in speeds.items()
    ]
    median = {key: statistics.median(found) for key, found in speeds.items()}
    claims = [
        must(f"{OURS} over {ALONE}, threads {number}", median[OURS, number] / median[ALONE, number], 1.0)
        for number in arguments.threads
    ]
    record = hardware()
    rows = [[e["tokenizer"], str(e["threads"]), f"{e['chars_per_s'] / 1e6:.1f}"] for e in entries]
    notes = NOTES.format(rounds=arguments.rounds, characters=characters, files=len(arguments.texts))
    print(machine_line(record), notes, "", table(["tokenizer", "threads", "M characters/s"], rows), "", sep="\n")
    print("\n".join(must_lines(claims)))
    write_json(arguments.json, {"benchmark": "tokenizing", "hardware": record, "tokenizers": entries, "musts": claims})
    return 0


if __name__ == "__main__":
    finish(main)
