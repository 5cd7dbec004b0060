"""In: places of ranks, some of which lead nowhere. Out: which device each takes, whether they meet, and what is said.
Does not need CUDA: how many devices there are is pretended, and their names are given."""

from __future__ import annotations

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import torch
from torch.distributed import HashStore

from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.train import addresses, world
from codescent.train.addresses import listening_address, name_interface
from codescent.train.devices import choose_device, name_of, refusal
from codescent.train.rendezvous import Topology, _compared, compare, meet
from codescent.train.world import backends

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
    assert choose_device("auto", Rank(6, 2, 8, 4)) == torch.device("cuda", index)
    assert chosen == [index]


@pytest.mark.parametrize(("wanted", "devices"), [("auto", 2), ("cuda", 3), ("cuda", 0)])
def test_too_few_devices(monkeypatch: pytest.MonkeyPatch, wanted: str, devices: int) -> None:
    see(monkeypatch, devices)
    with pytest.raises(UserError, match=f"this machine has {devices} CUDA devices for 4 local ranks"):
        choose_device(wanted, Rank(6, 2, 8, 4))


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["a 1", "a 2", "b 1", "b 2"], ""),
        (["cpu"] * 4, ""),
        (["a 1", "a 1", "b 1", "b 2"], r"ranks 0, 1 of 4 see the same CUDA device \(a 1\)"),
        (["a 1", "a 2", "cpu", "cpu"], "ranks 2, 3 of 4: no CUDA device, the others have one"),
    ],
)
def test_devices_are_compared(names: list[str], refused: str) -> None:
    found = refusal(names, "auto")
    assert re.search(refused, found) if refused else found == ""


def test_ranks_are_compared_by_the_first_and_told_to_all() -> None:
    """Two machines, numbered in turn; the ranks of each have the same cores."""
    for names, refused in ((["cpu"] * 4, False), (["a 1", "a 1", "b 1", "b 2"], True)):
        store = HashStore()
        with ThreadPoolExecutor(4) as pool:
            places = [Rank(rank, rank // 2, 4, 2) for rank in range(4)]
            tasks = [pool.submit(compare, store, place, "auto", name, {}) for place, name in zip(places, names)]
        errors = [task.exception() for task in tasks]
        if refused:
            assert all("see the same CUDA device" in str(error) for error in errors)
        else:
            assert [task.result() for task in tasks] == [Topology([0, 1], 4)] * 4


def test_bound_ranks_share_their_cores_with_nobody() -> None:
    about = {"device": "cpu", "host": "h", "facts": {}}
    ranks = [{**about, "local_rank": rank % 2, "cores": f"host {rank // 2}"} for rank in range(4)]
    assert _compared(ranks, "auto")["sharing"] == [2, 2, 2, 2]
    assert _compared([{**rank, "cores": f"host {number}"} for number, rank in enumerate(ranks)], "auto") == {
        "problems": [],
        "leaders": [0, 2],
        "sharing": [1, 1, 1, 1],
    }


def test_a_host_that_calls_itself_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(addresses, "route_to", lambda host: "127.0.1.1")
    monkeypatch.setattr(addresses, "interfaces", lambda: {"lo": LOOPBACK, "eth0": "10.0.0.1", "eth1": "10.0.1.1"})
    several = Rank(1, 0, 2, 1, "node0", 1)
    with pytest.raises(UserError, match=r"node0 resolves to 127.0.1.1 on this one.*_IFNAME.*eth0 \(10.0.0.1\), eth1"):
        listening_address(several)
    with pytest.raises(UserError, match=r"the name of this one, .* resolves to loopback"):
        name_interface(several, "10.0.9.9")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    name_interface(several, "10.0.9.9")
    assert listening_address(several) == "10.0.1.1"


def test_rank_0_listens_where_the_others_come_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "route_to", lambda host: "10.0.0.1")
    assert listening_address(Rank(0, 0, 4, 2, "node0", 1)) == "10.0.0.1"
    for local in (Rank(0, 0, 4, 4, "node0", 1), Rank(0, 0, 4, 2, "localhost", 1), Rank(0, 0, 4, 2, "127.0.0.1", 1)):
        assert listening_address(local) == LOOPBACK
    monkeypatch.setattr(addresses, "interfaces", lambda: {"lo": LOOPBACK, "eth0": "10.0.0.1"})
    monkeypatch.setattr(os, "environ", {})
    name_interface(Rank(0, 0, 4, 2, "node0", 1), "10.0.0.1")
    assert os.environ == {"GLOO_SOCKET_IFNAME": "eth0"}


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
    monkeypatch.setattr(world, "choose_device", lambda *_: device)
    monkeypatch.setattr(world, "name_of", str)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda names, **more: asked.update(more, names=names))
    world.World(Rank(), device.type, 1, 1.0, shards_alone=shards_alone)
    assert (asked["names"], asked["device_id"]) == expected


def test_a_cpu_has_a_name() -> None:
    assert name_of(torch.device("cpu")) == "cpu"


# meeting


def said(place: Rank) -> str:
    def join() -> None:
        with closing(meet(place, SECOND)) as meeting:
            compare(meeting.store, place, "cpu", "cpu", {})

    with pytest.raises(UserError) as caught:
        join()
    (problem,) = caught.value.problems
    return problem


def test_who_finds_nobody_says_where_it_looked_and_who_numbered_it() -> None:
    port = free_port()
    problem = said(Rank(1, 1, 2, 2, LOOPBACK, port, launcher="srun"))
    assert problem.startswith(
        f"rank 1 of 2, numbered by srun, on {socket.gethostname()}: rank 0 did not answer at 127.0.0.1:"
    )
    assert f":{port} within 1 s" in problem
    assert "set MASTER_ADDR" in problem


@pytest.mark.parametrize("address", [LOOPBACK, "localhost"])
def test_rank_0_says_that_others_have_not_come(address: str) -> None:
    problem = said(Rank(0, 0, 2, 1, address, free_port(), launcher="srun"))
    assert problem.startswith("rank 0 of 2, numbered by srun, on ")
    assert "not all ranks have connected: missing 1 of 2 (not set after 1 s: rank1)" in problem


def test_rank_0_says_that_the_address_is_not_its_own() -> None:
    problem = said(Rank(0, 0, 2, 1, "nowhere.invalid", free_port(), launcher="srun"))
    assert "but cannot be reached at nowhere.invalid:" in problem
    assert f"set MASTER_ADDR={socket.gethostname()}" in problem


@pytest.mark.parametrize("address", [LOOPBACK, "localhost"])
def test_a_port_that_is_taken(address: str) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        problem = said(Rank(0, 0, 2, 2, address, port))
    assert f"cannot listen at port {port}, which is taken; set MASTER_PORT to a free port" in problem


def test_one_rank_alone_needs_no_port() -> None:
    meet(Rank(), SECOND).store.set("key", "value")
