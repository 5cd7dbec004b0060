"""In: a wire, tensors of each rank. Out: their sum, with the same bits on all ranks; residuals of what was not sent.
Does not start threads (strategies/wire.py does) and does not know what the tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan.wire import Wire
from codescent.strategies.collectives import Exchanges
from codescent.strategies.wire_codecs import codec, largest

Shapes = Sequence[Sequence[int]]
SEED = 17
"""Of PowerSGD's first right factors, on every rank."""


class Reduction:
    """A sum over the ranks of a group. This class sums as `none` does: one all-reduce of all elements.

    Args:
        wire: how the summands travel.
        shapes: of the tensors.
        state: zeros of the shapes that `wire.state` declares, by name.
        like: a tensor whose dtype (fp32 or fp64) and device the sums have.
    """

    def __init__(self, wire: Wire, shapes: Shapes, group: ProcessGroup, state: dict[str, Tensor], like: Tensor) -> None:
        self.wire, self.shapes, self.group, self.state = wire, [tuple(shape) for shape in shapes], group, state
        self.ranks, self.rank = group.size(), group.rank()
        self.numel = sum(map(prod, self.shapes))
        self.buffers: list[Tensor] = []
        self.values = self.buffer(like, self.padded())
        self.views = self.parted(self.values)
        self.residuals = self.parted(state["residual"]) if "residual" in state else {}

    def padded(self) -> int:
        """Elements of the vector that is summed, with padding."""
        return self.numel

    def in_order(self) -> list[int]:
        """Indices of the tensors, in the order in which they lie in the vector."""
        return list(range(len(self.shapes)))

    def buffer(self, like: Tensor, *shape: int, dtype: str = "") -> Tensor:
        """Memory that lasts from sum to sum. It begins with zeros: padding stays zero."""
        made = like.new_zeros(shape, dtype=TORCH_DTYPE[dtype] if dtype else None)
        self.buffers.append(made)
        return made

    def parted(self, flat: Tensor) -> dict[int, Tensor]:
        """A view of each tensor's part of a vector, by index. A vector may lack the last tensors."""
        views, begin = {}, 0
        for index in self.in_order():
            end = begin + prod(self.shapes[index])
            if end <= len(flat):
                views[index] = flat[begin:end].view(self.shapes[index])
            begin = end
        return views

    def sum_(self, tensors: Sequence[Tensor], exchanges: Exchanges) -> None:
        """Replace the tensors by their sums. Tensors that are `views` are in place already."""
        for index, tensor in enumerate(tensors):
            if index in self.residuals:
                torch.add(tensor, self.residuals[index], out=self.views[index])
            elif tensor is not self.views[index]:
                self.views[index].copy_(tensor)
        self.reduce(exchanges)
        for index, tensor in enumerate(tensors):
            if tensor is not self.views[index]:
                tensor.copy_(self.views[index])

    def reduce(self, exchanges: Exchanges) -> None:
        """Replace the vector by its sum."""
        exchanges.all_reduce(self.values, group=self.group)

    def keep(self, name: str, unsent: Tensor, finite: Tensor) -> None:
        """Replace a residual. After a sum that is not finite, the step is skipped: the residual stays as it was."""
        torch.where(finite, unsent, self.state[name], out=self.state[name])


class Coded(Reduction):
    """Each element in a narrow format; sums in the wide dtype.

    Two ranks gather each other's vector. More ranks cut it: the owner of a part sums what the others send of it, and
    sends the sum to all, encoded anew with a residual of its own (Tang et al. 2019, DoubleSqueeze, algorithm 1).
    """

    def __init__(self, wire: Wire, shapes: Shapes, group: ProcessGroup, state: dict[str, Tensor], like: Tensor) -> None:
        super().__init__(wire, shapes, group, state, like)
        self.codec, self.part = codec(wire), wire.part(self.numel, self.ranks)
        parts, length = wire.parts(self.ranks), wire.message(self.part)
        self.rows, self.scratch = self.values.view(parts, -1), self.buffer(like, parts, self.part)
        self.sent = self.buffer(like, parts, length, dtype=wire.message_dtype)
        self.got = self.buffer(like, self.ranks, length, dtype=wire.message_dtype)
        self.cut = parts > 1
        if self.cut:
            self.owned = self.buffer(like, 1, self.part)
            self.padding = self.owned[:, max(0, self.numel - self.rank * self.part) :]
            self.answer = self.buffer(like, 1, length, dtype=wire.message_dtype)

    def padded(self) -> int:
        """See Reduction."""
        return self.wire.parts(self.ranks) * self.wire.part(self.numel, self.ranks)

    def reduce(self, exchanges: Exchanges) -> None:
        """See Reduction."""
        self.codec.encode(self.rows, self.sent, self.scratch)
        if self.cut:
            self._to_owners(exchanges)
            exchanges.all_gather(self.got, self.answer, group=self.group)
        else:
            exchanges.all_gather(self.got, self.sent, group=self.group)
        finite = self.codec.finite(self.got)  # the same on all ranks
        self._keep_unsent(finite)
        if self.cut:
            self.codec.decode(self.got, self.rows)
        else:  # a + b has the same bits as b + a
            self.codec.decode(self.got[1 - self.rank].unsqueeze(0), self.rows)
            self.rows.add_(self.scratch)
        self.values[self.numel :].zero_()

    def _to_owners(self, exchanges: Exchanges) -> None:
        """Sum this rank's part, and encode the sum."""
        exchanges.all_to_all(self.got, self.sent, group=self.group)
        self.codec.decode(self.got, self.scratch)
        torch.add(self.scratch[:1], self.scratch[1:2], out=self.owned)
        for number in range(2, self.ranks):
            self.owned.add_(self.scratch[number])
        self.owned.add_(self.state["owner_residual"])
        self.padding.zero_()  # `sign` decodes padding, too, to what is not zero
        self.codec.encode(self.owned, self.answer, self.scratch[:1])

    def _keep_unsent(self, finite: Tensor) -> None:
        """Keep what this rank's messages lack. Afterwards `scratch` has what its first messages stand for."""
        if self.cut:
            self.codec.decode(self.answer, self.scratch[:1])
            self.owned.sub_(self.scratch[:1])
            self.padding.zero_()
            self.keep("owner_residual", self.owned[0], finite)
        self.codec.decode(self.sent, self.scratch)
        self.rows.sub_(self.scratch)
        self.keep("residual", self.values[: self.numel], finite)


class TopK(Reduction):
    """The largest elements of each rank, with their indices; all ranks add them in the order of ranks."""

    def __init__(self, wire: Wire, shapes: Shapes, group: ProcessGroup, state: dict[str, Tensor], like: Tensor) -> None:
        super().__init__(wire, shapes, group, state, like)
        self.count = wire.top(self.numel)
        length = wire.top_message(self.numel, str(like.dtype).replace("torch.float", "fp"))
        self.scratch = self.buffer(like, self.numel)
        self.sent = self.buffer(like, 1, length, dtype="uint8")
        self.got = self.buffer(like, self.ranks, length, dtype="uint8")

    def reduce(self, exchanges: Exchanges) -> None:
        """See Reduction."""
        indices = largest(self.values, self.count, self.scratch)
        values, places = self._split(self.sent[0])
        torch.index_select(self.values, 0, indices, out=values)
        places.copy_(indices)
        exchanges.all_gather(self.got, self.sent, group=self.group)
        by_rank = [self._split(message) for message in self.got]
        if self.wire.lossy:
            finite = torch.stack([values.abs().amax() for values, _ in by_rank]).amax().isfinite()
            self.keep("residual", self.values.index_fill_(0, indices, 0.0), finite)
        self.values.zero_()
        for values, places in by_rank:  # within a rank no index comes twice, so the order of additions is fixed
            self.values.index_add_(0, places, values)

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the values and of the indices."""
        size = self.count * self.values.element_size()
        places = message[size : size + 4 * self.count].view(torch.int32)
        return message[:size].view(self.values.dtype), places


class PowerSGD(Reduction):
    """A matrix M as P Q^T of a low rank: one power iteration, from the last Q (Vogels et al. 2019, algorithms 1 and 2).

    P = sum of M Q, orthonormalised; Q = sum of M^T P. Each rank keeps M - P P^T M of its own M. Other tensors are
    summed whole. All ranks have the same P, and QR is deterministic.
    """

    def __init__(self, wire: Wire, shapes: Shapes, group: ProcessGroup, state: dict[str, Tensor], like: Tensor) -> None:
        self.matrices = wire.factored(shapes)
        super().__init__(wire, shapes, group, state, like)
        cut = sum(one.rows * one.columns for one in self.matrices)
        self.divided, self.whole = self.values[:cut], self.values[cut:]
        self.M = [self.views[one.index].view(one.rows, one.columns) for one in self.matrices]
        shapes_p, shapes_q = ([(getattr(m, dim), m.rank) for m in self.matrices] for dim in ("rows", "columns"))
        self.left = self.buffer(like, sum(map(prod, shapes_p)))
        self.right = self.buffer(like, sum(map(prod, shapes_q)))
        self.P, self.Q = _split(self.left, shapes_p), _split(self.right, shapes_q)
        self.before = _split(state["projector"], shapes_q) if self.matrices else []
        for number, projector in enumerate(self.before):
            seeded = torch.Generator().manual_seed(SEED + number)
            projector.copy_(torch.randn(projector.shape, generator=seeded, dtype=torch.float64))

    def in_order(self) -> list[int]:
        """See Reduction. The matrices that are sent as factors come first."""
        first = [one.index for one in self.matrices]
        return first + [index for index in range(len(self.shapes)) if index not in set(first)]

    def reduce(self, exchanges: Exchanges) -> None:
        """See Reduction."""
        if len(self.whole):
            exchanges.all_reduce(self.whole, group=self.group)
        if not self.matrices:
            return
        self.project()
        exchanges.all_reduce(self.left, group=self.group)
        sums = [self.left.abs().amax()]
        self.factor()
        exchanges.all_reduce(self.right, group=self.group)
        sums += [part.abs().amax() for part in (self.right, self.whole) if len(part)]
        finite = torch.stack(sums).amax().isfinite()  # the same on all ranks
        self.keep("residual", self.divided, finite)
        for Q, before in zip(self.Q, self.before, strict=True):
            self._warm(before, Q, finite)
        self.multiply()
        # QR of what is not finite may be finite.
        self.divided.add_(torch.where(finite, 0.0, torch.nan).to(self.values.dtype))

    def project(self) -> None:
        """P = M Q, of this rank."""
        for M, Q, P in zip(self.M, self.before, self.P, strict=True):
            torch.mm(M, Q, out=P)

    def factor(self) -> None:
        """Orthonormalise P; Q = M^T P, of this rank. What both lack stays in M."""
        for M, P, Q in zip(self.M, self.P, self.Q, strict=True):
            P.copy_(torch.linalg.qr(P).Q)
            torch.mm(M.t(), P, out=Q)
            M.addmm_(P, Q.t(), alpha=-1)

    def multiply(self) -> None:
        """M = P Q^T, the sum over ranks."""
        for M, P, Q in zip(self.M, self.P, self.Q, strict=True):
            torch.mm(P, Q.t(), out=M)

    def _warm(self, before: Tensor, Q: Tensor, finite: Tensor) -> None:
        """Q for the next sum, of norm 1: else M Q shrinks like the square of small gradients. Zeros change nothing."""
        norm = torch.linalg.vector_norm(Q)
        torch.where(finite & (norm > 0), Q / norm, before, out=before)


def _split(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views of these shapes, one after the other."""
    parts = flat.split_with_sizes([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


KINDS: dict[str, type[Reduction]] = {"none": Reduction, "topk": TopK, "powersgd": PowerSGD}
"""By method of a wire; the others are Coded."""
