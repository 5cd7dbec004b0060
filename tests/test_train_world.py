"""In: places of ranks, some of which lead nowhere. Out: which device each takes, whether they meet, and what is said.
Does not need CUDA: how many devices there are is pretended, and their names are given."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import psutil
import pytest
import torch
from runs import make_project

from codescent.base.device import unique_name
from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.base.token import key_of
from codescent.launch.allocator import MARKER
from codescent.meeting import addresses, interfaces, search
from codescent.meeting.addresses import addresses_of_first, listening_address
from codescent.meeting.agent_store import AgentStore
from codescent.meeting.compared import Topology, _compared, compare
from codescent.meeting.facts import facts_of_process
from codescent.meeting.interfaces import name_interface
from codescent.meeting.rendezvous import meet
from codescent.meeting.store import LocalStore, StoreError
from codescent.train import world
from codescent.train.devices import backends, choose_devices, refusal, versions
from codescent.train.torch_store import open_agent

SECOND = timedelta(seconds=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def see(monkeypatch: pytest.MonkeyPatch, devices: int) -> list[int]:
    """Pretend so many CUDA devices; returns where the chosen ones are noted."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize("marks", [(), ("cuda",)])
def test_only_tests_with_the_mark_find_a_device(monkeypatch: pytest.MonkeyPatch, marks: tuple[str, ...]) -> None:
    conftest._hidden.undo()  # what this test has itself
    see(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    item: Any = SimpleNamespace(get_closest_marker=dict.fromkeys(marks, "").get)
    conftest.pytest_runtest_setup(item)
    devices = "0,1" if marks else ""
    assert (torch.cuda.is_available(), os.environ["CUDA_VISIBLE_DEVICES"]) == (bool(marks), devices)
    conftest._hidden.undo()


@pytest.mark.parametrize(("devices", "index"), [(4, 2), (8, 2), (1, 0)])
def test_each_rank_takes_its_device_or_the_one_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, devices: int, index: int
) -> None:
    chosen = see(monkeypatch, devices)
    assert choose_devices("auto", Rank(6, 2, 8, 4)) == (torch.device("cuda", index),)
    assert chosen == [index]


@pytest.mark.parametrize(("wanted", "devices"), [("auto", 2), ("cuda", 3), ("cuda", 0)])
def test_too_few_devices(monkeypatch: pytest.MonkeyPatch, wanted: str, devices: int) -> None:
    see(monkeypatch, devices)
    with pytest.raises(UserError, match=f"this machine has {devices} CUDA devices for 4 local ranks"):
        choose_devices(wanted, Rank(6, 2, 8, 4))


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["a 1", "a 2", "b 1", "b 2"], ""),
        (["cpu"] * 4, ""),
        (["a 1", "a 1", "b 1", "b 2"], r"ranks 0, 1 of 4 see the same GPU \(a 1\)"),
        (["a 1", "a 2", "cpu", "cpu"], "ranks 2, 3 of 4: no GPU, the others have one"),
    ],
)
def test_devices_are_compared(names: list[str], refused: str) -> None:
    found = refusal(names, "auto")
    assert re.search(refused, found) if refused else found == ""


def test_ranks_are_compared_by_the_first_and_told_to_all() -> None:
    """Two machines, numbered in turn; the ranks of each have the same cores."""
    for names, refused in ((["cpu"] * 4, False), (["a 1", "a 1", "b 1", "b 2"], True)):
        store = LocalStore(SECOND)
        with ThreadPoolExecutor(4) as pool:
            places = [Rank(rank, rank // 2, 4, 2) for rank in range(4)]
            tasks = [
                pool.submit(compare, store, place, name, {}, partial(refusal, wanted="auto"))
                for place, name in zip(places, names)
            ]
        errors = [task.exception() for task in tasks]
        if refused:
            assert all("see the same GPU" in str(error) for error in errors)
        else:
            assert [task.result() for task in tasks] == [Topology([0, 1], 4)] * 4


def test_bound_ranks_share_their_cores_with_nobody() -> None:
    about = {"device": "cpu", "host": "h", "facts": {}}
    ranks = [{**about, "local_rank": rank % 2, "cores": f"host {rank // 2}"} for rank in range(4)]
    assert _compared(ranks, lambda names: "")["sharing"] == [2, 2, 2, 2]
    assert _compared([{**rank, "cores": f"host {number}"} for number, rank in enumerate(ranks)], lambda names: "") == {
        "problems": [],
        "leaders": [0, 2],
        "sharing": [1, 1, 1, 1],
    }


def has_interfaces(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    ipv4 = {"lo": LOOPBACK, **found}.items()
    monkeypatch.setattr(interfaces, "_addresses", lambda family: iter(ipv4 if family == socket.AF_INET else ()))


def test_a_host_that_calls_itself_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(addresses, "route_to", lambda host: "127.0.1.1")
    monkeypatch.setattr(addresses, "resolved", lambda host: ["127.0.1.1"])
    has_interfaces(monkeypatch, eth0="10.0.0.1", eth1="10.0.1.1")
    several = Rank(0, 0, 2, 1, "node0", 1)
    with pytest.raises(
        UserError, match=r"node0 resolves to 127.0.1.1 on this one.*parallel.listen.*eth0 \(10.0.0.1\), e"
    ):
        listening_address(several)
    assert listening_address(several, "eth1") == "10.0.1.1"
    assert addresses_of_first(several) == ["10.0.0.1", "10.0.1.1"]  # rank 0 listens at one of them, if it is here
    monkeypatch.setattr(interfaces, "_own_name_is_loopback", lambda: True)
    with pytest.raises(UserError, match=r"rank 1: .* the name of this one, .* resolves to loopback"):
        name_interface("rank 1", "10.0.9.9", is_local=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth1"
    name_interface("rank 1", "10.0.9.9", is_local=False)
    assert listening_address(several) == "10.0.1.1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"


def test_rank_0_listens_where_the_others_come_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(addresses, "route_to", lambda host: "10.0.0.1")
    has_interfaces(monkeypatch, eth0="10.0.0.1")
    assert listening_address(Rank(0, 0, 4, 2, "node0", 1)) == "10.0.0.1"
    assert listening_address(Rank(0, 0, 4, 2, "node0", 1), "all") == "0.0.0.0"
    name_interface("rank 0", "10.0.0.1", is_local=False)
    assert os.environ == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


@pytest.mark.parametrize("value", ["nope", "eth", "eth0,nope", "=eth0"])
def test_an_interface_for_gloo_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """gloo wants whole names."""
    has_interfaces(monkeypatch, eth0="10.0.0.1")
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": value})
    said = rf"rank 0: GLOO_SOCKET_IFNAME={value}: no network interface of this machine; it has .*eth0 \(10.0.0.1\)"
    with pytest.raises(UserError, match=said):
        name_interface("rank 0", "10.0.0.1", is_local=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0,lo"
    name_interface("rank 0", "10.0.0.1", is_local=False)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth0,lo"


@pytest.mark.parametrize("given", ["localhost", "127.0.0.1", "::1", "node0", socket.gethostname()])
def test_all_names_of_one_machine_are_loopback(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr(os, "environ", {})
    local = Rank(0, 0, 4, 4, given, 1)
    assert listening_address(local) == LOOPBACK
    assert addresses_of_first(local) == [LOOPBACK]
    name_interface("rank 0", LOOPBACK, is_local=True)
    assert os.environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize("given", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_loopback_with_several_machines_is_refused_with_the_address_that_would_do(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setattr(os, "environ", {})
    has_interfaces(monkeypatch, eth0="10.0.0.1")
    said = rf"MASTER_ADDR={given} is this machine alone, but only 2 of 4 ranks are on it; set MASTER_ADDR"
    with pytest.raises(UserError, match=f"{said}=10.0.0.1, for every rank"):
        listening_address(Rank(0, 0, 4, 2, given, 1))
    with pytest.raises(UserError, match=f"{said} to the address of the machine of rank 0"):
        addresses_of_first(Rank(2, 0, 4, 2, given, 1))
    with pytest.raises(UserError, match=r"start torchrun .*--local-addr=10.0.0.1.*--rdzv-endpoint 10.0.0.1"):
        listening_address(Rank(0, 0, 4, 2, given, 1, agent_store=True))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # who names it says that the machines share it
    assert listening_address(Rank(0, 0, 4, 2, given, 1)) == (LOOPBACK if given == "localhost" else given)


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has_interfaces(monkeypatch, eth0="10.0.0.1")
    with pytest.raises(UserError, match=r'parallel.listen = "ib0": no network interface of this machine; it has lo '):
        listening_address(Rank(0, 0, 4, 2, "node0", 1), "ib0")


CUDA, BOTH = torch.device("cuda", 3), "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("device", "ranks", "shards_alone", "expected"),
    [
        (torch.device("cpu"), 1, True, ("gloo", None)),
        (torch.device("cpu"), 4, False, ("gloo", None)),
        (CUDA, 4, False, (BOTH, CUDA)),
        (CUDA, 4, True, (BOTH, CUDA)),
        (CUDA, 1, False, ("gloo", None)),  # a run of one process does not start NCCL
        (CUDA, 1, True, (BOTH, None)),  # nor does a script's, before fully_shard sends
    ],
)
def test_nccl_starts_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, ranks: int, shards_alone: bool, expected: tuple[str, Any]
) -> None:
    assert backends(device, ranks, shards_alone=shards_alone) == expected
    if ranks > 1:
        return
    asked: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(world, "choose_devices", lambda *_, **__: (device,))
    monkeypatch.setattr(world, "unique_name", str)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda names, **more: asked.update(more, names=names))
    world.World(Rank(), device.type, 1, 1.0, shards_alone=shards_alone)
    assert (asked["names"], asked["device_id"]) == expected


def test_what_decides_the_numbers_of_a_rank_is_compared() -> None:
    env = {"NVIDIA_TF32_OVERRIDE": "1", "HOME": "/root"}
    found = facts_of_process("code", "gloo", versions("gloo"), env)
    assert found["Python"].endswith(platform.python_version())
    assert (
        found | {"codescent": "code", "torch": torch.__version__, "backend": "gloo", "NVIDIA_TF32_OVERRIDE": "1"}
        == found
    )
    assert not {"HOME", "ATEN_CPU_CAPABILITY", "NCCL"} & set(found)


def test_the_version_of_nccl_is_compared_where_ranks_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 21, 5))
    assert versions("gloo") == {"torch": torch.__version__}
    assert versions("cpu:gloo,cuda:nccl") == {"torch": torch.__version__, "NCCL": "2.21.5"}


def test_an_own_script_is_compared_and_a_module_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "loop.py"
    digests = set()
    for text in ("a = 1", "a = 2"):
        script.write_text(text)
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script), __spec__=None))
        digests.add(facts_of_process("code", "gloo", {}, {})["script loop.py"])
    assert len(digests) == 2
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script), __spec__="of a module"))
    assert "script loop.py" not in facts_of_process("code", "gloo", {}, {})


def test_a_cpu_has_a_name() -> None:
    assert unique_name(torch.device("cpu")) == "cpu"


# meeting


@pytest.fixture
def shared_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines that share their loopback interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def said(this_rank: Rank) -> str:
    def join() -> None:
        with closing(meet(this_rank, SECOND, open_agent)):
            pass

    with pytest.raises(UserError) as caught:
        join()
    (problem,) = caught.value.problems
    return problem


def test_who_finds_nobody_says_where_it_looked_and_who_numbered_it() -> None:
    port = free_port()
    problem = said(Rank(1, 1, 2, 2, LOOPBACK, port, launcher="srun"))
    assert problem.startswith(
        f"rank 1 of 2 on {socket.gethostname()}, numbered by srun: rank 0 did not answer at 127.0.0.1:"
    )
    assert f":{port} within 1 s" in problem
    assert "set MASTER_ADDR" in problem


@pytest.mark.parametrize("address", [LOOPBACK, "localhost"])
@pytest.mark.usefixtures("shared_loopback")
def test_rank_0_says_that_others_have_not_come(address: str) -> None:
    problem = said(Rank(0, 0, 3, 1, address, free_port(), launcher="srun"))
    here = socket.gethostname()
    assert (
        f"not all ranks came within 1 s (parallel.meet_s): missing ranks 1, 2 of 3; came: rank 0 (on {here})" in problem
    )


def test_rank_0_says_that_the_address_is_not_its_own() -> None:
    problem = said(Rank(0, 0, 2, 1, "nowhere.invalid", free_port(), launcher="srun"))
    assert "MASTER_ADDR=nowhere.invalid does not lead to this machine, where rank 0 is" in problem
    assert "set MASTER_ADDR" in problem.partition("rank 0 is")[2]


def test_an_interface_to_listen_on_that_the_address_does_not_lead_to(monkeypatch: pytest.MonkeyPatch) -> None:
    has_interfaces(monkeypatch, eth0="10.0.0.1", ib0="127.0.0.2")
    monkeypatch.setattr(addresses, "resolved", lambda host: ["10.0.0.1"])
    monkeypatch.setattr(addresses, "is_mine", lambda address: True)
    with pytest.raises(UserError) as caught:
        meet(Rank(0, 0, 2, 1, "node0", free_port()), timedelta(minutes=5), open_agent, "ib0")
    (problem,) = caught.value.problems
    assert 'parallel.listen = "ib0" is 127.0.0.2 here, but MASTER_ADDR=node0 leads to 10.0.0.1; set' in problem
    assert problem.endswith("set MASTER_ADDR=127.0.0.2, for every rank")


class SilentAgent:
    """The store of an agent that ends before rank 0 has written where it listens."""

    def __init__(self, *_: object) -> None:
        pass

    def set(self, *_: object) -> None:
        raise StoreError("the agent has ended")

    def publish(self, addresses: list[str], port: int) -> None:
        store = object.__new__(AgentStore)
        store._this_rank, store._store = Rank(0, 0, 2, 1, "10.0.0.1", 29400), self  # type: ignore[assignment]
        store.publish(addresses, port)


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.usefixtures("shared_loopback")
def test_an_error_of_rank_0_closes_its_port(monkeypatch: pytest.MonkeyPatch, agent: bool) -> None:
    def unknown(this_rank: Rank) -> str:
        raise UserError("no interface")

    def listens() -> set[Any]:
        return {one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN}

    before, this_rank = listens(), Rank(0, 0, 2, 1, LOOPBACK, free_port(), agent_store=agent)
    if agent:
        monkeypatch.setattr(search, "AgentStore", SilentAgent)
    else:
        monkeypatch.setattr(search, "outward", unknown)
    with pytest.raises(UserError, match="10.0.0.1:29400 did not answer" if agent else "no interface") as caught:
        meet(this_rank, timedelta(seconds=20), open_agent, None if agent else "all")
    assert caught.value.__traceback__ is not None  # which holds the sockets
    assert listens() == before


ORPHAN = """
import os, time
import codescent
while os.getppid() == int(os.environ["SHELL_PID"]):
    time.sleep(0.01)
print("orphan", flush=True)  # as if importing torch had taken so long
codescent.init("cpu", meet_s=30)
print("met", flush=True)
"""


RESTARTS = """
import os, sys, time
import codescent
from codescent.verbs.cli import run
execve = os.execve
def late(*words):
    while os.getppid() == int(os.environ["SHELL_PID"]):
        time.sleep(0.01)
    print("orphan", flush=True)
    execve(*words)
os.execve = late
words = ["train", "run.toml", "train.allocator=auto", "parallel.meet_s=20"]
sys.exit(run(words, may_restart=True))
"""


@pytest.mark.parametrize(
    "program",
    [
        ORPHAN,
        pytest.param(RESTARTS, marks=pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no restart")),
    ],
    ids=["own loop", "train"],
)
def test_a_rank_whose_launcher_ended_while_it_began_does_not_meet(tmp_path: Path, program: str) -> None:
    make_project(tmp_path)
    (tmp_path / "rank.py").write_text(program)
    ranked = dict.fromkeys(("RANK", "LOCAL_RANK"), "1") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    env = {**os.environ, **ranked, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    for name in ("GLIBC_TUNABLES", MARKER):
        env.pop(name, None)
    env |= {"TORCHELASTIC_RUN_ID": "none", "PYTHONPATH": str(Path(search.__file__).parents[2])}
    command = f'SHELL_PID=$$ "{sys.executable}" rank.py & sleep 0.5'
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "orphan\n", done.stderr
    assert re.search(r"rank 1 of 2 ends, because its parent process \d+ has ended", done.stderr)


@pytest.mark.parametrize("name", ["a..b", "a" * 70, "\udcff"])
def test_what_no_host_can_be_called_is_refused(name: str) -> None:
    problem = said(Rank(0, 0, 2, 1, name, free_port()))
    assert "is no name that a host can have); set MASTER_ADDR" in problem
    assert "is no name that a host can have); either its agent" in said(Rank(1, 0, 2, 1, name, 1, agent_store=True))
    assert key_of({"CODESCENT_TOKEN": "\udcff"}, "run") != key_of({"CODESCENT_TOKEN": "\udcfe"}, "run")


@pytest.mark.parametrize("address", [LOOPBACK, "localhost"])
def test_a_port_that_is_taken(address: str) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        problem = said(Rank(0, 0, 2, 2, address, port))
    assert f"cannot listen at port {port}, which is taken; set MASTER_PORT to a free port" in problem


def test_one_rank_alone_needs_no_port() -> None:
    meet(Rank(), SECOND, open_agent).store.set("key", "value")
