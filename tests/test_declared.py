"""In: a plan for several ranks. Out: the collectives that a step issues and the bytes that it holds are those declared.
Does not send anything: torch's fake process group stands in for the other ranks, and counts as one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from codescent.cost.memory import state_bytes
from codescent.plan import AXES, Plan

PROGRAM = """
import json, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from codescent.build import build
from codescent.config import Config
from codescent.data.loader import Batch
from codescent.plan import AXES, Collective, Verb
from codescent.train import assemble

values, world_size = json.loads(sys.argv[1]), int(sys.argv[2])
config = Config.model_validate(values)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
plan = build(config, 97, world_size)
groups = {axis: dist.new_group(list(plan.mesh.group(axis, 0)), use_local_synchronization=True) for axis in AXES}

class Loader:
    def next(self):
        size = plan.work.microbatch_size
        rows = torch.randint(0, 97, (plan.work.num_microbatches, size, plan.work.seq_len + 1))
        return [Batch(row[:, :-1], row[:, 1:], torch.arange(size)) for row in rows]

def sum_over(values, axis):
    if plan.mesh.degree(axis) > 1:
        dist.all_reduce(values, group=groups[axis])
    return values

assemble._loader = lambda *_: Loader()
world = SimpleNamespace(groups=groups, device=torch.device("cpu"), stage=0, sum_over=sum_over)
dataset, stop = SimpleNamespace(vocab_size=97), SimpleNamespace(wished=lambda: False)
trainer = assemble.assemble(config, plan, world, dataset, 0, stop)
executor, optimizer = trainer.executor, trainer.optimizer
KINDS = {"allreduce_": Collective.ALL_REDUCE, "_allgather_base_": Collective.ALL_GATHER,
         "_reduce_scatter_base_": Collective.REDUCE_SCATTER}
issued, during = [], None

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            # What a rank hands in, or for an all-gather what it gets: (tensors, ...), (output, input, ...).
            payload = args[0][0] if name == "allreduce_" else args[0] if "gather" in name else args[1]
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject)
                         and "ProcessGroup" in arg._type().name())
            size = payload.numel() * payload.element_size()
            issued.append([KINDS[name], dist.get_process_group_ranks(group), size, str(payload.dtype), during])
        return func(*args, **(kwargs or {}))

def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

# A validation beforehand changes nothing: what it gathered is not kept for the step.
batch = Loader().next()[0]
trainer.module.eval()
with torch.no_grad():
    trainer.module(batch.tokens_BT, batch.targets_BT)
trainer.module.train()

held = {}
for verb in Verb:
    def arm(instruction, act=executor.arms.get(verb), verb=verb):
        global during
        during = verb
        if verb == "backward":
            held["read"] = nbytes(map(local, trainer.module.parameters()))
            if hasattr(trainer.module, "unshard"):  # sums of micro-batches that fully_shard keeps whole
                shards = [s for m in trainer.module.modules() if hasattr(m, "unshard")
                          for group in [m._get_fsdp_state()._fsdp_param_group] for s in group.fsdp_params]
                sums = [s.unsharded_accumulated_grad for s in shards if s.unsharded_accumulated_grad is not None]
                held["whole_gradients"] = nbytes(sums) or nbytes(
                    s.unsharded_param.grad for s in shards if getattr(s, "_unsharded_param", None) is not None
                    and s.unsharded_param.grad is not None)
        if verb == "step":  # the gradients are complete, and everything of them is still there
            buckets = getattr(executor.gradients, "buffers", [])
            kept = [*getattr(executor.gradients, "sums", {}).values()]
            held["gradients"] = nbytes([*buckets, *kept] or executor.gradients.collect())
        act(instruction)
        during = None
    executor.arms[verb] = arm
with Watch():
    executor.step(0, 1e-3)
held["parameters"] = nbytes(map(local, trainer.module.parameters()))
held["masters"] = nbytes(w.master for w in optimizer.weights)
held["moments"] = nbytes(t for state in optimizer.torch.state.values() for t in state.values() if t.ndim)
print(json.dumps({"issued": issued, "plan": plan.to_json(), "held": held}))
"""
DTYPE = {"fp32": "torch.float32", "fp64": "torch.float64", "bf16": "torch.bfloat16"}


def step_of(
    world_size: int, precision: str, num_microbatches: int, **parallel: int | str
) -> tuple[Plan, Counter[tuple[object, ...]], dict[str, int]]:
    """The plan, how often each collective was issued, and bytes held, of a step by rank 0 of so many."""
    config = {
        "model": {"num_layers": 3, "num_heads": 2, "hidden_dim": 36, "seq_len": 8},
        "train": {
            "global_batch_size": 2 * world_size * num_microbatches,
            "microbatch_size": 2,
            "precision": precision,
        },
        "parallel": {"bucket_bytes": 20_000, **parallel},
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(config), str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    issued = Counter((kind, tuple(ranks), *others) for kind, ranks, *others in answer["issued"])
    return Plan.from_json(answer["plan"]), issued, answer["held"]


def declared(plan: Plan) -> Counter[tuple[object, ...]]:
    counted: Counter[tuple[object, ...]] = Counter()
    for t in plan.traffic:
        assert t.axis in AXES
        ranks = plan.mesh.group(t.axis, 0)
        counted[str(t.collective), ranks, t.payload_bytes, DTYPE[t.dtype], str(t.during or t.verb)] += t.times
    return counted


@pytest.mark.parametrize(
    ("world_size", "precision", "num_microbatches"),
    [(1, "fp32", 3), (1, "bf16", 3), (2, "fp32", 1), (64, "fp32", 3), (64, "bf16", 1), (64, "bf16", 3)],
)
def test_replicate_issues_and_holds_what_it_declares(world_size: int, precision: str, num_microbatches: int) -> None:
    plan, issued, held = step_of(world_size, precision, num_microbatches)
    assert issued.total() > 3 if world_size > 1 else not issued
    assert issued == declared(plan)
    state = state_bytes(plan)
    masters = 0 if precision == "fp32" else held["masters"]
    assert (held["parameters"], held["gradients"], masters + held["moments"]) == (
        state.weights_bytes,
        state.gradients_bytes,
        state.optimizer_bytes,
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("copies", "shards", "precision", "num_microbatches"),
    [(1, 2, "fp32", 1), (1, 5, "fp64", 3), (1, 64, "bf16", 1), (2, 4, "bf16", 3), (8, 8, "fp32", 2)],
)
def test_zero_issues_and_holds_what_it_declares(
    stage: int, copies: int, shards: int, precision: str, num_microbatches: int
) -> None:
    parallel = {"dp_replicate": copies, "dp_shard": shards, "zero_stage": stage}
    plan, issued, held = step_of(copies * shards, precision, num_microbatches, **parallel)
    assert issued == declared(plan)
    state = state_bytes(plan)
    wide_bytes = 8 if precision == "fp64" else 4
    # ZeRO table (Rajbhandari et al. 2020, figure 1), first dims rounded up to whole rows of every rank.
    part = sum(-(-t.parameter.shape[0] // shards) * (t.parameter.numel // t.parameter.shape[0]) for t in plan.tensors)
    assert held["masters"] == held["parameters"] == part * wide_bytes
    assert held["gradients"] == part * wide_bytes
    if stage == 1 and num_microbatches > 1:
        assert held["whole_gradients"] == state.gradients_bytes == plan.num_parameters * wide_bytes
    else:
        assert held["whole_gradients"] == 0
        assert state.gradients_bytes == part * wide_bytes
    if stage == 3:
        assert state.weights_bytes == part * wide_bytes
        assert held["moments"] == state.optimizer_bytes == 2 * part * wide_bytes
    else:
        narrow_bytes = 2 if precision == "bf16" else wide_bytes
        assert held["read"] == state.weights_bytes == plan.num_parameters * narrow_bytes
        assert held["masters"] + held["moments"] == state.optimizer_bytes == 3 * part * wide_bytes
