"""In: facts of hosts and measurements of pairs, words of a command line. Out: the right findings, in 80 columns.
Ranks on one machine by launchers, too, and refusals. Hosts with planted faults: test_doctor_faults.py."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import called, environment, make_project
from test_transport import all_descriptors

from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.clusters.by_links import of_device
from codescent.config.decided import head_chunk_tokens, with_device
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.cost.stage_memory import memory
from codescent.doctor import judge_network as judge
from codescent.doctor import pairs as pairs_module
from codescent.doctor.devices import chosen, visible
from codescent.doctor.examine import _came, _key, examine
from codescent.doctor.facts import cores_of_the_job, facts_of, hosts_of
from codescent.doctor.finding import WARNING, WRONG, Finding, exit_code
from codescent.doctor.folders import look
from codescent.doctor.from_config import of_config
from codescent.doctor.judge_devices import judge_devices
from codescent.doctor.judge_folders import judge_folder
from codescent.doctor.judge_host import judge_hosts
from codescent.doctor.judge_memory import judge_memory
from codescent.doctor.meeting import gather, join, ports
from codescent.doctor.mtu import MOST, echo, path_mtu
from codescent.doctor.network import PairMeasurements, _NetworkSurvey, tournament
from codescent.doctor.pairs import PairServer
from codescent.doctor.report import Report
from codescent.doctor.roll import Gathered, Roll
from codescent.doctor.tasks import Tasks
from codescent.doctor.wanted import Wanted
from codescent.jobs import room
from codescent.meeting import addresses
from codescent.meeting.store import LocalStore
from codescent.meeting.store_client import StoreClient
from codescent.plan import Plan
from codescent.preflight import plan_of, run_folder

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
GPUS = [{"index": str(number), "uuid": f"GPU-{number}a", "name": "A100"} for number in range(4)]
HOSTS = ("a", "b", "c", "d")
PAIRS = [(one, other) for one in HOSTS for other in HOSTS if one != other]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    make_project(tmp_path)
    return tmp_path


def doctor(folder: Path, *words: str, before: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "codescent", "doctor", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=100, check=False
    )


# --- devices ---


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, "0123"), ("", ""), ("2,1", "21"), ("GPU-3", "3"), ("GPU-3a,0", "30"), ("0,9,1", "0"), ("-1", ""),
        ("0, 1", "01"), ("1,1", "1"), ("void", ""),
    ],
)  # fmt: skip
def test_visible_devices_are_those_of_cuda(variable: str | None, seen: str) -> None:
    env = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert "".join(one["index"] for one in visible(GPUS, env)) == seen


def test_a_part_of_a_device_is_a_device() -> None:
    (one,) = visible(GPUS, {"CUDA_VISIBLE_DEVICES": "MIG-aaaa"})
    assert one["uuid"] == "MIG-aaaa"


def test_a_rank_takes_the_only_device_or_that_of_its_local_rank() -> None:
    assert chosen(GPUS[2:3], 3) == GPUS[2]
    assert chosen(GPUS, 3) == GPUS[3]
    assert chosen(GPUS[:2], 2) is None
    assert chosen([], 0) is None


# --- whom to blame ---


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("way", ["into", "out of", "both"])
def test_the_host_that_explains_the_pairs_is_blamed(host: str, way: str) -> None:
    into = [pair for pair in PAIRS if pair[1] == host] if way != "out of" else []
    out = [pair for pair in PAIRS if pair[0] == host] if way != "into" else []
    assert [where for where, _ in judge.blamed([*into, *out])] == [(host,)]


@pytest.mark.parametrize("pairs", [[("a", "b")], [("b", "a")], [("a", "b"), ("b", "a")]])
def test_two_hosts_that_explain_the_same_pairs_are_both_named(pairs: list[judge.Pair]) -> None:
    ((where, own),) = judge.blamed(pairs)
    assert (sorted(where), own) == (["a", "b"], pairs)
    slow = dict.fromkeys([("a", "b"), ("b", "a")], 1e9) | dict.fromkeys(pairs, 1e7)
    found = [
        *judge.judge_reach(dict.fromkeys(pairs, "timed out")), *judge.judge_rates(slow, pairs),
        *judge.judge_latencies(slow, pairs),
    ]  # fmt: skip
    for finding in found:
        assert sorted(finding.where) == ["a", "b"]
        assert finding.what.endswith("; either host may be the cause")
    assert all(f"{first} does not reach {second}" in found[0].what for first, second in pairs)


def test_many_hosts_are_judged_at_once() -> None:
    names = [str(number) for number in range(100)]
    begin_s = time.process_time()
    assert len(judge.blamed([(one, other) for one in names for other in names if one != other])) == 99
    assert time.process_time() - begin_s < 1  # 0.2 seconds; 3 where each pair is looked for in a list


@given(st.sets(st.sampled_from(PAIRS)))
def test_each_pair_is_told_once(pairs: set[judge.Pair]) -> None:
    told = [pair for _, own in judge.blamed(sorted(pairs)) for pair in own]
    assert sorted(told) == sorted(pairs)
    assert all(host in pair for where, own in judge.blamed(sorted(pairs)) for pair in own for host in where)


@pytest.mark.parametrize("host", HOSTS)
def test_a_slow_host_is_found_and_noise_is_not(host: str) -> None:
    noisy = {pair: 1e9 * (1 + 0.5 * (number % 3)) for number, pair in enumerate(PAIRS)}
    assert judge.slow_pairs(noisy) == []
    slow = {pair: rate * (0.1 if host in pair else 1) for pair, rate in noisy.items()}
    (finding,) = judge.judge_rates(slow, judge.slow_pairs(slow))
    assert (finding.where, finding.severity) == ((host,), WARNING)


def test_one_slow_pair_is_found_where_all_others_are_fast() -> None:
    rates = dict.fromkeys(PAIRS, 1e9) | {("b", "c"): 1e7}
    assert judge.slow_pairs(rates) == [("b", "c")]


def test_a_late_host_is_found_and_a_busy_one_is_not() -> None:
    busy = {pair: 50e-6 * (1 + number % 4) for number, pair in enumerate(PAIRS)}
    assert judge.late_pairs(busy) == []
    late = {pair: seconds + (5e-3 if "d" in pair else 0) for pair, seconds in busy.items()}
    (finding,) = judge.judge_latencies(late, judge.late_pairs(late))
    assert finding.where == ("d",)


def test_a_rank_measures_how_far_its_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(timedelta(seconds=1))
    monkeypatch.setattr(store, "clock", lambda: time.time_ns() - 5_000_000_000)
    ahead_s, error_s = json.loads(json.dumps(Tasks(LOOPBACK, b"", store)({"do": "clock"})))
    assert abs(ahead_s - 5) <= error_s < 1


@pytest.mark.parametrize("count", range(2, 8))
def test_clocks_are_those_of_most_hosts(count: int) -> None:
    ahead = {str(host): (5.0 + host * 0.1, 0.01) for host in range(count)}  # rank 0's own clock is behind
    ahead["0"] = (0.0, 0.0)
    (finding,) = judge.judge_clocks(ahead)
    assert finding.where == (("0",) if count > 2 else ("0", "1"))
    assert ("the clock of 1 is 5.10 s ahead of that of 0; either may" in finding.what) == (count == 2)


def test_of_clocks_that_are_divided_all_are_named() -> None:
    (finding,) = judge.judge_clocks({"a": (0.0, 0.0), "b": (7.0, 0.01), "c": (0.1, 0.01), "d": (7.1, 0.01)})
    assert finding.where == HOSTS
    assert "the clock of d is 7.10 s ahead of that of a; either may be the wrong one" in finding.what


@linux
@pytest.mark.parametrize("hosts", ["ab", "abcd"])
@pytest.mark.parametrize(
    ("check", "said", "of"),
    [
        ("versions", "torch is {}", lambda value: {"versions": FACTS["versions"] | {"torch": value}}),
        ("folders", "ranks start in {}", lambda value: {"folder": value}),
        ("mtu", "the MTU is {}", lambda value: {"mtu": int(value)}),
        ("devices", "the devices are {}", lambda value: {"device": {"uuid": "u", "index": "0", "name": value}}),
    ],
)
def test_of_hosts_that_are_divided_all_are_named(
    hosts: str, check: str, said: str, of: Callable[[str], dict[str, Any]]
) -> None:
    every = {}
    for rank, host in enumerate(hosts):
        changed = of(str(1500 + rank % 2))
        mtu = changed.pop("mtu", 1500)
        interface = {"name": "eth0", "mtu": mtu, "addresses": [f"10.0.0.{rank + 1}"]}
        every[rank] = facts(rank, host, interfaces=[interface], **changed)
    found = [*judge_hosts(hosts_of(every), 4), *judge.judge_mtu(hosts_of(every), {})]
    found += judge_devices(hosts_of(every), "", {})
    (finding,) = [one for one in found if one.check == check]
    assert finding.where == tuple(hosts)
    ones, others = ", ".join(hosts[::2]), ", ".join(hosts[1::2])
    assert finding.what == said.format(f"1500 on {ones}; 1501 on {others}; either may be the wrong one")


def test_a_clock_whose_way_is_long_is_not_blamed() -> None:
    assert list(judge.judge_clocks({"a": (0.0, 0.0), "b": (1.5, 0.8), "c": (0.0, 0.1)})) == []


def test_a_link_below_its_declared_rate_is_found() -> None:
    declared = {"a": 1e9, "b": 1e9, "c": 1e9, "d": 1e8}
    rates = {pair: 0.95 * min(declared[pair[0]], declared[pair[1]]) for pair in PAIRS}
    assert list(judge.judge_link(rates, declared)) == []
    slow = {pair: rate * (0.5 if "b" in pair else 1) for pair, rate in rates.items()}
    assert [finding.where for finding in judge.judge_link(slow, declared)] == [("b",)]


@pytest.mark.parametrize(("timeout_s", "severity"), [(600, None), (15, WARNING), (9, WRONG)])
def test_time_limits_are_compared_with_the_slowest_link(timeout_s: float, severity: str | None) -> None:
    rates = dict.fromkeys(PAIRS, 1e9) | {("b", "c"): 1e6}
    found = list(judge.judge_timeout(rates, 1e7, "gradients", timeout_s))
    assert [finding.severity for finding in found] == ([] if severity is None else [severity])
    assert all("from b to c" in finding.what for finding in found)


def test_a_link_that_carries_nothing_has_no_time() -> None:
    rates = dict.fromkeys(PAIRS, 1e9) | {("b", "c"): 0.0}
    assert list(judge.judge_timeout(rates, 0.0, "", 0.0)) == []  # without a config
    (finding,) = judge.judge_timeout(rates, 1e7, "gradients", 600)
    assert (finding.severity, finding.check) == (WRONG, "timeouts")
    assert "nothing has arrived from b at c" in finding.what
    assert [one.check for one in judge.judge_rates(rates, judge.slow_pairs(rates))] == ["bandwidth"]


@pytest.mark.parametrize("count", range(2, 10))
def test_a_tournament_has_each_pair_once_and_each_host_once_a_round(count: int) -> None:
    names = [str(number) for number in range(count)]
    rounds = list(tournament(names))
    assert len(rounds) == count - 1 + count % 2
    assert all(len({host for pair in one for host in pair}) == 2 * len(one) for one in rounds)
    met = sorted(tuple(sorted(pair)) for one in rounds for pair in one)
    assert met == sorted(combinations(names, 2))


# --- hosts ---


def facts(rank: int, host: str, **changed: Any) -> dict[str, Any]:
    own = facts_of(Rank(rank=rank, world_size=8), {}, f"10.0.0.{rank + 1}")
    same = {"host": host, "machine": host, "mask": list(range(8)), "cores": 8, "machine_cores": 8, "device": None}
    return own | same | {"files": (1024, 4096), "named_interfaces": {}, "folder": "/run"} | changed


@linux
def test_hosts_of_one_name_are_told_apart() -> None:
    every = {0: facts(0, "node", machine="x"), 1: facts(1, "node", machine="y")}
    hosts = hosts_of(every)
    assert [host.name for host in hosts] == ["node (10.0.0.1)", "node (10.0.0.2)"]
    (finding,) = judge_hosts(hosts, 2)
    assert (finding.check, finding.severity) == ("names", WARNING)


@linux
def test_ranks_of_a_host_need_not_follow_each_other() -> None:
    every = {rank: facts(rank, "ab"[rank % 2]) for rank in range(4)}
    assert [host.ranks for host in hosts_of(every)] == [(0, 2), (1, 3)]


@linux
@pytest.mark.parametrize(
    ("masks", "threads", "words"),
    [
        ([[0, 1], [2, 3]], None, None),
        ([list(range(8))] * 2, None, None),
        ([list(range(8))] * 2, 4, None),
        ([list(range(8))] * 2, 5, "10 threads on cores"),
        ([[0], [0]], None, "2 threads on core 0"),
        ([[0], [1]], None, "bound to core 0 of 8"),
        ([[0, 1, 2], [2, 3, 4]], None, "share 2"),
        ([list(range(8))] * 9, None, "9 ranks share 8 cores"),
    ],
)
def test_cores_and_threads(masks: list[list[int]], threads: int | None, words: str | None) -> None:
    every = {rank: facts(rank, "a", mask=mask, threads=threads) for rank, mask in enumerate(masks)}
    found = [one for one in judge_hosts(hosts_of(every), len(masks)) if one.check == "cores"]
    assert bool(found) == (words is not None)
    assert words is None or words in found[0].what


def test_the_cores_of_a_job_are_those_it_was_given(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_1/step_0\n")
    assert cores_of_the_job({}, tmp_path / "none", own) == os.cpu_count()
    (tmp_path / "slurm/job_1").mkdir(parents=True)
    (tmp_path / "cpuset.cpus.effective").write_text("0-63\n")
    (tmp_path / "slurm/job_1/cpuset.cpus.effective").write_text("0-3,8,10-11\n")
    assert cores_of_the_job({}, tmp_path, own) == 7
    assert cores_of_the_job({"SLURM_CPUS_ON_NODE": "2"}, tmp_path, own) == 2
    assert cores_of_the_job({"SLURM_CPUS_ON_NODE": "2(x3)"}, tmp_path, own) == 7


@linux
@pytest.mark.parametrize("mtu", [1500, 9000, 65_520, 65_536])
def test_packets_of_large_interfaces_are_no_finding(mtu: int) -> None:
    one = {"name": "ib0", "mtu": mtu}
    every = {
        rank: facts(rank, "ab"[rank], interfaces=[{**one, "addresses": [f"10.0.0.{rank + 1}"]}]) for rank in range(2)
    }
    pairs = [("a", "b"), ("b", "a")]
    assert list(judge.judge_mtu(hosts_of(every), dict.fromkeys(pairs, min(mtu, MOST)))) == []
    found = list(judge.judge_mtu(hosts_of(every), dict.fromkeys(pairs, 1400)))
    assert [finding.severity for finding in found] == [WRONG]
    assert f"packets of {min(mtu, MOST)} bytes" in found[0].what


@linux
@pytest.mark.parametrize(
    ("name", "value", "is_there"),
    [
        ("GLOO", "eth0", True), ("GLOO", "eth0,lo", True), ("GLOO", "eth0,", True), ("GLOO", "eth", False),
        ("GLOO", "=eth0", False), ("GLOO", "^lo", False), ("GLOO", "eth0,ib0", False),
        ("NCCL", "eth", True), ("NCCL", "ib0,eth", True), ("NCCL", "=eth0", True), ("NCCL", "^lo", True),
        ("NCCL", "=eth", False), ("NCCL", "ib0", False),
    ],
)  # fmt: skip
def test_interfaces_are_named_as_gloo_and_nccl_read_them(name: str, value: str, is_there: bool) -> None:
    there = [{"name": one, "addresses": ["10.0.0.1"], "mtu": 1500} for one in ("lo", "eth0")]
    every = {0: facts(0, "a", interfaces=there, named_interfaces={f"{name}_SOCKET_IFNAME": value})}
    assert [one.check for one in judge_hosts(hosts_of(every), 1)] == ["interfaces"] * (not is_there)


class LateOnce:
    """Four hosts. The first answer of host b to host a is late."""

    def __init__(self) -> None:
        self.pings = 0

    def ask(self, requests: dict[int, dict[str, Any]]) -> dict[int, Any]:
        if next(iter(requests.values()))["do"] == "serve":
            return {rank: {"tcp": 1, "udp": 2} for rank in requests}
        self.pings += 1
        late = {(0, "1"): 0.02} if self.pings == 1 else {}
        return {
            rank: {other: {"latency_s": late.get((rank, other), 1e-4)} for other in one["peers"]}
            for rank, one in requests.items()
        }


@linux
def test_an_answer_that_is_late_once_is_no_finding() -> None:
    hub: Any = LateOnce()
    survey = _NetworkSurvey(hosts_of({rank: facts(rank, host) for rank, host in enumerate(HOSTS)}), hub)
    survey.ping()
    assert judge.late_pairs(survey.measured.latencies) == [("a", "b")]
    assert survey.late_again() == []


@linux
def test_the_warm_up_of_a_volley_counts_neither_bytes_nor_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Peer:
        def settimeout(self, seconds: float) -> None:
            assert seconds > 0

        def recv_into(self, buffer: bytearray) -> int:
            now[0] += 0.125
            return 1000

    monkeypatch.setattr(pairs_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    peer: Any = Peer()
    found = pairs_module._drained(peer, 1.0)
    assert (found["bytes"], found["seconds"]) == (6000, 0.75)


@linux
@pytest.mark.parametrize(("world_size", "checks"), [(8, []), (1000, ["limits"])])
def test_a_rank_opens_files_for_each_other_rank(world_size: int, checks: list[str]) -> None:
    assert [one.check for one in judge_hosts(hosts_of({0: facts(0, "a")}), world_size)] == checks


@linux
def test_locked_memory_counts_with_infiniband_only() -> None:
    for there in (False, True):
        every = {0: facts(0, "a", memlock=(65536, 65536), infiniband=there)}
        assert [one.check for one in judge_hosts(hosts_of(every), 1)] == ["limits"] * there


def test_the_exit_code_is_that_of_the_worst() -> None:
    found = [Finding(severity, "x", ("a",), "", "", "") for severity in (WARNING, WRONG)]
    assert [exit_code([]), exit_code(found[:1]), exit_code(found)] == [0, 1, 2]


@linux
@given(st.integers(1, 12), st.integers(1, 40))
def test_a_report_fits_80_columns(count: int, length: int) -> None:
    names = [f"{number}".rjust(length, "n") for number in range(count)]
    hosts = hosts_of(
        {number: FACTS | {"rank": number, "host": name, "machine": name} for number, name in enumerate(names)}
    )
    pairs = {(one, other): 123.4e9 for one in names for other in names if one != other}
    finding = Finding(WRONG, "ports", tuple(names), "word " * 50, "word " * 30, "word " * 30, (1, 2))
    report = Report(
        count, hosts, [finding], PairMeasurements(dict.fromkeys(pairs, 1e-4), pairs), ["note " * 40], 1.0, "a:1"
    )
    lines = list(report.lines())
    assert max(map(len, lines)) <= 80
    assert json.loads(json.dumps(report.to_json()))["exit_code"] == 2
    assert lines[-1].startswith("1 wrong; checked in")


FACTS: dict[str, Any] = facts(0, "a") if sys.platform == "linux" else {}


# --- packets ---


@pytest.fixture
def echoing() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        threading.Thread(target=echo, args=(server, b"n" * 16), daemon=True).start()
        yield server


@linux
def test_the_size_of_packets_is_found(echoing: socket.socket) -> None:
    port = echoing.getsockname()[1]
    assert path_mtu("127.0.0.1", port, b"n" * 16, 9000) == 9000
    assert path_mtu("127.0.0.1", port, b"n" * 16, 65_536) == MOST
    assert path_mtu("127.0.0.1", port, b"other nonce 1234", 9000) is None


@linux
def test_a_closed_server_leaves_no_thread() -> None:
    before = threading.active_count()
    server = PairServer("127.0.0.1", b"key", b"n" * 16)
    time.sleep(0.1)  # both threads wait
    server.close()
    end_s = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert threading.active_count() <= before


# --- the command ---


@linux
def test_one_machine_alone(project: Path) -> None:
    done = doctor(project, "run.toml", "--json", "found.json")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert done.stdout.startswith("1 rank on 1 host\n")
    report = json.loads((project / "found.json").read_text())
    assert report["exit_code"] == done.returncode
    assert report["hosts"][0]["name"] == socket.gethostname()
    assert not [one["check"] for one in report["findings"] if one["severity"] == "wrong"]
    assert sorted(one.name for one in project.iterdir()) == ["corpus.txt", "found.json", "run.toml"]


def test_torch_is_not_imported(project: Path) -> None:
    code = "import sys; from codescent.verbs.cli import run; run(['doctor']); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done


@linux
def test_a_config_that_does_not_fit_is_a_finding(project: Path) -> None:
    done = doctor(project, "run.toml", "model.vocab_size=256", "parallel.tp=3", "parallel.ranks=3", "--json=-")
    assert done.returncode == 2
    found = [one for one in json.loads(done.stdout)["findings"] if one["severity"] == "wrong"]
    assert {one["check"] for one in found} == {"config"}


# --- what a config says ---


def wanted_of(project: Path, monkeypatch: pytest.MonkeyPatch, **checkpoint: Any) -> tuple[Wanted, Config, Plan]:
    monkeypatch.chdir(project)
    words = [f"checkpoint.{name}={value}" for name, value in checkpoint.items()]
    config = load("run.toml", ["model.vocab_size=256", *words]).config
    return of_config(Wanted(), config, 1, "a"), config, plan_of(config, 1, without_data=True)


def test_room_for_checkpoints_is_that_of_launch(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 10 and 20 are saved: two, and not the newest two, the best and one more."""
    wanted, _, plan = wanted_of(project, monkeypatch, every=0, keep_last=2)
    one = room.checkpoint_bytes(plan)
    assert wanted.checkpoint_bytes == 2 * one
    saved = project / "runs" / "default" / "checkpoints" / "step_00000010"
    saved.mkdir(parents=True)
    (saved / "state").write_bytes(bytes(one))
    assert wanted_of(project, monkeypatch, every=0, keep_last=2)[0].checkpoint_bytes == one
    none, config, plan = wanted_of(project, monkeypatch, every=0, keep_best="false", last="false")
    assert none.checkpoint_bytes == room.checkpoints(config, plan, run_folder(config)).more_bytes == 0


def test_what_ranks_hold_is_what_a_plan_says_and_must_have_room(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot fit passes the doctor, and ends when it allocates its weights."""
    wanted, config, plan = wanted_of(project, monkeypatch)
    held = memory(plan, 0, of_device("cuda"), chunk_tokens=head_chunk_tokens(with_device(config, "cuda")))
    assert (wanted.state_bytes, wanted.host_bytes) == (held.state, 0.0)
    assert held.state < wanted.device_bytes <= held.least
    size = int(wanted.state_bytes)
    for there, found in ((2 * size, []), (2 * size - 1, [("memory", WRONG)])):
        hosts = hosts_of({rank: facts(rank, "a", memory_bytes=there) for rank in range(2)})
        assert [(one.check, one.severity) for one in judge_memory(hosts, wanted)] == found
    large = dataclasses.replace(wanted, device="cuda", device_bytes=3 * 2**30, host_bytes=100.0)
    device = {"uuid": "x", "memory.total": "2048"}
    hosts = hosts_of({0: facts(0, "a", device=device, memory_bytes=100)})
    (finding,) = judge_memory(hosts, large)
    assert (finding.what, finding.expected) == ("rank 0: a device of 2.00 GiB", "3.00 GiB, the least that a step needs")
    assert [
        one.what for one in judge_memory(hosts, dataclasses.replace(large, host_bytes=101.0, device_bytes=0.0))
    ] == ["100 bytes for 1 rank"]
    hosts = hosts_of({0: facts(0, "a", device={"uuid": "MIG-1", "name": "MIG"}, memory_bytes=100)})
    assert list(judge_memory(hosts, large)) == []
    assert list(judge_memory(hosts, Wanted())) == []


def test_damaged_data_is_a_finding(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_: Config) -> None:
        raise UserError("datasets/x: is damaged")

    monkeypatch.chdir(project)
    monkeypatch.setattr("codescent.doctor.from_config.prepared", damaged)
    (finding,) = of_config(Wanted(), load("run.toml", []).config, 1, "a").problems
    assert (finding.severity, finding.check, finding.what) == (WRONG, "config", "datasets/x: is damaged")


def test_a_disk_need_not_have_room_for_no_checkpoint() -> None:
    look = {"path": "/runs", "exists": "/runs", "free_bytes": 100, "all_bytes": 1000, "error": "", "written": ""}
    found = {
        needs: [one.severity for one in judge_folder("run folder", {"a": look}, [], needs, "run.folder")]
        for needs in (None, 0, 100, 101)
    }
    assert found == {None: [WARNING], 0: [], 100: [], 101: [WRONG]}


def test_a_host_that_has_the_data_is_not_written_to(tmp_path: Path) -> None:
    ready = tmp_path / "data" / "corpus-1a"
    ready.mkdir(parents=True)
    found = look(str(tmp_path / "data"), "file", "text", str(ready))
    assert (found["written"], found["free_bytes"], found["error"]) == ("", None, "")
    assert [one.name for one in (tmp_path / "data").iterdir()] == ["corpus-1a"]
    assert look(str(tmp_path / "data"), "file", "text", str(tmp_path / "absent"))["written"]


def test_data_that_this_user_may_not_see_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, stat = str(tmp_path / "data" / "corpus-1a"), os.stat

    def refused(path: Any, *words: Any, **named: Any) -> os.stat_result:
        if str(path) == ready:
            raise PermissionError(13, "Permission denied")
        return stat(path, *words, **named)

    monkeypatch.setattr(os, "stat", refused)
    assert look(str(tmp_path / "data"), "file", "text", ready)["written"]


LAUNCHERS = {
    "our agent": ("-m", "codescent.launch.agent", "--ranks", "2", "--"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=29477"),
    "torchrun that meets": ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
}


@linux
@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_of_a_launcher_meet(project: Path, name: str) -> None:
    before = (sys.executable, *LAUNCHERS[name], *((sys.executable,) if name == "our agent" else ()))
    command = [*before, "-m", "codescent", "doctor", "--json=found.json"]
    done = subprocess.run(
        command, cwd=project, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    report = json.loads((project / "found.json").read_text())
    assert done.stdout.startswith("2 ranks on 1 host, rank 0 at 127.0.0.1:"), done.stderr
    assert [one["rank"] for one in report["hosts"][0]["ranks"]] == [0, 1]
    assert not [one for one in report["findings"] if one["severity"] == "wrong"]


@linux
def test_an_error_of_rank_0_alone_ends_all_ranks_and_is_told_once(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = ["run.toml", "train.num_steps=0", "--wait=60"]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda rank: doctor(project, *words, **env, RANK=rank, LOCAL_RANK=rank), ("0", "1")
        )  # fmt: skip
    assert (first.returncode, second.returncode) == (2, 0)
    assert "train.num_steps" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")


@linux
def test_a_rank_that_loses_rank_0_ends_with_2(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODESCENT_TOKEN", "token")
    this_rank = Rank(1, 1, 2, 2, master_addr="127.0.0.1", master_port=meeting.port)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(examine, this_rank, {"CODESCENT_TOKEN": "token"}, Wanted())
        found = gather(dataclasses.replace(this_rank, rank=0, local_rank=0), _key(this_rank, os.environ), FACTS, 20.0)
        found.close()
        with pytest.raises(UserError, match="rank 0 has gone before the checks ended") as lost:
            ended.result(30)
    assert lost.value.exit_code == 2


@linux
def test_rank_0_does_not_wait_for_ever(project: Path) -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = doctor(project, "--wait=1", "--json=-", MASTER_PORT=str(port), **env)
    assert done.returncode == 2
    (finding,) = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "ranks"]
    assert finding["ranks"] == [1]


# --- who comes to rank 0 ---


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = Meeting(port)
    yield made
    if made.thread.ident is not None:
        made.thread.join(30)
    for one in made.gathered:
        one.close()


class Meeting:
    """Rank 0 of three ranks of this machine, which waits in a thread."""

    key = b"k" * 32

    def __init__(self, port: int) -> None:
        self.port, self.gathered = port, list[Gathered]()
        self.thread = threading.Thread(target=self._gather)

    def place(self, rank: int) -> Rank:
        return Rank(rank, rank, 3, 3, master_addr="127.0.0.1", master_port=self.port)

    def _gather(self) -> None:
        self.gathered.append(gather(self.place(0), self.key, FACTS, 20.0))

    def connect(self) -> socket.socket:
        """Connect as a stranger, as soon as rank 0 listens."""
        for _ in range(100):
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", self.port), timeout=5)
            time.sleep(0.05)
        raise TimeoutError("rank 0 does not listen")

    def join(self, rank: int, key: bytes = key, wait_s: float = 10.0) -> closing[StoreClient]:
        return closing(join(self.place(rank), key, FACTS | {"rank": rank}, wait_s))

    def findings(self) -> list[Finding]:
        """What rank 0 finds wrong with those that came."""
        self.thread.join(30)
        (found,) = self.gathered
        return list(_came(self.place(0), found, hosts_of(found.facts)))


@linux
def test_who_only_connects_is_no_finding(meeting: Meeting) -> None:
    meeting.thread.start()
    meeting.connect().close()  # a probe of ports
    with meeting.connect() as cut_off:  # a rank that was too slow to prove itself
        cut_off.recv(32)
    with meeting.join(1), meeting.join(2):
        assert meeting.findings() == []


@linux
def test_a_stranger_that_takes_all_descriptors_shuts_no_rank_out(meeting: Meeting) -> None:
    """Its connections say nothing. While they are there, rank 0 can accept none; the ranks come again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    meeting.thread.start()
    meeting.connect().close()
    with socket.socket() as one, socket.socket() as other:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (other.fileno() + 1, hard)
        )  # no descriptor is free below this number
        filled = list(all_descriptors())
        try:
            for silent in (one, other):
                silent.connect(("127.0.0.1", meeting.port))  # the kernel has accepted it, and rank 0 cannot
            time.sleep(0.5)
        finally:
            for descriptor in filled:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with meeting.join(1), meeting.join(2):
            assert meeting.findings() == []


@linux
def test_another_token_is_no_finding_where_all_ranks_came(meeting: Meeting) -> None:
    meeting.thread.start()
    meeting.connect().close()
    with pytest.raises(UserError, match="has another token"):
        meeting.join(1, b"another key", 0.1)
    with meeting.join(1), meeting.join(2):
        assert meeting.findings() == []
    assert meeting.gathered[0].rejected


@linux
def test_a_rank_that_comes_twice_is_a_finding_of_its_own(meeting: Meeting) -> None:
    meeting.thread.start()
    meeting.connect().close()
    with meeting.join(1):
        with pytest.raises(UserError, match="refuses it: rank 1 is there already"):
            meeting.join(1, wait_s=0.1)
        with meeting.join(2):
            (finding,) = meeting.findings()
    assert (finding.check, finding.where, finding.ranks) == ("ranks", ("127.0.0.1",), (1,))
    assert "rank 1, which is there already" in finding.what


@linux
def test_a_rank_of_another_run_is_a_finding(meeting: Meeting) -> None:
    meeting.thread.start()
    meeting.connect().close()
    with pytest.raises(UserError, match="refuses it: rank 7 is none of 3 ranks; start each rank once"):
        meeting.join(7, wait_s=0.1)
    with meeting.join(1), meeting.join(2):
        (finding,) = meeting.findings()
    assert "rank 7, which is none of 3 ranks" in finding.what


@linux
def test_a_rank_of_another_number_of_ranks_is_told_so(meeting: Meeting) -> None:
    other = dataclasses.replace(meeting.place(1), world_size=5, local_world_size=5)
    env = {"CODESCENT_TOKEN": "a token"}
    assert _key(other, env) == _key(meeting.place(1), env)  # otherwise it would be told of another token
    meeting.thread.start()
    meeting.connect().close()
    with pytest.raises(UserError, match="refuses it: rank 1 is one of 5 ranks, but the run has 3 ranks; start"):
        join(other, Meeting.key, FACTS | {"rank": 1}, 0.1)
    with meeting.join(1), meeting.join(2):
        (finding,) = meeting.findings()
    assert "says that it is rank 1, which is one of 5 ranks, but the run has 3 ranks" in finding.what


@linux
def test_a_rank_that_comes_again_is_there_and_a_late_one_is_told_to_wait_longer() -> None:
    found, hello = Gathered(LOOPBACK, 1), {"facts": {"rank": 1, "world_size": 2}}
    roll = Roll(2, found)
    with socket.create_server((LOOPBACK, 0)) as server, ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(server.getsockname())) for _ in range(2)]
        mine = [stack.enter_context(server.accept()[0]) for _ in range(2)]
        assert roll.ask(mine[0], hello) == {"refused": ""}
        peers[0].close()
        assert roll.ask(mine[1], hello) == {"refused": ""}
        roll.left(mine[0], "the first has gone")
        assert found.lost == {}
        roll.left(mine[1], "the second, too")
        assert found.lost == {1: "the second, too"}
        roll.wait(0.0)
        assert "a longer --wait" in roll.ask(mine[1], hello)["refused"]


@linux
def test_a_rank_with_another_token_is_found_beside_one_that_came() -> None:
    """Both are on the same machine."""
    every = {rank: facts(rank, "a", address="10.0.0.1") for rank in range(2)}
    found = Gathered("10.0.0.1", 1, facts=every, rejected=["10.0.0.1"])
    assert [one.check for one in _came(Rank(world_size=3), found, hosts_of(every))] == ["ranks", "token"]


@pytest.mark.parametrize("name", ["a..b", "a" * 70, "\udcff"])
def test_what_no_host_can_be_called_is_told(name: str) -> None:
    with pytest.raises(UserError, match="is no name that a host can have"):
        join(Rank(1, 0, 2, 1, master_addr=name, master_port=1), Meeting.key, FACTS, 0.1)


@linux
def test_a_rank_whose_connection_has_gone_may_come_again(meeting: Meeting) -> None:
    meeting.thread.start()
    meeting.connect().close()
    with meeting.join(1):
        pass
    with meeting.join(1), meeting.join(2):
        assert meeting.findings() == []


@linux
@pytest.mark.parametrize("listen", ["lo", "all"])
def test_rank_0_listens_where_the_config_says(listen: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [Rank(rank, 0, 2, 1, master_addr="127.0.0.1", master_port=port) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(gather, places[0], Meeting.key, FACTS, 20.0, listen)
        join(places[1], Meeting.key, FACTS | {"rank": 1}, 10.0).close()
        found = gathered.result(30)
        found.close()
    assert (found.address, found.port, found.facts[0]["address"]) == ("127.0.0.1", port, "127.0.0.1")


@linux
def test_an_interface_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match='listen = "ib7"'):
        gather(Rank(0, 0, 2, 2, master_addr="127.0.0.1"), Meeting.key, FACTS, 0.1, "ib7")


@linux
def test_rank_0_listens_where_master_addr_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with torchrun's store may listen at another interface: it says so there. Without it, a run refuses."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "d0")
    monkeypatch.setattr(addresses, "interfaces", lambda: {"d0": "127.0.0.3", "d1": "127.0.0.2"})
    monkeypatch.setattr(addresses, "route_to", lambda host: "127.0.0.3")
    monkeypatch.setattr(addresses, "resolved", lambda host: ["10.0.0.1"])
    monkeypatch.setattr(addresses, "is_mine", lambda address: True)
    this_rank = Rank(0, 0, 2, 1, master_addr="10.0.0.1", job="listens")
    found = gather(dataclasses.replace(this_rank, agent_store=True), Meeting.key, FACTS, 0.1, "d1")
    found.close()
    assert found.address == "127.0.0.3"
    with pytest.raises(UserError, match=r'"d1" is 127.0.0.2 here, but MASTER_ADDR=10.0.0.1 leads to 10.0.0.1; set'):
        gather(this_rank, Meeting.key, FACTS, 0.1, "d1")


@linux
def test_a_rank_beside_rank_0_finds_it_by_a_name_that_means_loopback_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts maps a machine's own name to 127.0.1.1. Rank 0 listens at another address, as in a run."""
    monkeypatch.setattr(addresses, "resolved", lambda host: ["127.0.1.1"])
    monkeypatch.setattr(addresses, "route_to", lambda host: "127.0.1.1")
    monkeypatch.setattr(addresses, "outside", lambda: {"d0": "127.0.0.3"})
    with socket.create_server(("127.0.0.3", 0)) as free:
        port = free.getsockname()[1]
    places = [Rank(rank, rank, 2, 1, master_addr="node0", master_port=port) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(gather, places[0], Meeting.key, FACTS, 20.0)
        join(places[1], Meeting.key, FACTS | {"rank": 1}, 10.0).close()
        with closing(gathered.result(30)) as found:
            assert (found.address, sorted(found.facts)) == ("127.0.0.3", [0, 1])


@linux
def test_with_torchruns_store_the_port_of_the_run_is_not_taken() -> None:
    """MASTER_PORT is the agent's, and the doctor has not tried it."""
    this_rank = Rank(0, 0, 2, 2, master_port=29400, job="a port of its own is taken", agent_store=True)
    with (
        socket.create_server((LOOPBACK, ports(this_rank)[0])),
        closing(gather(this_rank, Meeting.key, FACTS, 0.1)) as found,
    ):
        assert (found.port, found.taken) == (ports(this_rank)[1], "")


def test_with_torchruns_store_the_port_is_another_one() -> None:
    this_rank = Rank(world_size=2, master_addr="10.0.0.1", master_port=29400)
    agents = Rank(world_size=2, master_addr="10.0.0.1", master_port=29400, agent_store=True)
    assert ports(this_rank)[0] == 29400
    assert ports(agents) == ports(this_rank)[1:]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "nosuch"),
        (["--link", "fast"], "--link: 'fast' is no link"),
        (["--link", "1gbit", "--no-bandwidth"], "does not measure it"),
        (["--hosts", "a:0"], '--hosts: a has "0" slots'),
        (["--hosts", "a:1,a:1"], "a is named twice"),
        (["--site", "lab"], '--site "lab": no such file'),
        (["--nodes", "2"], "give --hosts HOST:SLOTS,... (by ssh), or --to TARGET"),
        (["site.time=00:10:00"], "give --hosts HOST:SLOTS,... (by ssh), or --to TARGET"),
        (["--to", "slurm", "--nodes", "2", "--devices", "4"], "--to slurm needs the time limit"),
        (["--to", "ssh"], "--to ssh needs the names of the machines"),
        (["--hosts", "a:1", "--out", "x.sh"], "--out: is for the script of --to"),
        (["--to", "local", "--nodes", "1", "--devices", "1", "--out", "no/x.sh"], "there is no folder"),
        (["--json", "no/such/file"], "there is no folder"),
        (["--json", "run.toml"], "--json run.toml: it exists, and is no report of this command"),
        (["--json", "."], "it exists, and is no report of this command"),
        (["--json", "/dev/null"], "it exists, and is no report of this command"),
        (["train.num_steps=1"], "name it first"),
        (["run.toml", "train.num_steps=0"], "train.num_steps"),
        (["--wait", "0"], "is not a whole number of at least 1"),
    ],
)
def test_wrong_words_are_refused(project: Path, words: list[str], said: str) -> None:
    done = called(project, "doctor", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert sorted(one.name for one in project.iterdir()) == ["corpus.txt", "run.toml"]


def test_a_report_may_be_written_again(project: Path) -> None:
    for _ in range(2):
        done = called(project, "doctor", "--json", "found.json")
        assert done.returncode in (0, 1), done.stderr
    (project / "link").symlink_to("found.json")
    assert called(project, "doctor", "--json", "link").returncode == 2


def test_folders_that_are_files_and_a_time_that_is_none_are_found(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = called(project, "doctor", "run.toml", "run.folder=run.toml", "data.folder=corpus.txt/data", "--json=-")
    found = [one["what"] for one in json.loads(done.stdout)["findings"] if one["check"] == "folders"]
    assert [one.rpartition(": ")[2] for one in found] == [
        f"{project / name} is no folder" for name in ("run.toml", "corpus.txt")
    ]
    assert done.returncode == 2
    monkeypatch.setenv("CODESCENT_STOP_AT", "soon")
    done = called(project, "doctor")
    assert (done.returncode, done.stderr.count("CODESCENT_STOP_AT")) == (2, 1)


def test_a_working_directory_that_was_removed_is_told(project: Path) -> None:
    gone = project / "gone"
    gone.mkdir()
    command = f'cd "{gone}" && rmdir "{gone}" && exec "{sys.executable}" -P -m codescent doctor'
    env = environment(PYTHONPATH=str(Path(__file__).resolve().parent.parent))
    done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "error: the working directory was removed: change to another one\n")


def test_all_problems_are_told_at_once(project: Path) -> None:
    done = called(project, "doctor", "--hosts", "a:x,b,b", "--link", "fast", "--json", "no/file")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 4, done.stderr


def test_hosts_are_refused_under_a_launcher(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "has started this process already" in called(project, "doctor", "--hosts", "a,b").stderr


@linux
def test_hosts_are_reached_by_ssh(project: Path) -> None:
    """An ssh that runs the words here: three agents of one machine find each other."""
    programs = project / "programs"
    programs.mkdir()
    (programs / "ssh").write_text('#!/bin/bash\nwhile [ "$1" = -o ]; do shift 2; done\nshift\nexec bash -c "$*"\n')
    (programs / "ssh").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = doctor(project, "--hosts=127.0.0.1:2", "--json=found.json", PATH=path)
    assert done.stdout.startswith("2 ranks on 1 host, rank 0 at 127.0.0.1:"), done.stderr
    assert json.loads((project / "found.json").read_text())["world_size"] == 2


SLURM = ("--nodes=2", "--devices=4", "site.time=00:10:00", "site.devices=--gpus-per-node={n}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "slurm", *SLURM], "srun"),
        (["--to", "ssh", "--hosts", "a:2,b:1"], "ssh -o BatchMode=yes"),
        (["--to", "torchrun", "--hosts", "a:2,b:2"], "torchrun --nproc-per-node=2"),
        (["--to", "mpirun", "--hosts", "a:2,b:2", "site.mpi=openmpi"], "mpirun"),
    ],
)
def test_a_script_starts_it_elsewhere(project: Path, words: list[str], said: str) -> None:
    done = called(project, "doctor", "run.toml", "train.num_steps=7", "--no-bandwidth", *words)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "doctor run.toml train.num_steps=7 --no-bandwidth --wait=30" in done.stdout.replace(" \\\n    ", " ")
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True, timeout=20)
