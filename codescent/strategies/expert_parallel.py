"""In: the mesh axis ep, parameters with the roles of experts. Out: expert parallelism: each rank has some experts of
every layer, and rows of tokens travel to the ranks of their experts and back.
Does not choose experts (operators/routing.py does) and does not send anything itself (expert_exchange.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from codescent.base.counted import counted
from codescent.base.refusal import Refusal
from codescent.plan import DTYPE_BYTES, Collective, Placement, Plan, Role, TensorPlan, Traffic, Verb
from codescent.strategies.refusals import near_degrees
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch

EXPERTS = (Role.EXPERT_COLUMN, Role.EXPERT_ROW)
"""Roles of the matrices of experts."""
DIM = 1
"""The dim of these matrices that counts experts."""
COUNTS = "numbers of rows of each expert"
FORWARD, BACKWARD = ("rows of tokens", "outputs of experts"), ("gradients of outputs", "gradients of rows")
"""What travels in the passes, in order."""


class ExpertParallel(Strategy):
    """Expert parallelism (Lepikhin et al. 2020, "GShard"; Fedus et al. 2021, "Switch Transformers", section 3).

    The ranks of the axis read other samples, as those of dp_shard do. They hold all other parameters alike, and each
    computes one summand of their gradients.
    """

    axis = "ep"
    variants = ({},)

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse a model without experts, experts that cannot be divided equally, and ranks that work apart."""
        degree, experts = candidate.mesh.ep, candidate.model.num_experts
        if degree == 1:
            return
        if not experts or experts % degree:
            said = f"{counted(experts, 'expert')} (model.num_experts) do not divide into {degree} parts"
            yield Refusal(
                f"parallel.ep = {degree}: {said if experts else 'the model has no experts (model.num_experts)'}",
                near_degrees(candidate, self.axis, max(1, experts), _fits),
            )
        if candidate.layout.served or candidate.layout.hands_out:
            key = candidate.layout.hands_out_by or "servers"
            yield Refusal(
                f"parallel.ep = {degree}: with parallel.{key} ranks take different steps at a time, and rows of tokens "
                "travel between ranks that take the same one",
                near_degrees(candidate, self.axis, 1, lambda other: other.mesh.ep == 1),
            )

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Divide experts. Gradients of all other tensors are partial."""
        if tensor.parameter.role in EXPERTS:
            shard = Placement({**tensor.weights.shards, self.axis: DIM})
            return replace(tensor, weights=shard, gradients=shard, optimizer=shard)
        return replace(tensor, partial=(*tensor.partial, self.axis)) if tensor.parameter.trained else tensor

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """All-to-alls of each micro-batch and layer of experts: rows to their experts and back, and their gradients.

        How many rows two ranks exchange is decided by the router. A rank sends the rows of its own tokens, and receives
        as many outputs, so `payload_bytes` is exact for both; what it does for tokens of others varies.
        """
        routed = [t.parameter.depths[0] for t in plan.held_by(stage) if t.parameter.role is Role.EXPERT_COLUMN]
        work, model = plan.work, plan.model
        rows = work.microbatch_size * model.expert_rows // plan.mesh.cp
        backward = plan.schedule.input_verb
        again = [(backward, f"{what}, again") for what in (COUNTS, *FORWARD)] if plan.layout.recompute == "full" else []
        found = [(Verb.FORWARD, COUNTS), *((Verb.FORWARD, what) for what in FORWARD), *again]
        for verb, what in (*found, *((backward, what) for what in BACKWARD)):
            counts = what.startswith(COUNTS)
            dtype = "int64" if counts else work.precision
            payload_bytes = (model.num_experts if counts else rows * model.hidden_dim) * DTYPE_BYTES[dtype]
            for first, end in _runs(routed):
                times = (end - first) * work.num_microbatches
                record = Traffic(Collective.ALL_TO_ALL, self.axis, payload_bytes, dtype, verb, None, what, times)
                yield replace(record, depths=(first, end))

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Shrink the matrices of experts to this rank's, and set what exchanges their rows."""
        import torch  # noqa: PLC0415 - keeps torch out of planning

        from codescent.strategies.expert_exchange import exchange  # noqa: PLC0415

        planned = {tensor.parameter.name: tensor for tensor in this_rank.tensors}
        for name, parameter in list(part.named_parameters()):
            tensor, (owner, _, leaf) = planned[name], name.rpartition(".")
            if tensor.parameter.role not in EXPERTS:
                continue
            sizes = tensor.optimizer.without("dp_shard").sizes(
                tensor.parameter.shape, this_rank.plan.mesh, this_rank.rank
            )
            if sizes != tuple(parameter.shape):
                layer = cast(Any, part.get_submodule(owner))
                setattr(layer, leaf, torch.nn.Parameter(parameter.new_empty(sizes), parameter.requires_grad))
        for layer in part.modules():
            if hasattr(layer, "exchange"):
                cast(Any, layer).exchange = partial(exchange, group=this_rank.groups[self.axis])


def _fits(candidate: Candidate) -> bool:
    return candidate.mesh.ep == 1 or candidate.model.num_experts % candidate.mesh.ep == 0


def _runs(depths: list[int]) -> Iterator[tuple[int, int]]:
    """[first, end) of depths that follow each other."""
    for at, depth in enumerate(depths):
        if at == 0 or depths[at - 1] != depth - 1:
            first = depth
        if at + 1 == len(depths) or depths[at + 1] != depth + 1:
            yield first, depth + 1
