"""In: train.fp8. Out: matrices of blocks whose products are computed in 8-bit floats; what cannot have them.
Does not compute a product (operators/fp8.py does), look for a device (train/machine.py does) or check sizes
(build/few_bits.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal
from codescent.plan import Plan
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch


class Fp8Products(Strategy):
    """Products of the blocks' matrices in fp8 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

    Losses must not depend on the layout, so factors must not either. With "rowwise" a factor is of one token, or of one
    row or column of a whole weight: no axis divides these but tp. With "tensorwise" it is of all tokens of a
    micro-batch, so that a step has one micro-batch on one rank.
    """

    def active(self, run: Candidate | Plan) -> bool:
        """True if train.fp8 is set."""
        return run.work.fp8 != ""

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse layouts that divide what has one factor (build/few_bits.py has sizes)."""
        if not self.active(candidate):
            return
        work, mesh, layout, model = candidate.work, candidate.mesh, candidate.layout, candidate.model
        said, off = f'train.fp8 = "{work.fp8}"', [Change({"train.fp8": "none"})]
        if mesh.tp > 1:
            yield Refusal(f"{said}: parallel.tp = {mesh.tp} would divide rows that have one factor", off)
        if layout.recompute in ("selective", "products"):
            whole = Change({"parallel.recompute": "full"})
            yield Refusal(f'{said}: parallel.recompute = "{layout.recompute}" keeps other products', [whole, *off])
        if layout.defers_weights and mesh.pp > 1:
            others = Change({"parallel.schedule": "1f1b"})
            yield Refusal(f"{said}: its gradients of weights cannot wait, as zero-bubble wants", [others, *off])
        if model.lora is not None:
            yield Refusal(f"{said}: lora.rank adds products of adapters, which are in train.precision", off)
        ranks = mesh.dp * mesh.cp * layout.data_parallel
        if work.fp8 == "tensorwise" and (ranks > 1 or work.num_microbatches > 1):
            rowwise = Change({"train.fp8": "rowwise"})
            yield Refusal(
                f"{said}: a factor is of all tokens of a step, which must be one micro-batch on one rank",
                [rowwise, *off],
            )

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Give the matrices of blocks their products. Raises UserError: it has layers of another library."""
        from codescent.operators.fp8 import Fp8  # noqa: PLC0415 - keeps torch out of planning
        from codescent.operators.linear import Linear  # noqa: PLC0415

        work, blocks = this_rank.plan.work, cast(Any, part).blocks
        layers = [layer for layer in blocks.modules() if isinstance(layer, Linear)]
        if len(blocks) and not layers:
            raise UserError(f'train.fp8 = "{work.fp8}": this model has layers of another library; set it to "none"')
        for layer in layers:
            layer.fp8 = Fp8(work.fp8, work.fp8_emulated)
