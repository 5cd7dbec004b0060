"""In: minutes. Out: the alarms of a run of 4 ranks on two hosts, whose link loses packets. There must be none.
Does not make a fault. Needs root, for network namespaces, and /dev/net/tun for the wire."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hosts
from measure import must, table
from survive_run import COPIES, ENDLESS, Ended, Run

LOSS, DELAY_MS, MBIT = 0.01, 10.0, 100.0
ALARMS = ("hang", "straggler", "crash", "resume")
WORDS = (ENDLESS, COPIES, "model.hidden_dim=32", "model.num_layers=2", "checkpoint.every=200", "train.eval_every=200")


def missing() -> str:
    """Why this machine cannot do it; "" if it can."""
    return hosts.missing() or ("" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun for a lossy wire")


def false_alarms(place: Path, minutes: float) -> dict[str, Any]:
    """Train for so long, and count. A run that ends is an alarm, too."""
    loads = []
    with hosts.Hosts(2) as made, made.lossy(DELAY_MS, MBIT, LOSS) as counts:
        run = Run.on_hosts(made, place, WORDS)
        try:
            run.until(lambda: run.step() > 5)
            end_s = time.monotonic() + 60 * minutes
            while run.is_running and time.monotonic() < end_s:
                time.sleep(min(10.0, max(0.0, end_s - time.monotonic())))
                loads.append(os.getloadavg()[0])
            steps, ended = run.step(), not run.is_running
        finally:
            run.end()
    if ended:
        raise Ended(run.said()[-3000:])
    carried, lost = counts
    return {
        "minutes": minutes, "loss": LOSS, "delay_ms": DELAY_MS, "mbit": MBIT, "packets": carried, "packets_lost": lost,
        "steps": steps, "load_mean": sum(loads) / len(loads), "load_max": max(loads), "alarms": run.events(*ALARMS),
    }  # fmt: skip


def text(found: Mapping[str, Any]) -> str:
    """What was counted."""
    alarms = Counter(one["kind"] for one in found["alarms"])
    rows = [[kind, str(alarms[kind])] for kind in ALARMS]
    link = f"{found['packets_lost']:,} of {found['packets']:,} packets lost"
    return f"{table(['alarms', 'count'], rows)}\n\n{found['minutes']:g} minutes, {found['steps']:,} steps, {link}"


def claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """There must be none. A rank is named as slow too, if other programs take its processor: the load says it."""
    slow = sum(one["kind"] == "straggler" for one in found["alarms"])
    others = len(found["alarms"]) - slow
    where = f"in {found['minutes']:g} minutes on a link with {found['loss']:.0%} loss"
    return [
        must(f"false verdicts of a hang, crashes and restarts {where}", others, 0, at_least=False),
        must(f"ranks named as slow {where}, at a load of {found['load_mean']:.1f}", slow, 0, at_least=False),
    ]
