"""In: a run that stops in one layout and goes on in another. Out: the losses and tensors of one that stayed.
Does not test the files of a checkpoint (test_checkpoint does) nor kills (test_train_resume does)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forker import Forker
from runs import assert_same, make_project

from codescent.checkpoint.checkpoints import read_tensors
from codescent.record import RunFolder

STEPS, HALF = 8, 4
WORDS = (
    "model.num_heads=4",
    "model.hidden_dim=20",
    "model.ffn_dim=45",
    "model.vocab_size=97",
    "model.dropout=0.1",
    "data.tokenizer=char",
    "train.precision=fp64",
    "train.global_batch_size=12",
    "train.eval_every=2",
    "optimizer.decay_steps=20",
    "checkpoint.every=4",
    "checkpoint.keep_best=false",  # the checkpoint of every fourth step is compared
)
PAIRS = [  # before -> after, ranks of both, layers
    ("dp_replicate=4 -> dp_shard=2", 4, 2, 2),
    ("tp=2 -> pp=2", 2, 2, 2),
    (" -> tp=4", 1, 4, 2),
    ("dp_shard=3 -> tp=2 sequence_parallel=false", 3, 2, 2),
    ("pp=2 schedule=zero-bubble -> cp=4", 2, 4, 2),
    ("dp_shard=2 tp=2 -> pp=2 dp_shard=2 zero_stage=1", 4, 4, 2),
]
SLOW_PAIRS = [
    ("pp=4 schedule=interleaved virtual_stages=2 -> ", 4, 1, 9),
    ("dp_replicate=2 pp=2 tp=2 -> dp_shard=2 cp=2", 8, 4, 2),
    ("pp=2 dp_shard=2 zero_stage=2 -> dp_replicate=2 tp=2", 4, 4, 5),
    ("cp=2 tp=2 -> dp_shard=3", 4, 3, 2),
    ("dp_shard=4 zero_stage=1 -> pp=4", 4, 4, 5),
    ("pp=4 -> dp_shard=2 tp=2", 4, 4, 5),
    ("dp_shard=2 cp=2 -> dp_replicate=2 pp=2 tp=2", 4, 8, 2),
    ("pp=2 tp=2 schedule=interleaved virtual_stages=2 -> pp=3", 4, 3, 5),
    ("dp_shard=2 tp=2 cp=2 -> pp=2 schedule=interleaved virtual_stages=4", 8, 2, 9),
    ("tp=4 sequence_parallel=false -> dp_shard=2 tp=2 zero_stage=1", 4, 4, 2),
]


class Project:
    """A folder of runs, and for each number of layers that of one process which stays."""

    def __init__(self, folder: Path, forker: Forker) -> None:
        self.folder, self.forker = folder, forker
        self.stayed: dict[int, RunFolder] = {}

    def run(self, name: str, layout: str, ranks: int, layers: int, steps: int, *, resume: bool = False) -> RunFolder:
        """Up to so many steps."""
        keys = [f"parallel.{key}" for key in layout.split()]
        size = 2 if "dp_shard=3" in layout else 3
        words = [f"model.num_layers={layers}", f"train.num_steps={steps}", *keys]
        words.append(f"train.microbatch_size={size}")
        return self.forker.train(self.folder, name, ranks, *WORDS, *words, resume=resume)

    def of_one(self, layers: int) -> RunFolder:
        """All the steps on one process."""
        if layers not in self.stayed:
            self.stayed[layers] = self.run(f"one-{layers}", "", 1, layers, STEPS)
        return self.stayed[layers]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Project:
    folder = tmp_path_factory.mktemp("layouts")
    make_project(folder)
    return Project(folder, forker)


def saved(run: RunFolder, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint."""
    return dict(read_tensors(run.checkpoints / f"step_{step:08}"))


def assert_same_tensors(found: RunFolder, expected: RunFolder, step: int) -> None:
    tensors, others = saved(found, step), saved(expected, step)
    assert tensors.keys() == others.keys()
    assert {name.split(".")[0] for name in tensors} == {"model", "optimizer"}
    for name, tensor in tensors.items():
        other = others[name]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
        assert torch.allclose(tensor, other, rtol=1e-7, atol=1e-12), name


@pytest.mark.parametrize(
    ("pair", "ranks", "ranks_after", "layers"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS)],
)
def test_a_run_goes_on_in_another_layout(
    project: Project, pair: str, ranks: int, ranks_after: int, layers: int
) -> None:
    before, after = pair.split("->")
    name = "".join(letter if letter.isalnum() else "-" for letter in pair)
    expected = project.of_one(layers)
    begun = project.run(name, before, ranks, layers, HALF)
    assert_same_tensors(begun, expected, HALF)
    run = project.run(name, after, ranks_after, layers, STEPS, resume=True)
    assert len(run.read_metrics()) == STEPS
    assert_same(run, expected, 1e-9)
    assert_same_tensors(run, expected, STEPS)
