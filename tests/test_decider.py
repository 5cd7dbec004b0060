"""In: what hosts report of their processes. Out: who takes which rank on which host, and when the run ends.
Starts no process: tests/faults/test_lost_hosts.py kills ranks and agents of runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from codescent.launch.decider import Decider
from codescent.launch.losses import LossCount
from codescent.launch.places import FewerRanks, LossPolicy
from codescent.launch.reports import HostPlace, HostReport, Orders, ProcessDeath

KILLED = "was killed by SIGKILL (9)"


class Run:
    """A decider, and hosts that do what it orders at once."""

    def __init__(self, *counts: int, spares: int = 0, fewer: tuple[int, ...] = (), most: int = 3) -> None:
        found = (lambda there: next((FewerRanks(n) for n in fewer if n <= there), None)) if fewer else None
        self.said: list[str] = []
        self.crashes: list[tuple[int, str]] = []
        self.now_s = 0.0
        self.decider = Decider(
            sum(counts),
            LossPolicy(LossCount(most, 3600.0, batch=0), spares, found),
            counts[0],
            "a",
            self.said.append,
            lambda rank, death, host: self.crashes.append((rank, host)),
            lambda: self.now_s,
        )
        self.reports: dict[int, HostReport] = {0: HostReport(step=5, progressed=True)}
        first = counts[0]
        for name, count in zip("bcd", counts[1:], strict=False):
            self.decider.join(first, HostPlace(name, count))
            self.reports[first] = HostReport()
            first += count
        self.look()

    def look(self) -> None:
        """All hosts report, and the decider decides."""
        self.now_s += 2.0
        for host, report in self.reports.items():
            self.decider.hear(host, replace(report, number=self.decider.places.number))
        self.decider.look()

    def die(self, host: int, *slots: int) -> None:
        """Processes of a host are killed."""
        deaths = tuple(ProcessDeath(slot, 100 + slot, -9, KILLED) for slot in slots)
        self.reports[host] = replace(self.reports[host], deaths=(*self.reports[host].deaths, *deaths))
        self.look()

    def become_ready(self) -> None:
        """All processes that were started can take a place."""
        for host, report in self.reports.items():
            self.reports[host] = replace(report, ready=self.decider.orders([host])[host].slots)
        self.look()

    def orders(self, host: int = 0) -> Orders:
        """What a host does now."""
        return self.decider.orders([host])[host]


def test_a_rank_is_started_again_on_its_own_host() -> None:
    """Fault: another host starts it, which has no device for it; or ranks that live get other numbers."""
    run = Run(2, 2)
    run.die(2, 2)
    assert run.orders().ranks == (0, 1, 4, 3)
    assert run.orders(2).slots == (4, 3)
    assert run.orders(0).slots == (0, 1)
    assert run.crashes == [(2, "b")]


def test_nobody_imports_torch_while_the_others_meet() -> None:
    """Fault: the process in place of a dead rank, for which nobody waits, takes the processor of the ranks that go on
    with fewer, until they have a step; or it is never started where they have none."""
    run = Run(4, fewer=(3,))
    run.reports[0] = replace(run.reports[0], progressed=False)
    run.die(0, 1)
    assert (run.orders().ranks, run.orders().slots) == ((0, 3, 2), (0, 3, 2))
    run.reports[0] = replace(run.reports[0], progressed=True)
    run.look()
    assert run.orders().slots == (0, 3, 2, 4)
    run = Run(4, fewer=(3,))
    run.reports[0] = replace(run.reports[0], progressed=False)
    run.die(0, 1)
    for _ in range(6):
        run.look()
    assert 4 in run.orders().slots


def test_ranks_of_a_host_follow_each_other() -> None:
    """Fault: after a loss rank 0 is on a host where nobody looks for it, or the ranks of a host are torn apart."""
    run = Run(2, 2, fewer=(3,))
    run.die(0, 0)
    assert run.orders().ranks == (1, 3, 2), "host 0 has rank 0, and host b the others"
    run = Run(1, 2, fewer=(2,))
    run.die(0, 0)
    assert run.orders().ranks[0] == 3, "they wait for the new process of host 0"
    assert run.orders().ranks[1:] == (1,) or run.orders().ranks[1:] == (2,)


def test_a_host_without_ranks_ends_nothing() -> None:
    """Fault: a host that only waits is asked to end, and from then on each loss ends the run, or nobody joins."""
    run = Run(2, 2, fewer=(2,))
    run.decider.lose(2, "its agent has ended")
    run.look()
    run.decider.join(2, HostPlace("b", 2))
    run.reports[2] = HostReport(ends=True)
    run.look()
    run.decider.lose(2, "its agent has ended")
    run.look()
    assert (run.decider.is_lost(2), run.orders().ends) == (True, False)
    assert not run.decider.is_lost(9), "it comes as the run ends"


def test_what_a_lost_host_has_said_counts_no_more() -> None:
    """Fault: two starts in a row without a step do not end the run, because a host that is gone had done steps."""
    run = Run(3, 1, fewer=(3, 2, 1), most=99)
    run.reports[3] = HostReport(step=7, progressed=True)
    run.look()
    run.decider.lose(3, "its agent has ended")
    run.look()
    run.reports[0] = HostReport(step=1)
    run.die(0, 1)
    run.die(0, 2)
    assert run.orders().over.startswith("the run ends: 2 starts in a row")


def test_a_lost_host_shrinks_the_run_and_comes_back() -> None:
    """Fault: processes are asked for on a host that is gone; it comes back with the slots of before, which are dead."""
    run = Run(2, 2, fewer=(2,))
    run.decider.lose(2, "its agent has ended")
    run.look()
    assert (run.orders().ranks, run.orders(2).slots) == ((0, 1), ())
    assert run.decider.is_lost(2)
    assert run.said[0] == "codescent: b is lost: its agent has ended"
    run.decider.join(2, HostPlace("b", 2))
    run.reports[2] = HostReport()
    run.look()
    assert run.orders(2).slots == (4, 5)
    run.become_ready()
    assert run.orders().ranks == (0, 1, 4, 5)
    assert run.orders().urgent < run.orders().number, "they join at the end of a step"


def test_with_restart_a_lost_host_needs_spares() -> None:
    """Fault: the others wait for a host that is gone; or spares on other hosts are not taken."""
    run = Run(2, 2, spares=2)
    run.decider.lose(2, "it was silent for 10 s")
    run.look()
    assert run.orders().ranks == (0, 1, 4, 5)
    run = Run(2, 2, spares=1)
    run.decider.lose(2, "it was silent for 10 s")
    run.look()
    assert run.orders().over.startswith("the run ends: b is lost, and 3 processes are left for 4 ranks")
    assert run.orders().code == 1


def test_a_host_whose_ranks_have_ended_is_not_lost() -> None:
    """Fault: at the end of a run the first agent that leaves is taken for a loss, and the last step is done again."""
    run = Run(1, 1, fewer=(1,))
    run.reports[1] = HostReport(ends=True)
    run.look()
    run.decider.lose(1, "its agent has ended")
    run.look()
    assert (run.orders().number, run.orders().over, run.orders().ends) == (0, "", True)
    run.decider.finish()
    assert run.orders().done


def test_an_error_of_a_rank_ends_all_hosts() -> None:
    """Fault: a rank with a wrong input is started again, or only its own host ends."""
    run = Run(1, 1)
    run.reports[1] = HostReport(failed="rank 1 of 2 on b ended with exit code 2: see its message", code=2)
    run.look()
    assert (run.orders().over, run.orders().code) == (run.reports[1].failed, 2)


def test_processes_that_die_as_they_wait_are_not_started_for_ever() -> None:
    """Fault: a spare that cannot start is started again every tenth of a second."""
    run = Run(1, spares=1, most=2)
    started = []
    for _ in range(9):
        new = [slot for slot in run.orders().slots if slot > 0 and slot not in started]
        started += new
        run.die(0, *new)
    assert started == [1, 2, 3]


@pytest.mark.parametrize("report", [HostReport(), HostReport((ProcessDeath(1, 2, -9, KILLED, "", 3),), (4,), True, 7)])
def test_reports_and_orders_are_json(report: HostReport) -> None:
    """Fault: a message comes back as another object, so a host does what was not decided."""
    assert HostReport.of(json.loads(json.dumps(report.to_json()))) == report
    orders = Orders(3, (0, 4), {"parallel.dp_replicate": 2}, ("a note",), 2, (4,), "over", 1, True, True)
    assert Orders.of(json.loads(json.dumps(orders.to_json()))) == orders
