"""In: a number of runs. Out: seconds of `codescent doctor` on four sound hosts, with bandwidth and without; findings.
Does not plant faults (tests/test_doctor_faults.py does). Skips, saying so, without root or namespaces."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import hosts
from doctor_hosts import Fault, examine
from measure import finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json

HOSTS = 4
MODES: dict[str, tuple[tuple[str, ...], float]] = {"with bandwidth": ((), 30.0), "without": (("--no-bandwidth",), 5.0)}
"""By name: the words of the command, and the seconds that it may take."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser(f"Time `codescent doctor` on {HOSTS} sound hosts, and count what it finds: nothing.")
    parsed.add_argument("--runs", type=positive, default=20, help="runs with bandwidth, and as many without")
    return parsed.parse_args()


def main() -> int:
    """Measure and print. Returns the exit code."""
    arguments = arguments_of()
    if reason := hosts.missing():
        print(f"skipped: {reason}")
        return 0
    record = hardware()
    taken: dict[str, list[float]] = {name: [] for name in MODES}
    findings: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="codescent-doctor-") as name, hosts.Hosts(HOSTS) as cluster:
        for number in range(arguments.runs):
            for mode, (words, _) in MODES.items():
                begin_s = time.perf_counter()
                found = examine(cluster, Path(name), Fault(words=words))
                taken[mode].append(time.perf_counter() - begin_s)
                if not found.report:
                    say("".join(found.errors))
                    return 1
                findings += [{"run": number, "mode": mode, **one} for one in found.report["findings"]]
    medians = {mode: statistics.median(seconds) for mode, seconds in taken.items()}
    claims = [
        must(f"seconds {mode}, median", medians[mode], most_s, at_least=False, unit=" s")
        for mode, (_, most_s) in MODES.items()
    ]
    claims.append(must(f"findings in {2 * arguments.runs} runs", len(findings), 0, at_least=False))
    rows = [
        [mode, f"{medians[mode]:.2f}", f"{min(seconds):.2f}", f"{max(seconds):.2f}"] for mode, seconds in taken.items()
    ]
    print(machine_line(record), "", table(["codescent doctor", "s median", "least", "most"], rows), "", sep="\n")
    print("\n".join(must_lines(claims)))
    for one in findings:
        say(json.dumps(one))
    write_json(
        arguments.json,
        {"benchmark": "doctor", "hardware": record, "seconds": taken, "findings": findings, "musts": claims},
    )
    return 0


if __name__ == "__main__":
    finish(main)
