"""In: a file of plans by name; names on the standard input. Out: for each name how fast this processor codes, as JSON.
Does not send anything. slow_runs.py starts one for each rank and asks all at once."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from pathlib import Path

from measure import ROOT

sys.path.insert(0, str(ROOT))

import torch

from codescent.collectives.coding_speed import measure
from codescent.cost.coding import Coding
from codescent.plan import Plan


def main() -> None:
    """Answer each line with the figures of a `Coding`; "ready" with zeros, when torch is there."""
    torch.set_num_threads(1)
    plans = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for line in sys.stdin:
        name = line.strip()
        found = Coding() if name == "ready" else measure(Plan.from_json(plans[name]))
        print(json.dumps(astuple(found)), flush=True)


if __name__ == "__main__":
    main()
