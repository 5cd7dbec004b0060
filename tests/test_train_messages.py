"""In: a stage's receives, a process group that notes what it is asked for. Out: who waits for a message, and when.
Does not send anything: test_prove does, with real processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from codescent.plan import Instruction, Verb
from codescent.train.messages import Messages

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


def messages() -> Messages:
    return Messages(1, {"pp[0,1]": None}, (0, 1), torch.float32, torch.device("cpu"), (4, 2))  # type: ignore[dict-item]


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
