"""In: this machine. Out: what faults cost a run, what finds them and what that costs, as JSON; the page docs/faults.md.
Does not measure itself (survive_*.py do). Every fault is real: a signal, a cut link or a flipped bit, in a real run.

Parts can be measured alone. A file of results keeps the parts that are not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import survive_alarms
import survive_cost
import survive_detection
import survive_docs
import survive_flips
import survive_losses
import survive_soak
from measure import (
    SystemFailed,
    finish,
    hardware,
    machine_line,
    must_lines,
    not_negative,
    parser,
    positive,
    say,
    write_json,
)

Claims = list[dict[str, Any]]


class Part(NamedTuple):
    """A part: its measurement in a new folder, its table, and what is asked of it."""

    measure: Callable[[Path, argparse.Namespace, random.Random], dict[str, Any]]
    text: Callable[[Any], str]
    claims: Callable[[Any], Claims]


def _losses(place: Path, asked: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    found = {}
    for number, name in enumerate(asked.kinds):
        say(f"losses: {name}")
        found[name] = vars(survive_losses.measured(place.with_name(f"losses-{number}"), name, asked.times, rng))
    return found


PARTS = {
    "losses": Part(_losses, survive_losses.text, survive_losses.claims),
    "detection": Part(
        lambda place, asked, rng: survive_detection.measured(place, asked.tries, rng),
        survive_detection.text,
        survive_detection.claims,
    ),
    "flips": Part(
        lambda place, asked, rng: survive_flips.measured(place, asked.flips, rng),
        survive_flips.text,
        survive_flips.claims,
    ),
    "cost": Part(lambda place, asked, rng: survive_cost.measured(place), survive_cost.text, survive_cost.claims),
    "soak": Part(
        lambda place, asked, rng: survive_soak.soak(place, asked.soak or 10.0, rng),
        survive_soak.text,
        survive_soak.claims,
    ),
    "false-alarms": Part(
        lambda place, asked, rng: survive_alarms.false_alarms(place, asked.false_alarms or 60.0),
        survive_alarms.text,
        survive_alarms.claims,
    ),
}
LONG = ("soak", "false-alarms")
"""Not measured unless they are asked for."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Make faults in runs of 4 ranks: how they are found, how the runs go on, and what that costs.")
    add = parsed.add_argument
    add("--only", nargs="+", choices=PARTS, help="these parts alone (default: all but soak and false-alarms)")
    add("--times", type=positive, default=20, help="losses of each kind")
    add("--kinds", nargs="+", choices=survive_losses.KINDS, default=survive_losses.KINDS, help="of losses")
    add("--tries", type=positive, default=5, help="of each detection")
    add("--flips", type=positive, default=200, help="flipped bits of each kind")
    add("--soak", type=not_negative, metavar="MINUTES", help="also a soak, with a fault each 15 s (10)")
    add("--false-alarms", type=not_negative, metavar="MINUTES", help="also a run on a link that loses packets (60)")
    add("--seed", type=int, default=1, help="of moments, ranks and bits")
    add("--docs", action="store_true", help="write docs/faults.md from the committed results, and measure nothing")
    asked = parsed.parse_args()
    if asked.only is None:
        wanted = {"soak": asked.soak, "false-alarms": asked.false_alarms}
        asked.only = [name for name in PARTS if name not in LONG or wanted[name]]
    if "false-alarms" in asked.only and not asked.docs and (reason := survive_alarms.missing()):
        parsed.error(f"false-alarms: {reason}")
    return asked


def main() -> int:
    """Measure the parts, print their tables, and add them to the file."""
    asked = arguments_of()
    if asked.docs:
        survive_docs.write()
        return 0
    rng, code = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory(prefix="survive-") as folder:
        for name in asked.only:
            part, record = PARTS[name], hardware()
            say(f"{name}: {machine_line(record)}")
            try:
                found = part.measure(Path(folder) / name, asked, rng)
            except SystemFailed as failure:
                say(f"{name}: {failure}")
                code = 1
                continue
            found = json.loads(json.dumps(found))  # as a file has it
            claims = part.claims(found)
            print(part.text(found), "", *must_lines(claims), "", sep="\n", flush=True)
            add_part(asked.json, name, {"hardware": record, "result": found, "musts": claims})
    return code


def add_part(path: Path | None, name: str, part: dict[str, Any]) -> None:
    """Write a part to the file. Its other parts stay."""
    before = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
    parts = {**before.get("parts", {}), name: part}
    write_json(path, {"benchmark": "survive", "parts": {key: parts[key] for key in PARTS if key in parts}})


if __name__ == "__main__":
    finish(main)
