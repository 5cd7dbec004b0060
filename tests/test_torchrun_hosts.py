"""In: real torchrun on two and three hosts that are network namespaces; workers, agents and hosts that die or come.
Out: the ranks of one start find each other each time, and what is said where they cannot. Skips without root."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrun_hosts import PORT, SCRIPT, Nodes, listeners_of_process

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hosts

TIMES = 20
LONG = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def made() -> Iterator[hosts.Hosts]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Hosts(3) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").write_text(SCRIPT)
    return tmp_path


def elastic(host: int, nodes: str) -> list[str]:
    """The words of `codescent launch --to torchrun` for nodes that come and go, with short waits."""
    words = [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={hosts.address(0)}:{PORT}"]
    conf = f"is_host={int(host == 0)},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [*words, f"--local-addr={hosts.address(host)}", f"--rdzv-conf={conf}", f"--max-restarts={3 * TIMES}"]


def static(host: int, nodes: int = 2, address: str = hosts.address(0)) -> list[str]:
    return [f"--nnodes={nodes}", f"--node-rank={host}", f"--master-addr={address}", f"--master-port={PORT}"]


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("shares", ["0", "1"])
def test_a_worker_that_is_killed_is_started_again(made: hosts.Hosts, folder: Path, shares: str) -> None:
    """Agents that share a store (torch's default) keep what ranks of earlier starts wrote; each counts its starts."""
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            nodes.start(host, *elastic(host, "2"), TORCH_DISABLE_SHARE_RDZV_TCP_STORE=shares)
        kill_workers(nodes)


def kill_workers(nodes: Nodes) -> None:
    """Kill a worker of two, again and again. Each time both train again; in the end they stop well."""
    before: list[int] = []
    for number in range(TIMES):
        found = nodes.train(2, before)
        before = [one.pid for one in found]
        os.kill(found[number % 2].pid, signal.SIGKILL)
    nodes.train(2, before)
    assert nodes.stop() == [0, 0]


@pytest.mark.slow
@LONG
def test_a_worker_of_numbered_nodes_that_is_killed_is_started_again(made: hosts.Hosts, folder: Path) -> None:
    """No agent hears of a failure on the other node: its own ranks fail, and it starts them again."""
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            nodes.start(host, *static(host), f"--max-restarts={3 * TIMES}")
        kill_workers(nodes)


@pytest.mark.slow
@LONG
def test_a_node_that_is_lost_is_replaced(made: hosts.Hosts, folder: Path) -> None:
    """The agent that stays counts more starts than the one that comes."""
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            nodes.start(host, *elastic(host, "2"))
        before: list[int] = []
        for number in range(TIMES):
            before = [one.pid for one in nodes.train(2, before)]
            gone, comes = (1, 2) if number % 2 == 0 else (2, 1)
            nodes.kill(gone)
            nodes.start(comes, *elastic(comes, "2"))
        nodes.train(2, before)
        assert nodes.stop() == [0, 0]


@pytest.mark.slow
@LONG
def test_nodes_come_and_go(made: hosts.Hosts, folder: Path) -> None:
    """One node, two, and one again: no count of starts has moved when the second one comes."""
    with Nodes(made, folder, stock=True) as nodes:
        nodes.start(0, *elastic(0, "1:2"))
        before: list[int] = []
        for _ in range(TIMES):
            before = [one.pid for one in nodes.train(1, before)]
            nodes.start(1, *elastic(1, "1:2"))
            before = [one.pid for one in nodes.train(2, before)]
            nodes.kill(1)
        nodes.train(1, before)
        assert nodes.stop() == [0]


def test_s1_ranks_listen_on_the_interface_of_the_route_alone(made: hosts.Hosts, folder: Path) -> None:
    """Hosts with stock names: each has the same, which means loopback. The agents listen on every interface."""
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            nodes.start(host, *static(host))
        found = nodes.train(2)
        for one in found:
            listeners = set(listeners_of_process(one.pid))
            assert {address for address, _ in listeners} == {hosts.address(one.rank)}, listeners
        agents = {address for address, _ in listeners_of_process(nodes.agents[0].pid)}
        assert any(ipaddress.ip_address(address).is_unspecified for address in agents)  # docs/launch.md says so
        assert nodes.stop() == [0, 0]


def test_s1_ranks_of_one_machine_listen_on_loopback_alone(made: hosts.Hosts, folder: Path) -> None:
    with Nodes(made, folder, stock=True) as nodes:
        nodes.start(0, "--standalone", "--nproc-per-node=2")
        for one in nodes.train(2):
            listeners = {address for address, _ in listeners_of_process(one.pid)}
            assert all(ipaddress.ip_address(address).is_loopback for address in listeners), listeners
            assert listeners
        assert nodes.stop() == [0]


@pytest.mark.parametrize(("listen", "of_store"), [("all", "0.0.0.0"), ("eth0", hosts.address(0))])
@pytest.mark.slow
def test_s1_more_listens_only_where_it_is_asked_for(
    made: hosts.Hosts, folder: Path, listen: str, of_store: str
) -> None:
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            nodes.run(host, hosts.rank_environment({"LISTEN": listen}, host, 2, PORT))
        first, other = (set(listeners_of_process(one.pid)) for one in nodes.train(2))
        assert (of_store, PORT) in first
        assert {address for address, _ in first - {(of_store, PORT)}} == {hosts.address(0)}  # gloo's
        assert {address for address, _ in other} == {hosts.address(1)}
        assert nodes.stop() == [0, 0]


@pytest.mark.slow
def test_f7_ranks_end_with_their_agent_and_the_others_with_them(made: hosts.Hosts, folder: Path) -> None:
    """Only the agent is killed: torch leaves its worker, which would train on as an orphan."""
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            nodes.start(host, *static(host))
        orphan, other = (one.pid for one in nodes.train(2)[::-1])
        os.kill(nodes.agents[1].pid, signal.SIGKILL)
        nodes.until(lambda: not Path(f"/proc/{orphan}").exists(), 10)
        nodes.until(lambda: not Path(f"/proc/{other}").exists(), 30)
        assert nodes.finish()[0] == 1
        assert "rank 1 of 2 ends, because its parent process" in nodes.said()


@pytest.mark.slow
@pytest.mark.parametrize("words", [static, lambda host: elastic(host, "2")], ids=["static", "c10d"])
def test_f4_the_job_ends_when_the_host_of_rank_0_is_lost(made: hosts.Hosts, folder: Path, words: object) -> None:
    """Its agent has the store of all agents: torchrun cannot go on."""
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            nodes.start(host, *words(host))  # type: ignore[operator]
        nodes.train(2)
        nodes.kill(0)
        (code,) = nodes.finish(60)
        assert code != 0
        assert "rank 0 had ended before" in nodes.said() or "RendezvousConnectionError" in nodes.said()


# addresses that lead nowhere (F21), each refused on the host that has to change something


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["0", "1"])
def test_f21_a_name_that_means_loopback_is_refused_with_the_words_for_torchrun(
    made: hosts.Hosts, folder: Path, shares: str
) -> None:
    """torchrun gives its workers the name of a host, unless it has --local-addr."""
    words = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={hosts.address(0)}:{PORT}"]
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            conf = f"--rdzv-conf=is_host={int(host == 0)}"
            nodes.start(host, *words, conf, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=shares)
        nodes.until(lambda: "error: " in nodes.said(), 60)
        (line,) = [line for line in nodes.said().splitlines() if "error: " in line and "MASTER_ADDR=vm" in line]
        other = 1 if line in (folder / "host1.log").read_text() else 0  # which agent has rank 0 is not certain
        assert f"(here --local-addr={hosts.address(other)})" in line


@pytest.mark.parametrize("given", ["localhost", "127.0.0.1"])
def test_f21_loopback_for_several_machines_is_refused_at_once(made: hosts.Hosts, folder: Path, given: str) -> None:
    env = hosts.rank_environment({}, 0, 2, PORT) | {"MASTER_ADDR": given}
    with Nodes(made, folder, stock=True) as nodes:
        nodes.run(0, env)
        assert nodes.finish(60) == [2]
        assert f"set MASTER_ADDR={hosts.address(0)}, for every rank" in nodes.said()


def test_f21_an_address_of_another_machine_is_refused_on_the_host_of_rank_0(made: hosts.Hosts, folder: Path) -> None:
    env = hosts.rank_environment({}, 0, 2, PORT) | {"MASTER_ADDR": hosts.address(2)}
    with Nodes(made, folder, stock=True) as nodes:
        nodes.run(0, env)
        assert nodes.finish(60) == [2]
        said = nodes.said()
        assert f"MASTER_ADDR={hosts.address(2)} does not lead to this machine, where rank 0 is" in said
        assert f"set MASTER_ADDR={hosts.address(0)}, for every rank" in said


@pytest.mark.slow
def test_f21_ranks_of_runs_of_other_sizes_are_named_once(made: hosts.Hosts, folder: Path) -> None:
    with Nodes(made, folder, stock=True) as nodes:
        nodes.run(0, hosts.rank_environment({}, 0, 2, PORT))
        nodes.run(1, hosts.rank_environment({}, 1, 3, PORT))
        assert nodes.finish(60) == [2, 2]
        assert nodes.said().count("rank 0 was started as one of 2 ranks, but rank 1 (pid ") == 1


@pytest.mark.slow
def test_f21_ranks_with_other_code_are_named_once_with_their_hosts(made: hosts.Hosts, folder: Path) -> None:
    other = folder / "copy" / "loop.py"
    other.parent.mkdir()
    other.write_text(SCRIPT + "# changed on one machine")
    with Nodes(made, folder) as nodes:
        nodes.run(0, hosts.rank_environment({}, 0, 2, PORT))
        nodes.run(1, hosts.rank_environment({}, 1, 2, PORT), "copy/loop.py")
        assert nodes.finish(60) == [2, 2]
        said = nodes.said()
        assert len(re.findall(r"error: .*the ranks have different runs: script loop.py is", said)) == 1, said
        assert re.search(r'"\w{16}" on rank 0 \(host0\); "\w{16}" on rank 1 \(host1\)', said)


@pytest.mark.slow
def test_f21_a_port_that_is_taken(made: hosts.Hosts, folder: Path) -> None:
    taken = "import socket; s = socket.create_server(('', 29400)); print('listens', flush=True); input()"
    with Nodes(made, folder, stock=True) as nodes:
        other = nodes.command(0, [sys.executable, "-c", taken])
        with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            nodes.run(0, hosts.rank_environment({}, 0, 2, PORT))
            assert nodes.finish(60) == [2]
            process.communicate("\n", timeout=20)
        assert f"cannot listen at port {PORT}, which is taken; set MASTER_PORT" in nodes.said()


def test_ranks_of_stock_hosts_meet_without_a_word_about_interfaces(made: hosts.Hosts, folder: Path) -> None:
    """The first row of the facts: gloo would advertise 127.0.0.1, and fail after 77 s."""
    with Nodes(made, folder, stock=True) as nodes:
        for host in range(2):
            nodes.run(host, hosts.rank_environment({}, host, 2, PORT))
        nodes.train(2)
        assert nodes.stop() == [0, 0]


@pytest.mark.slow
def test_rank_0_may_have_its_own_name_as_the_address(made: hosts.Hosts, folder: Path) -> None:
    """Debian: the name means loopback on its own machine, and is right on the others."""
    with Nodes(made, folder, stock=True) as nodes:
        nodes.run(0, hosts.rank_environment({}, 0, 2, PORT) | {"MASTER_ADDR": "vm"})
        nodes.run(1, hosts.rank_environment({}, 1, 2, PORT))
        nodes.train(2)
        assert nodes.stop() == [0, 0]


def test_a_rank_that_takes_its_own_machine_for_that_of_rank_0_is_refused(made: hosts.Hosts, folder: Path) -> None:
    with Nodes(made, folder, stock=True) as nodes:
        nodes.run(1, hosts.rank_environment({}, 1, 2, PORT) | {"MASTER_ADDR": "vm"})
        assert nodes.finish(60) == [2]
        assert "MASTER_ADDR=vm is a name that means this machine, and rank 0 does not listen here" in nodes.said()
