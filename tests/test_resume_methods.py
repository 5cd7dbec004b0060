"""In: runs of methods with state beside the weights, on layouts of several ranks. Out: a resumed run, bitwise the same.
Does not test methods on replicas of one rank (the tests of each method do), nor kills (test_train_resume does)."""

from __future__ import annotations

from pathlib import Path

import pytest
from forker import Forker
from runs import losses

from codescent.record import RunFolder

AVERAGES = ("average_every=5", "outer_optimizer=nesterov")
METHODS: dict[str, tuple[int, tuple[str, ...]]] = {
    "outer int4, zero 3": (4, (*AVERAGES, "wire=int4", "dp_shard=2", "zero_stage=3")),
    "outer powersgd, fragments, tp": (4, (*AVERAGES, "wire=powersgd:2", "fragments=2", "overlap_steps=2", "tp=2")),
    "mean int8, pp": (4, ("average_every=5", "wire=int8", "pp=2")),
    "gossip topk, tp": (4, ("gossip=ring", "gossip_every=5", "wire=topk:0.1", "gossip_rate=0.3", "tp=2")),
    "gossip pairs, zero 3": (8, ("gossip=pairs", "gossip_every=5", "dp_shard=2", "zero_stage=3")),
    "workers serve": (3, ("servers=workers",)),
    "3 servers, int4": (5, ("servers=3", "wire=int4")),
    "workers serve rounds, int4": (2, ("servers=workers", "average_every=5", "wire=int4")),
}
QUICK = ("outer int4, zero 3", "workers serve rounds, int4")
STEPS, AT = 20, 10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]
)
def test_a_resumed_run_is_bitwise(project: Path, forker: Forker, name: str) -> None:
    ranks, keys = METHODS[name]
    words = [f"parallel.{key}" for key in keys]
    words += ["train.global_batch_size=24", f"optimizer.decay_steps={STEPS}", "train.eval_every=5", "model.dropout=0.1"]
    folder = name.replace(", ", "-").replace(" ", "-")
    whole = forker.train(project, f"whole-{folder}", ranks, *words, f"train.num_steps={STEPS}")
    forker.train(project, folder, ranks, *words, f"train.num_steps={AT}")
    again = forker.train(project, folder, ranks, *words, f"train.num_steps={STEPS}", resume=True)
    assert [row["val_loss"] for row in rows(again)] == [row["val_loss"] for row in rows(whole)]
    assert losses(again) == losses(whole)
    assert any(event["kind"] == "resume" for event in again.read_events())


def rows(run: RunFolder) -> list[dict[str, float | None]]:
    """The steps with a validation."""
    return [row for row in run.read_metrics() if row["val_loss"] is not None]
