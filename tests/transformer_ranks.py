"""In: one rank of tp. Out: how an encoder-decoder divided over tp differs from one device's, and what the rank sent.
Does not assert anything (test_models_transformer_divided does) and starts no process (rank_server does)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from rank_server import Place
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codescent import models
from codescent.models.initialize import fill_
from codescent.models.transformer.declare import TransformerShape
from codescent.models.transformer.module import Transformer
from codescent.plan import Layout, Mesh, ModelFacts, Plan, TaskFacts, TensorPlan, Work
from codescent.plan.schedule import accumulate
from codescent.strategies import Candidate, TensorParallel, ThisRank, active, traffic_of

DEGREE, BATCH, CHUNK = 2, 3, 4
SIZES = {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "hidden_dim": 16, "ffn_dim": 24}
SIZES |= {"vocab_size": 37, "source_len": 6, "target_len": 4}
KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "send": "send",
}
CASES: list[dict[str, Any]] = [
    {"splits": splits, "recompute": recompute, "options": options}
    for splits in (True, False)
    for recompute in ("none", "full")
    for options in (
        {},
        {"norm": "first", "embedding": "untied"},
        {"norm": "first", "dropout": 0.2},
        {"dropout": 0.2, "embedding": "untied", "causal": False},
    )
] + [
    {"splits": splits, "recompute": "none", "options": {"causal": causal}, "padded": True}
    for splits in (True, False)
    for causal in (True, False)
]


def shape_of(case: dict[str, Any]) -> TransformerShape:
    options = dict(case["options"])
    dropout = options.pop("dropout", 0.0)
    shape = models.shape_of("transformer", SIZES | options, dropout=dropout)
    assert isinstance(shape, TransformerShape)
    return shape


def candidate_of(case: dict[str, Any]) -> Candidate:
    """As build makes it, of one micro-batch."""
    shape = shape_of(case)
    model = ModelFacts(
        kind="transformer",
        num_layers=shape.num_layers,
        hidden_dim=shape.hidden_dim,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        forward_flops=models.forward_flops("transformer", shape, shape.seq_len),
        dropout=shape.dropout,
        encoder_layers=shape.num_encoder_layers,
        head_chunk_tokens=CHUNK,
    )
    work = Work(
        seq_len=shape.seq_len,
        global_batch_size=BATCH,
        microbatch_size=BATCH,
        num_microbatches=1,
        precision="fp64",
        streams=shape.streams,
    )
    layout = Layout(sequence_parallel=case["splits"], recompute=case["recompute"])
    return Candidate(Mesh(tp=DEGREE), model, TaskFacts("seq2seq"), work, layout, DEGREE, None)


def plan_of(case: dict[str, Any]) -> Plan:
    """The plan of a candidate with tensor parallelism alone."""
    candidate, strategy = candidate_of(case), TensorParallel()
    assert not list(strategy.refuse(candidate))
    tensors = tuple(
        strategy.place(TensorPlan(parameter, "fp64", "fp64", "fp64", "", 2), candidate)
        for parameter in models.parameters_of("transformer", shape_of(case))
    )
    plan = Plan(
        mesh=candidate.mesh,
        model=candidate.model,
        task=candidate.task,
        work=candidate.work,
        layout=candidate.layout,
        tensors=tensors,
        schedule=accumulate(1, len(candidate.model.forward_flops)),
    )
    return dataclasses.replace(plan, traffic=traffic_of(strategy, plan))


class Watch(TorchDispatchMode):
    """Notes what this rank hands in to the process group, or gets from all."""

    def __init__(self) -> None:
        super().__init__()
        self.verb = "forward"
        self.issued: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name in KINDS:
            payload = args[0][0] if name in ("allreduce_", "send") else args[0] if "gather" in name else args[1]
            self.issued.append([KINDS[name], self.verb, payload.numel() * payload.element_size()])
        return func(*args, **(kwargs or {}))


def step(module: Transformer, plan: Plan, case: dict[str, Any]) -> tuple[Tensor, list[list[Any]]]:
    """The loss, whose gradients are then there, and what was sent."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, SIZES["vocab_size"], (BATCH, plan.work.seq_len + 1), generator=generator)
    targets, extras = rows[:, 1:].clone(), {}
    if case.get("padded"):
        extras = {"source_lengths_B": torch.tensor([6, 1, 4]), "target_lengths_B": torch.tensor([2, 4, 1])}
        targets[0, 8:], targets[2, 7:] = -1, -1
    module.train()
    module.set_dropout_context(4, 0, torch.arange(BATCH))
    with Watch() as watch:
        loss = module(rows[:, :-1], targets, loss_scale=1 / plan.work.tokens, **extras)
        watch.verb = "backward"
        loss.backward()
    return loss.detach(), watch.issued


def slices(tensor: TensorPlan, plan: Plan, rank: int) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in tensor.optimizer.box(tensor.parameter.shape, plan.mesh, rank))


def run(case: dict[str, Any], group: Any) -> dict[str, Any]:
    shape, plan, rank = shape_of(case), plan_of(case), group.rank()
    whole, divided = (Transformer(shape, CHUNK, "meta").double() for _ in range(2))
    for strategy in active(plan):
        strategy.divide(divided, ThisRank(plan, rank, {"tp": group}))
    whole.to_empty(device="cpu")
    divided.to_empty(device="cpu")
    fill_(3, [(t.parameter, whole.get_parameter(t.parameter.name), None) for t in plan.tensors])
    fill_(3, [(t.parameter, divided.get_parameter(t.parameter.name), slices(t, plan, rank)) for t in plan.tensors])
    expected, _ = step(whole, plan, case)
    loss, issued = step(divided, plan, case)
    errors = {}
    for tensor in plan.tensors:
        name = tensor.parameter.name
        mine, truth = divided.get_parameter(name).grad, whole.get_parameter(name).grad
        assert mine is not None
        assert truth is not None
        if "tp" in tensor.partial:
            dist.all_reduce(mine, group=group)
        truth = truth[slices(tensor, plan, rank)]
        errors[name] = ((mine - truth).norm() / truth.norm()).item()
    return {"loss": abs(loss.item() / expected.item() - 1), "errors": errors, "issued": issued}


def work(place: Place, numbers: list[int]) -> list[tuple[int, dict[str, Any]]]:
    """What this rank found in the cases with these numbers."""
    group = place.join()
    answer = [(number, run(CASES[number], group)) for number in numbers]
    dist.barrier()
    return answer
