"""In: four hosts that are namespaces, and on one of them a planted fault. Out: the doctor finds it there, alone.
Skips without root and iproute2. docs/doctor.md has these faults in a table: a test compares."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import environment, make_project

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import hosts  # noqa: E402 - found by the line above: a folder of scripts, no package
from doctor_hosts import PORT, Fault, examine  # noqa: E402

FIREWALL = """nft 'add table inet doctor; add chain inet doctor in { type filter hook input priority 0; };
add rule inet doctor in ip saddr { 10.77.0.2, 10.77.0.4 } tcp dport 1024-65535 drop'"""
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 7;
    return code;
}
"""
NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*)
    echo "0, GPU-aaaaaaaa-0000-0000-0000-$(hostname)00000000, NVIDIA A100-SXM4-40GB, 40960, 4, 550.54.15"
    echo "1, GPU-bbbbbbbb-0000-0000-0000-$(hostname)00000000, NVIDIA A100-SXM4-40GB, 40960, 4, 550.54.15" ;;
esac
"""
LISTENER = f"import socket, time; s = socket.create_server(('10.77.0.1', {PORT})); print(flush=True); time.sleep(100)"
FULL = "mount -t tmpfs -o size=1m doctor /dev/shm; fallocate -l 900k /dev/shm/x"
TMPFS = "mount -t tmpfs -o size={size} doctor {where}"

SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
number=$(( ${host##*.} - 1 ))
exec nsenter --net=/run/netns/PREFIXh$number unshare --uts bash -c "hostname host$number; $*"
"""

HOST1, HOST2, HOST3 = ("host1",), ("host2",), ("host3",)
ALL = tuple(f"host{host}" for host in range(4))
WITH_BANDWIDTH = ()

FAULTS: dict[str, tuple[Fault, set[tuple[str, str, tuple[str, ...]]]]] = {
    "a firewall between hosts": (Fault(before={2: FIREWALL}), {("wrong", "ports", HOST2)}),
    "a wrong address in /etc/hosts": (Fault(names={1: {"host3": "10.9.9.9"}}), {("wrong", "names", HOST1)}),
    "the own name means 127.0.1.1": (Fault(names={3: {"host3": "127.0.1.1"}}), {("warning", "names", HOST3)}),
    "another MTU": (Fault(before={2: "ip link set eth0 mtu 1400"}), {("warning", "mtu", HOST2)}),
    "a slow link": (
        Fault(before={2: "tc qdisc add dev eth0 root tbf rate 100mbit burst 128kb latency 50ms"}, words=WITH_BANDWIDTH),
        {("warning", "bandwidth", HOST2)},
    ),
    "a clock that is ahead": (Fault(env={1: {"LD_PRELOAD": "FOLDER/clock.so"}}), {("warning", "clocks", HOST1)}),
    "another torch": (Fault(env={3: {"PYTHONPATH": f"FOLDER/torch:{ROOT}"}}), {("wrong", "versions", HOST3)}),
    "other sources": (Fault(env={2: {"PYTHONPATH": "FOLDER/sources"}}), {("wrong", "versions", HOST2)}),
    "two ranks on one core": (
        Fault(slots=(1, 2, 1, 1), prefix={1: ("taskset", "-c", "0")}), {("warning", "cores", HOST1)},
    ),
    "two ranks on one device": (
        Fault(slots=(1, 1, 2, 1), env={host: {"PATH": "FOLDER/gpu:PATH", **one} for host, one in enumerate(
            ({}, {}, {"CUDA_VISIBLE_DEVICES": "0"}, {}))}),
        {("wrong", "devices", HOST2)},
    ),
    "no device on a host": (
        Fault(env={host: {"PATH": "FOLDER/gpu:PATH"} for host in (0, 1, 2)}), {("wrong", "devices", HOST3)},
    ),
    "few open files": (Fault(prefix={2: ("prlimit", "--nofile=64:64")}), {("wrong", "limits", HOST2)}),
    "a full /dev/shm": (
        Fault(slots=(1, 2, 1, 1), before={1: FULL}),
        {("wrong", "limits", HOST1)},
    ),
    "a run folder of its own": (
        Fault(before={2: TMPFS.format(size="2g", where="FOLDER/runs")}), {("wrong", "folders", HOST2)},
    ),
    "a run folder that is read-only": (
        Fault(before={3: "mount --bind FOLDER/runs FOLDER/runs; mount -o remount,bind,ro FOLDER/runs"}),
        {("wrong", "folders", HOST3)},
    ),
    "a full data folder": (
        Fault(before={1: TMPFS.format(size="1m", where="FOLDER/datasets")}, words=("run.toml", "--no-bandwidth")),
        {("warning", "folders", HOST1)},
    ),
    "a process of an earlier run": (
        Fault(before={1: "CODESCENT_MARK=FOLDER/runs/old sleep 100 &"}), {("warning", "leftovers", HOST1)},
    ),
    "a process of this run": (
        Fault(before={2: "CODESCENT_MARK=FOLDER/runs/default sleep 100 &"}, words=("run.toml", "--no-bandwidth")),
        {("wrong", "leftovers", HOST2)},
    ),
    "a port that is taken": (
        Fault(before={0: f'coproc "{sys.executable}" -c "{LISTENER}"; read -u "${{COPROC[0]}}"'}),
        {("wrong", "port", ("host0",))},
    ),
    "an interface that is not there": (
        Fault(env={3: {"NCCL_SOCKET_IFNAME": "ib0"}}), {("wrong", "interfaces", HOST3)},
    ),
    "a link too slow for the time limit": (
        Fault(
            before={2: "tc qdisc add dev eth0 root tbf rate 1mbit burst 16kb latency 50ms"},
            words=("run.toml", "model.hidden_dim=256", "model.vocab_size=256", "parallel.timeout_s=5"),
        ),
        {("warning", "bandwidth", HOST2), ("wrong", "timeouts", HOST2)},
    ),
}  # fmt: skip
"""By name: the fault, and what is found: severity, check and host."""
NEEDS = {"a firewall between hosts": "nft", "a clock that is ahead": "cc"}


@pytest.fixture
def cluster() -> Iterator[hosts.Hosts]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Hosts(4) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_project(tmp_path)
    config = (tmp_path / "run.toml").read_text().replace("global_batch_size = 8", "global_batch_size = 20")
    (tmp_path / "run.toml").write_text(config)
    for name in ("runs", "datasets", "gpu"):
        (tmp_path / name).mkdir()
    (tmp_path / "gpu" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "gpu" / "nvidia-smi").chmod(0o755)
    torch = tmp_path / "torch" / "torch-2.0.1.dist-info"
    torch.mkdir(parents=True)
    (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n")
    return tmp_path


def in_folder(text: str, folder: Path) -> str:
    return text.replace("FOLDER", str(folder)).replace(":PATH", f":{os.environ['PATH']}")


def planted(fault: Fault, folder: Path) -> Fault:
    """The fault with the paths of a folder."""
    before = {host: in_folder(lines, folder) for host, lines in fault.before.items()}
    env = {host: {name: in_folder(text, folder) for name, text in one.items()} for host, one in fault.env.items()}
    return Fault(before, env, fault.prefix, fault.slots, fault.words, fault.names)


def prepare(name: str, folder: Path) -> None:
    """What a fault needs beside."""
    if (program := NEEDS.get(name)) is not None and shutil.which(program) is None:
        pytest.skip(f"there is no {program}")
    if name == "a clock that is ahead":
        (folder / "clock.c").write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=folder, check=True)
    if name == "other sources":
        shutil.copytree(ROOT / "codescent", folder / "sources" / "codescent", ignore=shutil.ignore_patterns("*.pyc"))
        with (folder / "sources" / "codescent" / "__init__.py").open("a") as file:
            file.write("# another line\n")


QUICK = ("a firewall between hosts", "the own name means 127.0.1.1", "two ranks on one core", "a run folder of its own")
"""These are planted in the quick tests; the others are slow ones."""


@pytest.mark.parametrize("name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAULTS])
def test_a_planted_fault_is_found_on_its_host(cluster: hosts.Hosts, folder: Path, name: str) -> None:
    fault, expected = FAULTS[name]
    prepare(name, folder)
    found = examine(cluster, folder, planted(fault, folder))
    assert found.report, found.errors
    assert found.found == expected, found.report["findings"]
    assert found.codes[0] == (2 if any(severity == "wrong" for severity, _, _ in expected) else 1)
    assert found.codes[1:] == [0, 0, 0]
    for finding in found.report["findings"]:
        assert finding["what"]
        assert finding["expected"]
        assert finding["mend"]
    assert not list(folder.rglob(".codescent-doctor*"))


def test_a_sound_cluster_has_no_finding(cluster: hosts.Hosts, folder: Path) -> None:
    found = examine(cluster, folder, Fault(words=()))
    assert (found.codes, found.errors) == ([0] * 4, [""] * 4)
    assert found.report["findings"] == []
    assert len(found.report["hosts"]) == 4
    pairs = {(one["from"], one["to"]) for one in found.report["pairs"]}
    assert pairs == {(one, other) for one in ALL for other in ALL if one != other}
    assert all(one["mtu"] == 1500 and one["latency_s"] > 0 and one["bytes_per_s"] > 0 for one in found.report["pairs"])


def test_packets_that_a_switch_drops_are_found(cluster: hosts.Hosts, folder: Path) -> None:
    switch = cluster.name(0).removesuffix("h0") + "sw"
    subprocess.run(["ip", "-n", switch, "link", "set", "port2", "mtu", "1450"], check=True)
    found = examine(cluster, folder, Fault())
    assert found.found == {("wrong", "mtu", HOST2)}
    assert "1450 bytes do" in found.report["findings"][0]["what"]


def test_a_host_that_cannot_reach_rank_0_says_so_itself(cluster: hosts.Hosts, folder: Path) -> None:
    found = examine(cluster, folder, Fault(before={2: "ip route add unreachable 10.77.0.1/32"}), wait_s=3)
    assert found.codes[2] == 2
    said = "rank 2 of 4 on host2: cannot reach rank 0 at 10.77.0.1, port 29400 (No route to host)"
    assert said in " ".join(found.errors[2].split())
    assert found.found == {("wrong", "ranks", ("host0",))}
    assert "rank 2 did not come" in found.report["findings"][0]["what"]


def test_another_token_is_told_on_both_sides(cluster: hosts.Hosts, folder: Path) -> None:
    found = examine(cluster, folder, Fault(env={3: {"CODESCENT_TOKEN": "another"}}), wait_s=3)
    assert "rank 3 of 4 on host3: the process at 10.77.0.1:29400 has another token" in found.errors[3]
    assert {("wrong", "ranks", ("host0",)), ("wrong", "token", ("10.77.0.4",))} == found.found


def test_room_for_the_checkpoints_is_counted(cluster: hosts.Hosts, folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "doctor", str(folder / "runs")], check=True)
    try:
        words = ("run.toml", "model.hidden_dim=256", "model.vocab_size=256", "--no-bandwidth")
        found = examine(cluster, folder, Fault(words=words))
    finally:
        subprocess.run(["umount", str(folder / "runs")], check=True)
    assert found.found == {("wrong", "folders", ALL)}
    assert "for the checkpoints" in found.report["findings"][0]["expected"]


@pytest.mark.parametrize("listen", ["eth0", "all"])
def test_rank_0_listens_where_the_config_says(cluster: hosts.Hosts, folder: Path, listen: str) -> None:
    words = ("run.toml", f"parallel.listen={listen}", "--no-bandwidth")
    found = examine(cluster, folder, Fault(words=words, slots=(1, 1)))
    assert (found.found, found.errors) == (set(), ["", ""])
    assert [host["ranks"][0]["address"] for host in found.report["hosts"]] == ["10.77.0.1", "10.77.0.2"]


TWO = {
    "a run folder of its own": ("wrong", "folders", "; either host may be the cause"),
    "a clock that is ahead": ("warning", "clocks", "the clock of host1 is 7.0"),
}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("host", [0, 1])
def test_with_two_hosts_both_are_named(cluster: hosts.Hosts, folder: Path, name: str, host: int) -> None:
    """Two hosts differ, and nobody can say which one is wrong."""
    prepare(name, folder)
    severity, check, said = TWO[name]
    one = FAULTS[name][0]
    moved = Fault({host: next(iter(one.before.values()), "")}, {host: next(iter(one.env.values()), {})}, slots=(1, 1))
    found = examine(cluster, folder, planted(moved, folder))
    assert found.found == {(severity, check, ("host0", "host1"))}
    assert said.replace("host1", f"host{host}") in found.report["findings"][0]["what"]


READ_ONLY = "mount --bind FOLDER/datasets FOLDER/datasets; mount -o remount,bind,ro FOLDER/datasets"


def test_a_data_folder_that_is_read_only_is_no_finding_where_the_corpus_is_prepared(
    cluster: hosts.Hosts, folder: Path
) -> None:
    """Until then host 1 could not prepare it."""
    words = ("run.toml", "--no-bandwidth")
    fault = planted(Fault(before={1: READ_ONLY}, words=words), folder)
    assert examine(cluster, folder, fault).found == {("wrong", "folders", HOST1)}
    prepared = ["data", "corpus.txt", "--tokenizer=byte", "--folder=datasets"]
    subprocess.run([sys.executable, "-m", "codescent", *prepared], cwd=folder, env=environment(), check=True)
    assert examine(cluster, folder, fault).found == set()


def test_hosts_are_reached_by_ssh(cluster: hosts.Hosts, folder: Path) -> None:
    """Instead of ssh a shell enters the namespace: the ranks of two hosts meet, and rank 0 reports here."""
    (folder / "ssh").write_text(SSH.replace("PREFIXh", cluster.name(0).removesuffix("0")))
    (folder / "ssh").chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["doctor", "--no-bandwidth", "--hosts=10.77.0.1:1,10.77.0.3:2", "--json=found.json"]
    done = subprocess.run(
        [sys.executable, "-m", "codescent", *words], cwd=folder, env=environment(PATH=path, PYTHONPATH=str(ROOT)),
        text=True, capture_output=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("3 ranks on 2 hosts, rank 0 at 10.77.0.1:"), done.stderr
    assert done.stderr == ""  # what it finds is no failure of a rank
    report = json.loads((folder / "found.json").read_text())
    assert [[one["rank"] for one in host["ranks"]] for host in report["hosts"]] == [[0], [1, 2]]
    assert done.returncode == report["exit_code"] == 1


def test_the_page_has_each_fault_with_what_is_found() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| `(\w+)` \|", page.partition("## The faults")[2], re.MULTILINE))
    checks = {name: max(found)[1] for name, (_, found) in FAULTS.items()}
    assert rows == checks
    assert len(rows) >= 15
