"""In: runs whose replicas have different weights, on real ranks. Out: what is validated, saved, evaluated, sampled and
exported is their mean. Does not test how replicas average: test_local_sgd, test_gossip and test_pair_gossip do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from forker import Forker
from runs import called
from safetensors.torch import load_file

from codescent.checkpoint.checkpoints import read_tensors
from codescent.inference.trained import dataset_of, find, module_of
from codescent.record import RunFolder
from codescent.tasks.score import mean_loss

STEPS = (10, 20)
"""The steps that are validated and saved."""
WINDOWS = 40
COMMON = (
    "train.precision=fp64",
    "train.global_batch_size=12",
    "optimizer.learning_rate=0.03",
    "train.eval_every=10",
    "checkpoint.every=10",
    "data.validation=valid.txt",
)
FRAGMENTS = ("parallel.average_every=10", "parallel.fragments=2", "parallel.overlap_steps=6")
RING = ("parallel.gossip=ring", "parallel.gossip_every=5", "parallel.gossip_rate=0.5")
PUSH_SUM = ("parallel.gossip=push-sum", "parallel.gossip_every=5", "run.seed=4")
PAIRS = ("parallel.gossip=pairs", "parallel.gossip_every=5", "parallel.gossip_mode=asynchronous")
METHODS: dict[str, tuple[int, tuple[str, ...]]] = {
    "local_sgd": (2, FRAGMENTS),
    "ring": (3, RING),
    "push-sum": (3, PUSH_SUM),
    "asynchronous": (3, PAIRS),
}
CPU = torch.device("cpu")
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def run_of(project: Path, forker: Forker) -> Callable[[str], RunFolder]:
    """The run of a method, trained once. Its validation text is whole windows: `evaluate` reads what the run read."""
    text = (project / "corpus.txt").read_text()
    (project / "valid.txt").write_text(text[: 16 * WINDOWS + 1])
    done: dict[str, RunFolder] = {}

    def run(method: str) -> RunFolder:
        if method not in done:
            ranks, words = METHODS[method]
            done[method] = forker.train(project, method, ranks, *COMMON, *words)
        return done[method]

    return run


def saved(run: RunFolder, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(run.checkpoints / f"step_{step:08}")


def named(tensors: Weights, prefix: str) -> dict[str, torch.Tensor]:
    """The weights with this prefix, by name of the parameter."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def means(tensors: Weights, replicas: int) -> dict[str, torch.Tensor]:
    """The means over replicas. With push-sum a replica counts by its weight, and the weights' mean is 1."""
    one = torch.ones(1, dtype=torch.float64)
    counts = [tensors.get(f"rank{index}.gossip.weight", one) for index in range(replicas)]
    every = [named(tensors, f"replica{index}.model.") for index in range(replicas)]
    return {name: torch.stack([count * own[name] for count, own in zip(counts, every)]).mean(0) for name in every[0]}


def loss_of(run: RunFolder, weights: Weights) -> float:
    """Over the whole validation split."""
    with chdir(run.path.parent.parent):
        trained = find(run.path)
        source, module = dataset_of(trained).source("validation", 16, 16), module_of(trained, CPU).eval()
    module.load_state_dict(weights)
    assert source.num_samples == WINDOWS
    return mean_loss(module, source, 16, CPU)[0]


def evaluated_of(run: RunFolder, weights: Weights) -> float:
    """As `evaluate` counts: each token after a separator in front, in windows of 16."""
    with chdir(run.path.parent.parent):
        trained = find(run.path)
        dataset, module = dataset_of(trained), module_of(trained, CPU).eval()
    module.load_state_dict(weights)
    split = dataset.validation
    tokens = np.append([256], split.span(0, split.num_tokens))
    tokens = tokens[: len(tokens) - (tokens[-1] == 256)]
    nats = 0.0
    for first in range(0, len(tokens) - 1, 16):
        window = torch.from_numpy(tokens[None, first : first + 17].astype(np.int64))
        with torch.no_grad():
            nats += float(module(window[:, :-1], window[:, 1:]))
    return nats / (len(tokens) - 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_validation_loss_of_a_run_is_that_of_the_mean(run_of: Callable[[str], RunFolder], method: str) -> None:
    run = run_of(method)
    found = {row["step"]: row["val_loss"] for row in run.read_metrics() if row["val_loss"] is not None}
    assert tuple(found) == STEPS
    for step, loss in found.items():
        tensors = saved(run, step)
        assert loss == pytest.approx(loss_of(run, named(tensors, "model.")), rel=1e-9)
        own = loss_of(run, named(tensors, "replica0.model."))
        assert abs(own - loss) > 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_has_the_mean(run_of: Callable[[str], RunFolder], method: str) -> None:
    run, replicas = run_of(method), METHODS[method][0]
    for step in STEPS:
        tensors = saved(run, step)
        found = named(tensors, "model.")
        for name, mean in means(tensors, replicas).items():
            torch.testing.assert_close(found.pop(name), mean, rtol=0, atol=1e-14)
        assert not found


def test_the_mean_of_push_sum_is_not_the_plain_one(run_of: Callable[[str], RunFolder]) -> None:
    """So the tests above and below see whether a replica counts by its weight."""
    run, replicas = run_of("push-sum"), METHODS["push-sum"][0]
    for step in STEPS:
        tensors = saved(run, step)
        counts = [tensors.pop(f"rank{index}.gossip.weight").item() for index in range(replicas)]
        assert sum(counts) == pytest.approx(replicas, rel=1e-12)
        plain = means(tensors, replicas)["tok.weight"]
        assert float((plain - tensors["model.tok.weight"]).abs().max()) > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_commands_read_the_mean(run_of: Callable[[str], RunFolder], method: str) -> None:
    """What is imported again has one set of weights alone, so its texts are those of the mean."""
    run = run_of(method)
    project, path, folder, again = run.path.parent.parent, str(run.path), f"{method}-out", f"runs/{method}-again"
    wanted = means(saved(run, STEPS[-1]), METHODS[method][0])
    evaluated = called(project, "evaluate", path)
    assert evaluated.returncode == 0, evaluated.stderr
    shown = re.search(r"^loss (\S+),", evaluated.stdout, re.MULTILINE)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(evaluated_of(run, wanted), abs=5.1e-5)
    assert called(project, "export", path, folder).returncode == 0
    exported = load_file(project / folder / "model.safetensors")
    torch.testing.assert_close(exported["transformer.wte.weight"], wanted["tok.weight"], rtol=0, atol=1e-14)
    assert called(project, "import", folder, again, "data.corpus=corpus.txt").returncode == 0
    texts = [called(project, "sample", one, "--prompt", "many ", "--tokens", "100") for one in (path, again)]
    assert [text.returncode for text in texts] == [0, 0]
    assert texts[0].stdout == texts[1].stdout
