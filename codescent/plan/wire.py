"""In: the text of the key `wire`; shapes of tensors that ranks sum. Out: the collectives and the state of each rank.
Does not send anything (strategies/wire.py does) and does not choose the sums that are compressed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from codescent.base.dtypes import DTYPE_BYTES
from codescent.base.errors import UserError
from codescent.base.wire_form import read_form, text_of
from codescent.plan.schedule import Verb
from codescent.plan.traffic import Collective, Traffic

BLOCK = 256
"""Elements that share one fp32 scale. Measured on the gradients of 64 tokens of a GPT with 1.8 M parameters, after 200
steps: the error of int4 is 11 % of their norm with 64, 15 % with 256 and 20 % with 1,024. The scales add 12 %, 3 % and
1 % to the bytes of int4, and four times that to those of sign (errors 60, 67 and 77 %)."""

PIECE_BYTES = 64 * 1024
"""What two ranks send each other in a piece. gloo sends large messages of two directions one after the other. Four
ranks with links of 49 Mbit/s needed 1.9 to 2.3 s for an all-to-all of 10.65 MB. In pieces they need 1.31 s. The link's
own time is 1.30 s."""

PIECES_AT_ONCE = 2
"""Pieces under way at once. With one at a time a link is idle between two: 1.40 s in pieces of 128 KiB."""

CODE_BITS = {"int8": 8, "int4": 4, "sign": 1}
"""Bits of an element in the formats with a scale per block."""

MOST_INDEXED = 2**31 - 1
"""Most elements of a message of topk."""

Shape = Sequence[int]


@dataclass(frozen=True)
class Sent:
    """One collective of a sum.

    Attributes:
        payload_bytes: as in Traffic: the input buffer of the largest rank; for ALL_GATHER the whole gathered buffer.
        dtype: of the buffer. uint8: codes and scales, or values and indices.
        what: its purpose, in words.
        times: how often it runs in one sum.
    """

    collective: Collective
    payload_bytes: int
    dtype: str
    what: str
    times: int = 1

    def traffic(self, axis: str, verb: Verb, during: Verb | None, of: str, stage: int | None = None) -> Traffic:
        """The record of the plan. `of`: what is summed, in words."""
        what = f"{of}: {self.what}"
        return Traffic(self.collective, axis, self.payload_bytes, self.dtype, verb, during, what, self.times, stage)


@dataclass(frozen=True)
class WireState:
    """A tensor that each rank keeps from one sum to the next. A run that is resumed needs it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its bytes on one rank."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Factored:
    """A matrix that PowerSGD sends as two factors, [rows, rank] and [columns, rank].

    Attributes:
        index: which of the tensors it is.
    """

    index: int
    rows: int
    columns: int
    rank: int


@dataclass(frozen=True)
class Wire:
    """How the summands of a sum over ranks travel.

    Attributes:
        method: none, bf16, int8, int4, sign, powersgd or topk.
        rank: of PowerSGD's factors; 0 otherwise.
        share: of the elements that topk sends; 0 otherwise.
    """

    method: str = "none"
    rank: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Wire:
        """Read the key's value. Raises ValueError, which names all forms, for any other text."""
        method, rank, share = read_form(text)
        return cls(method, rank, share)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return text_of(self.method, self.rank, self.share)

    @property
    def exact(self) -> bool:
        """Whether a sum differs from an all-reduce by rounding in the wide dtype at most."""
        return self.method == "none" or self.share == 1

    @property
    def lossy(self) -> bool:
        """Whether ranks keep what a sum has not delivered (error feedback). PowerSGD is lossy at any rank."""
        return not self.exact

    def exact_for(self, shapes: Sequence[Shape]) -> bool:
        """Whether a sum of tensors of these shapes is exact: with PowerSGD of full rank it is, see `factored`."""
        return self.exact or (self.method == "powersgd" and not self.factored(shapes))

    @property
    def coded(self) -> bool:
        """Whether each element travels, in a narrow format."""
        return self.method == "bf16" or self.method in CODE_BITS

    @property
    def message_dtype(self) -> str:
        """Dtype of the messages of a coded sum."""
        return "bf16" if self.method == "bf16" else "uint8"

    def parts(self, ranks: int) -> int:
        """Into how many parts a coded sum cuts the vector.

        With two ranks each gathers the other's whole vector: the same bytes as cutting, and one rounding instead of
        two. With more ranks gathering would send n/2 times the bytes.
        """
        return 1 if ranks == 2 else ranks

    def part(self, numel: int, ranks: int) -> int:
        """Elements of each part of a coded sum: equal parts of whole blocks, the last ones padded with zeros."""
        block = BLOCK if self.method in CODE_BITS else 1
        return ceil(numel / (self.parts(ranks) * block)) * block

    def message(self, part: int) -> int:
        """Length of a coded part in elements of `message_dtype`; with scales per block first."""
        return part if self.method == "bf16" else part // BLOCK * 4 + part * CODE_BITS[self.method] // 8

    def top(self, numel: int) -> int:
        """How many elements topk sends."""
        return max(1, ceil(self.share * numel))

    def top_message(self, numel: int, dtype: str) -> int:
        """Bytes that topk sends: values in the wide dtype, int32 indices, filled up to a multiple of 8.

        Raises UserError: an index would not fit in int32.
        """
        if numel > MOST_INDEXED:
            raise UserError(
                f'parallel.wire = "{self}": its indices are int32, too short for a message of {numel:,} elements; '
                'shorter ones need parallel.fragments, or more parallel.servers; or set parallel.wire = "int8"'
            )
        return ceil(self.top(numel) * (DTYPE_BYTES[dtype] + 4) / 8) * 8

    def message_bytes(self, numel: int, dtype: str) -> int:
        """Bytes of one vector of `numel` elements on its way to one other process. Not for PowerSGD."""
        if self.method == "none":
            return numel * DTYPE_BYTES[dtype]
        if self.method == "topk":
            return self.top_message(numel, dtype)
        return self.message(self.part(numel, 2)) * DTYPE_BYTES[self.message_dtype]

    def factored(self, shapes: Sequence[Shape]) -> list[Factored]:
        """The tensors that PowerSGD sends as factors: matrices that are larger than their two factors.

        A tensor of more than two dims is a matrix of its first dim and all others. At full rank two factors are never
        smaller, so such a matrix travels as it is.
        """
        found = []
        for index, shape in enumerate(shapes):
            rows, columns = (shape[0] if shape else 1), prod(shape[1:])
            if self.rank and len(shape) >= 2 and self.rank * (rows + columns) < rows * columns:
                found.append(Factored(index, rows, columns, self.rank))
        return found

    def collectives(self, shapes: Sequence[Shape], dtype: str, ranks: int) -> tuple[Sent, ...]:
        """Each collective of one sum of tensors of these shapes over so many ranks, in order.

        `dtype`: fp32 or fp64, the dtype of the tensors and of the sums. Raises ValueError for another dtype.
        """
        if dtype not in ("fp32", "fp64"):
            raise ValueError(f"sums are in fp32 or fp64, not in {dtype}")
        if ranks < 2 or not sum(map(prod, shapes)):
            return ()
        return tuple(self._collectives(shapes, dtype, ranks))

    def _collectives(self, shapes: Sequence[Shape], dtype: str, ranks: int) -> Iterator[Sent]:
        numel, wide = sum(map(prod, shapes)), DTYPE_BYTES[dtype]
        if self.method == "none":
            yield Sent(Collective.ALL_REDUCE, numel * wide, dtype, "whole")
        elif self.method == "topk":
            size = ranks * self.top_message(numel, dtype)
            yield Sent(Collective.ALL_GATHER, size, "uint8", "values and indices of the largest elements of each rank")
        elif self.method == "powersgd":
            matrices = self.factored(shapes)
            if rest := numel - sum(one.rows * one.columns for one in matrices):
                yield Sent(Collective.ALL_REDUCE, rest * wide, dtype, "tensors without factors")
            if matrices:
                left, right = (sum(getattr(one, dim) * one.rank for one in matrices) for dim in ("rows", "columns"))
                yield Sent(Collective.ALL_REDUCE, left * wide, dtype, "left factors P")
                yield Sent(Collective.ALL_REDUCE, right * wide, dtype, "right factors Q")
        else:
            size = ranks * self.message(self.part(numel, ranks)) * DTYPE_BYTES[self.message_dtype]
            if ranks > 2:
                yield Sent(Collective.ALL_TO_ALL, size, self.message_dtype, f"parts in {self.method}, to their owners")
            what = f"sums of the parts in {self.method}" if ranks > 2 else f"{self.method}"
            yield Sent(Collective.ALL_GATHER, size, self.message_dtype, what)

    def state(self, shapes: Sequence[Shape], dtype: str, ranks: int) -> tuple[WireState, ...]:
        """What each rank keeps, in the order of `WireSum.state()`; nothing where no collective runs.

        `residual`: what this rank has not sent yet (Seide et al. 2014; Karimireddy et al. 2019, algorithm 2).
        `owner_residual`: what the owner of a part has not sent of its sums (Tang et al. 2019, DoubleSqueeze).
        `projector`: the last right factors, with which the next sum begins (Vogels et al. 2019, section 3).
        """
        if self.exact or not self.collectives(shapes, dtype, ranks):
            return ()
        numel = sum(map(prod, shapes))
        if self.method == "powersgd":
            matrices = self.factored(shapes)
            elements = sum(one.rows * one.columns for one in matrices)
            projected = sum(one.columns * one.rank for one in matrices)
            named = {"residual": elements, "projector": projected} if matrices else {}
        else:
            named = {"residual": numel}
            if self.coded and ranks > 2:
                named["owner_residual"] = self.part(numel, ranks)
        return tuple(WireState(name, (size,), dtype) for name, size in named.items())

    def held_bytes(self, shapes: Sequence[Shape], dtype: str, ranks: int) -> int:
        """Bytes that each rank holds from sum to sum: state, the vector that is summed, and messages."""
        if not self.collectives(shapes, dtype, ranks):
            return 0
        numel, wide = sum(map(prod, shapes)), DTYPE_BYTES[dtype]
        state = sum(one.nbytes for one in self.state(shapes, dtype, ranks))
        if self.coded:
            part, parts = self.part(numel, ranks), self.parts(ranks)
            length = self.message(part) * DTYPE_BYTES[self.message_dtype]
            owned = part * wide + length if parts > 1 else 0
            return state + 2 * parts * part * wide + (parts + ranks) * length + owned
        if self.method == "topk":
            return state + 2 * numel * wide + (1 + ranks) * self.top_message(numel, dtype)
        factors = sum((one.rows + one.columns) * one.rank for one in self.factored(shapes))
        return state + (numel + factors) * wide

    def sent_bytes(self, shapes: Sequence[Shape], dtype: str, ranks: int) -> float:
        """Bytes that one rank sends in one sum, with ring algorithms (Traffic.wire_bytes)."""
        sent = self.collectives(shapes, dtype, ranks)
        return sum(one.traffic("", Verb.REDUCE, None, "").wire_bytes(ranks) * one.times for one in sent)


def kept_name(number: int, name: str) -> str:
    """The name in a plan and in a checkpoint of what the sum of a bucket or fragment keeps (`WireState.name`)."""
    return f"wire.{number}.{name}"
