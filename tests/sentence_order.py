"""In: a text. Out: the task "order" of the tests: are two lines of it in their order, or swapped? One file, one line.
Does not test anything: test_added_task.py does."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from codescent import tasks
from codescent.base.sealed import digest
from codescent.data.samples import Numbers, Samples, in_range
from codescent.tasks.task import TaskRequest
from codescent.tasks.text import TextDataset, TextTask

IN_ORDER, SWAPPED = 0, 1  # behind the tokens of the tokenizer


class OrderSource:
    """Two lines that follow one another, a separator between them, in order or swapped; which, is wanted at the end."""

    losses_per_sample: int | None = 1

    def __init__(self, name: str, lines: list[Numbers], vocab_size: int, seq_len: int, seed: int) -> None:
        self.name, self.num_samples = name, len(lines) - 1
        self._lines, self._vocab_size, self._seq_len, self._seed = lines, vocab_size, seq_len, seed

    def read(self, numbers: Numbers) -> Samples:
        numbers = in_range(numbers, self.num_samples, self.name)
        inputs = np.zeros((len(numbers), self._seq_len), np.int64)
        targets, lengths = np.full_like(inputs, -1), np.zeros(len(numbers), np.int64)
        room = (self._seq_len - 1) // 2
        for row, number in enumerate(numbers.tolist()):
            label = hashlib.blake2b(f"{self._seed} {number}".encode()).digest()[0] % 2
            first, second = (self._lines[number + (place ^ label)][:room] for place in (0, 1))
            sample = np.concatenate([first, [ord("\n")], second])
            lengths[row] = len(sample)
            inputs[row, : len(sample)] = sample
            targets[row, len(sample) - 1] = self._vocab_size + label
        return Samples(inputs, targets, {"lengths_B": lengths})

    def losses(self, numbers: Numbers) -> Numbers:
        return np.ones(len(numbers), np.int64)


@dataclass(frozen=True)
class OrderDataset(TextDataset):
    seed: int

    @property
    def vocab_size(self) -> int:
        return super().vocab_size + 2

    @cached_property
    def fingerprint(self) -> str:
        return digest(["order", self.seed, self.text.fingerprint])

    def source(self, split: str, seq_len: int, num_targets: int) -> OrderSource:
        tokens = self.text.train if split == "train" else self.text.validation
        whole = tokens.span(0, tokens.num_tokens)
        lines = [line[line != ord("\n")] for line in np.split(whole, np.flatnonzero(whole == ord("\n")))]
        return OrderSource(split, [line for line in lines if len(line)], self.text.vocab_size, seq_len, self.seed)


class Order(TextTask):
    name = "order"
    kinds = ("gpt2", "llama")
    extras = True
    marks = 2
    unit = "pairs of lines"

    def open(self, request: TaskRequest, path: Path) -> OrderDataset:
        return OrderDataset(self.text(request, path), request.seed)


REGISTERED = (*tasks.TASKS, Order())


def register() -> None:
    tasks.TASKS = REGISTERED
