"""In: vectors in fp32 or fp64. Out: messages in narrow formats, what messages stand for; indices of largest elements.
Does not send messages and keeps no residuals (strategies/wire_sums.py does)."""

from __future__ import annotations

from math import ceil, isqrt
from typing import Protocol

import torch
from torch import Tensor

from codescent.plan.wire import BLOCK, CODE_BITS, Wire

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A block with a smaller scale is sent as zeros: the inverse of a subnormal number may be infinite."""

SAMPLE_STRIDE = 61
"""One element in 61 is read to guess a threshold. A prime, so that a sample is not one column of a matrix."""


class Codec(Protocol):
    """A narrow format. All tensors are contiguous, with one row per part."""

    def encode(self, values: Tensor, messages: Tensor, scratch: Tensor) -> None:
        """Write `values` [rows, part] into `messages` [rows, length]. Overwrites `scratch` [rows, part]."""

    def decode(self, messages: Tensor, values: Tensor) -> None:
        """Write what `messages` [rows, length] stand for into `values` [rows, part]."""

    def finite(self, messages: Tensor) -> Tensor:
        """Whether all decoded values are finite: a bool on the device. A vector with NaN or infinity decodes to one."""


def codec(wire: Wire) -> Codec:
    """The codec of a wire that is coded."""
    return BF16() if wire.method == "bf16" else _WITH_SCALES[wire.method]()


class BF16:
    """Values rounded to bf16. A value above its range becomes infinite."""

    def encode(self, values: Tensor, messages: Tensor, scratch: Tensor) -> None:
        """See Codec."""
        messages.copy_(values)

    def decode(self, messages: Tensor, values: Tensor) -> None:
        """See Codec."""
        values.copy_(messages)

    def finite(self, messages: Tensor) -> Tensor:
        """See Codec. On a CPU `isfinite` of all elements takes 17 times as long as the maximum."""
        return messages.abs().amax().isfinite()


class _Scaled:
    """Codes with an fp32 scale per block of BLOCK elements. A message is its scales, then its codes.

    A scale of a block with NaN or infinity is not finite, so the whole block decodes to values that are not finite.
    """

    bits = 8
    levels = 127.0
    """The code of the largest element of a block."""

    def encode(self, values: Tensor, messages: Tensor, scratch: Tensor) -> None:
        """See Codec. |value - decoded| <= scale / 2, up to rounding, in a block whose scale is not zero."""
        torch.abs(values, out=scratch)
        scales, codes = self._split(messages)
        scales.copy_(self._scale(_blocks(scratch)))
        scales.masked_fill_(scales < SMALLEST_SCALE, 0.0)  # NaN stays
        self._pack(values, scales, codes, scratch)

    def decode(self, messages: Tensor, values: Tensor) -> None:
        """See Codec."""
        scales, codes = self._split(messages)
        self._unpack(codes, values)
        _blocks(values).mul_(scales.to(values.dtype)[..., None])

    def finite(self, messages: Tensor) -> Tensor:
        """See Codec."""
        return self._split(messages)[0].abs().amax().isfinite()

    def _scale(self, magnitudes: Tensor) -> Tensor:
        return magnitudes.amax(2) / self.levels

    def _split(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the scales, fp32 [rows, blocks], and of the codes, int8 [rows, bytes]."""
        of_scales = messages.shape[1] // (4 + BLOCK * self.bits // 8) * 4
        return messages[:, :of_scales].view(torch.float32), messages[:, of_scales:].view(torch.int8)

    def _pack(self, values: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor) -> None:
        """Write the codes of `values`. They are in [-levels, levels] where the scale is finite."""
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0.0).to(values.dtype)
        torch.mul(_blocks(values), inverse[..., None], out=_blocks(scratch))
        self._join(scratch.round_(), codes)

    def _join(self, rounded: Tensor, codes: Tensor) -> None:
        codes.copy_(rounded)

    def _unpack(self, codes: Tensor, values: Tensor) -> None:
        values.copy_(codes)


class _Int4(_Scaled):
    """Two codes of -7 to 7 in a byte: low + 16 high, one of each half of the part."""

    bits = CODE_BITS["int4"]
    levels = 7.0

    def _join(self, rounded: Tensor, codes: Tensor) -> None:
        low, high = rounded.chunk(2, 1)
        codes.copy_(low.add_(high, alpha=16))

    def _unpack(self, codes: Tensor, values: Tensor) -> None:
        low, high = values.chunk(2, 1)
        upper = (codes + 8) >> 4  # low + 8 is in 1 to 15
        high.copy_(upper)
        low.copy_(torch.sub(codes, upper, alpha=16))


class _Sign(_Scaled):
    """A bit per element: it decodes to scale or -scale, 0 to scale. The scale is the block's mean magnitude
    (Karimireddy et al. 2019, ICML, algorithm 1).

    Byte j has the elements j, j + part/8, ..., j + 7 part/8 of a part.
    """

    bits = CODE_BITS["sign"]

    def _scale(self, magnitudes: Tensor) -> Tensor:
        return magnitudes.mean(2)

    def _pack(self, values: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor) -> None:
        positive = scratch.view(torch.int8)[:, : values.shape[1]]
        torch.ge(values, 0, out=positive.view(torch.bool))
        strips = positive.view(len(values), 8, -1)
        codes.copy_(strips[:, 7])
        for bit in range(6, -1, -1):
            codes.add_(codes).add_(strips[:, bit])

    def _unpack(self, codes: Tensor, values: Tensor) -> None:
        for bit, strip in enumerate(values.view(len(values), 8, -1).unbind(1)):
            strip.copy_((codes >> bit).bitwise_and_(1))
        values.mul_(2).sub_(1)


def _blocks(values: Tensor) -> Tensor:
    return values.view(len(values), -1, BLOCK)


_WITH_SCALES: dict[str, type[_Scaled]] = {"int8": _Scaled, "int4": _Int4, "sign": _Sign}


def largest(values: Tensor, count: int, scratch: Tensor) -> Tensor:
    """Indices [count], int64, of the elements of `values` [numel] with the largest magnitudes. NaN counts as largest.

    On a CPU, torch.topk of 10 M elements takes 0.2 s. There a sample gives a threshold that few more than `count`
    elements pass, and topk sees these only. If too few pass, it sees all. The choice is exact both times.
    """
    numel = len(values)
    if count == numel:
        return torch.arange(numel, device=values.device)
    torch.abs(values, out=scratch)
    sample = scratch[::SAMPLE_STRIDE]
    expected = ceil(len(sample) * count / numel)
    above = expected + 4 * isqrt(expected) + 4  # four standard deviations
    if values.device.type == "cpu" and 4 * above < len(sample):
        threshold = sample.kthvalue(len(sample) - above).values
        passed = torch.lt(scratch, threshold).logical_not_().nonzero()[:, 0]
        if len(passed) >= count:
            return passed[scratch[passed].topk(count, sorted=False).indices]
    return scratch.topk(count, sorted=False).indices
