"""In: a plan for several ranks. Out: the collectives that a step really issues are those that the plan declares.
Does not send anything: torch's fake process group stands in for the other ranks, and counts as one of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.profiler import profile, record_function
from codescent import models
from codescent.build import build, chosen, model_shape
from codescent.config import Config
from codescent.models.initialize import initialize_

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
during = None
for microbatch in range(plan.work.num_microbatches):
    tokens = torch.randint(0, 97, (plan.work.microbatch_size, plan.work.seq_len + 1))
    loss = applied.module(tokens[:, :-1], tokens[:, 1:])
    applied.gradients.before_backward(last=microbatch == plan.work.num_microbatches - 1)
    during = "backward"
    loss.backward()
    during = None
applied.gradients.reduce(torch.zeros(2, dtype=torch.float64))
held = [[g.numel() * g.element_size(), str(g.dtype)] for g in applied.gradients.collect()]
print(json.dumps({"issued": issued, "plan": plan.to_json(), "held": held}))
"""
DTYPE = {"fp32": "torch.float32", "fp64": "torch.float64", "bf16": "torch.bfloat16"}


@pytest.mark.parametrize(
    ("world_size", "precision", "num_microbatches"), [(2, "fp32", 1), (64, "fp32", 3), (64, "bf16", 1), (64, "bf16", 3)]
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
    declared = [
        [record["payload_bytes"], DTYPE[record["dtype"]], record["during"]] for record in answer["plan"]["traffic"]
    ]
    assert len(declared) > 5
    assert answer["issued"] == declared
    assert sum(size for size, _ in answer["held"]) == sum(size for size, _, during in declared if during)
