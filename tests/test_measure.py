"""In: `codescent measure`: ranks over gloo, tables of nccl-tests, wrong words. Out: files that load, links that fit.
Does not compare times with anything: a machine has no right ones."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forker import Forker
from host_ranks import hosts
from runs import called, environment, started_by

from codescent.base.errors import UserError
from codescent.clusters.cluster import ClusterDevice
from codescent.clusters.files import load_cluster
from codescent.clusters.link import CurvePoint, Link
from codescent.cost.device_time import spent
from codescent.cost.operators import ATTENTION, Computed
from codescent.measure import trial_runs
from codescent.measure.constants import EXACT, attention_efficiency, waiting_constants
from codescent.measure.fit import TimedCollective, fit
from codescent.measure.items import COPY, PRODUCT, Item, OfAllRanks, joined
from codescent.measure.nccl_tests import read_table
from codescent.measure.pairs import PairTime, names_of, outlying_pairs, outlying_ranks
from codescent.measure.placement import RankPlacement, placement
from codescent.measure.spread import Spread
from codescent.plan import Collective

HEAD = """\
# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 \
validation: 1 graph: 0
#
# Using devices
{ranks}
#
#                                                              out-of-place                       in-place          \

#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \

"""
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 123.456 \n#\n"
SIZES = tuple(1024 * 4**power for power in range(11))
INSIDE, BETWEEN = Link(370e9, 2.5e-6), Link(48e9, 9e-6)


def ranks_of(hosts: int, each: int) -> str:
    return "\n".join(
        f"#  Rank {rank:2d} Group  0 Pid {4700 + rank:6d} on    node{rank // each} device {rank % each:2d} "
        f"[0000:{rank % each:02x}:00] NVIDIA H100 80GB HBM3"
        for rank in range(hosts * each)
    )


def timed(collective: Collective, size: int, hosts: int, each: int) -> TimedCollective:
    """A collective that takes what the price says of these links."""
    one = TimedCollective(collective, size, hosts * each, each, 1.0)
    link, inside = (BETWEEN, INSIDE) if hosts > 1 else (INSIDE, Link(math.inf))
    return TimedCollective(collective, size, hosts * each, each, one.predicted_s(link, inside))


def micros(seconds: float) -> str:
    """As nccl-tests prints a time: fewer digits of long ones."""
    us = 1e6 * seconds
    return f"{us:7.0f}" if us >= 1e4 else f"{us:7.1f}" if us >= 100 else f"{us:7.2f}"


def table(
    collective: Collective, hosts: int, each: int, redop: str = "sum", root: int = -1, sizes: Sequence[int] = SIZES
) -> str:
    """The output of a program of nccl-tests on such ranks, with the times of the price."""
    share = (hosts * each - 1) / (hosts * each)
    factor = {Collective.ALL_REDUCE: 2 * share, Collective.SEND: 1.0, Collective.BROADCAST: 1.0}.get(collective, share)
    lines = []
    for size in sizes:
        seconds = timed(collective, size, hosts, each).seconds
        rate = size / seconds / 1e9
        one = f"  {micros(seconds)}  {rate:6.2f}  {rate * factor:6.2f}      0"
        in_place = f"  {micros(1.3 * seconds)}  {rate / 1.3:6.2f}  {rate * factor / 1.3:6.2f}      0"
        lines.append(f"{size:12d}  {size // 4:12d}     float  {redop:>6}  {root:6d}{one}{in_place}")
    return HEAD.format(ranks=ranks_of(hosts, each)) + "\n".join(lines) + "\n" + TAIL


ALL_REDUCE = table(Collective.ALL_REDUCE, 1, 8)
PROGRAMS = {
    "all_reduce": (Collective.ALL_REDUCE, table(Collective.ALL_REDUCE, 2, 8)),
    "reduce_scatter": (Collective.REDUCE_SCATTER, table(Collective.REDUCE_SCATTER, 1, 8)),
    "all_gather": (Collective.ALL_GATHER, table(Collective.ALL_GATHER, 1, 8, "none")),
    "sendrecv": (Collective.SEND, table(Collective.SEND, 1, 8, "none")),
    "broadcast": (Collective.BROADCAST, table(Collective.BROADCAST, 1, 8, "none", 0)),
    "sendrecv of two": (Collective.SEND, table(Collective.SEND, 1, 2, "none")),
    "all_reduce of two": (Collective.ALL_REDUCE, table(Collective.ALL_REDUCE, 1, 2)),
    "alltoall, named": (
        Collective.ALL_TO_ALL,
        "# nccl-tests version 2.17.2\n# Collective test starting: alltoall_perf\n"
        + table(Collective.ALL_TO_ALL, 1, 8, "none"),
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_table_says_which_collective_it_is_of(program: str, tmp_path: Path) -> None:
    """Its bytes and its latency are counted in another way, where it is taken for another collective."""
    collective, text = PROGRAMS[program]
    (tmp_path / "table.txt").write_text(text)
    found = read_table(tmp_path / "table.txt")
    assert found.collective is collective
    assert [one.payload_bytes for one in found.measured] == list(SIZES)
    hosts = 2 if program == "all_reduce" else 1
    assert (found.hosts, found.ranks) == (hosts, 2 if "of two" in program else 8 * hosts)
    expected = [float(micros(timed(collective, size, hosts, found.ranks // hosts).seconds)) for size in SIZES]
    assert [1e6 * one.seconds for one in found.measured] == pytest.approx(expected), "not those in-place"


def test_lines_of_launchers_and_of_nccl_are_left_out(tmp_path: Path) -> None:
    """Output of mpirun has a prefix or other programs' words; old tables have no root, and "error" for "#wrong"."""
    text = (
        ALL_REDUCE.replace("#wrong", "error").replace("    root     time", "     time", 1).replace("      -1  ", "  ")
    )
    noise = "node0:4700:4711 [0] NCCL INFO Connected all rings\nWarning: Permanently added 'node1'\n2024-05-01 begins\n"
    (tmp_path / "table.txt").write_text(noise + text.replace("# Out of bounds", f"{noise}# Out of bounds"))
    found = read_table(tmp_path / "table.txt")
    assert (found.collective, len(found.measured)) == (Collective.ALL_REDUCE, len(SIZES))


ROW = ALL_REDUCE.splitlines()[-4]
NUMBER = ALL_REDUCE.splitlines().index(ROW) + 1


def with_cell(column: int, text: str) -> str:
    """A table with one other cell."""
    words = ROW.split()
    words[column] = text
    return ALL_REDUCE.replace(ROW, "  ".join(words))


WRONG_TABLES = {
    "empty": ("", "has no row of a table; give what all_reduce_perf"),
    "cut row": (ALL_REDUCE.replace(ROW, ROW[:60]), f"line {NUMBER}: has 6 columns; must have 13"),
    "no number": (with_cell(5, "x12"), f'line {NUMBER}: time is "x12"; must be a number'),
    "no time": (with_cell(5, "0.00"), f"line {NUMBER}: size and time must be above 0"),
    "wrong results": (with_cell(8, "12"), f"line {NUMBER}: 12 results were wrong"),
    "no columns": (ALL_REDUCE.replace("#       size", "#"), "comes before the line that names the columns"),
    "no ranks": (ALL_REDUCE.replace("Rank", "rank"), 'no line names the ranks ("#  Rank  0 ... on HOST device 0")'),
    "one rank": (
        HEAD.format(ranks=ranks_of(1, 1)) + "\n".join(ALL_REDUCE.splitlines()[-14:]) + "\n",
        "is of one rank, which sends nothing",
    ),
    "one size": (table(Collective.ALL_REDUCE, 1, 8, sizes=SIZES[-1:]), "has one size alone"),
    "of a reduce": (table(Collective.ALL_REDUCE, 1, 8, root=0), "are those of none of all_reduce_perf,"),
    "a missing rank": (ALL_REDUCE.replace("#  Rank  7", "#  task  7"), "are those of none of all_reduce_perf"),
    "another program": (
        "# Collective test starting: gather_perf\n" + ALL_REDUCE,
        "is of gather_perf, from which no link",
    ),
    "uneven hosts": (
        table(Collective.ALL_REDUCE, 1, 3).replace("on    node0 device  2", "on    node1 device  0"),
        "3 ranks on 2 hosts; a price needs as many on each host",
    ),
}


@pytest.mark.parametrize("what", WRONG_TABLES)
def test_a_table_that_cannot_be_used_is_refused_with_its_line(what: str, tmp_path: Path) -> None:
    """A link of half a table would be believed."""
    text, expected = WRONG_TABLES[what]
    (tmp_path / "table.txt").write_text(text)
    with pytest.raises(UserError) as caught:
        read_table(tmp_path / "table.txt")
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"--nccl-tests {tmp_path / 'table.txt'}")


@pytest.mark.parametrize("hosts", [1, 2, 32])
@pytest.mark.parametrize("each", [1, 8])
def test_a_fit_finds_the_link_of_the_price(hosts: int, each: int) -> None:
    """A collective whose latency or bytes are counted otherwise than by the price gives another link."""
    if hosts * each == 1:
        return
    measured = [
        timed(collective, size, hosts, each)
        for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.SEND)
        for size in SIZES
    ]
    inside = INSIDE if hosts > 1 and each > 1 else Link(math.inf)
    found = fit(measured, inside)
    expected = BETWEEN if hosts > 1 else INSIDE
    assert found.link.bytes_per_s == pytest.approx(expected.bytes_per_s, rel=1e-3)
    assert found.link.latency_s == pytest.approx(expected.latency_s, rel=1e-3)
    assert found.worst < 1e-3


def test_one_disturbed_repeat_does_not_bend_a_fit() -> None:
    """Least squares would: one payload that met another program moves latency and bandwidth."""
    measured = [timed(Collective.ALL_REDUCE, size, 1, 8) for size in SIZES]
    slow = TimedCollective(Collective.ALL_REDUCE, SIZES[5], 8, 8, 20 * measured[5].seconds)
    found = fit([*measured[:5], slow, *measured[6:]])
    assert found.link.bytes_per_s == pytest.approx(INSIDE.bytes_per_s, rel=0.02)
    assert found.link.latency_s == pytest.approx(INSIDE.latency_s, rel=0.02)
    assert found.median < 0.02 < 0.9 < found.worst


PROTOCOLS = Link(
    INSIDE.bytes_per_s, 5e-6, curve=(CurvePoint(1024.0, 1e8), CurvePoint(2.0**16, 1e9), CurvePoint(2.0**24, 1e11))
)


def test_where_no_line_is_near_a_fit_has_a_curve_that_is() -> None:
    """A library that changes its protocol: its line is off by a factor, and the file says nothing of it."""
    measured = [
        dataclasses.replace(one, seconds=one.predicted_s(PROTOCOLS))
        for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.SEND)
        for size in SIZES
        for one in [TimedCollective(collective, size, 8, 8, 1.0)]
    ]
    found = fit(measured)
    assert len(found.link.curve) > 2
    assert found.median < 0.1
    line = dataclasses.replace(found.link, curve=())
    assert max(abs(one.predicted_s(line) / one.seconds - 1.0) for one in measured) > 0.5
    assert fit([timed(Collective.ALL_REDUCE, size, 1, 8) for size in SIZES]).link.curve == ()


def test_times_that_do_not_grow_give_no_bandwidth() -> None:
    with pytest.raises(ValueError, match="take no longer"):
        fit([TimedCollective(Collective.SEND, size, 2, 2, 1e-3) for size in (4, 8, 16)])


LOCAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@pytest.mark.parametrize("leaders", [[0], [0, 1]], ids=["one node", "two nodes"])
def test_ranks_measure_every_collective_and_the_file_loads_as_it_was_written(
    forker: Forker, tmp_path: Path, leaders: list[int]
) -> None:
    """A collective that is left out, a number out of the file's bounds, or a rank that repeats less than the others."""
    first, second = forker.call("measure_ranks:measured", tmp_path, 2, leaders=leaders, seconds=0.2)
    assert second is None
    link = "inside" if leaders == [0] else "between"
    assert {one["kind"] for one in first["items"] if one["name"] == link} == set(LOCAL)
    kinds = {one["kind"] for one in first["items"]}
    assert kinds - {"contention"} == {*LOCAL, PRODUCT, COPY, "element-wise", "attention", "launch", "waiting"}
    assert {one["name"] for one in first["items"] if one["kind"] == PRODUCT} == {"fp32", "bf16"}
    for one in first["items"]:
        spread = one["seconds"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert spread["repeats"] >= 5
        assert len(one["of_ranks"]) == 2
    assert first["told"][0] == "products of matrices"
    (tmp_path / "here.toml").write_text(first["text"])
    cluster = load_cluster(tmp_path / "here.toml")
    own, nodes = cluster.software["codescent"], len(leaders)
    assert (cluster.devices, cluster.cards, cluster.nodes) == (2 // nodes, 1, 1 if nodes == 1 else None)
    assert (own.memory_efficiency, own.inside_efficiency, own.between_efficiency, own.hop_s) == (1.0, 1.0, 1.0, 0.0)
    assert own.held_bytes > 50e6
    assert set(cluster.device.peaks) == {"fp32", "bf16"}
    assert cluster.sources[f"links.{link}"].startswith("measured: collectives of 2 ")
    other = "between" if link == "inside" else "inside"
    assert cluster.sources[f"links.{other}"].startswith("not measured: no collective of several ")
    assert all("10 to 90 %" in cluster.sources[f"peaks.{name}"] for name in ("fp32", "bf16"))
    assert "# all_reduce " in first["text"]
    assert max(map(len, first["printed"])) <= 120
    assert [line for line in first["printed"] if line.startswith(("link inside", "link between"))]


def test_ranks_that_do_not_lie_node_by_node_are_refused(forker: Forker, tmp_path: Path) -> None:
    """A price takes neighbouring ranks to share a node: links would be those of other ranks."""
    for said in forker.call("measure_ranks:refused", tmp_path, 3, leaders=[0, 1]):
        assert "the ranks are not divided evenly over nodes" in said
        assert "srun --distribution=block" in said


def test_ranks_of_nodes_and_those_that_lie_otherwise() -> None:
    found = placement(["a", "a", "b", "b"], [0, 2])
    assert (found.devices, found.nodes, found.links) == (2, 2, ("inside", "between"))
    assert [found.members("inside", rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [found.members("between", rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert placement(["a"], [0]).links == ()
    for where, leaders in ((["a", "b", "a", "b"], [0, 1]), (["a", "a", "b"], [0, 2])):
        with pytest.raises(UserError, match="not divided evenly"):
            placement(where, leaders)


def items(kind: str, *of_ranks: float) -> list[Item]:
    """An item as each rank has measured it."""
    return [Item(kind, "", (1,), 1.0, Spread(seconds, seconds, seconds, 5)) for seconds in of_ranks]


def test_a_rank_that_computes_more_slowly_is_named() -> None:
    """Not the others, whose median it moves."""
    ranks = zip(items(PRODUCT, 1.0, 1.02, 1.5, 0.97), items(COPY, 1.0, 1.1, 1.0, 0.9), strict=True)
    found = list(outlying_ranks(joined(list(ranks)), [f"rank {rank}" for rank in range(4)]))
    assert found == ["rank 2: products take 1.50 times as long as on the other ranks"]
    assert not list(outlying_ranks(joined([[*items(PRODUCT, 1.0)]]), ["rank 0"]))


def test_a_rank_with_slow_messages_is_named_with_its_host() -> None:
    """Beside those that cross the same link: messages inside of a node are always quicker."""
    where = RankPlacement(tuple("aabbccdd"), 2, 4)
    names = names_of(where)
    assert names[3] == "rank 3 on b"
    pairs = {
        (names[one], names[other]): PairTime(1e-6, 1e10) if one // 2 == other // 2 else PairTime(5e-5, 1e9)
        for one in range(8)
        for other in range(one + 1, 8)
    }
    assert not list(outlying_pairs(pairs, names, where))
    slow = {
        pair: PairTime(5e-5, 1e8) if names[3] in pair and one.bytes_per_s == 1e9 else one for pair, one in pairs.items()
    }
    (said,) = outlying_pairs(slow, names, where)
    assert said.startswith("rank 3 on b: 100 MB/s between ")
    assert said.endswith("others 1.00 GB/s")


@pytest.mark.parametrize(("name", "efficiency"), [("fp32", 0.15), ("fp32", 0.9), ("bf16", 0.4)])
def test_an_efficiency_of_attention_gives_back_what_was_measured(name: str, efficiency: float) -> None:
    """The price of fp32 grows with 1 / efficiency: an efficiency on a straight line was ten times too small."""
    device = ClusterDevice("", "cpu", 1, 1e10, {"fp32": 1e11, "bf16": 4e11}, units=0)
    flops = 6e8
    one = Computed(1, "attn", ATTENTION, (2, 8, 256, 256, 64), flops, 0.0, 0.0, 0.0)
    taken_s = spent([one], device, replace(EXACT, attention_efficiency=efficiency), name, 1)[0].attention_s
    item = Item("attention", name, (2, 8, 256, 64), flops, Spread(taken_s, taken_s, taken_s, 5))
    found = attention_efficiency([OfAllRanks(item, (taken_s,))], device)
    assert found.value == pytest.approx(efficiency)


def waited(mean_s: float, slowest_s: float, met_s: float, alone_s: float) -> list[OfAllRanks]:
    names = {"mean rank": mean_s, "slowest rank": slowest_s, "with a collective": met_s, "collective": alone_s}
    return [
        OfAllRanks(Item("waiting", name, (1,), 1.0, Spread(one, one, one, 8)), (one, one))
        for name, one in names.items()
    ]


def test_what_ranks_wait_for_is_told_apart() -> None:
    """The slowest rank, and waking up after a computation: on CUDA no host waits for a collective."""
    found = waiting_constants(waited(0.010, 0.012, 0.015, 0.001), "cpu")
    assert found["imbalance"].value == pytest.approx(1.2)
    assert found["collective_s"].value == pytest.approx(0.002)
    assert set(waiting_constants(waited(0.010, 0.012, 0.015, 0.001), "cuda")) == {"imbalance"}
    quick = waiting_constants(waited(0.010, 0.0099, 0.0100, 0.001), "cpu")
    assert (quick["imbalance"].value, quick["collective_s"].value) == (1.0, 0.0)


@pytest.mark.slow
def test_the_memory_of_a_run_is_its_own() -> None:
    """What the process holds that starts a trial is not counted: getrusage(2) hands it on."""
    large = bytearray(1_200_000_000)
    found = trial_runs.measure()
    assert 1e8 < found.held_bytes < len(large) / 2
    assert 0.0 <= found.fragments < 1.0


BASE = "a100-80gb-sxm"


def test_tables_alone_change_the_links_of_a_cluster_file(tmp_path: Path) -> None:
    """The link of a card is a share of what a ring gets that enters a node with all of its cards."""
    (tmp_path / "in.txt").write_text(table(Collective.ALL_REDUCE, 1, 8))
    (tmp_path / "out.txt").write_text(table(Collective.ALL_REDUCE, 4, 8))
    words = ("--nccl-tests", "out.txt", "in.txt", "--cluster", BASE, "--out", "new.toml")
    done = called(tmp_path, "measure", *words)
    assert (done.returncode, done.stderr) == (0, "")
    before, found = load_cluster(BASE), load_cluster(tmp_path / "new.toml")
    assert found.inside.bytes_per_s == pytest.approx(INSIDE.bytes_per_s, rel=0.01)
    assert found.inside.latency_s == pytest.approx(INSIDE.latency_s, rel=0.02)
    assert found.between.bytes_per_s == pytest.approx(BETWEEN.bytes_per_s / before.cards, rel=0.01)
    assert found.between.latency_s == pytest.approx(BETWEEN.latency_s, rel=0.02)
    assert found.sources["links.between"].startswith(
        "nccl-tests: all_reduce of 32 ranks on 4 hosts, fitted with an error"
    )
    assert (found.device, found.bus, found.devices) == (before.device, before.bus, before.devices)


REFUSED = {
    "no file": ([], "--out"),
    "another ending": (["--out", "here.json"], "--out here.json: is a cluster file, whose name ends with .toml"),
    "taken": (["--out", "taken.toml"], "--out taken.toml: is there already; delete it, or give another name"),
    "no folder": (["--out", "none/here.toml"], "there is no folder"),
    "no ranks": (["--out", "here.toml", "--ranks", "0"], "'0' is not a whole number of at least 1"),
    "too many ranks": (["--out", "here.toml", "--ranks", "9" * 9], "each rank is a process on this machine"),
    "too long": (["--out", "here.toml", "--seconds", "9999"], "--seconds 9999: at most 3600, which is an hour"),
    "a link of nothing": (["--out", "here.toml", "--inside"], "--inside: says what --nccl-tests has measured"),
    "no table": (["--out", "here.toml", "--nccl-tests", "none.txt"], "--nccl-tests none.txt: No such file"),
    "a table of another link": (
        ["--out", "here.toml", "--nccl-tests", "in.txt", "--between", "--cluster", BASE],
        "--between --nccl-tests in.txt: its 8 ranks are on one host; leave out --between",
    ),
    "a table of other machines": (
        ["--out", "here.toml", "--nccl-tests", "in.txt", "--ranks", "2"],
        "--nccl-tests in.txt: its hosts have 8 ranks each, and a node has 2 devices here: it is of other machines",
    ),
    "no cluster": (
        ["--out", "here.toml", "--nccl-tests", "in.txt", "--cluster", "a100-80gb-sxn"],
        "did you mean a100-80gb-sxm (shipped)",
    ),
    "a cluster without tables": (
        ["--out", "here.toml", "--cluster", BASE],
        f"--cluster {BASE}: is a file for links of tables",
    ),
    "ranks beside a cluster": (
        ["--out", "here.toml", "--nccl-tests", "in.txt", "--cluster", BASE, "--ranks", "2"],
        "--ranks: with --cluster no rank measures",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_words_are_refused_before_anything_is_measured(what: str, tmp_path: Path) -> None:
    words, expected = REFUSED[what]
    (tmp_path / "taken.toml").write_text("mine")
    (tmp_path / "in.txt").write_text(ALL_REDUCE)
    done = called(tmp_path, "measure", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "taken.toml"]
    assert (tmp_path / "taken.toml").read_text() == "mine"


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("nothing\n")
    done = called(tmp_path, "measure", "--out", "here.json", "--inside", "--nccl-tests", "bad.txt", "--seconds", "9999")
    assert done.stderr.count("error: ") == 3


def test_ranks_of_a_launcher_start_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "1", "2", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    done = called(tmp_path, "measure", "--out", "here.toml", "--ranks", "4")
    assert done.returncode == 2
    assert "--ranks 4: this process is rank 1 of 2, numbered by the variables of torchrun" in done.stderr


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`codescent measure`, running in a group of its own, as in a terminal."""
    words = (sys.executable, "-m", "codescent", "measure", "--device", "cpu", *words)
    env = environment()
    env.pop("OMP_NUM_THREADS")
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True, process_group=0)


@pytest.mark.slow
def test_the_command_writes_one_file_and_says_what_is_in_it(tmp_path: Path) -> None:
    """More ranks than cores are told, not refused."""
    ranks = (os.cpu_count() or 1) + 1
    with command(tmp_path, "--ranks", str(ranks), "--out", "here.toml", "--seconds", "2") as process:
        out, err = process.communicate(timeout=170)
    assert process.returncode == 0, err
    assert f"{ranks} ranks share {ranks - 1} core" in err
    assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]
    assert load_cluster(tmp_path / "here.toml").devices == ranks
    assert out.splitlines()[-1] == "here.toml is written: each number in it has its source and its spread"
    assert "link inside" in out


@pytest.mark.slow
@pytest.mark.parametrize("of_trial", [False, True], ids=["in products", "in a trial run"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_command_leaves_no_file_and_no_process(
    tmp_path: Path, number: signal.Signals, *, of_trial: bool
) -> None:
    with command(tmp_path, "--ranks", "2", "--out", "here.toml", "--seconds", "600") as process:
        assert process.stdout is not None
        for said in ("measuring the memory of short runs\n", "measuring products of matrices\n")[: 2 - of_trial]:
            assert process.stdout.readline() == said
        trials = 1 if of_trial else 0
        ranks = list[psutil.Process]()
        while len(ranks) < 2 + trials:  # a trial starts a moment after it is told
            ranks = started_by(process.pid)
        assert len(ranks) == 2 + trials
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    end_s = time.monotonic() + 30
    while any(map(runs, ranks)) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert not [rank for rank in ranks if runs(rank)]
    assert not list(tmp_path.iterdir())


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
def test_under_torchrun_one_rank_writes_the_file(tmp_path: Path) -> None:
    """A second start finds the file, and one of its ranks says so."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "codescent"]
    words += ["measure", "--device", "cpu", "--out", "here.toml", "--seconds", "1"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("here.toml is written") == 1
    assert load_cluster(tmp_path / "here.toml").devices == 2
    again = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=170, check=False
    )
    assert again.returncode != 0
    assert sum(line.startswith("error: --out here.toml: is there ") for line in again.stderr.splitlines()) == 1
    assert "on the way out" not in again.stderr


@pytest.mark.slow
def test_hosts_measure_the_link_between_them_and_name_the_slow_one(tmp_path: Path) -> None:
    """Real hosts, with links that carry 200 Mbit/s. The last one carries a tenth."""
    if reason := hosts.missing():
        pytest.skip(reason)
    words = [sys.executable, "-P", "-m", "codescent", "measure", "--device", "cpu", "--seconds", "6", "--out"]
    found = {}
    with hosts.Hosts(4) as made:
        made.shape(200.0)
        for name, slow in (("alike", False), ("slow", True)):
            if slow:
                tc = ("tc", "-n", made.name(3), "qdisc", "replace", "dev", hosts.DEVICE, "root", *hosts.shaper(20.0))
                subprocess.run(tc, check=True)
            logs = [tmp_path / f"{name}-{host}.log" for host in range(4)]
            ranks = []
            for host, log in enumerate(logs):
                variables = {
                    "RANK": host,
                    "LOCAL_RANK": 0,
                    "WORLD_SIZE": 4,
                    "LOCAL_WORLD_SIZE": 1,
                    "MASTER_PORT": 29_511,
                }
                env = environment(MASTER_ADDR=hosts.address(0), **{key: str(value) for key, value in variables.items()})
                with log.open("w") as stream:
                    ranks.append(made.start(host, [*words, f"{name}.toml"], env, tmp_path, stream))
            assert [rank.wait(timeout=150) for rank in ranks] == [0] * 4, [log.read_text() for log in logs]
            found[name] = load_cluster(tmp_path / f"{name}.toml"), logs[0].read_text()
    cluster, said = found["alike"]
    assert (cluster.devices, cluster.nodes) == (1, None)
    assert cluster.sources["links.between"].startswith("measured: collectives of 4 nodes, 1 at the same time")
    assert 10e6 < cluster.between.bytes_per_s < 35e6, said
    assert "rank 3 on host3" not in said or "other programs used" in said  # a machine that is busy delays any rank
    _, said = found["slow"]
    assert re.search(r"^rank 3 on host3: .* between rank", said, re.MULTILINE), said
