"""In: a pipeline stage's instruction list. Out: activations and their gradients, sent to other stages and received.
Does not decide when a tensor is sent (the list does), and does not compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from codescent.base.ranges import Flight
from codescent.plan import DTYPE_BYTES, RECEIVES, SENDS, Collective, Instruction, Plan, Verb

RECEIVE = "receive"
"""The other end of a `Collective.SEND`: the name of its flight on the rank that receives."""


@dataclass(frozen=True)
class Message:
    """A tensor that is being received."""

    work: Any
    memory: torch.Tensor
    flight: Flight

    def wait(self) -> torch.Tensor:
        """Wait until the tensor has arrived, and return it."""
        self.work.wait()
        self.flight.waited()
        return self.memory


MOST_SENT = 2
"""Largest number of unfinished sends to one stage on a CPU: gloo holds the memory of a send until the sender waits.
To wait for old sends is safe: the lists do not deadlock even if every send waits for its receive (plan/pipeline)."""


class Messages:
    """The point-to-point messages of one stage.

    The computation that reads a message waits for its receive. On a CPU a send is waited for after MOST_SENT later
    sends. On CUDA the wait would stop the stream of computations until the receiver is ready, so only `end` waits.
    Until a send has finished, a reference keeps its memory. Without one, the allocator would give the memory to the
    next computation, while NCCL's stream still reads it. Each later send to that stage drops the references to sends
    that have finished, so few are kept. They are activations, which backward keeps anyway, and gradients that the stage
    before has not received yet. There is at most one gradient for each micro-batch.

    On a CPU a receive is posted one receive early, when the list reaches the receive before it: the message travels
    while this rank computes. On CUDA a receive is posted at its place in the list. A CUDA receive blocks its stream,
    so an early one could block work that the sender waits for.

    Each pair (from, to) of stages is a channel with its own process group. Messages arrive in the order of both
    lists, and a waiting NCCL receive does not block a send.

    Args:
        stage: of this rank.
        groups: process groups; the names of channels are "pp[from,to]".
        ranks: the rank of each stage, along the pp axis.
        dtype: of activations.
        device: of activations.
        shape: [T, D] of one sample's activations.
    """

    def __init__(
        self,
        stage: int,
        groups: Mapping[str, dist.ProcessGroup],
        ranks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        shape: tuple[int, int],
    ) -> None:
        self.stage, self.groups, self.ranks = stage, dict(groups), ranks
        self.dtype, self.device, self.shape = dtype, device, shape
        self.batch = 0
        self.ahead = device.type == "cpu"
        self.sent: dict[int, deque[tuple[Any, torch.Tensor, Flight]]] = {}
        self.awaited: dict[int, deque[Instruction]] = {}
        self.posted: dict[int, Message] = {}

    def begin(self, program: Iterable[Instruction], batch: int) -> None:
        """Begin an instruction list: note its receives, and on a CPU post the first of each channel.

        Args:
            program: the list.
            batch: number of samples in each message.
        """
        assert not self.posted, "the last list has ended with unread messages"
        self.batch = batch
        for instruction in program:
            if instruction.verb in RECEIVES:
                assert instruction.peer is not None
                self.awaited.setdefault(instruction.peer, deque()).append(instruction)
        for peer in self.awaited if self.ahead else ():
            self._post_next(peer)

    def send(self, instruction: Instruction, message: torch.Tensor) -> None:
        """Begin to send `message`; a reference keeps its memory until the send has finished."""
        assert instruction.verb in SENDS
        assert instruction.peer is not None
        sent = self.sent.setdefault(instruction.peer, deque())
        while len(sent) >= MOST_SENT if self.ahead else sent and sent[0][0].is_completed():
            _wait(*sent.popleft())  # it blocks nothing if the send has finished; errors are raised
        message = message.detach().contiguous()
        group = self.groups[f"pp[{self.stage},{instruction.peer}]"]
        flight = Flight(Collective.SEND, group, message)
        sent.append((dist.isend(message, self.ranks[instruction.peer], group=group), message, flight))

    def receive(self, instruction: Instruction) -> Message:
        """Return the message of this instruction, the next of its channel. It may still be on its way."""
        peer = instruction.peer
        assert peer is not None
        expected = self.awaited[peer].popleft()
        assert expected == instruction, f"{expected} is next from stage {peer}, not {instruction}"
        if not self.ahead:
            return self._post(peer)
        message = self.posted.pop(peer)
        self._post_next(peer)
        return message

    def end(self) -> None:
        """End the list: wait until all sends have finished."""
        for sent in self.sent.values():
            for one in sent:
                _wait(*one)
        self.forget()

    def buffers(self) -> Iterator[torch.Tensor]:
        """The memory of unfinished sends and of receives that nobody reads yet."""
        for sent in self.sent.values():
            yield from (memory for _, memory, _ in sent)
        yield from (message.memory for message in self.posted.values())

    def forget(self) -> None:
        """Drop the references to all sends and receives, finished or not."""
        self.sent.clear()
        self.awaited.clear()
        self.posted.clear()

    def close(self) -> None:
        """Drop the references to process groups."""
        self.groups.clear()

    def _post_next(self, peer: int) -> None:
        if self.awaited[peer]:
            self.posted[peer] = self._post(peer)

    def _post(self, peer: int) -> Message:
        memory = torch.empty(self.batch, *self.shape, dtype=self.dtype, device=self.device)
        group = self.groups[f"pp[{peer},{self.stage}]"]
        flight = Flight(RECEIVE, group, memory)
        return Message(dist.irecv(memory, self.ranks[peer], group=group), memory, flight)


def _wait(work: Any, message: torch.Tensor, flight: Flight) -> None:
    """Wait until `message` has been sent."""
    work.wait()
    flight.waited()


def message_shape(plan: Plan) -> tuple[int, int]:
    """The shape [T, D] of one sample's activations between two stages; T is the number of positions on a rank."""
    work, sent = plan.work, [t.payload_bytes for t in plan.traffic if t.verb is Verb.SEND_ACTIVATION]
    position_bytes = work.microbatch_size * plan.model.hidden_dim * DTYPE_BYTES[work.precision]
    return (sent[0] // position_bytes if sent else work.seq_len), plan.model.hidden_dim
