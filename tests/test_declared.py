"""In: layouts of every strategy and hybrids. Out: what a step issues and what a rank holds is what the plan declares.
Does not run a step itself: declared_ranks does, on torch's fake process group or on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import pytest
from declared_cases import CASES, is_slow
from declared_ranks import Answer, plan_of
from declared_traffic import check_issued
from forker import Forker

from codescent.cost.memory import StateBytes, state_bytes, state_of_rank
from codescent.plan import DTYPE_BYTES, WIDE, Plan, TensorPlan

Answers = dict[int, Answer]


@pytest.fixture(scope="module")
def answers(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Answers]:
    """What each rank of a case issued and held."""
    folder = tmp_path_factory.mktemp("declared")

    def of_case(group: str, name: str) -> Answers:
        case = CASES[group][name]
        if group == "gloo":
            return dict(enumerate(forker.call("declared_ranks:on_gloo_rank", folder, case["world_size"], case=case)))
        (found,) = forker.call("declared_ranks:on_fake_ranks", folder, cases={name: case})
        return {int(rank): answer for rank, answer in found[name].items()}

    return of_case


def check_bytes(plan: Plan, rank: int, held: dict[str, int]) -> StateBytes:
    """What a rank has held against the placements of its own part; as the plan's summary counts it."""
    mesh, tensors = plan.mesh, plan.held_by(plan.mesh.coordinates(rank)["pp"])
    trained = [tensor for tensor in tensors if tensor.parameter.trained]

    def numel(what: str, of: Sequence[TensorPlan] = trained) -> int:
        placed = ((getattr(tensor, what), tensor.parameter.shape) for tensor in of)
        return sum(prod(placement.sizes(shape, mesh, rank)) for placement, shape in placed)

    one, wide_bytes = plan.trained[0], DTYPE_BYTES[WIDE[plan.work.precision]]
    assert len({(t.weight_dtype, t.gradient_dtype, t.bucket_dtype, t.master_dtype) for t in plan.trained}) == 1
    left = [tensor for tensor in tensors if not tensor.parameter.trained]
    assert {tensor.weight_dtype for tensor in left} <= {plan.work.precision}
    left_bytes = sum(tensor.weights_bytes(mesh, rank) for tensor in left)
    # Where only masters are divided, what forward and backward read is gathered for them.
    weights = held["read"] if mesh.dp_shard > 1 and one.master_dtype else held["parameters"]
    assert weights == numel("weights") * DTYPE_BYTES[one.weight_dtype] + left_bytes
    # fully_shard keeps sums of micro-batches whole until the last one.
    gradients = held["whole_gradients"] or held["gradients"]
    assert gradients == numel("gradients") * (DTYPE_BYTES[one.gradient_dtype] + DTYPE_BYTES.get(one.bucket_dtype, 0))
    assert held["masters"] == numel("optimizer") * wide_bytes
    moments = sum(numel("optimizer", [tensor]) * tensor.optimizer_tensors for tensor in trained)
    assert held["moments"] == moments * wide_bytes
    return StateBytes(weights, gradients, held["moments"] + (held["masters"] if one.master_dtype else 0))


def check_counted(plan: Plan, rank: int, counted: dict[str, int]) -> None:
    """What the run itself counts against the plan, and the padding with which fully_shard makes shards equal."""
    declared, mesh = state_of_rank(plan, rank), plan.mesh
    padding = dict.fromkeys(("weights_bytes", "gradients_bytes", "optimizer_bytes"), 0)
    for tensor in plan.held_by(mesh.coordinates(rank)["pp"]):
        if "dp_shard" not in tensor.optimizer.shards:
            continue
        rows, *others = tensor.optimizer.without("dp_shard").sizes(tensor.parameter.shape, mesh, rank)
        padded = -(-rows // mesh.dp_shard) * prod(others)
        shard = padded - tensor.optimizer.numel(tensor.parameter.shape, mesh, rank)
        whole = padded * mesh.dp_shard - rows * prod(others)
        gathered = tensor.weights == tensor.optimizer.without("dp_shard")
        padding["weights_bytes"] += (whole if gathered else shard) * DTYPE_BYTES[tensor.weight_dtype]
        if tensor.parameter.trained:
            padding["optimizer_bytes"] += shard * DTYPE_BYTES.get(tensor.master_dtype, 0)
            divided = tensor.gradients == tensor.optimizer
            padding["gradients_bytes"] += shard * DTYPE_BYTES[tensor.gradient_dtype] * divided
    assert {part: counted[part] - size for part, size in padding.items()} == {
        part: getattr(declared, part) for part in padding
    }
    assert counted["activations_bytes"] > 0


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, marks=[pytest.mark.slow] * is_slow(group, name))
        for group, cases in CASES.items()
        for name in cases
    ],
)
def test_a_step_issues_and_holds_what_is_declared(
    answers: Callable[[str, str], Answers], group: str, name: str
) -> None:
    plan, firsts = plan_of(CASES[group][name]), []
    for rank, answer in answers(group, name).items():
        assert "failed" not in answer, answer["failed"]
        check_issued(plan, rank, answer["issued"], on_gloo=group == "gloo")
        held = check_bytes(plan, rank, answer["held"])
        check_counted(plan, rank, answer["counted"])
        if rank in plan.mesh.group("pp", 0):
            firsts.append(held)
    if len(firsts) == plan.mesh.pp:  # the fullest rank of every stage
        assert state_bytes(plan) == max(firsts, key=lambda held: held.total_bytes)
