"""In: numbers of validation samples, ranks, samples of a pass. Out: each sample counts once; ranks make equal passes.
Does not compute a loss: an executor that notes its batches stands in; test_hybrids compares real validation losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codescent.data.loader import Batch
from codescent.data.samples import Numbers, Samples
from codescent.plan import Mesh
from codescent.tasks.score import TOKENS_AT_ONCE
from codescent.train.execute import Executor
from codescent.train.validate import validation_loss


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
        self.plan, self.world = SimpleNamespace(mesh=mesh, work=work), SimpleNamespace(place=SimpleNamespace(rank=rank))
        self.device, self.batches = torch.device("cpu"), list[list[int]]()

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
