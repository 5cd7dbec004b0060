"""In: changes of rounds, speeds, closed versions. Out: the formulas of delayed Nesterov, and the rules of late rounds.
Does not start ranks (test_served_rounds does)."""

from __future__ import annotations

import pytest
import torch

from codescent.coupling.delayed import Delayed
from codescent.coupling.outer import Outer
from codescent.servers import Ledger, Portion, Portions, Speeds, Verdict


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["none", "sgd", "nesterov"])
def test_changes_of_equal_weights_act_as_their_mean(kind: str, every: int) -> None:
    """Liu et al. 2024: N changes of the same weights are one step of the outer optimizer of local SGD."""
    torch.manual_seed(0)
    weights = [torch.randn(4, 3, dtype=torch.float64)]
    outer = Outer(weights, kind, 0.7, 0.9)
    found = Delayed(weights, kind, 0.7, 0.9, every)
    for _ in range(4):
        changes = [torch.randn(4, 3, dtype=torch.float64) for _ in range(every)]
        (expected,) = outer.step([0], [torch.stack(changes).mean(0)])
        for change in changes:
            found.step([change])
        torch.testing.assert_close(weights[0], expected, rtol=1e-12, atol=1e-12)


def test_between_two_updates_of_the_momentum_a_change_counts_alone() -> None:
    weight = torch.zeros(1, dtype=torch.float64)
    found = Delayed([weight], "nesterov", 1.0, 0.5, 2)
    seen = []
    for change in (2.0, 4.0, 2.0):
        found.step([torch.tensor([change], dtype=torch.float64)])
        seen.append(float(weight))
    assert seen == [-1.0, -1.0 - 2.0 - 0.5 * 3.0, -4.5 - 1.0]


def test_a_slow_worker_takes_the_share_of_its_speed() -> None:
    speeds = Speeds(8)
    assert speeds.steps(0) == 8
    for worker, seconds in ((0, 8.0), (1, 32.0), (2, 8.1), (3, 800.0), (5, 12.0)):
        speeds.record(worker, 8, seconds)
    assert [speeds.steps(worker) for worker in range(6)] == [8, 2, 8, 1, 8, 5]  # 5.6 steps would end after the fastest


def test_a_closed_version_refuses_what_comes_later() -> None:
    ledger = Ledger(0, 3)
    grants = [ledger.pull(worker) for worker in range(3)]
    assert None not in grants
    assert not ledger.close()  # there is nothing to update with
    tickets = [grant.ticket for grant in grants if grant]
    for worker in (0, 1):
        assert ledger.push(worker, 1, tickets[worker]).verdict is Verdict.APPLY
    assert ledger.close()
    assert (ledger.version, ledger.pending) == (1, 0)
    assert ledger.push(2, 1, tickets[2]).verdict is Verdict.REFUSED
    assert ledger.refused == {2: 1}
    assert ledger.pull(2) is not None


def test_portions_that_are_dropped_are_not_given_again() -> None:
    portions = Portions(2, 0, 8, own=True, period=4)
    for worker in (0, 1):
        portions.weights_given(worker)
    assert portions.take(0) == Portion(0, 0)
    portions.done(0, Portion(0, 0))
    assert portions.drop_open() == [Portion(0, 1)]
    assert not portions.is_ready(1)
    portions.weights_given(1)
    assert portions.take(1) == Portion(4, 1)
    assert portions.end == 8
