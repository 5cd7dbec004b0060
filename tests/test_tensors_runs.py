"""In: an encoder-decoder on synthetic tensors, in every format, under axes of the mesh. Out: the losses of one process.
Does not look at files (test_data_tensors does)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forker import Forker, Runs
from runs import assert_same, called, losses, make_project

from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.data.loader import Sampler
from codescent.plan import Plan
from codescent.record import RunFolder
from codescent.tasks.tensors.dataset import open_file

SIZES = (
    "model.kind=transformer",
    "model.num_layers=auto",
    "model.seq_len=auto",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=2",
    "model.num_heads=2",
    "model.hidden_dim=12",
    "model.source_len=2",
    "model.target_len=5",
    "model.dropout=0.1",
    "model.causal=false",
    "model.embedding=none",
    "data.corpus=synthetic:30",
    "train.precision=fp64",
    "train.global_batch_size=8",
    "train.eval_every=3",
    "optimizer.decay_steps=20",
    "optimizer.max_grad_norm=0.1",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("tensors_runs")
    make_project(project)
    return Runs(project, forker, SIZES, ("train.num_steps=8",))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("pp=2", 2),
        ("dp_replicate=2 data.format=hdf5", 2),
        pytest.param("tp=2 sequence_parallel=false data.format=memory", 2, marks=pytest.mark.slow),
        pytest.param("dp_shard=2 data.format=pt", 2, marks=pytest.mark.slow),
        pytest.param("dp_shard=2 pp=2 schedule=gpipe cut=encoder-decoder data.format=pt", 4, marks=pytest.mark.slow),
        pytest.param("dp_replicate=4 data.format=safetensors", 4, marks=pytest.mark.slow),
        pytest.param("pp=2 schedule=zero-bubble recompute=full", 2, marks=pytest.mark.slow),
    ],
)
def test_every_layout_and_format_walks_the_trajectory_of_one(runs: Runs, layout: str, ranks: int) -> None:
    words = [word if "." in word else f"parallel.{word}" for word in layout.split()]
    found = runs.run(ranks, *words, "train.num_steps=6", "train.microbatch_size=2")
    assert_same(found, runs.of_one(), 1e-9, stop=6)
    assert len(losses(found)) == 6


@pytest.mark.parametrize("storage", ["memory", "hdf5"])
def test_a_resumed_run_is_the_same_bitwise(runs: Runs, storage: str) -> None:
    """Also where the numbers were in memory before: they are the same."""
    runs.run(1, "train.num_steps=8", "train.eval_every=0", "checkpoint.every=4", "train.num_steps=4")
    words = ("train.num_steps=8", "train.eval_every=0", "checkpoint.every=4", f"data.format={storage}")
    assert losses(runs.run(1, *words, resume=True)) == losses(runs.of_one())


def test_a_sample_that_is_not_finite_is_named_by_file_and_number_on_its_rank(runs: Runs) -> None:
    """And the run is not led to another optimizer. Sample 7 is of rank 0 or 1 once in an epoch of two steps."""
    rng = np.random.default_rng(3)
    given = {name: torch.from_numpy(rng.random((18, length, 12))) for name, length in (("source", 2), ("target", 5))}
    given["target"][7, 3, 1] = torch.nan
    torch.save(given, runs.project / "one.pt")
    words = ("data.corpus=one.pt", "train.num_steps=2", "train.eval_every=0", "parallel.dp_replicate=2")
    done = runs.forker.run(runs.project, 2, [*SIZES, *words, "run.name=bad_sample", "data.validation_fraction=0.1"])
    run = RunFolder.open(runs.project / "runs" / "bad_sample")
    (found,) = [event for event in run.read_events() if event["kind"] == "data_not_finite"]
    dataset = open_file(runs.project / "one.pt", 0.1)
    order = Sampler(1337, 16, 8).indices_of_steps(0, 2, 0, 8)
    ((step, place),) = np.argwhere(order == 7).tolist()
    assert dataset.train.read(np.arange(16)).not_finite == {7: f"{runs.project / 'one.pt'}: sample 7 of target"}
    assert found["step"] == step + 1
    assert found["samples"] == [f"rank {place // 4}: one.pt: sample 7 of target"]
    assert (
        f"step {step + 1}: the data holds NaN or infinity: rank {place // 4}: one.pt: sample 7 of target" in done.said
    )
    assert [event["step"] for event in run.read_events() if event["kind"] == "skipped_step"] == [step + 1]
    given["target"][:] = torch.inf
    torch.save(given, runs.project / "all.pt")
    done = runs.forker.run(runs.project, 1, [*SIZES, *words[1:3], "data.corpus=all.pt", "run.name=bad_data"])
    assert done.codes == [1]
    ended = done.said[done.said.index("ended at step 2, which is not saved") :]
    assert "the data holds NaN or infinity: rank 0: all.pt: sample " in ended
    assert "and 13 more: mend the data, and begin a new run" in ended
    assert "optimizer" not in ended


def test_the_run_says_that_it_is_synthetic(runs: Runs) -> None:
    (event,) = [event for event in runs.of_one().read_events() if event["kind"] == "synthetic_data"]
    assert event["synthetic"] is True
    assert event["recipe"] == {
        "train": 30,
        "validation": 3,
        "sizes": {"source_len": 2, "target_len": 5, "width": 12},
        "seed": 0,
    }
    assert Plan.from_json(runs.of_one().plan).task.synthetic
    assert Plan.from_json(runs.of_one().plan).task.name == "tensors"
    said = called(runs.project, "plan", "synthetic_transformer")
    assert "synthetic: random numbers" in said.stdout


def test_the_shipped_experiment_has_the_numbers_of_the_lab() -> None:
    config = load("synthetic_transformer").config
    plan = build(config, None, 4)
    assert plan.num_parameters == 44_140_544  # torch.nn.Transformer()
    assert plan.work.streams == (1, 20)
    assert plan.work.global_batch_size * config.train.num_steps == 10 * 2048
    assert (config.optimizer.kind, config.optimizer.learning_rate) == ("adam", 1e-3)
    assert config.optimizer.scale_learning_rate == "linear"


MODEL: dict[str, Any] = {"kind": "transformer", "num_encoder_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
MODEL |= {"hidden_dim": 8, "source_len": 2, "target_len": 3, "embedding": "none"}


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ({"embedding": "tied"}, {}, ['model.embedding: data.task = "tensors" has vectors', '"none"']),
        ({"embedding": None}, {}, ["model.embedding"]),
        ({}, {"corpus": "python-stdlib"}, ['data.task = "lm" gives tokens', '"tied"']),
        ({}, {"task": "lm"}, ["is tensors, not text", 'model.embedding = "none"']),
        ({"kind": "gpt2"}, {"task": "tensors"}, ['"tensors": model.kind = "gpt2" is trained for lm', "transformer"]),
        ({"kind": "gpt2"}, {}, ['"tensors", chosen for data.corpus = synthetic:9 (tensors): model.kind = "gpt2" is']),
        ({"kind": "gpt2"}, {"format": "pt"}, ['"tensors", chosen for data.format = pt: model.kind = "gpt2" is']),
    ],
)
def test_text_and_vectors_are_kept_apart(model: dict[str, Any], data: dict[str, Any], words: list[str]) -> None:
    sizes = MODEL if "kind" not in model else {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "seq_len": 4}
    config = Config.model_validate({"model": sizes | model, "data": {"corpus": "synthetic:9"} | data})
    with pytest.raises(UserError) as told:
        build(config, 11, 1)
    for word in words:
        assert word in str(told.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.corpus=python-stdlib", "data.format=hdf5"], "not tensors"),
        (["data.corpus=mine.h5", "data.format=pt"], "mine.h5 is hdf5; leave data.format out"),
        (["data.corpus=mine.h5"], "mine.h5: no such file"),
        (["data.corpus=synthetic:4"], "has 4 samples of 7 positions, fewer than train.global_batch_size = 8"),
        (["data.corpus=synthetic:many"], "must be synthetic:SAMPLES"),
    ],
)
def test_a_run_refuses_in_words(runs: Runs, words: list[str], said: str) -> None:
    done = runs.forker.run(runs.project, 1, ["run.name=refused", *SIZES, *words])
    assert done.codes == [2]
    assert said in done.said


def test_other_sizes_than_the_models_are_refused(runs: Runs) -> None:
    made = called(
        runs.project, "data", "--synthetic", "9", "--source", "1x4", "--target", "5x4", "--format", "safetensors"
    )
    folder = made.stdout.splitlines()[-1]
    done = runs.forker.run(runs.project, 1, ["run.name=refused", *SIZES, f"data.corpus={folder}"])
    assert done.codes == [2]
    assert "has 1 vectors of the source; give model.source_len = 1" in done.said
    assert "give model.hidden_dim = 4" in done.said
