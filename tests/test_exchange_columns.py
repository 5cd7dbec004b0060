"""In: runs that send something, on real ranks. Out: the columns sent_bytes and staleness_mean of their metrics.csv.
Does not count what the ranks really send: test_declared and the tests of each method do."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from forker import Forker, Runs

from codescent.plan import Plan
from codescent.record import RunFolder, gossip_order, order
from codescent.servers.changes import STEPPED

STEPS = 20
QUIET = ("train.eval_every=0", "checkpoint.every=0", "train.global_batch_size=12")
ASYNCHRONOUS = "parallel.updates=asynchronous"


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, QUIET, ())


def column(run: RunFolder, name: str) -> list[float]:
    """A column of metrics.csv, which has a row for each step."""
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row[name] for row in rows]


# sent_bytes

SENDING: dict[str, tuple[int, tuple[str, ...], list[float]]] = {
    "local_sgd": (
        3,
        ("parallel.average_every=5", "parallel.synchronous_steps=10"),
        [4 / 3] * 10 + 2 * [0, 0, 0, 0, 4 / 3],
    ),
    "local_sgd, int4": (2, ("parallel.average_every=5", "parallel.wire=int4"), 4 * [0, 0, 0, 0, 1 / 8]),
    "int4 from step 8": (2, ("parallel.wire=int4", "parallel.wire_from=8"), [1] * 8 + [1 / 8] * 12),
}
"""By case: ranks, words, and by step what a rank sends of the bytes of all parameters in fp32: in a ring of n ranks
2 (n - 1) / n of them. Scales and scalars come to that."""


@pytest.mark.parametrize("case", SENDING)
def test_a_row_has_the_bytes_that_the_plan_declares_for_its_step(runs: Runs, case: str) -> None:
    ranks, words, shares = SENDING[case]
    run = runs.run(ranks, *words)
    plan, sent = Plan.from_json(run.plan), column(run, "sent_bytes")
    assert sent == [plan.sent_bytes(0, number) for number in range(STEPS)]
    assert [number / (4 * plan.num_parameters) for number in sent] == pytest.approx(shares, rel=0.05)


def test_one_rank_sends_nothing(runs: Runs) -> None:
    assert set(column(runs.run(1), "sent_bytes")) == {None}


# staleness_mean

SERVED: dict[str, tuple[int, tuple[str, ...]]] = {
    "one server": (4, ("parallel.servers=1", ASYNCHRONOUS)),
    "two servers, bound": (5, ("parallel.servers=2", ASYNCHRONOUS, "parallel.staleness=2")),
    "rounds": (4, ("parallel.servers=1", ASYNCHRONOUS, "parallel.average_every=2")),
}
PACED = "paced 0.01 4"
"""Ranks take so many seconds longer for a pass, the last one four times as many: so gradients are of old weights."""


@pytest.mark.parametrize("case", SERVED)
def test_a_row_has_the_mean_staleness_of_the_pushes_of_its_step(runs: Runs, case: str) -> None:
    """A step is complete when the first server has applied as many pushes as it has parts, whichever they are. With
    rounds all rows of a round have its numbers."""
    ranks, words = SERVED[case]
    run = started(runs, ranks, *words)
    plan = Plan.from_json(run.plan)
    parts, period = plan.mesh.dp, plan.schedule.period
    applied = [row.version - row.base for row in order.read(run.path, 0, STEPS, parts, period)]
    of_rows = [applied[number // period * parts :][:parts] for number in range(STEPS)]
    assert column(run, "staleness_mean") == pytest.approx([fmean(one) for one in of_rows], rel=1e-12)
    assert column(run, "staleness_max") == [max(one) for one in of_rows]
    assert max(applied) > 0


def test_rows_have_the_mean_staleness_of_the_updates_of_asynchronous_gossip(runs: Runs) -> None:
    """Rank 0 counts the updates of all replicas, which have no common order: the sums of all steps are compared."""
    run = started(runs, 2, "parallel.gossip=ring", "parallel.gossip_mode=asynchronous")
    rows = [row for rank in range(2) for row in gossip_order.read(run.path, rank, STEPS) if row.kind == STEPPED]
    found = column(run, "staleness_mean")
    assert 2 * sum(found) == pytest.approx(sum(row.number for row in rows), rel=1e-12)
    assert sum(found) > 0


def started(runs: Runs, ranks: int, *words: str) -> RunFolder:
    """A run that is paced, and must end well."""
    done = runs.start(ranks, *words, fault=PACED)
    assert done.codes == [0] * ranks, done.said
    return runs.last()
