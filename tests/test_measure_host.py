"""In: ranks on CPUs that take their host for one with GPUs; items of ranks. Out: the bandwidth of the host's memory.
Does not compare it with anything: a machine has no right one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forker import Forker

from codescent.clusters.files import load_cluster
from codescent.cost.update_time import HOST_KEY
from codescent.measure.host import is_apart
from codescent.measure.host_rate import host_bandwidth, host_spread
from codescent.measure.items import COPY, HOST_COPY, Item, joined
from codescent.measure.machine_findings import MachineFindings
from codescent.measure.placement import RankPlacement
from codescent.measure.spread import Spread


def found_of(kind: str, devices: int, *of_ranks: float) -> MachineFindings:
    """Findings in which each rank reads and writes 2 GB in so many seconds."""
    items = [[Item(kind, "", (10**9,), 2e9, Spread(each_s, 0.9 * each_s, 1.1 * each_s, 5))] for each_s in of_ranks]
    where = RankPlacement(
        tuple(f"host {rank // devices}" for rank in range(len(items))), devices, len(items) // devices
    )
    return MachineFindings("gpu", "cuda", 1, 1, 1, 1, 0.0, False, None, where, tuple(joined(items)), (), (), "torch")


def test_rates_of_the_ranks_of_a_node_add_up_and_not_those_of_all_nodes() -> None:
    """A rank's share that is taken for the whole memory; nodes that are added up; seconds that are averaged."""
    one = host_bandwidth(found_of(HOST_COPY, 2, 1.0, 4.0))
    assert one is not None
    assert one.value == pytest.approx(2e9 + 0.5e9)
    assert "of 2 ranks at once, added up; median of 5, 10 to 90 %: 2.2" in one.source
    three = host_spread(found_of(HOST_COPY, 2, 1.0, 1.0, 2.0, 2.0, 1.0, 0.5))
    assert three is not None
    assert three.median == pytest.approx(4e9)  # of 4, 2 and 6 GB/s
    assert three.low < three.median < three.high
    assert host_bandwidth(found_of(COPY, 2, 1.0, 1.0)) is None


def test_a_cpu_has_no_other_memory_than_its_host() -> None:
    """A key that no price on a CPU reads; none on the GPUs whose offload needs it."""
    assert [is_apart(torch.device(kind)) for kind in ("cpu", "cuda")] == [False, True]


def test_ranks_copy_in_the_memory_of_their_host_and_the_file_has_it(forker: Forker, tmp_path: Path) -> None:
    """Copies that are measured and left out of the file, or that a rank makes while the others are done."""
    first, _ = forker.call("measure_host_ranks:measured", tmp_path, 2, leaders=[0], seconds=0.1)
    (copied,) = [one for one in first["items"] if one["kind"] == HOST_COPY]
    assert len(copied["of_ranks"]) == 2
    assert copied["seconds"]["repeats"] >= 5
    (tmp_path / "here.toml").write_text(first["text"])
    cluster = load_cluster(tmp_path / "here.toml")
    each = sum(copied["amount"] / seconds for seconds in copied["of_ranks"])
    assert cluster.host_bytes_per_s == pytest.approx(each, rel=0.01)
    assert cluster.sources[HOST_KEY].startswith("measured: copies of 4.00 MiB in the memory of the host")
    assert [line for line in first["printed"] if line.startswith("copies in the host's memory ")]
