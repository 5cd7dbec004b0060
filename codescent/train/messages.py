"""In: a pipeline stage's instruction list. Out: activations and their gradients, sent to other stages and received.
Does not decide what is sent when (the list does) and computes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from codescent.plan import RECEIVES, SENDS, Instruction


@dataclass(frozen=True)
class Message:
    """A tensor that is being received."""

    work: Any
    memory: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor, once it has arrived."""
        self.work.wait()
        return self.memory


MOST_SENT = 2
"""Sends to one stage that may be in flight: gloo keeps what was sent until somebody waits for it. The lists do not
deadlock even if every send waits for its receive (plan/pipeline), so waiting for older ones is safe."""


class Messages:
    """The point-to-point messages of one stage.

    A receive is waited for by the computation that reads it, a send only after MOST_SENT more. On a CPU a receive is
    posted when the list reaches the receive before it, so that a message travels while its receiver computes. On CUDA
    it is posted in its place: a receive that waits on the device must not come before the work its sender waits for.

    A channel leads from one stage to another, on a process group of its own: messages arrive in the order of both
    lists, and on NCCL a receive that waits holds up no send.

    `groups` are named "pp[from,to]"; `ranks` are those of the pp axis; `shape` is [T, D] of a sample.
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
        self.sent: dict[int, deque[tuple[Any, torch.Tensor]]] = {}
        self.awaited: dict[int, deque[Instruction]] = {}
        self.coming: dict[int, Message] = {}

    def begin(self, program: Iterable[Instruction], batch: int) -> None:
        """The receives of a list, the first of each channel posted. Every message of it is of so many samples."""
        assert not self.coming, "a list ended with messages that nobody has read"
        self.batch = batch
        for instruction in program:
            if instruction.verb in RECEIVES:
                assert instruction.peer is not None
                self.awaited.setdefault(instruction.peer, deque()).append(instruction)
        for peer in self.awaited if self.ahead else ():
            self._post(peer)

    def send(self, instruction: Instruction, message: torch.Tensor) -> None:
        """Begin to send; the tensor is kept until it has left."""
        assert instruction.verb in SENDS
        assert instruction.peer is not None
        sent = self.sent.setdefault(instruction.peer, deque())
        if len(sent) == MOST_SENT:
            sent.popleft()[0].wait()
        message = message.detach().contiguous()
        group = self.groups[f"pp[{self.stage},{instruction.peer}]"]
        sent.append((dist.isend(message, self.ranks[instruction.peer], group=group), message))

    def receive(self, instruction: Instruction) -> Message:
        """The message of this instruction, the next of its channel; it need not have arrived."""
        peer = instruction.peer
        assert peer is not None
        expected = self.awaited[peer].popleft()
        assert expected == instruction, f"{expected} is next from stage {peer}, not {instruction}"
        if not self.ahead:
            return self._posted(peer)
        message = self.coming.pop(peer)
        self._post(peer)
        return message

    def end(self) -> None:
        """The list is done: wait until everything that was sent has left."""
        for sent in self.sent.values():
            for work, _ in sent:
                work.wait()
        self.forget()

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        self.sent.clear()
        self.awaited.clear()
        self.coming.clear()

    def close(self) -> None:
        """Let go of the process groups."""
        self.groups.clear()

    def _post(self, peer: int) -> None:
        if self.awaited[peer]:
            self.coming[peer] = self._posted(peer)

    def _posted(self, peer: int) -> Message:
        memory = torch.empty(self.batch, *self.shape, dtype=self.dtype, device=self.device)
        return Message(dist.irecv(memory, self.ranks[peer], group=self.groups[f"pp[{peer},{self.stage}]"]), memory)
