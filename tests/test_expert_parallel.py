"""In: one model with experts on layouts of two and four ranks. Out: the losses of one process, and its checkpoints.
Does not test a layer (test_experts does). What is declared: test_declared."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from declared_cases import CASES
from declared_ranks import plan_of
from forker import Forker
from runs import assert_same, called, losses, make_project

from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.plan import Collective, Verb
from codescent.plan.measured import OF_EXPERTS
from codescent.record import RunFolder

SIZES = (
    "model.kind=llama",
    "model.num_layers=3",
    "model.hidden_dim=20",
    "model.ffn_dim=46",
    "model.num_heads=2",
    "model.num_experts=4",
    "model.experts_per_token=2",
    "model.expert_dim=18",
    "model.dense_layers=1",
    "train.precision=fp64",
    "train.num_steps=4",
    "optimizer.decay_steps=4",
    "train.global_batch_size=8",
    "train.balance_loss=0.05",
    "train.router_z_loss=0.01",
    "train.check_every=1",
    "checkpoint.every=2",
)
TOLERANCE = 1e-9

DEEPSEEK = (
    "model.num_experts=8",
    "model.experts_per_token=3",
    "model.route_scores=sigmoid",
    "model.route_bias=true",
    "model.route_groups=4",
    "model.groups_per_token=2",
    "model.route_scale=2.5",
    "model.shared_dim=22",
    "train.balance_rate=0.02",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "microbatches": (1, ("train.microbatch_size=2",)),
    "ep 2": (2, ("parallel.ep=2", "train.microbatch_size=2")),
    "ep 2, full": (2, ("parallel.ep=2", "parallel.recompute=full")),
    "ep 4": (4, ("parallel.ep=4",)),
    "tp 2": (2, ("parallel.tp=2",)),
    "dp_shard 2": (2, ("parallel.dp_shard=2",)),
    "cp 2 x ep 2": (4, ("parallel.cp=2", "parallel.ep=2", "train.balance_loss=0")),
    "dp 2 x ep 2": (4, ("parallel.ep=2",)),
    "dp_shard 2 x ep 2": (4, ("parallel.ep=2", "parallel.dp_shard=2")),
    "dp_shard 2, stage 1 x ep 2": (
        4,
        ("parallel.ep=2", "parallel.dp_shard=2", "parallel.zero_stage=1", "train.microbatch_size=1"),
    ),
    "ep 2 x tp 2": (4, ("parallel.ep=2", "parallel.tp=2")),
    "ep 2 x tp 2 without sequence": (
        4,
        ("parallel.ep=2", "parallel.tp=2", "parallel.sequence_parallel=false", "parallel.recompute=full"),
    ),
    "pp 2 x ep 2": (4, ("parallel.pp=2", "parallel.ep=2", "train.microbatch_size=2")),
    "pp 2 x ep 2, zero-bubble": (
        4,
        ("parallel.pp=2", "parallel.ep=2", "train.microbatch_size=2", "parallel.schedule=zero-bubble"),
    ),
    "deepseek, microbatches": (1, (*DEEPSEEK, "train.microbatch_size=2")),
    "deepseek, ep 2 x tp 2": (4, (*DEEPSEEK, "parallel.ep=2", "parallel.tp=2")),
    "deepseek, dp_shard 2 x ep 2": (4, (*DEEPSEEK, "parallel.ep=2", "parallel.dp_shard=2")),
    "deepseek, pp 2 x ep 2": (4, (*DEEPSEEK, "parallel.pp=2", "parallel.ep=2", "train.microbatch_size=2")),
    "ep 2, capacity": (2, ("parallel.ep=2", "train.microbatch_size=1", "model.capacity_factor=0.75")),
}
QUICK = ("ep 2",)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("experts")).parent


def one_process(project: Path, forker: Forker, changes: Sequence[str]) -> RunFolder:
    """The run of one rank with these changes of the model and of what it minimises, made once."""
    kept = tuple(word for word in changes if not word.startswith(("parallel.", "train.microbatch_size")))
    name = f"one {zlib.crc32(' '.join(kept).encode())}"
    path = project / "runs" / name
    return RunFolder.open(path) if path.exists() else forker.train(project, name, 1, *SIZES, *kept)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in LAYOUTS])
def test_losses_are_those_of_one_process(name: str, project: Path, forker: Forker) -> None:
    """Fault: a gradient of an expert or a router is summed twice or not at all; a loss of routers depends on the
    layout; copies of a tensor drift apart."""
    ranks, changes = LAYOUTS[name]
    expected = one_process(project, forker, changes)
    found = forker.train(project, name, ranks, *SIZES, *changes)
    assert_same(found, expected, TOLERANCE)
    for row, other in zip(found.read_metrics(), expected.read_metrics(), strict=True):
        for column in (one for one in OF_EXPERTS if one != "balance_loss" or "parallel.cp=2" not in changes):
            assert row[column] == pytest.approx(other[column], rel=TOLERANCE, abs=TOLERANCE), column
        assert row["expert_load_max"] >= 1.0 >= row["expert_load_min"]
    assert (found.read_metrics()[0]["expert_dropped"] > 0) == ("model.capacity_factor=0.75" in changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("ep 2", "dp_shard 2 x ep 2"), ("dp_shard 2 x ep 2", "ep 2 x tp 2"), ("ep 4", "microbatches")]
)
def test_a_checkpoint_continues_in_another_layout(first: str, second: str, project: Path, forker: Forker) -> None:
    """Fault: a box of experts is saved or read as another one."""
    expected, name = one_process(project, forker, ()), f"{first} to {second}"
    ranks, changes = LAYOUTS[first]
    forker.train(project, name, ranks, *SIZES, *changes, "train.num_steps=2")
    ranks, changes = LAYOUTS[second]
    run = forker.train(project, name, ranks, *SIZES, *changes, resume=True)
    assert losses(run) == pytest.approx(losses(expected), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts, dp x ep on 4", "experts, ep x tp on 4"])
def test_all_ranks_together_send_the_declared_bytes(name: str, tmp_path: Path, forker: Forker) -> None:
    """Fault: rows go elsewhere, or twice. Each rank's own part is decided by the router; the sum is not."""
    case = CASES["gloo"][name]
    plan = plan_of(case)
    answers = forker.call("declared_ranks:on_gloo_rank", tmp_path, case["world_size"], case=case)
    declared = sum(
        record.payload_bytes * record.times
        for record in plan.traffic
        if record.collective is Collective.ALL_TO_ALL and record.dtype != "int64" and record.verb is not Verb.STEP
    )
    sent, received = (sum(answer["moved"][way] for answer in answers) for way in (0, 1))
    assert sent == received == declared * plan.world_size > 0


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        ({"ep": 3}, 3, r"parallel\.ep = 3: 4 experts \(model\.num_experts\) do not divide into 3 parts; nearest"),
        ({"ep": 8}, 8, r"parallel\.ep = 8: 4 experts"),
        ({"ep": 2, "servers": 1}, 3, r"parallel\.ep = 2: with parallel\.servers ranks take different steps"),
    ],
)
def test_what_cannot_be_divided_is_refused(keys: dict[str, Any], ranks: int, message: str) -> None:
    """Fault: a traceback in the first step, or ranks that wait for each other."""
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "seq_len": 16, "vocab_size": 61}
    model = {"kind": "llama", **sizes, "num_experts": 4, "experts_per_token": 2}
    config = {"model": model, "train": {"global_batch_size": 24}, "parallel": keys}
    with pytest.raises(UserError, match=message):
        build(Config.model_validate(config), 61, ranks)


def test_a_model_without_experts_has_nothing_to_divide(project: Path) -> None:
    """Fault: ranks along ep that do nothing, in silence."""
    done = called(project, "plan", "run.toml", "parallel.ranks=2", "parallel.ep=2")
    assert done.returncode == 2
    assert "parallel.ep = 2: the model has no experts (model.num_experts)" in done.stderr
