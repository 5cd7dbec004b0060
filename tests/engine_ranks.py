"""In: one rank of tp. Out: the tokens of an engine over both ranks, of one on a device, and what the rank sent.
Does not assert anything (test_engine_ranks does) and starts no process (rank_server does)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from generating import tokens_of
from rank_server import Place
from torch.utils._python_dispatch import TorchDispatchMode

from codescent import models
from codescent.inference.engine import Engine
from codescent.inference.ranks import LeadingReader, follow
from codescent.inference.request import Sampling
from codescent.inference.schedule import Capacity
from codescent.models.decoder import Decoder
from codescent.models.initialize import fill_
from codescent.plan import Layout, Mesh, Plan, TaskFacts, TensorPlan, Work
from codescent.plan.schedule import accumulate
from codescent.strategies import Candidate, TensorParallel, ThisRank, active
from codescent.strategies.whole_sequences import whole_sequences

DEGREE, LAYERS = 2, 2
SIZES: dict[str, Any] = {"num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 16, "seq_len": 32}
SIZES |= {"vocab_size": 37, "ffn_dim": 24, "window": 6}
LATENTS: dict[str, Any] = {"num_kv_heads": 4, "head_dim": 8, "rotary_dim": 4, "kv_latent_dim": 6, "value_dim": 6}
CASES = [{"splits": False}, {"splits": True}, {"splits": True, "qk_norm": "all"}, {"splits": True, **LATENTS}]
PROMPTS = [[5, 3, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [36]]
CAPACITY = Capacity(2, 20, 4, 6)


class Counted(TorchDispatchMode):
    """How many collectives of each kind this rank issues."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self.found[name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def plan_of(case: dict[str, Any]) -> Plan:
    """Tensor parallelism alone, with or without a divided sequence."""
    more = {name: value for name, value in case.items() if name != "splits"}
    shape = models.shape_of("llama", SIZES | more)
    model, layout = models.facts_of("llama", shape), Layout(sequence_parallel=case["splits"])
    work = Work(seq_len=32, global_batch_size=1, microbatch_size=1, num_microbatches=1, precision="fp64")
    candidate = Candidate(Mesh(tp=DEGREE), model, TaskFacts("lm"), work, layout, DEGREE, None)
    strategy = TensorParallel()
    tensors = tuple(
        strategy.place(TensorPlan(parameter, "fp64", "fp64", "fp64", "", 2), candidate)
        for parameter in models.parameters_of("llama", shape)
    )
    schedule = accumulate(1, len(model.forward_flops))
    return Plan(
        mesh=candidate.mesh,
        model=model,
        task=candidate.task,
        work=work,
        layout=layout,
        tensors=tensors,
        schedule=schedule,
    )


def module_of(plan: Plan, rank: int, group: Any) -> Decoder:
    """This rank's part of a model with far from uniform predictions; `group` None: the whole model."""
    module = models.construct(plan.model, "meta").double()
    assert isinstance(module, Decoder)
    if group is not None:
        for strategy in active(plan):
            strategy.divide(module, ThisRank(plan, rank, {"tp": group}))
    module.to_empty(device="cpu")
    boxes = [
        (one.parameter, module.get_parameter(one.parameter.name), None if group is None else _slices(one, plan, rank))
        for one in plan.tensors
    ]
    fill_(3, boxes)
    with torch.no_grad():
        for parameter, tensor, _ in boxes:
            tensor.mul_(25.0 if len(parameter.shape) > 1 else 1.0)
    return module.eval()


def _slices(tensor: TensorPlan, plan: Plan, rank: int) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in tensor.optimizer.box(tensor.parameter.shape, plan.mesh, rank))


def samplings() -> list[Sampling]:
    return [Sampling(1.0 if number else 0.0, seed=4, max_new_tokens=20) for number in range(len(PROMPTS))]


def run(case: dict[str, Any], group: Any) -> dict[str, Any]:
    plan, rank = plan_of(case), group.rank()
    divided = module_of(plan, rank, group)
    with whole_sequences(divided, group), Counted() as counted:
        if rank:
            return {"passes": follow(divided, CAPACITY, group), "sent": dict(counted.found)}
        reader = LeadingReader(divided, CAPACITY, group)
        engine = Engine(divided, None, CAPACITY, reader=reader)
        found = tokens_of(engine, PROMPTS, samplings())
        reader.close()
    again = tokens_of(Engine(module_of(plan, rank, None), None, CAPACITY), PROMPTS, samplings())
    return {"tokens": found, "alone": again, "sent": dict(counted.found), "preemptions": engine.preemptions}


def work(place: Place) -> list[dict[str, Any]]:
    """What this rank found in each case."""
    group = place.join()
    answer = [run(case, group) for case in CASES]
    dist.barrier()
    return answer
