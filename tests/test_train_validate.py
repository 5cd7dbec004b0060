"""In: numbers of validation samples, ranks, samples of a pass. Out: each sample counts once; ranks make equal passes.
Does not compute a loss: an executor that notes its batches stands in; test_hybrids compares real validation losses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codescent import models
from codescent.data.loader import Batch, InOrder
from codescent.data.samples import Numbers, Samples
from codescent.models.gpt2.module import GPT2
from codescent.plan import Mesh
from codescent.tasks.score import TOKENS_AT_ONCE, fitting
from codescent.train import assemble
from codescent.train.execute import Executor
from codescent.train.validate import samples_at_once, validation_loss


class Numbered:
    """Samples of one token, their number; sample i has i + 1 losses."""

    name = "validation"
    losses_per_sample = None

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def read(self, numbers: Numbers) -> Samples:
        return Samples(numbers[:, None], numbers[:, None])

    def losses(self, numbers: Numbers) -> Numbers:
        return numbers + 1


class Noting:
    """What `validation_loss` asks of an executor. The loss of a batch is the sum of its numbers."""

    def __init__(self, mesh: Mesh, rank: int, microbatch_size: int) -> None:
        work = SimpleNamespace(microbatch_size=microbatch_size, seq_len=TOKENS_AT_ONCE)
        self.plan = SimpleNamespace(mesh=mesh, work=work)
        share = mesh.dp_index(rank), mesh.dp
        self.world = SimpleNamespace(this_rank=SimpleNamespace(rank=rank), share=lambda plan: share)
        self.device, self.batches = torch.device("cpu"), list[list[int]]()
        self.number = 0

    def note_data(self, step: int, portion: object) -> None:
        """All numbers are finite."""

    @contextmanager
    def evaluating(self) -> Iterator[Callable[[Batch], torch.Tensor]]:
        yield self._evaluate

    def _evaluate(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch.inputs.flatten().tolist())
        return batch.inputs.sum()

    def sum_of_losses(self, loss: torch.Tensor) -> torch.Tensor:
        self.loss = float(loss)
        return loss


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.none() | st.integers(1, 50))
def test_each_sample_is_read_once_and_the_passes_are_alike(
    num_samples: int, copies: int, shards: int, size: int, most: int | None
) -> None:
    mesh, source = Mesh(dp_replicate=copies, dp_shard=shards), Numbered(num_samples)
    ranks = [Noting(mesh, rank, size) for rank in range(mesh.world_size)]
    found = [validation_loss(cast(Executor, one), cast(Any, source), most) for one in ranks]
    wanted = range(min(num_samples, most or num_samples))
    assert len({len(one.batches) for one in ranks}) == 1
    assert all(len(batch) <= size for one in ranks for batch in one.batches)
    read = np.concatenate([batch for one in ranks for batch in one.batches])
    assert set(read.tolist()) == set(wanted)
    assert sum(one.loss for one in ranks) == sum(wanted)  # a pass that reads nothing new counts nothing
    assert sum(found) == pytest.approx(sum(wanted) / sum(number + 1 for number in wanted))


@pytest.mark.parametrize(
    ("words", "device", "samples"),
    [
        ({}, "cpu", 8),  # 8192 tokens
        ({}, "cuda", 24),  # 4 samples of 6 blocks: training keeps as much
        ({"num_layers": 32}, "cuda", 64),  # 65,536 tokens
        ({"microbatch_size": 100}, "cuda", 100),
        ({"microbatch_size": 100}, "cpu", 100),
        ({"pp": 3}, "cuda", 8),
        ({"recompute": "full"}, "cuda", 8),
    ],
)
def test_a_pass_needs_no_more_memory_than_training(words: dict[str, Any], device: str, samples: int) -> None:
    of = {"pp": 1, "microbatch_size": 4, "num_layers": 6, "recompute": "none"} | words
    plan = SimpleNamespace(
        mesh=Mesh(pp=of["pp"]),
        work=SimpleNamespace(microbatch_size=of["microbatch_size"], seq_len=1024),
        model=SimpleNamespace(num_layers=of["num_layers"]),
        layout=SimpleNamespace(recompute=of["recompute"]),
    )
    assert samples_at_once(cast(Any, plan), torch.device(device)) == samples


def test_off_the_cpu_a_pass_of_validation_has_no_more_logits_than_a_micro_batch() -> None:
    for chunk, expected in ((8192, 64), (0, 64), (10, 10)):
        work = SimpleNamespace(microbatch_size=2, positions=lambda depth: 32)
        plan = SimpleNamespace(work=work, model=SimpleNamespace(head_chunk_tokens=chunk))
        assert assemble._of_micro_batch(cast(Any, plan)) == expected


@pytest.mark.parametrize(("free_bytes", "samples"), [(1 << 40, 4096), (1 << 24, 330), (1, 1)])
def test_a_device_with_little_free_memory_scores_fewer_samples_at_once(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, samples: int
) -> None:
    """12 D^2 + 13 D parameters of a block make 397 numbers of 4 bytes for each of 16 tokens: 330 samples in 8 MiB."""
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 32, "vocab_size": 61, "seq_len": 16}
    module = GPT2(models.shape_of("gpt2", sizes), 0, "meta")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 40))
    assert fitting(module, 16, torch.device("cuda")) == samples
    assert fitting(module, 16, torch.device("cpu")) == 512


@pytest.mark.parametrize("passes", [None, 5])
def test_a_thread_reads_the_passes_ahead_in_the_same_order(passes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # needs CUDA
    numbers, before, found = np.arange(3, 13), threading.active_count(), []
    for pins in (False, True):
        with InOrder(cast(Any, Numbered(40)), numbers, 4, passes, pins) as loader:
            assert threading.active_count() == before + pins
            portions = [loader.next() for _ in range(loader.passes)]
            with pytest.raises(ValueError, match=f"there are {loader.passes} steps"):
                loader.next()
        assert threading.active_count() == before
        found.append([(one.batches[0].inputs.flatten().tolist(), one.losses) for one in portions])
    whole = [list(range(3, 7)), list(range(7, 11)), [11, 12]]
    expected = [(batch, sum(batch) + len(batch)) for batch in whole]
    assert found == [expected + [([0], 0)] * (0 if passes is None else 2)] * 2
