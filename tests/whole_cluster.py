"""In: changes of a cluster file that is right. Out: the file, and what loading the changed one refuses.
Does not say what should be refused (test_clusters_refused.py does)."""

from __future__ import annotations

from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.clusters.files import load_cluster

WHOLE = """\
what = "two nodes"
[device]
spec = "A100 SXM4 80 GB"
units = 108
[node]
devices = 8
cards = 4
[links]
inside = "300GB/s,3us"
between = "200gbit,5us"
bus = "31.5GB/s"
[software.megatron]
host_s = 2e-5
[sources]
device.units = "white paper"
"""


def problems(name: str = "lab.toml", *changes: str) -> tuple[str, ...]:
    """What loading a cluster refuses."""
    with pytest.raises(UserError) as caught:
        load_cluster(name, changes)
    assert caught.value.exit_code == 2
    return caught.value.problems


def broken(old: str, new: str) -> tuple[str, ...]:
    """What is refused in the whole file with one text replaced."""
    assert old in WHOLE
    Path("broken.toml").write_text(WHOLE.replace(old, new))
    return problems("broken.toml")
