"""In: configs. Out: plans with the published sizes, closed-form bytes and traffic; every refusal, all at once.
Does not run a plan: test_trajectories and test_declared do."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.load import load, shipped
from codescent.config.sections import Config
from codescent.cost.lengths import lengths
from codescent.cost.memory import state_bytes, wire_bytes
from codescent.plan import AXES, Collective, Plan, Verb
from codescent.strategies.ddp import buckets

OPENAI = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
SMALL = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "seq_len": 16}


def config(**sections: dict[str, object]) -> Config:
    return Config.model_validate({"model": SMALL, **sections})


@pytest.mark.parametrize(("preset", "parameters"), OPENAI.items())
def test_presets_have_openais_parameter_counts(preset: str, parameters: int) -> None:
    assert build(config(model={"preset": preset}), None, 1).num_parameters == parameters


@pytest.mark.parametrize(
    ("precision", "microbatch", "per_parameter"),
    [
        ("fp32", None, (4, 4, 8)),
        ("fp64", None, (8, 8, 16)),
        ("bf16", None, (2, 2, 12)),  # Rajbhandari et al. 2020: 16 bytes per parameter
        ("bf16", 3, (2, 4, 12)),  # sums over micro-batches are kept in fp32
    ],
)
def test_state_bytes_are_the_closed_form(
    precision: str, microbatch: int | None, per_parameter: tuple[int, int, int]
) -> None:
    train = {"precision": precision, "global_batch_size": 12, "microbatch_size": microbatch}
    plan = build(config(model={"preset": "gpt2"}, train=train), None, 1)
    state = state_bytes(plan)
    assert (state.weights_bytes, state.gradients_bytes, state.optimizer_bytes) == tuple(
        number * OPENAI["gpt2"] for number in per_parameter
    )


def test_traffic_is_every_gradient_once() -> None:
    plan = build(config(model={"preset": "gpt2"}, train={"precision": "bf16"}), None, 4)
    gradients = [record for record in plan.traffic if record.what.startswith("gradients")]
    assert sum(record.payload_bytes for record in gradients) == 2 * OPENAI["gpt2"]
    assert wire_bytes(plan) == 2 * 3 / 4 * (2 * OPENAI["gpt2"] + 24)


@pytest.mark.parametrize("keys", [{}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"pp": 2, "dp_shard": 2}])
def test_loss_stop_request_and_norm_are_one_sum_over_all_ranks(keys: dict[str, object]) -> None:
    plan = build(config(parallel=keys, train={"global_batch_size": 8}), 11, 8)
    (sums,) = [record for record in plan.traffic if record.dtype == "fp64"]
    assert (sums.collective, sums.verb, sums.payload_bytes, sums.times) == (Collective.ALL_REDUCE, Verb.STEP, 24, 1)
    assert plan.mesh.group(sums.axis, 3) == tuple(range(8))


def test_wire_dtype_is_a_choice() -> None:
    plan = build(config(train={"precision": "bf16"}, parallel={"reduce_dtype": "fp32"}), 11, 2)
    gradients = [record for record in plan.traffic if record.what.startswith("gradients")]
    assert sum(record.payload_bytes for record in gradients) == 4 * plan.num_parameters


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 10**9])
def test_the_last_bucket_overlaps_with_nothing(bucket_bytes: int) -> None:
    """It is full when backward has computed its last gradient."""
    plan = build(config(parallel={"bucket_bytes": bucket_bytes}), 11, 2)
    *others, last = [record for record in plan.traffic if record.what.startswith("gradients")]
    assert {record.during for record in others} <= {Verb.BACKWARD}
    assert (last.during, bool(others)) == (None, bucket_bytes < 10**9)
    sent = sum(record.wire_bytes(2) for record in plan.traffic if record.during is None)
    exchanges = lengths(plan, flops_per_byte := 1e-6).exchanges  # so fast that backward hides the other buckets
    waits = {at.verb: exchange.waits_s for (_, at), exchange in exchanges.items()}
    unit_flops = sum(plan.model.forward_flops) * plan.work.microbatch_size * plan.work.seq_len
    assert waits[Verb.REDUCE] + waits[Verb.STEP] == pytest.approx(sent * flops_per_byte / unit_flops)
    assert waits.get(Verb.BACKWARD, 0.0) == 0.0


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_the_first_gather_and_the_last_sum_of_zero_overlap_with_nothing(
    zero_stage: int, copies: int, microbatches: int
) -> None:
    """A pass cannot begin without its first weights, and it has computed its last gradient when it ends."""
    train = {"global_batch_size": 2 * copies * microbatches, "microbatch_size": 1}
    plan = build(config(train=train, parallel={"dp_shard": 2, "zero_stage": zero_stage}), 11, 2 * copies)
    own = [record for record in plan.traffic if record.what.startswith(("weights", "gradients"))]
    waited = [record for record in own if record.during is None]
    gathers = microbatches if zero_stage == 3 else 1
    expected = {("all_gather", gathers), ("reduce_scatter", 1), *([("all_reduce", 1)] if copies > 1 else [])}
    assert {(str(record.collective), record.times) for record in waited} == expected
    assert {record.what for record in waited} == {"weights of the root", "gradients of the root"}
    assert {record.during for record in own} == {None, Verb.FORWARD, Verb.BACKWARD}
    # The last sum of each earlier micro-batch overlaps with the next one.
    sums = [record for record in own if record.what == "gradients of the root" and record not in waited]
    assert {record.times for record in sums} == ({microbatches - 1} if zero_stage > 1 and microbatches > 1 else set())
    exchanges = lengths(plan, flops_per_byte := 1e-6).exchanges  # so fast that computation hides all others
    sent = sum(record.times * record.wire_bytes(plan.mesh.degree(record.axis)) for record in waited)
    waits = sum(exchange.waits_s for (_, at), exchange in exchanges.items() if at.verb in (Verb.FORWARD, Verb.BACKWARD))
    unit_flops = sum(plan.model.forward_flops) * plan.work.microbatch_size * plan.work.seq_len
    assert waits == pytest.approx(sent * flops_per_byte / unit_flops)


@pytest.mark.parametrize(("parallel", "waited"), [({"pp": 2}, 2), ({"pp": 4}, 4)])
def test_every_stage_waits_for_its_own_first_unit(parallel: dict[str, int], waited: int) -> None:
    """A stage in the middle has no root: its first block is gathered first and reduced last."""
    layers = {**SMALL, "num_layers": 8}
    plan = build(config(model=layers, parallel={"dp_shard": 2, **parallel}), 11, 2 * parallel["pp"])
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        found = [record for record in plan.traffic if (record.collective, record.during) == (collective, None)]
        assert sorted({record.stage for record in found}) == list(range(waited))
        middle = [record.what for record in found if record.stage not in (0, waited - 1)]
        assert all("block" in what for what in middle)


def test_flops_by_both_formulas() -> None:
    train = {"global_batch_size": 4}
    flops = build(config(model={"preset": "gpt2"}, data={"seq_len": 256}, train=train), None, 1).flops()
    assert flops.dense_flops == 6 * OPENAI["gpt2"] * 1024
    assert flops.total_flops - flops.dense_flops == 12 * 12 * 768 * 256 * 1024


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 1000))
def test_buckets_hold_every_tensor_once_last_first(sizes: list[int], bucket_bytes: int) -> None:
    filled = buckets(sizes, bucket_bytes, "fp32")
    assert [index for bucket in filled for index in bucket] == list(reversed(range(len(sizes))))
    for bucket in filled:
        assert len(bucket) == 1 or sum(4 * sizes[index] for index in bucket) <= bucket_bytes


def refusal(config: Config, vocab_size: int | None = 11, world_size: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        build(config, vocab_size, world_size)
    return str(caught.value)


def test_batch_that_does_not_divide_over_the_ranks() -> None:
    message = refusal(config(train={"global_batch_size": 12}), world_size=5)
    assert "train.global_batch_size = 12" in message
    assert "train.global_batch_size = 10 or 15" in message
    assert "4 or 6 ranks" in message


def test_microbatch_that_does_not_divide_prints_the_equation() -> None:
    message = refusal(config(train={"global_batch_size": 24, "microbatch_size": 8}), world_size=2)
    assert "24 (global_batch_size) = 2 (data-parallel ranks) x 8 (microbatch_size) x 1.5" in message
    assert "6 or 12" in message


def test_degrees_whose_product_is_not_the_world() -> None:
    assert "= 3 ranks, but the run has 2" in refusal(config(parallel={"dp_replicate": 3}), world_size=2)


def test_model_problems_come_together_with_the_others() -> None:
    message = refusal(config(model={**SMALL, "num_heads": 3}, parallel={"dp_replicate": 3}), world_size=2)
    assert "3 heads do not divide" in message
    assert "= 3 ranks, but the run has 2" in message


def test_samples_longer_than_the_model() -> None:
    assert "data.seq_len = 17" in refusal(config(data={"seq_len": 17}))


def test_vocabulary_smaller_than_the_tokenizers() -> None:
    assert "has 300 tokens" in refusal(config(model={**SMALL, "vocab_size": 256}), vocab_size=300)


def test_unknown_vocabulary_says_how_to_know_it() -> None:
    assert "codescent data python-stdlib --tokenizer char" in refusal(config(), vocab_size=None)


def test_plan_survives_json() -> None:
    plan = build(config(train={"global_batch_size": 8, "microbatch_size": 2}), 11, 2)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("section", "key", "value", "decides"),
    [
        ("run", "seed", 7, True),
        ("model", "num_layers", 3, True),
        ("model", "dropout", 0.3, True),
        ("data", "seq_len", 8, True),
        ("train", "global_batch_size", 4, True),
        ("train", "precision", "bf16", True),
        ("train", "label_smoothing", 0.1, True),
        ("train", "z_loss", 1e-4, True),
        ("train", "microbatch_size", 2, False),
        ("data", "prefetch", 9, False),
        ("optimizer", "beta2", 0.9, True),
        ("optimizer", "decay_steps", 7, True),
        ("parallel", "bucket_bytes", 1000, False),
        ("parallel", "recompute", "full", False),
    ],
)
def test_what_decides_the_losses_is_in_the_trajectory_under_its_key(
    section: str, key: str, value: object, decides: bool
) -> None:
    sections: dict[str, dict[str, object]] = {"train": {"global_batch_size": 8}, "model": SMALL}
    other = {**sections, section: {**sections.get(section, {}), key: value}}
    before, after = (build(config(**of), 11, 1).trajectory() for of in (sections, other))
    differing = [name for name in before if before[name] != after[name]]
    assert [name.startswith(f"{section}.{key}") for name in differing] == [True] * decides


def test_more_micro_batches_than_a_plan_can_list_are_refused() -> None:
    config = Config.model_validate(
        {"model": {"preset": "gpt2"}, "train": {"global_batch_size": 2**31 - 1, "microbatch_size": 1}}
    )
    with pytest.raises(
        UserError,
        match="2,147,483,647 micro-batches, more than 100,000; nearest",
    ):
        build(config, None, 1)


PARAMETERS = {
    "gpt2_124m_openwebtext": 124_439_808,
    "gpt2_350m_openwebtext": 354_823_168,
    "gpt2_774m_openwebtext": 774_030_080,
    "gpt2_1558m_openwebtext": 1_557_611_200,
    "bert_squad": 108_893_186,
    "llama3_8b": 8_030_261_248,  # the three: Llama 3's released weights
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_8b_lora": 8_030_261_248 + 35_651_584,
}


@pytest.mark.parametrize("name", ["gpt2_124m", "llama3_8b", "synthetic_transformer"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_stage_holds_what_its_chunks_read_in_the_order_of_the_forward_pass(name: str, chunks: int) -> None:
    """A tensor of another stage, or the tied matrix twice."""
    schedule = ["parallel.schedule=interleaved", "parallel.virtual_stages=2"] if chunks > 1 else []
    words = ["parallel.pp=2", "parallel.dp_shard=1", *schedule, "train.global_batch_size=8", "train.microbatch_size=2"]
    plan = build(load(name, words).config, None, 2)
    for stage in range(2):
        held: list[str] = []
        for part in plan.schedule.parts(stage):
            held += [one.parameter.name for one in plan.tensors if set(one.parameter.depths) & set(part)]
        assert [one.parameter.name for one in plan.held_by(stage)] == list(dict.fromkeys(held))


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_config_has_a_plan(name: str) -> None:
    config = load(name, ["model.preset=gpt2"] if name in ("finetune", "preferences") else []).config
    vocab_size = None if config.model.preset or config.model.embedding == "none" else 65
    copy = math.prod(getattr(config.parallel, axis) or 1 for axis in AXES)
    plan = build(config, vocab_size, copy)
    assert plan.num_parameters == PARAMETERS.get(name, plan.num_parameters)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    shape = models.shape_of_facts(again.model)
    own = [tensor.parameter for tensor in again.tensors]
    assert own == list(models.parameters_of(again.model.kind, shape, again.model.lora))
    assert (again.trained, again.flops(), again.held_by(0)) == (plan.trained, plan.flops(), plan.held_by(0))
    for ranks in (2, 4) if name in PARAMETERS and copy == 1 else ():
        build(load(name, [f"parallel.dp_shard={ranks}"]).config, None, ranks)


def test_stages_have_the_layers_that_the_config_gives() -> None:
    """A stage too many or too few layers further on; an embedding or a head that no stage has."""
    sections = {
        "model": {"preset": "gpt2", "num_layers": 6},
        "data": {"corpus": "synthetic"},
        "train": {"global_batch_size": 4, "microbatch_size": 1},
        "parallel": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "cut": "1, 3,2,0"},
    }
    schedule = build(Config.model_validate(sections), None, 2).schedule
    assert [schedule.parts(stage) for stage in (0, 1)] == [
        [range(2), range(5, 7)],
        [range(2, 5), range(7, 8)],
    ]
