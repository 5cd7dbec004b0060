"""In: processes of a host that are replaced many times, agents that do not fit. Out: nothing is left, nor mixed.
Trains nothing: tests/faults/test_restart.py and test_lost_hosts.py kill ranks of runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from codescent.base.progress import Pages, shared_memory
from codescent.base.token import TOKEN, key_of
from codescent.launch import hosts, run_layouts
from codescent.launch.decider import Decider
from codescent.launch.endings import Endings
from codescent.launch.hosts import LOST, RUN, AgentHub, Follower
from codescent.launch.losses import LossCount
from codescent.launch.places import LossPolicy
from codescent.launch.reports import HostPlace, HostReport, Orders
from codescent.launch.stacks import Stacks
from codescent.launch.supervisor import Supervisor
from codescent.launch.survivors import WAITING_PAGES, Survivors
from codescent.transport.sockets import listen_at


def files() -> int:
    """Open descriptors of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


class Given:
    """Who decides: gives the orders that a test has set."""

    every_s, port = 1.0, 0

    def __init__(self) -> None:
        self.orders, self.reports = Orders(ranks=(0,), slots=(0,)), list[HostReport]()

    def exchange(self, report: HostReport) -> Orders:
        """Say the orders."""
        self.reports.append(report)
        return self.orders

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.skipif(sys.platform != "linux", reason="files of memory")
def test_many_starts_keep_no_file_and_share_no_page() -> None:
    """Fault: each start keeps a descriptor of its agent until it has none left; after 64 starts a process that waits
    has the page of another one, and is taken for ready."""
    pages, stacks, given, pids = Pages(shared_memory(1 + WAITING_PAGES), 1 + WAITING_PAGES), Stacks(), Given(), []
    said = dict[int, str]()

    def start(slot: int, survives: str) -> subprocess.Popen[bytes]:
        said[slot] = survives
        stacks.environment(slot)
        pids.append(subprocess.Popen(["sleep", "600"]))
        return pids[-1]

    supervisor = cast(Supervisor, SimpleNamespace(pages=pages, begin_anew=lambda ranks: None))
    survivors = Survivors(1, given, supervisor, stacks, Endings(), start, print, lambda process: "")
    try:
        survivors.look({}, ends=False)
        before = files()
        for slot in range(1, WAITING_PAGES + 3):  # slot 1 lives and waits; the others die as they wait
            given.orders = Orders(ranks=(0,), slots=tuple(sorted({0, 1, slot})))
            survivors.look({}, ends=False)
            page = said[slot].split()[1]
            assert slot == 1 or page != said[1].split()[1], f"start {slot} has the page of a process that waits"
            if slot > 1:
                pids[-1].kill()
                pids[-1].wait()
        survivors.look({}, ends=False)
        assert files() <= before + 1, "that of slot 1"
    finally:
        for process in pids:
            process.kill()
            process.wait()
        stacks.close()


def test_agents_whose_ranks_overlap_are_refused() -> None:
    """Fault: two hosts have the same rank; which of them takes part is chance, and ranks wait for others in vain."""
    env = {TOKEN: "a secret"}
    listener = listen_at("127.0.0.1", 0, 4)
    where = listener.getsockname()[:2]
    decider = Decider(4, LossPolicy(LossCount(3, 60.0, batch=0)), 2, "a", print, lambda *_: None)
    hub = AgentHub(decider, listener, key_of(env, RUN), 1)
    connect = partial(socket.create_connection, where, 3.0)
    follow = [Follower(2, HostPlace("b", 2), connect, key_of(env, RUN))]
    try:
        end_s = time.monotonic() + 30
        while not follow[0].port and time.monotonic() < end_s:
            hub.exchange(HostReport())
            follow[0].exchange(HostReport())
            time.sleep(0.02)
        follow += [Follower(first, HostPlace("c", 1), connect, key_of(env, RUN)) for first in (1, 3)]
        end_s, over = time.monotonic() + 30, dict[str, str]()
        while len(over) < 2 and time.monotonic() < end_s:
            hub.exchange(HostReport())
            over = {
                name: orders.over
                for name, one in zip("bcd", follow, strict=True)
                if (orders := one.exchange(HostReport())).over
            }
            time.sleep(0.02)
        assert over == {
            "c": "--first 1 --ranks 1: the agent of a has some of these ranks, or all",
            "d": "--first 3 --ranks 1: the agent of b has some of these ranks, or all",
        }
    finally:
        for one in follow:
            one.close()
        hub.close()


def test_an_agent_takes_the_place_of_one_whose_host_has_no_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: no connection ends, host 0 is busy meanwhile, and the agent that is started again is refused."""
    decider = Decider(6, LossPolicy(LossCount(3, 60.0, batch=0)), 2, "a", print, lambda *_: None)
    hub = AgentHub(decider, listen_at("127.0.0.1", 0, 4), key_of({TOKEN: "a secret"}, RUN), 1)

    def ask(host: int, session: str, count: int) -> str:
        place, report = HostPlace(session, count).to_json(), HostReport().to_json()
        answer = hub.ask(object(), {"host": host, "session": session, "place": place, "report": report})
        return str(answer["orders"]["over"]) if answer else ""

    try:
        assert (ask(2, "old", 2), ask(2, "new", 2)) == ("", "")
        assert "the agent of old has some" in ask(3, "other", 3), "the old one may still live"
        monkeypatch.setattr(hosts, "SILENT_S", -1.0)
        assert (ask(2, "new", 2), ask(3, "other", 3)) == ("", "")
        assert ask(2, "old", 2) == LOST.over
    finally:
        hub.close()


def test_a_layout_that_was_not_found_for_want_of_an_answer_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: one answer that came too late, on a busy machine, and the run never goes on with fewer ranks."""
    folder = SimpleNamespace(config_text="", plan={})
    monkeypatch.setattr(run_layouts, "RunFolder", SimpleNamespace(open=lambda path: folder))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(run_layouts, "PROGRAM", "late")
    (tmp_path / "late.py").write_text("import sys; sys.exit('the disk is full')")
    (tmp_path / "answers.py").write_text('print(\'{"ranks": 1, "values": {}, "notes": [], "parts": [0]}\')')
    pages: Any = SimpleNamespace(folder="runs/a", read=lambda rank: SimpleNamespace(position=5))
    said = list[str]()
    fewer = run_layouts.layouts_of_run(pages, 2, said.append)
    assert fewer(1) is None
    assert said == ["codescent: no layout of at most 1 ranks is found: the disk is full"]
    monkeypatch.setattr(run_layouts, "PROGRAM", "answers")
    found = fewer(1)
    assert found is not None
    assert found.ranks == 1
    monkeypatch.setattr(run_layouts, "PROGRAM", "late")
    assert fewer(1) is found, "it is known"
    assert [fewer(0) for _ in range(5)] == [None] * 5
    assert len(said) == 1 + run_layouts.MOST_FAILURES
