"""In: a script of `codescent launch` for `places.py`, that was run. Out: what each rank read in its environment.
Does not start ranks, and imports no torch: a rank is there in a tenth of a second."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

PROGRAM = """
import dataclasses, json, os, socket, sys
from codescent.launch.environment import read

rank = read(os.environ)
if rank is None:
    sys.exit("no launcher has started this process")
names = ("CODESCENT_TOKEN", "CODESCENT_MARK", "CODESCENT_STOP_AT", "GLOO_SOCKET_IFNAME", "TMPDIR")
found = dataclasses.asdict(rank) | {name: os.environ.get(name) for name in names}
found |= {"host": socket.gethostname(), "words": sys.argv[1:]}
os.makedirs("places", exist_ok=True)
with open(f"places/{rank.rank}.new", "x") as file:  # two ranks with one number: the second fails
    json.dump(found, file)
os.rename(file.name, f"places/{rank.rank}")
"""


def make_program(folder: Path) -> None:
    """Write places.py there."""
    (folder / "places.py").write_text(PROGRAM)


def taken(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank of the last start has read, by its number. It is forgotten."""
    above = folder / "places"
    assert sorted(path.name for path in above.iterdir()) == sorted(map(str, range(ranks)))
    found = [json.loads((above / str(rank)).read_text()) for rank in range(ranks)]
    shutil.rmtree(above)
    assert [one["rank"] for one in found] == list(range(ranks))
    assert {one["world_size"] for one in found} == {ranks}
    assert len({one["CODESCENT_TOKEN"] for one in found}) == 1
    return found
