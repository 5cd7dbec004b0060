"""In: a decoder divided over tp, on each rank its part. Out: an engine: rank 0 decides, others read the same.
Does not divide the decoder (strategies/tensor.py does) or start ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from codescent.inference.reader import Pass, Reader
from codescent.inference.schedule import Capacity
from codescent.models.decoder import Decoder
from codescent.operators.cache import RowPart, TextPages
from codescent.strategies.collectives import broadcast

# A pass as numbers: rows, tokens; of each row its new tokens, its length, whether its logits are wanted, its number of
# pages, the pages; then the tokens. A count of no numbers is the end. Collectives of a pass on every rank, with L
# layers: two BROADCASTs (how many numbers, the numbers), 1 + 2 L ALL_REDUCEs (embedding, attention and feed-forward of
# each layer; with norms over all heads L more), one ALL_GATHER (logits of the rows that want them, even of none).


class LeadingReader(Reader):
    """Rank 0's reader. Each pass is told to the other ranks of the group, which are in `follow`.

    Keys and values of a head are on the rank that has the head. The logits are gathered; rank 0 alone chooses tokens.

    Args:
        module: this rank's part, in evaluation mode, without sequence parallelism (`strategies.whole_sequences`).
        capacity: of the engine, the same on every rank.
        group: the ranks of tp.
    """

    def __init__(self, module: Decoder, capacity: Capacity, group: dist.ProcessGroup) -> None:
        super().__init__(module, capacity.pages, capacity.page_size)
        self._group = group

    def read(self, work: Pass) -> Tensor:
        """See `Reader`."""
        _send(_numbers(work), self.device, self._group)
        return super().read(work)

    def close(self) -> None:
        """Let the other ranks return from `follow`."""
        _send([], self.device, self._group)


@torch.inference_mode()
def follow(module: Decoder, capacity: Capacity, group: dist.ProcessGroup) -> int:
    """Read the passes of rank 0 until it closes its reader. Returns their number. See `LeadingReader`."""
    reader, passes = Reader(module, capacity.pages, capacity.page_size), 0
    while numbers := _received(reader.device, group):
        reader.read(_pass(numbers, capacity.page_size))
        passes += 1
    return passes


def _numbers(work: Pass) -> list[int]:
    numbers = [len(work.parts), len(work.tokens)]
    for part, wanted in zip(work.parts, work.wanted, strict=True):
        pages = part.pages.numbers
        numbers += [part.new, part.length, int(wanted), len(pages), *pages]
    return numbers + work.tokens


def _pass(numbers: list[int], page_size: int) -> Pass:
    rows, tokens, at = numbers[0], numbers[1], 2
    parts, every = list[RowPart](), list[bool]()
    for _ in range(rows):
        new, length, wanted, pages = numbers[at : at + 4]
        at += 4 + pages
        parts.append(RowPart(new, length, TextPages(page_size, numbers[at - pages : at])))
        every.append(bool(wanted))
    return Pass(numbers[at : at + tokens], parts, every)


def _send(numbers: list[int], device: torch.device, group: dist.ProcessGroup) -> None:
    root = dist.get_global_rank(group, 0)
    broadcast(torch.tensor([len(numbers)], device=device), root, group=group)
    if numbers:
        broadcast(torch.tensor(numbers, device=device), root, group=group)


def _received(device: torch.device, group: dist.ProcessGroup) -> list[int]:
    root = dist.get_global_rank(group, 0)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    broadcast(count, root, group=group)
    numbers = count.new_zeros(int(count))
    if len(numbers):
        broadcast(numbers, root, group=group)
    found: list[int] = numbers.tolist()
    return found
