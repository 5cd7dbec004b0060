"""In: configs. Out: the keys that plan.json has, and those of [parallel] that a resumed run compares.
Does not run a plan, and does not read plan.json of earlier versions: test_versions does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from refused import Keys, planned

from codescent.build import plan_of
from codescent.plan import AXES, Plan

PLAIN: Mapping[str, set[str]] = {
    "": {"activations layout mesh model objective operators schedule seed task tensors traffic update work"},
    "layout": {
        "bucket_bytes context cut data_parallel offload recompute reduce_dtype schedule sequence_parallel "
        "virtual_stages zero_stage"
    },
    "mesh": {"cp dp_replicate dp_shard pp tp"},
    "model": {
        "causal_layers dropout encoder_layers forward_flops head_chunk_tokens head_dim hidden_dim kind lora num_heads "
        "num_kv_heads num_layers sizes vocab_size weights"
    },
    "model.sizes": {"bias dropout ffn_dim hidden_dim num_heads num_layers seq_len vocab_size"},
    "objective": {"label_smoothing z_loss"},
    "schedule": {"depths programs"},
    "schedule.programs[][]": {"chunk last microbatch peer verb"},
    "task": {"extras head_share identity name synthetic"},
    "task.identity": {"corpus text_key tokenizer validation validation_fraction"},
    "tensors[]": {
        "bucket_dtype gradient_dtype gradients gradients_in master_dtype optimizer optimizer_dtype optimizer_in "
        "optimizer_tensors orthogonalized parameter partial weight_dtype weights weights_in"
    },
    "tensors[].parameter": {"alternating depths mean name role shape std stream trained"},
    "traffic[]": {"axis collective devices dtype during payload_bytes stage times verb what"},
    "update": {
        "beta1 beta2 decay_steps eps kind learning_rate max_grad_norm min_learning_rate momentum num_workers "
        "scale_learning_rate schedule warmup_steps weight_decay"
    },
    "work": {"global_batch_size microbatch_size num_microbatches precision prefetch seq_len streams"},
}
"""By path: the keys of each object there, as `codescent plan --json` printed them before replicas could train apart
(commit ba771b8), and what forward keeps for backward."""
ACTIVATION = {"begins", "depths", "dims", "dtype", "name", "on", "placement", "rounded", "shape"}
"""The fields of what forward keeps. Most of them are left out of most tensors."""
OPERATOR = {
    "again", "depths", "dims", "dtype", "flops", "joins", "layer", "moves", "name", "on", "placement", "shape", "shared"
}  # fmt: skip
"""The fields of what a rank computes beside products with matrices."""
TRAFFIC = set(" ".join(PLAIN["traffic[]"]).split())
"""The fields of a collective. It has `depths` too if it belongs to some."""
PLACES = ("weights", "gradients", "optimizer")

LAYOUTS: dict[str, tuple[int, Keys, set[str]]] = {
    "ddp": (2, {}, {""}),
    "pp": (2, {"parallel.pp": 2, "train.microbatch_size": 2}, {""}),
    "tp, zero 3": (4, {"parallel.tp": 2, "parallel.dp_shard": 2}, {"dp_shard", "dp_shard tp"}),
}
"""By name: ranks, keys, and the axes that cut a tensor."""


def keys_of(value: Any, path: str = "") -> dict[str, set[str]]:
    """By path: the keys of each object there. The items of a list have one path."""
    found: dict[str, set[str]] = {}
    if isinstance(value, dict):
        found[path] = {" ".join(sorted(value))}
        inner = [(f"{path}.{key}".lstrip("."), item) for key, item in value.items()]
    else:
        inner = [(f"{path}[]", item) for item in value] if isinstance(value, list) else []
    for at, item in inner:
        for name, keys in keys_of(item, at).items():
            found.setdefault(name, set()).update(keys)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_has_no_key_of_a_method_that_it_does_not_use(layout: str) -> None:
    ranks, keys, axes = LAYOUTS[layout]
    expected = {**PLAIN}
    for place in PLACES:
        expected |= {f"tensors[].{place}": {"shards"}, f"tensors[].{place}.shards": axes}
    found = keys_of(planned(keys, ranks).to_json())
    of_activations = {path: found.pop(path) for path in list(found) if path.startswith("activations")}
    of_operators = {path: found.pop(path) for path in list(found) if path.startswith("operators")}
    assert {key for keys in found["traffic[]"] for key in keys.split()} == {*TRAFFIC, "depths"}
    found["traffic[]"] = expected["traffic[]"]
    assert found == expected
    names = {name for names in of_operators["operators[]"] for name in names.split()}
    assert names == OPERATOR
    names = {name for names in of_activations["activations[]"] for name in names.split()}
    assert names == ACTIVATION | ({"border"} if layout == "pp" else set())
    assert of_activations["activations[].placement.shards"] == {"", *(["tp"] if "tp" in axes_of(axes) else [])}


def axes_of(cuts: set[str]) -> set[str]:
    """The axes of all cuts."""
    return {axis for cut in cuts for axis in cut.split()}


def test_a_plan_of_a_version_that_did_not_write_what_forward_keeps_and_computes_has_it_again() -> None:
    plan = planned({"parallel.pp": 2, "train.microbatch_size": 2, "parallel.recompute": "full"}, 2)
    written = json.loads(json.dumps(plan.to_json()))
    assert plan_of(written) == plan
    assert written.pop("activations")
    assert written.pop("operators")
    assert plan_of(written) == plan


def test_a_model_with_scaled_frequencies_has_a_plan_that_is_read_again() -> None:
    keys = {"model.kind": "llama", "model.num_kv_heads": 2, "model.rope_factor": 4.0}
    plan = planned(keys, 1)
    written = json.loads(json.dumps(plan.to_json()))
    assert plan_of(written) == plan
    assert str(plan.trajectory()["model.rope_scaling"]).startswith("factor 4.0, ")
    for factor in (2.0, None):  # another one, and none
        other = planned(keys | {"model.rope_factor": factor}, 1)
        assert list(plan.differing(other)) == list(other.differing(plan)) == ["model.rope_scaling"]


def test_a_window_counts_the_pairs_inside_and_is_in_the_plan_that_is_read_again() -> None:
    """Catches: FLOPs of pairs that nobody computes; a plan that forgets the window."""
    keys = {"model.kind": "llama", "data.seq_len": 16}
    whole, windowed = planned(keys, 1), planned(keys | {"model.window": 5}, 1)
    assert plan_of(json.loads(json.dumps(windowed.to_json()))) == windowed
    pairs = sum(min(query + 1, 5) for query in range(16))
    assert windowed.flops().attention_flops / whole.flops().attention_flops == pytest.approx(pairs / 16**2)
    assert list(whole.differing(windowed)) == ["model.window"]
    assert planned(keys | {"model.window": 16}, 1).flops() == whole.flops()


def test_a_plan_that_computes_what_is_no_operator_is_refused() -> None:
    wrongs = ({"shape": []}, {"dims": []}, {"flops": [1.0]}, {"dtype": "fp1"}, {"shared": 2}, {"shape": [-1, 2, 3]})
    for wrong in wrongs:
        written = json.loads(json.dumps(planned({}, 1).to_json()))
        written["operators"][0] |= wrong
        with pytest.raises(ValueError, match="tok: "):
            plan_of(written)


def test_a_plan_with_depths_or_sizes_of_no_model_is_refused() -> None:
    written = json.loads(json.dumps(planned({"parallel.tp": 2}, 2).to_json()))
    for depths in ([0], [5, 1], [-1, 2], [0, 10**30]):
        written["traffic"][0]["depths"] = depths
        with pytest.raises(ValueError, match="are no depths of the model"):
            plan_of(written)
    older = json.loads(json.dumps(planned({}, 1).to_json()))
    del older["activations"], older["operators"]
    older["model"]["sizes"]["num_heads"] = 0
    with pytest.raises(ValueError, match=r"model: .*zero"):
        plan_of(older)


@pytest.mark.parametrize(
    "wrong",
    [{"shape": []}, {"dims": ["sample"]}, {"depths": [1]}, {"dtype": "fp1"}, {"placement": {"shards": {"tp": 7}}}],
)
def test_a_plan_that_keeps_what_is_no_tensor_is_refused(wrong: dict[str, Any]) -> None:
    written = json.loads(json.dumps(planned({}, 1).to_json()))
    written["activations"][0] |= wrong
    with pytest.raises(ValueError, match="tok tokens: "):
        plan_of(written)


# keys that a resumed run compares

AVERAGES = {"average_every": 10}
OUTER = {**AVERAGES, "outer_optimizer": "nesterov"}
LOSSY = {"wire": "int4"}
GOSSIPS = {"gossip": "ring"}
SERVED = {**AVERAGES, "servers": 1}
ASYNCHRONOUS = {**SERVED, "updates": "asynchronous"}
COMPARED: dict[str, tuple[Keys, Any, Any]] = {
    "average_every": (AVERAGES, 5, 10),
    "synchronous_steps": (AVERAGES, 0, 20),
    "fragments": (AVERAGES, 2, 3),
    "overlap_steps": (AVERAGES, 1, 2),
    "outer_optimizer": (OUTER, "sgd", "nesterov"),
    "outer_learning_rate": (OUTER, 0.7, 1.0),
    "outer_momentum": (OUTER, 0.9, 0.8),
    "servers": (SERVED, 1, 2),
    "updates": (SERVED, "synchronous", "asynchronous"),
    "staleness": (ASYNCHRONOUS, None, 2),
    "momentum_every": (ASYNCHRONOUS, None, 3),
    "local_steps": (ASYNCHRONOUS, "equal", "by_speed"),
    "quorum": (SERVED, None, 1),
    "gossip": (GOSSIPS, "ring", "pairs"),
    "gossip_mode": (GOSSIPS, "synchronous", "asynchronous"),
    "gossip_every": (GOSSIPS, 1, 2),
    "gossip_rate": (GOSSIPS, 1.0, 0.5),
    "wire": (LOSSY, "int8", "int4"),
    "wire_from": (LOSSY, 0, 10),
    "bucket_bytes": (LOSSY, 20_000, 40_000),
}
"""By key: the others with which it decides the losses, and two values."""
BY_RANK: dict[str, Keys] = {
    "lossy gradients": LOSSY,
    "lossy changes": {**AVERAGES, **LOSSY},
    "fragments": {**AVERAGES, "fragments": 2},
    "overlap": {**AVERAGES, "overlap_steps": 1},
    "push-sum": {"gossip": "push-sum"},
}
"""What a rank keeps between steps, or counts, is then its own: on another layout the losses are others."""
DEGREES = [
    (method, axis)
    for method in BY_RANK
    for axis in AXES
    if axis != "ep" and (method, axis) != ("lossy gradients", "dp_shard")  # ep: of models with experts
]


EXACT = {
    "schedule", "virtual_stages", "cut", "zero_stage", "context", "sequence_parallel", "recompute", "offload",
    "data_parallel", "reduce_dtype", "agree_every",
}  # fmt: skip
"""The other keys of a layout: they change where and when something is computed, and losses by rounding alone."""


def assert_compared(key: str, others: Keys, one: Any, other: Any) -> None:
    """Two plans of two replicas that differ in one key of [parallel] differ in their trajectories, under that key."""
    before, after = (of_two_replicas({**others, key: value}) for value in (one, other))
    name, trajectories = f"parallel.{key}", (before.trajectory(), after.trajectory())
    assert {at for at in trajectories[0] if trajectories[0][at] != trajectories[1][at]} == {name}
    values = ("auto" if value is None else value for value in (one, other))
    assert before.differing(after) == {name: tuple(values)}


def of_two_replicas(keys: Keys) -> Plan:
    """The plan of some keys of [parallel], on as many ranks as it needs."""
    layout = {"dp_replicate": 2, **keys}
    workers = math.prod(layout.get(axis, 1) for axis in AXES)
    return planned({f"parallel.{key}": value for key, value in layout.items()}, workers + layout.get("servers", 0))


@pytest.mark.parametrize("key", COMPARED)
def test_a_resumed_run_compares_each_key_that_decides_the_losses(key: str) -> None:
    assert_compared(key, *COMPARED[key])


@pytest.mark.parametrize(("method", "axis"), DEGREES)
def test_a_resumed_run_compares_the_layout_where_a_rank_keeps_something(method: str, axis: str) -> None:
    first = 2 if axis == "dp_replicate" else 1
    assert_compared(axis, BY_RANK[method], first, first + 1)


@pytest.mark.parametrize("others", [AVERAGES, GOSSIPS, SERVED, {"servers": 1, "updates": "asynchronous"}])
def test_a_resumed_run_compares_the_number_of_replicas_that_have_a_part_of_the_batch_to_themselves(
    others: Keys,
) -> None:
    assert_compared("dp_replicate", others, 2, 3)


def test_a_replica_that_is_averaged_may_have_another_layout() -> None:
    one, other = (of_two_replicas({**AVERAGES, "tp": degree}) for degree in (1, 2))
    assert one.trajectory() == other.trajectory()


def test_no_key_is_forgotten() -> None:
    """Whoever adds a key of [parallel] says whether it decides the losses: here, and where its strategy `decides`."""
    names = {key.removeprefix("parallel.") for key in planned({}, 1).trajectory() if key.startswith("parallel.")}
    assert names == {*COMPARED, *AXES, *EXACT}


@pytest.mark.parametrize("keys", [{}, AVERAGES, LOSSY, {"gossip": "push-sum"}, {**SERVED, "updates": "asynchronous"}])
def test_a_plan_of_a_version_that_did_not_write_them_has_the_same_keys(keys: Keys) -> None:
    plan = of_two_replicas(keys)
    written = json.loads(json.dumps(plan.to_json()))
    assert ("decides" in written) == bool(keys)
    written.pop("decides", None)
    assert plan_of(written) == plan
    assert plan_of(plan.to_json()) == plan
