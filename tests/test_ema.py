"""In: runs with train.ema. Out: averages are those of torch, equal on every layout, and leave the training as it is.
Does not check schedules (test_rate_schedules.py does)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from forker import Forker
from runs import called, losses
from safetensors.torch import load_file

from codescent.base.errors import UserError
from codescent.checkpoint.checkpoints import read_tensors
from codescent.config.load import load
from codescent.plan import Plan
from codescent.plan.state import state_of_rank
from codescent.preflight import plan_of
from codescent.record import RunFolder
from codescent.train.ema import Ema
from codescent.train.optimize import Weight

DECAY, STEPS = 0.8, 12
WORDS = (f"train.ema={DECAY}", f"train.num_steps={STEPS}", "train.eval_every=6", f"optimizer.decay_steps={STEPS}")
FP64 = (*WORDS, "train.precision=fp64")


def saved(run: RunFolder, step: int = STEPS) -> Mapping[str, torch.Tensor]:
    return read_tensors(run.checkpoints / f"step_{step:08}")


def averages(run: RunFolder, step: int = STEPS) -> dict[str, torch.Tensor]:
    return {name[4:]: value for name, value in saved(run, step).items() if name.startswith("ema.")}


def column(run: RunFolder, name: str) -> list[float | None]:
    return [row[name] for row in run.read_metrics()]


@pytest.mark.parametrize(("decay", "every"), [(0.999, 1), (0.3, 1), (0.9, 3)])
def test_the_average_is_that_of_torch(decay: float, every: int) -> None:
    theirs = torch.nn.Linear(5, 3)
    model = torch.optim.swa_utils.AveragedModel(
        theirs, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), use_buffers=True
    )
    model.update_parameters(theirs)  # its first update copies
    weights = [Weight(name, value.data, value.data, decay=True) for name, value in theirs.named_parameters()]
    ours = Ema(weights, decay, every)
    for step in range(1, 8):
        for weight in weights:
            weight.master.add_(torch.randn_like(weight.master))
        ours.update(step)
        if step % every == 0:
            model.update_parameters(theirs)
    for (_, _, value), other in zip(ours.named(), model.module.parameters(), strict=True):
        assert torch.equal(value, other.data)


def test_weights_are_there_again_bit_by_bit() -> None:
    """fp32 weights change places with their averages; bf16 weights are rounded again from their masters."""
    wide, master = torch.randn(4, 3), torch.randn(5)
    narrow = master.bfloat16()
    ema = Ema([Weight("a", wide, wide, decay=True), Weight("b", narrow, master, decay=False)], 0.5, 1)
    before = [value.clone() for value in (wide, narrow, *ema.averages)]
    wide.add_(1.0), master.mul_(2.0), narrow.copy_(master)
    trained = [value.clone() for value in (wide, narrow)]
    with ema.in_place_of_weights():
        assert torch.equal(wide, before[0])
        assert torch.equal(narrow, before[1])
    assert torch.equal(wide, trained[0])
    assert torch.equal(narrow, trained[1])
    assert all(torch.equal(one, other) for one, other in zip(ema.averages, before[2:], strict=True))


@pytest.fixture(scope="module")
def one(project: Path, forker: Forker) -> RunFolder:
    """A run of one process in fp64, with all its checkpoints."""
    return forker.train(project, "one", 1, *FP64, "checkpoint.every=1", f"checkpoint.keep_last={STEPS}")


def test_averages_follow_from_the_weights_of_all_checkpoints(one: RunFolder) -> None:
    """A late update, a wrong decay, or an average of rounded weights would differ."""
    expected = averages(one, 1)
    for step in range(2, STEPS + 1):
        weights = {name[6:]: value for name, value in saved(one, step).items() if name.startswith("model.")}
        assert weights.keys() == expected.keys()
        expected = {name: DECAY * value + (1 - DECAY) * weights[name] for name, value in expected.items()}
    found = averages(one)
    assert all(torch.allclose(found[name], value, rtol=1e-12, atol=1e-14) for name, value in expected.items())


@pytest.mark.parametrize("words", [(), ("train.precision=bf16",)])
def test_the_weights_are_those_of_a_run_without_it(project: Path, forker: Forker, words: tuple[str, ...]) -> None:
    name = "".join(words) or "fp32"
    runs = [
        forker.train(project, f"{name}-{ema}", 1, *WORDS, f"train.ema={ema}", "optimizer.max_grad_norm=0.5", *words)
        for ema in (0.0, DECAY)
    ]
    assert losses(runs[0]) == losses(runs[1])
    assert column(runs[0], "val_loss") == column(runs[1], "val_loss")
    assert not any(column(runs[0], "val_loss_ema"))
    assert [loss is not None for loss in column(runs[1], "val_loss_ema")] == [step in (6, 12) for step in range(1, 13)]
    without, found = map(saved, runs)
    assert found.keys() - without.keys() == {f"ema.{name[6:]}" for name in found if name.startswith("model.")}
    assert all(torch.equal(found[name], value) for name, value in without.items())
    assert {value.dtype for value in averages(runs[1]).values()} == {torch.float32}


LAYOUTS = (
    pytest.param((2, "parallel.dp_replicate=2"), marks=pytest.mark.slow),
    pytest.param((2, "parallel.dp_shard=2", "parallel.zero_stage=1"), marks=pytest.mark.slow),
    (2, "parallel.dp_shard=2", "parallel.zero_stage=3"),
    (2, "parallel.tp=2", "parallel.sequence_parallel=true"),
    pytest.param((2, "parallel.pp=2", "train.microbatch_size=2"), marks=pytest.mark.slow),
    pytest.param((2, "parallel.cp=2"), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[-1] if len(layout) < 3 else " ".join(layout[1:]))
def test_every_layout_has_the_same_averages(
    project: Path, forker: Forker, one: RunFolder, layout: tuple[int, str]
) -> None:
    """Each rank averages its shards alone. What a rank counts as optimizer state is what the plan says."""
    ranks, *words = layout
    run = forker.train(project, "-".join(words), ranks, *FP64, *words)
    assert losses(run) == pytest.approx(losses(one), rel=1e-11)
    ours, theirs = ([loss for loss in column(each, "val_loss_ema") if loss is not None] for each in (run, one))
    assert ours == pytest.approx(theirs, rel=1e-11)
    found, expected = averages(run), averages(one)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], value, rtol=1e-9, atol=1e-12) for name, value in expected.items())
    plan = Plan.from_json(run.plan)
    for row in run.iter_memory():
        declared = state_of_rank(plan, int(row["rank"])).optimizer_bytes
        assert row["optimizer_bytes"] == pytest.approx(declared, abs=256)  # torch pads master copies of uneven shards


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_and_another_layout_goes_on(
    project: Path, forker: Forker, one: RunFolder
) -> None:
    for name, then in (("part", ()), ("moved", ("parallel.dp_shard=2",))):
        forker.train(project, name, 1, *FP64, "train.num_steps=7")
        run = forker.train(project, name, 2 if then else 1, *FP64, *then, resume=True)
        found, expected = averages(run), averages(one)
        if then:
            assert all(torch.allclose(found[key], value, rtol=1e-9, atol=1e-12) for key, value in expected.items())
        else:
            assert all(torch.equal(found[key], value) for key, value in expected.items())
            assert column(run, "val_loss_ema")[-1] == column(one, "val_loss_ema")[-1]
    done = forker.run(project, 1, ["run.name=part", *FP64, "train.ema=0.9", "train.num_steps=14"], resume=True)
    assert done.codes == [2]
    assert "train.ema: the run in" in done.said


def test_averages_are_evaluated_exported_and_sampled(project: Path, forker: Forker) -> None:
    run = forker.train(project, "shown", 1, *WORDS)
    for words, name in ((), "val_loss"), (("--ema",), "val_loss_ema"):  # evaluate reads other windows: about the same
        said = called(project, "evaluate", str(run.path), *words).stdout
        assert float(re.search(r"loss ([\d.]+)", said)[1]) == pytest.approx(column(run, name)[-1], abs=0.01)
    for words in ((), ("--ema",)):
        assert called(project, "export", str(run.path), f"exported{len(words)}", *words).returncode == 0
    weights, found = (load_file(project / f"exported{number}" / "model.safetensors") for number in (0, 1))
    kept = averages(run)
    assert torch.equal(found["transformer.wte.weight"], kept["tok.weight"])
    assert not torch.equal(found["transformer.wte.weight"], weights["transformer.wte.weight"])
    texts = {called(project, "sample", str(run.path), "--tokens", "40", *words).stdout for words in ((), ("--ema",))}
    assert len(texts) == 2
    forker.train(project, "none", 1, "train.num_steps=1")
    done = called(project, "sample", "runs/none", "--ema")
    assert (done.returncode, done.stderr) == (
        2,
        "error: runs/none: --ema: the run keeps no moving average of its weights (train.ema = 0); leave it out\n",
    )


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("parallel.average_every=4", "train.eval_every=4"), "average_every"),
        (("parallel.gossip=ring",), "gossip"),
        (("parallel.servers=workers",), "servers"),
    ],
)
def test_methods_whose_ranks_have_other_weights_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], key: str
) -> None:
    monkeypatch.chdir(project)
    config = load(project / "run.toml", [*words, "train.ema=0.9", "parallel.dp_replicate=2"]).config
    with pytest.raises(
        UserError, match=rf"train\.ema = 0\.9: with parallel\.{key} = .* no rank has the weights"
    ) as said:
        plan_of(config, 2, without_data=True)
    assert "nearest that would do: train.ema = 0.0" in str(said.value)


def test_an_average_that_never_changes_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.ema_every: given 2000, so the average would stay"):
        load("default", ["train.ema=0.99", "train.ema_every=2000"])


def test_the_plan_counts_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 bytes more for each weight of bf16 training, in the state of the optimizer; plan.json of other runs stays."""
    monkeypatch.chdir(project)
    found = {}
    for ema in (0.0, 0.99):
        words = ["train.precision=bf16", f"train.ema={ema}", "parallel.dp_shard=2"]
        found[ema] = plan_of(load(project / "run.toml", words).config, 2)
    held, before = (state_of_rank(found[ema], 0).optimizer_bytes for ema in (0.99, 0.0))
    shard = sum(tensor.optimizer.numel(tensor.parameter.shape, found[0.0].mesh, 0) for tensor in found[0.0].trained)
    assert held - before == 4 * shard
    assert '"ema"' not in json.dumps(found[0.0].to_json())
    assert Plan.from_json(json.loads(json.dumps(found[0.99].to_json()))) == found[0.99]
