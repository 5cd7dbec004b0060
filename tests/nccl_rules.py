"""In: calls of torch's process groups. Out: the same transfers by NCCL's rules, a log of them, and the rules broken.
Does not join the logs of the ranks (nccl_graph does) and needs no NCCL: the transfers go by gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from nccl_graph import Entry, Node

UNWATCHED = (
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "gather",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Transfers that no step makes. One of them would pass without a rule, so it is an error."""


class Handle(dist.Work):
    """The handle of a transfer between copies. Only `wait` puts what has arrived where its reader looks."""

    def __init__(self, rules: Rules, what: str, work: Any, sent: Sequence[Any], received: Sequence[Any]) -> None:
        super().__init__()
        self.rules, self.what, self.work = rules, what, work
        self.received = list(received)
        for tensor, _ in self.received:
            poison_(tensor)
        self.then = [(tensor, tensor.detach().clone()) for tensor in (*sent, *(one for one, _ in self.received))]
        rules.pending.append(self)

    def wait(self, *timeout: Any) -> bool:
        """Finish the transfer, and compare its buffers with what they were when it began."""
        if self not in self.rules.pending:
            return True
        self.rules.pending.remove(self)
        self.work.wait(*timeout)
        if not all(same_bits(tensor, then) for tensor, then in self.then):
            self.rules.problems.append(f"{self.what}: a buffer was overwritten before the wait")
        for tensor, arrived in self.received:
            tensor.data.copy_(arrived)
        return True


class Rules:
    """What NCCL guarantees of transfers, and no more.

    A result is NaN until its handle has been waited for. A buffer belongs to the transfer until then. Messages have no
    tags: those of two ranks in one group arrive in the order in which they were sent.

    Attributes:
        log: the transfers of this rank in order; those of one batch are one entry.
        made: ranks and name of each new group.
        problems: rules that were broken.
        pending: transfers that nobody has waited for yet.
    """

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.made: list[tuple[list[int], str]] = []
        self.problems: list[str] = []
        self.pending: list[Handle] = []
        self._numbers: dict[str, int] = {}
        self._batch: Entry | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The rules hold for every transfer of this process. At the end, all of them have to be waited for."""
        kind, patches = dist.ProcessGroup, []
        watched: dict[str, Callable[..., Any]] = {
            "allreduce": self._all_reduce,
            "broadcast": self._broadcast,
            "send": self._send,
            "recv": self._receive,
            "all_gather_single": self._gather_or_scatter("all_gather", 0),
            "_allgather_base": self._gather_or_scatter("all_gather", 0),
            "reduce_scatter_single": self._gather_or_scatter("reduce_scatter", 1),
            "_reduce_scatter_base": self._gather_or_scatter("reduce_scatter", 1),
            "all_to_all_single": self._all_to_all,
            "alltoall_base": self._all_to_all,
            **dict.fromkeys(UNWATCHED, self._unwatched),
        }
        for name, watch in watched.items():
            if real := getattr(kind, name, None):  # torch 2.13 has other names than 2.11
                patches.append(patch.object(kind, name, _method(watch, real)))
        patches.append(patch.object(dist, "new_group", self._noting(dist.new_group)))
        patches.append(patch.object(dist, "batch_isend_irecv", self._batched(dist.batch_isend_irecv)))
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()
        self.problems += [f"{handle.what}: nobody waited for it" for handle in self.pending]

    def _start(
        self, what: str, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], real: Callable[..., Any]
    ) -> Handle:
        """Start a transfer. `real` gets a copy of each sent tensor, then memory for those received that are not sent.

        The copies take what the buffers hold now. NCCL may read them later; that makes no difference unless somebody
        writes to them, and the handle finds that.
        """
        copies = {id(tensor): tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in sent}
        for tensor in received:
            copies.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))
        work = real(*copies.values())
        return Handle(self, what, work, sent, [(tensor, copies[id(tensor)]) for tensor in received])

    def _note(self, *nodes: Node) -> None:
        if self._batch is None:
            self.log.append(list(nodes))
        else:
            self._batch += nodes

    def _node(self, channel: str, ranks: Sequence[int], what: str) -> Node:
        number = self._numbers[channel] = self._numbers.get(channel, -1) + 1
        return channel, number, list(ranks), what

    def _collective(self, group: dist.ProcessGroup, what: str) -> Node:
        return self._node(group.group_name, dist.get_process_group_ranks(group), what)

    def _message(self, group: dist.ProcessGroup, source: int, target: int, what: str) -> Node:
        ranks = dist.get_process_group_ranks(group)
        ends = ranks[source], ranks[target]
        return self._node(f"{group.group_name}[{ends[0]},{ends[1]}]", ends, what)

    def _all_reduce(self, real: Any, group: Any, tensors: list[torch.Tensor], opts: Any) -> Handle:
        what = f"all_reduce {sum_of(opts)} of {size(tensors[0])}"
        self._note(self._collective(group, what))
        return self._start(what, tensors, tensors, lambda copy: real(group, [copy], opts))

    def _broadcast(self, real: Any, group: Any, tensors: list[torch.Tensor], opts: Any) -> Handle:
        what = f"broadcast from {opts.rootRank} of {size(tensors[0])}"
        self._note(self._collective(group, what))
        sends = group.rank() == opts.rootRank
        mine = (tensors, []) if sends else ([], tensors)
        return self._start(what, *mine, lambda copy: real(group, [copy], opts))

    def _gather_or_scatter(self, name: str, whole: int) -> Callable[..., Handle]:
        """(output, input): `whole` is the index of the one that has the parts of all ranks."""

        def start(real: Any, group: Any, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Handle:
            how = f" {sum_of(opts)}" if hasattr(opts, "reduceOp") else ""
            what = f"{name}{how} of {size((output, given)[whole])}"
            self._note(self._collective(group, what))
            return self._start(what, [given], [output], lambda sent, received: real(group, received, sent, opts))

        return start

    def _all_to_all(
        self,
        real: Any,
        group: Any,
        output: torch.Tensor,
        given: torch.Tensor,
        takes: list[int],
        gives: list[int],
        o: Any,
    ) -> Handle:
        """As NCCL does it: a batch of messages between all pairs of ranks."""
        mine, item = group.rank(), given.element_size()
        nodes = [self._collective(group, f"all_to_all of {given.dtype}")]
        for other in range(group.size()):
            if other != mine:
                nodes.append(self._message(group, mine, other, f"all_to_all of {gives[other] * item} bytes"))
                nodes.append(self._message(group, other, mine, f"all_to_all of {takes[other] * item} bytes"))
        self._note(*nodes)
        return self._start(
            "all_to_all", [given], [output], lambda sent, received: real(group, received, sent, takes, gives, o)
        )

    def _send(self, real: Any, group: Any, tensors: list[torch.Tensor], target: int, tag: int) -> Handle:
        node = self._message(group, group.rank(), target, f"send of {size(tensors[0])}")
        self._note(node)
        return self._start(f"send of {size(tensors[0])}", tensors, [], lambda copy: real(group, [copy], target, 0))

    def _receive(self, real: Any, group: Any, tensors: list[torch.Tensor], source: int, tag: int) -> Handle:
        node = self._message(group, source, group.rank(), f"send of {size(tensors[0])}")
        self._note(node)
        return self._start(f"receive of {size(tensors[0])}", [], tensors, lambda copy: real(group, [copy], source, 0))

    def _unwatched(self, real: Any, *arguments: Any) -> None:
        raise AssertionError(f"{real} is a transfer that no rule watches")

    def _batched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def start(operations: list[dist.P2POp]) -> Any:
            self._batch = []
            works = real(operations)
            entry, self._batch = self._batch, None
            self._note(*entry)
            return works

        return start

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(ranks: list[int], *arguments: Any, **options: Any) -> Any:
            group = real(ranks, *arguments, **options)
            self.made.append((list(ranks), group.group_name))
            return group

        return new_group


def _method(watch: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def method(group: Any, *arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            return watch(real, group, *arguments, **options)

    return method


def size(tensor: torch.Tensor) -> str:
    """What one end of a transfer says of its tensor."""
    return f"{tensor.numel() * tensor.element_size()} bytes of {tensor.dtype}"


def sum_of(options: Any) -> str:
    """The name of what a reduction computes."""
    return next(name for name in ("SUM", "AVG", "MIN", "MAX") if options.reduceOp == getattr(dist.ReduceOp, name))


def poison_(tensor: torch.Tensor) -> None:
    """Write what no reader can take for a result; autograd's count of versions does not see it."""
    tensor.data.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a shape are equal bit by bit. NaN equals NaN."""
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)))
