"""In: a prepared text and the positions of a rank. Out: the right batches, in order, ready; errors told.
Does not train."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from codescent.base.errors import UserError
from codescent.data.loader import Loader, Portion, Sampler
from codescent.data.samples import Numbers, Samples
from codescent.data.text.dataset import Dataset, open_dataset
from codescent.data.text.prepare import prepare
from codescent.data.text.split import TextSource
from codescent.train.assemble import _loader

SEQ_LEN = 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("loader")
    (folder / "text.txt").write_text("".join(f"line {number} of the text\n" for number in range(500)))
    return open_dataset(prepare(str(folder / "text.txt"), "byte", folder))


@pytest.fixture
def sampler(dataset: Dataset) -> Sampler:
    return Sampler(11, dataset.train.num_samples(SEQ_LEN), 8)


@pytest.fixture
def source(dataset: Dataset) -> TextSource:
    return TextSource(dataset.train, SEQ_LEN, SEQ_LEN)


def rows(portion: Portion) -> torch.Tensor:
    return torch.cat([batch.inputs for batch in portion.batches])


def test_a_batch_is_the_samples_at_its_positions(dataset: Dataset, source: TextSource, sampler: Sampler) -> None:
    with Loader(source, sampler, SEQ_LEN, [(2, 5), (5, 6)], first_step=70, prefetch=2) as loader:
        for step in range(70, 75):
            first, second = loader.next().batches
            expected = torch.from_numpy(dataset.train.read(sampler.indices_of_steps(step, 1, 2, 6)[0], SEQ_LEN))
            for batch, wanted in ((first, expected[:3]), (second, expected[3:])):
                assert torch.equal(batch.inputs, wanted[:, :-1])
                assert torch.equal(batch.targets, wanted[:, 1:])
                assert batch.inputs.dtype == batch.targets.dtype == torch.int64
                assert batch.inputs.is_contiguous()
                assert batch.targets.is_contiguous()


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_and_reading_ahead_do_not_show(
    dataset: Dataset, source: TextSource, sampler: Sampler, prefetch: int, ranks: int
) -> None:
    share = 8 // ranks
    loaders = [
        Loader(source, sampler, SEQ_LEN, [(rank * share, (rank + 1) * share)], 0, prefetch) for rank in range(ranks)
    ]
    steps = 2 * sampler.steps_per_epoch + 3  # over the border of two epochs
    for step in range(steps):
        together = torch.cat([rows(loader.next()) for loader in loaders])
        expected = dataset.train.read(sampler.indices_of_steps(step, 1, 0, 8)[0], SEQ_LEN)[:, :-1]
        assert torch.equal(together, torch.from_numpy(expected))
    for loader in loaders:
        loader.close()


def test_steps_are_read_before_they_are_asked_for(dataset: Dataset, source: TextSource, sampler: Sampler) -> None:
    asked = threading.Semaphore(0)

    class Noting(Sampler):
        def indices_of_steps(self, first: int, count: int, start: int, stop: int) -> np.ndarray:
            for _ in range(count):
                asked.release()
            return super().indices_of_steps(first, count, start, stop)

    noting = Noting(sampler.seed, sampler.num_samples, sampler.global_batch_size)
    with Loader(source, noting, SEQ_LEN, [(0, 8)], 0, prefetch=6):
        for _ in range(6):  # three ready and three in the thread's hand, without a call of `next`
            assert asked.acquire(timeout=60)
        assert not asked.acquire(timeout=0.2)


def test_what_the_thread_meets_is_raised_in_next_and_again(
    dataset: Dataset, source: TextSource, sampler: Sampler, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("x" * 3000)
    made = prepare(str(tmp_path / "text.txt"), "byte", tmp_path / "datasets")
    broken = open_dataset(made)
    np.full(2700, 300, "<u2").tofile(made / "train_000000.bin")
    small = Sampler(1, broken.train.num_samples(SEQ_LEN), 4)
    loader = Loader(TextSource(broken.train, SEQ_LEN, SEQ_LEN), small, SEQ_LEN, [(0, 4)], 0, prefetch=2)
    for _ in range(2):
        with pytest.raises(UserError, match=r"train_000000\.bin: changed while it was in use"):
            loader.next()
    loader.close()


def test_the_first_step_does_not_wait_for_a_huge_prefetch(
    dataset: Dataset, source: TextSource, sampler: Sampler
) -> None:
    with Loader(source, sampler, SEQ_LEN, [(0, 8)], 0, prefetch=1 << 40) as loader:
        for step in range(200):
            expected = dataset.train.read(sampler.indices_of_steps(step, 1, 0, 8)[0], SEQ_LEN)[:, :-1]
            assert torch.equal(rows(loader.next()), torch.from_numpy(expected))


def test_steps_before_a_broken_one_are_given(dataset: Dataset, source: TextSource, sampler: Sampler) -> None:
    class Breaking(Sampler):
        def indices_of_steps(self, first: int, count: int, start: int, stop: int) -> np.ndarray:
            if first <= 6 < first + count:
                raise UserError("step 6 is broken")
            return super().indices_of_steps(first, count, start, stop)

    breaking = Breaking(sampler.seed, sampler.num_samples, sampler.global_batch_size)
    for prefetch in (0, 1, 16):
        with Loader(source, breaking, SEQ_LEN, [(0, 8)], 0, prefetch) as loader:
            for step in range(6):
                expected = dataset.train.read(sampler.indices_of_steps(step, 1, 0, 8)[0], SEQ_LEN)[:, :-1]
                assert torch.equal(rows(loader.next()), torch.from_numpy(expected))
            for _ in range(2):
                with pytest.raises(UserError, match="step 6 is broken"):
                    loader.next()


def test_a_closed_loader_leaves_no_thread(dataset: Dataset, source: TextSource, sampler: Sampler) -> None:
    before = threading.active_count()
    loaders = [Loader(source, sampler, SEQ_LEN, [(0, 8)], 0, prefetch) for prefetch in (0, 1, 5) * 5]
    for loader in loaders:
        loader.close()
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            loader.next()
    assert threading.active_count() == before


def test_a_rank_without_positions_has_no_batches(dataset: Dataset, source: TextSource, sampler: Sampler) -> None:
    with Loader(source, sampler, SEQ_LEN, [], 0, prefetch=1) as loader:
        assert loader.next() == Portion([], 8 * SEQ_LEN, 8 * SEQ_LEN)


class Uneven:
    """Sample j has j losses and a second row of numbers beside its tokens."""

    name, num_samples, losses_per_sample = "train", 20, None

    def read(self, numbers: Numbers) -> Samples:
        return Samples(numbers[:, None].copy(), -numbers[:, None], {"lengths_B": numbers * 10})

    def losses(self, numbers: Numbers) -> Numbers:
        return numbers


def test_ranks_know_the_losses_of_the_whole_step_and_what_is_beside_tokens() -> None:
    sampler = Sampler(3, 20, 4)
    halves = [Loader(Uneven(), sampler, 1, places, 0, prefetch=8) for places in ([(0, 1), (1, 2)], [(2, 4)], [])]
    for step in range(12):
        wanted = sampler.indices_of_steps(step, 1, 0, 4)[0]
        portions = [loader.next() for loader in halves]
        assert [portion.losses for portion in portions] == [int(wanted.sum())] * 3
        batches = [batch for portion in portions for batch in portion.batches]
        assert [len(batch.inputs) for batch in batches] == [1, 1, 2]
        assert torch.cat([batch.inputs[:, 0] for batch in batches]).tolist() == wanted.tolist()
        assert torch.cat([batch.targets[:, 0] for batch in batches]).tolist() == (-wanted).tolist()
        assert torch.cat([batch.extras["lengths_B"] for batch in batches]).tolist() == (10 * wanted).tolist()
    for loader in halves:
        loader.close()


@pytest.mark.parametrize("each", [None, 3])
def test_the_parts_of_a_model_are_told_how_many_losses_a_sample_has(each: int | None) -> None:
    """The head of masked tokens computes so many rows, and waits for no device."""
    source, part = Uneven(), SimpleNamespace()
    source.losses_per_sample = each  # type: ignore[assignment]
    work = SimpleNamespace(seq_len=4, positions=lambda _: 4, global_batch_size=2, num_microbatches=1, prefetch=0)
    plan = SimpleNamespace(
        work=work, seed=1, model=SimpleNamespace(vocab_size=9), apart=(), layout=SimpleNamespace(hands_out=False)
    )
    plan.schedule, plan.samples = SimpleNamespace(programs=[[]]), lambda rank, number: slice(0, 2)
    plan.samples_of_replica = lambda rank: range(2)
    world = SimpleNamespace(this_rank=SimpleNamespace(rank=0), stage=0, device=torch.device("cpu"))
    dataset = SimpleNamespace(source=lambda *_: source)
    _loader([part], plan, world, dataset, 0, (), False).close()  # type: ignore[arg-type, list-item]
    assert part.losses_per_sample == each
