"""In: meshes, tensors, plans. Out: the nouns hold what they promise: inverses, partitions, closed forms, JSON.
Does not build plans from configs: test_build does."""

from __future__ import annotations

import json
import subprocess
import sys
import typing

import pytest
import reported
from hypothesis import given
from hypothesis import strategies as st

from codescent.plan import (
    AXES,
    Collective,
    Layout,
    Mesh,
    ModelFacts,
    OlderPlan,
    Parameter,
    Placement,
    Plan,
    Role,
    TaskFacts,
    TensorPlan,
    Traffic,
    Verb,
    Work,
)
from codescent.plan.schedule import accumulate

meshes = st.builds(Mesh, **{axis: st.integers(1, 4) for axis in AXES})


@given(meshes)
def test_coordinates_and_ranks_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank_at(mesh.coordinates(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


@given(meshes, st.sampled_from(AXES))
def test_groups_of_an_axis_partition_the_ranks(mesh: Mesh, axis: str) -> None:
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.degree(axis)}


AXIS_NAMES = (*AXES, "dp_replicate*cp", "tp*pp", "dp_shard*cp*tp", "pp[0]*tp", "*".join(AXES), "")


@given(meshes, st.sampled_from(AXIS_NAMES), st.data())
def test_a_group_has_the_ranks_that_differ_on_its_axes_only(mesh: Mesh, axis: str, data: st.DataObject) -> None:
    """A group in another order, or of other ranks, where axes are joined or stages are selected."""
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    chosen = [part.partition("[")[0] for part in axis.split("*") if part]
    fixed = {name: index for name, index in mesh.coordinates(rank).items() if name not in chosen}
    members = [one for one in range(mesh.world_size) if fixed.items() <= mesh.coordinates(one).items()]
    if "[0]" in axis:
        members = [one for one in members if mesh.coordinates(one)["pp"] == 0]
    members.sort(key=lambda one: [mesh.coordinates(one)[name] for name in chosen])
    assert mesh.group(axis, rank) == tuple(members)


def test_tp_neighbours_are_neighbouring_ranks() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, tp=2)
    assert mesh.group("tp", 5) == (4, 5)
    assert mesh.group("dp_replicate", 5) == (5, 7)
    assert mesh.group("pp", 5) == (1, 5)


@given(meshes)
def test_every_part_of_the_batch_has_the_same_number_of_ranks(mesh: Mesh) -> None:
    parts = [mesh.dp_index(rank) for rank in range(mesh.world_size)]
    assert {part: parts.count(part) for part in parts} == dict.fromkeys(range(mesh.dp), mesh.world_size // mesh.dp)


def test_accumulation_is_a_list_whose_last_backward_completes_the_gradients() -> None:
    (program,) = accumulate(3).programs
    assert [str(instruction) for instruction in program] == [
        *("load 0", "forward 0", "backward 0"),
        *("load 1", "forward 1", "backward 1"),
        *("load 2", "forward 2", "backward 2"),
        "reduce",
        "step",
    ]
    assert [instruction.microbatch for instruction in program if instruction.last] == [2]


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (Collective.ALL_REDUCE, 2 * 3 / 4 * 1000),
        (Collective.REDUCE_SCATTER, 3 / 4 * 1000),
        (Collective.ALL_GATHER, 3 / 4 * 1000),
        (Collective.BROADCAST, 1000),
    ],
)
def test_wire_bytes_of_the_ring(collective: Collective, expected: float) -> None:
    record = Traffic(collective, "dp_replicate", 1000, "fp32", Verb.REDUCE, None, "test")
    assert record.wire_bytes(4) == expected
    assert record.wire_bytes(1) == 0


def test_bytes_of_a_tensor_in_mixed_precision() -> None:
    parameter = Parameter("w", (10, 6), Role.COLUMN, 0.02)
    mesh = Mesh(dp_shard=4)
    whole = TensorPlan(parameter, "bf16", "bf16", "fp32", "fp32", 2)
    assert (whole.weights_bytes(mesh), whole.gradients_bytes(mesh), whole.optimizer_bytes(mesh)) == (120, 120, 720)
    sharded = TensorPlan(parameter, "bf16", "bf16", "fp32", "fp32", 2, optimizer=Placement({"dp_shard": 0}))
    assert sharded.optimizer_bytes(mesh) == 3 * 6 * 12  # 10 rows over 4 ranks: the fullest has 3


def test_json_round_trip_is_equal() -> None:
    tensor = TensorPlan(
        Parameter("w", (3, 2), Role.VOCAB, 0.02), "bf16", "fp32", "fp32", "fp32", 2, weights=Placement({"tp": 1})
    )
    model = ModelFacts("gpt2", 2, 8, 2, 2, 4, 11, (0.0, 1.5, 1.5, 2.0))
    work = Work(16, 8, 2, 2, "bf16")
    traffic = (
        Traffic(Collective.ALL_REDUCE, "dp_replicate", 12, "bf16", Verb.REDUCE, Verb.BACKWARD, "gradients"),
        Traffic(Collective.ALL_REDUCE, "dp_replicate", 16, "fp64", Verb.REDUCE, None, "loss"),
    )
    mesh, task = Mesh(dp_replicate=2), TaskFacts("lm")
    plan = Plan(mesh, model, task, work, Layout(), (tensor,), accumulate(2), traffic)
    assert plan.trained == plan.held_by(0) == (tensor,)  # facts that are kept are no part of its value
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    data = plan.to_json()
    data["work"] |= {"kind": "gpt2", "task": "lm"}
    del data["model"], data["task"], data["layout"]
    with pytest.raises(OlderPlan):
        Plan.from_json(data)


def test_the_annotations_of_a_class_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were asked for at each value: three quarters of the time in which a report reads a long schedule."""
    data = reported.plan_of(1).to_json()
    Plan.from_json(data)
    monkeypatch.setattr(typing, "get_type_hints", lambda kind: pytest.fail(f"{kind} again"))
    Plan.from_json(data)


def test_the_nouns_import_nothing_heavy() -> None:
    heavy = "import sys, codescent.plan; print([m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout == "[]\n"
