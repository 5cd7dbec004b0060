"""In: a plan for several ranks. Out: the collectives that a step issues and the bytes that it holds are those declared.
Does not send anything: torch's fake process group stands in for the other ranks, and counts as one of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from codescent.cost.memory import state_bytes
from codescent.plan import Plan

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.profiler import profile, record_function
from codescent import models
from codescent.build import build, chosen, model_shape
from codescent.config import Config
from codescent.data.loader import Batch
from codescent.models.initialize import initialize_
from codescent.train.execute import Executor
from codescent.train.optimize import Optimizer, Weight

values, world_size = json.loads(sys.argv[1]), int(sys.argv[2])
config = Config.model_validate(values)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
plan = build(config, 97, world_size)
shape = model_shape(config, 97)
module = models.construct("gpt2", shape, device="cpu")
module.to({"fp32": torch.float32, "bf16": torch.bfloat16}[config.train.precision])
initialize_(module, 1, models.parameters_of("gpt2", shape))
issued, original = [], dist.all_reduce

def all_reduce(tensor, *args, **kwargs):
    issued.append([tensor.numel() * tensor.element_size(), str(tensor.dtype), during])
    return original(tensor, *args, **kwargs)

dist.all_reduce = all_reduce
(strategy,) = chosen(config.parallel)
applied = strategy.apply(module, {"dp_replicate": dist.group.WORLD}, plan)
optimizer = Optimizer([Weight(name, p, p.detach().float() if p.dtype == torch.bfloat16 else p, p.ndim > 1)
                       for name, p in module.named_parameters()], config.optimizer)

class Loader:
    def next(self):
        size = plan.work.microbatch_size
        rows = torch.randint(0, 97, (plan.work.num_microbatches, size, plan.work.seq_len + 1))
        return [Batch(row[:, :-1], row[:, 1:], torch.arange(size)) for row in rows]

executor = Executor(plan, 0, applied, optimizer, Loader(), torch.device("cpu"), 1, lambda: False)
during, held = None, {}
for verb in ("backward", "reduce", "step"):
    def arm(instruction, act=executor.arms[verb], verb=verb):
        global during
        during = verb
        if verb == "step":  # the gradients are complete, and everything of them is still there
            buckets = applied.gradients.buffers
            kept = [*applied.gradients.sums.values()] or ([] if buckets else applied.gradients.collect())
            held["gradients"] = sum(t.numel() * t.element_size() for t in [*buckets, *kept])
        act(instruction)
        during = None
    executor.arms[verb] = arm
executor.step(0, 1e-3)
state = optimizer.tensors()
masters = [] if config.train.precision == "fp32" else [state[name] for name in state if name.startswith("model.")]
per_element = [t for name, t in state.items() if name.startswith("optimizer.") and t.ndim]
held["optimizer"] = sum(t.numel() * t.element_size() for t in [*masters, *per_element])
held["weights"] = sum(p.numel() * p.element_size() for p in module.parameters())
print(json.dumps({"issued": issued, "plan": plan.to_json(), "held": held}))
"""
DTYPE = {"fp32": "torch.float32", "fp64": "torch.float64", "bf16": "torch.bfloat16"}


@pytest.mark.parametrize(
    ("world_size", "precision", "num_microbatches"),
    [(1, "fp32", 3), (1, "bf16", 3), (2, "fp32", 1), (64, "fp32", 3), (64, "bf16", 1), (64, "bf16", 3)],
)
def test_issued_collectives_are_the_declared_ones(world_size: int, precision: str, num_microbatches: int) -> None:
    config = {
        "model": {"num_layers": 3, "num_heads": 2, "hidden_dim": 32, "seq_len": 8},
        "train": {
            "global_batch_size": 2 * world_size * num_microbatches,
            "microbatch_size": 2,
            "precision": precision,
        },
        "parallel": {"bucket_bytes": 20_000},
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(config), str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    plan = Plan.from_json(answer["plan"])
    declared = [[t.payload_bytes, DTYPE[t.dtype], t.during or t.verb] for t in plan.traffic]
    assert len(declared) > 5 if world_size > 1 else not declared
    assert answer["issued"] == declared
    state = state_bytes(plan)
    assert answer["held"] == {
        "weights": state.weights_bytes,
        "gradients": state.gradients_bytes,
        "optimizer": state.optimizer_bytes,
    }
