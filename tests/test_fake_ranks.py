"""In: layouts of every strategy, on a device that is no CPU. Out: a step sends what the plan declares, and waits for
the device only where it is written down.
Does not run a step itself: meta_ranks does, a rank at a time, on torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from declared_cases import CASES, ON_DEVICES, Case
from declared_ranks import Answer, plan_of
from declared_traffic import check_copied, check_issued
from forker import Forker

LAYOUTS: dict[str, Case] = {
    f"{group}: {name}": one
    for group, cases in CASES.items()
    if group not in ("gloo", "experts")  # experts: the sizes of messages are values, which this device has not
    for name, one in cases.items()
} | ON_DEVICES
QUICK = (
    "strategies: replicate: 2-bf16-1-fp32 on the wire",
    "strategies: replicate: 8-fp64-2",
    "strategies: zero: stage 1-2x4-bf16-3",
    "strategies: zero: stage 2-2x4-bf16-3",
    "strategies: zero: stage 3-2x4-bf16-3",
    "strategies: zero: stage 3-1x2-fp32-1",
    "strategies: tensor: tp 2-fp32-1-chunks of 0-sequence True",
    "strategies: tensor: tp 2-fp32-1-chunks of 0-sequence False",
    "strategies: context: cp 2-ring-fp32-1-dropout 0.0",
    "strategies: context: cp 2-all-gather-fp32-1-dropout 0.0",
    "stages: pipeline: naive-pp 2-fp32-2",
    "stages: pipeline: gpipe-pp 2-fp32-2",
    "stages: pipeline: 1f1b-pp 2-bf16-4",
    "stages: pipeline: interleaved-pp 2-fp32-2",
    "stages: pipeline: zero-bubble-pp 2-bf16-4",
    "stages: recompute: zero 3 bf16-full-dropout 0.1",
    "stages: recompute: tp-selective-dropout 0.1",
    "stages: recompute: tp x cp-full-dropout 0.1",
    "stages: recompute: cp ring-products-dropout 0.0",
    "hybrids: dp x pp x tp",
    "hybrids: fsdp x cp all-gather",
    "hybrids: pp x fsdp interleaved stage 2",
    "hybrids: everything 64",
    "bert: tp-mlm",
    "bert: everything 32-qa",
    "lora: fsdp x tp-all",
    "muon: hsdp",
    "muon: everything 64",
    *(f"offload: {name}" for name in ("alone", "replicate", "all", "muon, zero 3")),
    "kind: llama: cp ring",
    "kind: llama: pp zero-bubble",
    "kind: transformer: tp",
    "kind: transformer: pp zero-bubble",
    "kind: transformer: zero 3, full",
)
"""Each strategy and schedule, alone and with others. The other layouts are slow."""
WAITS = {
    "muon": {("copy meta to cpu", "train/optimize.py"): "Muon has no fused kernel: the host clips and skips"},
    "offload": {
        ("copy meta to cpu", "train/optimize.py"): "the host updates the weights, so it clips and skips",
        ("copy cpu to meta", "coupling/coupling.py"): "the norm of gradients in the host's memory goes to all ranks",
        ("copy meta to cpu", "strategies/collectives.py"): "fully_shard adds micro-batches in the host's memory",
        ("copy cpu to meta", "train/muon.py"): "the momentum is in the host's memory, matrices are computed on devices",
        ("copy meta to cpu", "train/muon.py"): "as above",
    },
}
"""Where the host waits for the device in a step, and what for, by group of layouts. Elsewhere it does not."""


def steps(
    forker: Forker, folder: Path, names: Iterable[str], fault: str = "", *, first: bool = False
) -> dict[str, dict[int, Answer]]:
    """The steps of some layouts. `first`: of rank 0, and of the last one if all that is divided are the layers."""
    cases = {name: dict(LAYOUTS[name]) for name in names}
    for name, one in cases.items():
        if first and not name.startswith("stages: pipeline"):
            one["ranks"] = [0]
    (found,) = forker.call("meta_ranks:on_meta_ranks", folder, cases=cases, fault=fault)
    return {name: {int(rank): answer for rank, answer in ranks.items()} for name, ranks in found.items()}


def check(name: str, answers: dict[int, Answer]) -> set[tuple[str, str]]:
    """The steps of some ranks of a layout. Where they wait, by operator and file."""
    plan, seen = plan_of(LAYOUTS[name]), set[tuple[str, str]]()
    for rank, answer in answers.items():
        assert "failed" not in answer, answer["failed"]
        check_issued(plan, rank, answer["issued"])
        if rank in plan.mesh.group("pp", 0):
            check_copied(plan, rank, answer["copied"])
        seen |= {(why, place.partition(":")[0]) for why, place, _ in answer["waits"]}
    return seen


@pytest.mark.parametrize("group", dict.fromkeys(name.partition(":")[0] for name in QUICK))
def test_a_step_sends_what_is_declared(forker: Forker, tmp_path: Path, group: str) -> None:
    names = [name for name in QUICK if name.startswith(f"{group}:")]
    waits = [check(name, answers) for name, answers in steps(forker, tmp_path, names, first=True).items()]
    assert set().union(*waits) == WAITS.get(group, {}).keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_sends_what_is_declared(forker: Forker, tmp_path: Path, name: str) -> None:
    assert check(name, steps(forker, tmp_path, [name])[name]) <= WAITS.get(name.partition(":")[0], {}).keys()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("strategies: replicate: 8-fp64-2", "bucket_not_sent"),
        ("stages: pipeline: 1f1b-pp 2-bf16-4", "message_twice"),
        ("strategies: tensor: tp 4-bf16-2-chunks of 5-sequence False", "wide_sums"),
    ],
)
def test_another_traffic_is_found(forker: Forker, tmp_path: Path, name: str, fault: str) -> None:
    found = steps(forker, tmp_path, [name], fault)[name]
    assert "failed" not in found[0], found[0]["failed"]
    with pytest.raises(AssertionError, match="issued alone, declared alone"):
        check(name, found)
