"""In: a stage's receives, a process group that notes what it is asked for. Out: who waits for a message, and when.
Does not send anything: test_prove does, with real processes."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from codescent.plan import Instruction, Verb
from codescent.train.messages import Messages

SENDS = [Instruction(Verb.SEND_ACTIVATION, number, peer=0) for number in range(4)]
RECEIVES = [Instruction(Verb.RECEIVE_ACTIVATION, number, peer=0) for number in range(3)]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process group was asked for, in order; message n is full of n."""
    notes: list[str] = []

    def irecv(memory: torch.Tensor, source: int, group: Any) -> SimpleNamespace:
        number = sum(note.startswith("posted") for note in notes)
        notes.append(f"posted {number}")
        memory.fill_(number)
        return SimpleNamespace(wait=lambda: notes.append(f"waited {number}"))

    monkeypatch.setattr(dist, "irecv", irecv)
    return notes


def messages(channel: str = "pp[0,1]") -> Messages:
    return Messages(1, {channel: None}, (0, 1), torch.float32, torch.device("cpu"), (4, 2))  # type: ignore[dict-item]


def test_a_receive_posts_the_next_and_waits_for_nothing(noted: list[str]) -> None:
    mail = messages()
    mail.begin(RECEIVES, 3)
    assert noted == ["posted 0"]
    coming = [mail.receive(instruction) for instruction in RECEIVES]
    assert noted == ["posted 0", "posted 1", "posted 2"]
    for number in (1, 0, 2):  # whoever reads waits, in whatever order
        assert coming[number].wait().tolist() == torch.full((3, 4, 2), float(number)).tolist()
    assert noted[3:] == ["waited 1", "waited 0", "waited 2"]


def test_a_receive_out_of_the_channels_order_is_a_mistake(noted: list[str]) -> None:
    mail = messages()
    mail.begin(RECEIVES, 3)
    with pytest.raises(AssertionError, match="is next from stage 0"):
        mail.receive(RECEIVES[1])


class Sent:
    """A send that ends when it is told to."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.done, self.waited = weakref.ref(memory), False, False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.waited = True


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    found: list[Sent] = []

    def isend(memory: torch.Tensor, target: int, group: Any) -> Sent:
        found.append(Sent(memory))
        return found[-1]

    monkeypatch.setattr(dist, "isend", isend)
    return found


def send(mail: Messages, number: int) -> None:
    """No one else keeps the memory of what is sent."""
    mail.send(SENDS[number], torch.full((3, 4, 2), float(number)))


def test_cuda_waits_for_no_send_before_the_end_and_keeps_what_is_on_its_way(sends: list[Sent]) -> None:
    mail = messages("pp[1,0]")
    mail.ahead = False
    for number in range(3):
        send(mail, number)
    assert [one.waited for one in sends] == [False] * 3
    assert all(one.memory() is not None for one in sends)
    sends[0].done = sends[2].done = True  # messages arrive in order, so the third is looked at after the second
    send(mail, 3)
    assert [one.waited for one in sends] == [True, False, False, False]
    assert [one.memory() is None for one in sends] == [True, False, False, False]
    assert [float(memory[0, 0, 0]) for memory in mail.buffers()] == [1.0, 2.0, 3.0]
    mail.end()
    assert all(one.waited and one.memory() is None for one in sends)


def test_a_cpu_keeps_two_sends(sends: list[Sent]) -> None:
    mail = messages("pp[1,0]")
    for number in range(4):
        send(mail, number)
    assert [one.waited for one in sends] == [True, True, False, False]
    assert [one.memory() is None for one in sends] == [True, True, False, False]
