"""In: `train.num_epochs` and `train.global_batch_tokens`. Out: the run with the same number of steps and samples.
Does not test the order of samples: test_data_sampler does."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from forker import Forker
from hypothesis import given
from hypothesis import strategies as st
from runs import called, losses, make_project, refused

from codescent.base.errors import UserError
from codescent.build import build
from codescent.config import decided
from codescent.config.contradictions import INSTEAD
from codescent.config.load import describe, load, to_toml
from codescent.config.mixture import MIXTURE
from codescent.config.sections import Config, Data, Model, Train
from codescent.config.words import KEYS
from codescent.data.text.dataset import open_dataset
from codescent.plan import Plan
from codescent.preflight import check, plan_of
from codescent.record import RunFolder

TINY = {"num_layers": 1, "num_heads": 1, "hidden_dim": 8, "seq_len": 16}


def per_epoch(project: Path) -> int:
    """Steps of an epoch: whole samples of 16 tokens, 8 in a step."""
    (folder,) = (path for path in (project / "datasets").iterdir() if "byte" in path.name)
    return open_dataset(folder).train.num_samples(16) // 8


def recorded(run: RunFolder) -> Config:
    """The config in the run's folder."""
    return load(run.path / "config.toml").config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_project(tmp_path)


@pytest.mark.parametrize(("epochs", "steps"), [(3, 3), (0.5, 1), (2.5, 2), (2.6, 3)])
def test_an_epoch_is_a_whole_number_of_steps(epochs: float, steps: int) -> None:
    """15 samples fill one step of 8, decision 4."""
    config = Config(train=Train(num_epochs=epochs, global_batch_size=8))
    assert decided.with_steps(config, 15).train.num_steps == steps


def test_epochs_are_the_run_of_as_many_steps(project: Path, forker: Forker) -> None:
    words = ("data.validation_fraction=0.5", "data.seq_len=16", "model.dropout=0.1")
    run = forker.train(project, "epochs", 1, *words, "train.num_epochs=0.25")
    steps = round(0.25 * per_epoch(project))
    assert 5 < steps < 20
    expected = forker.train(project, "steps", 1, *words, f"train.num_steps={steps}")
    assert losses(run) == losses(expected)
    rates = [row["learning_rate"] for row in run.read_metrics()]
    assert rates == [row["learning_rate"] for row in expected.read_metrics()]
    assert run.plan == expected.plan
    assert run.plan["update"]["decay_steps"] == recorded(run).train.num_steps == steps
    assert "num_epochs" not in run.config_text
    forker.train(project, "epochs", 1, *words, "train.num_epochs=0.25", resume=True)
    done = forker.run(project, 1, ["run.name=epochs", *words, "train.num_epochs=0.5"], resume=True)
    assert done.codes == [0]
    assert len(losses(run)) == round(0.5 * per_epoch(project))


def test_more_epochs_go_on(project: Path, forker: Forker) -> None:
    """By another number of ranks. Epochs win over the number of steps in the file of the run folder."""
    words = ("data.validation_fraction=0.5", "optimizer.schedule=constant")
    half = forker.train(project, "longer", 2, *words, "train.num_epochs=0.1")
    before = len(losses(half))
    assert load(half.path / "config.toml", ["train.num_epochs=0.2"]).config.train.num_epochs == 0.2
    run = forker.train(project, "longer", 1, *words, "train.num_epochs=0.2", resume=True)
    assert len(losses(run)) == recorded(run).train.num_steps == round(0.2 * per_epoch(project)) > before
    expected = forker.train(project, "longer-whole", 1, *words, f"train.num_steps={len(losses(run))}")
    assert losses(run) == pytest.approx(losses(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ("train.microbatch_size=4",)),
        (2, ("parallel.dp_replicate=2", "train.microbatch_size=2")),
        pytest.param(2, ("parallel.dp_shard=2", "train.microbatch_size=2"), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.pp=2", "train.microbatch_size=4"), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.tp=2",), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.cp=2",), marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_tokens_are_the_run_of_as_many_samples(
    project: Path, forker: Forker, ranks: int, layout: tuple[str, ...]
) -> None:
    words = (*layout, "train.num_steps=6", "train.eval_every=3")
    number = "-".join(layout)
    run = forker.train(project, f"tokens-{number}", ranks, *words, "train.global_batch_tokens=256")
    expected = forker.train(project, f"samples-{number}", ranks, *words, "train.global_batch_size=16")
    assert losses(run) == losses(expected)
    assert run.plan == expected.plan
    assert recorded(run).train == recorded(expected).train
    assert [row["tokens"] for row in run.read_metrics()] == [256 * step for step in range(1, 7)]


def planned(ranks: int = 1, **train: int | None) -> Plan:
    return build(Config(model=Model(**TINY), data=Data(tokenizer="byte"), train=Train(**train)), 256, ranks)


@given(ranks=st.integers(1, 8), microbatch=st.none() | st.integers(1, 5), tokens=st.integers(1, 5000))
def test_tokens_that_do_not_divide_name_the_nearest_that_do(ranks: int, microbatch: int | None, tokens: int) -> None:
    try:
        work = planned(ranks, global_batch_tokens=tokens, microbatch_size=microbatch).work
    except UserError as error:
        (problem,) = error.problems
        near = problem.rpartition("train.global_batch_tokens = ")[2].partition(", or ")[0].split(" or ")  # then ranks
        for number in near:
            assert planned(ranks, global_batch_tokens=int(number), microbatch_size=microbatch).work.tokens == int(
                number
            )
        unit = 16 * ranks * (microbatch or 1)
        assert {int(number) // unit - tokens // unit for number in near} <= {0, 1}
    else:
        assert work.tokens == tokens
        assert work.global_batch_size * 16 == tokens
        assert work == planned(ranks, global_batch_size=tokens // 16, microbatch_size=microbatch).work


def test_tokens_of_a_transformer_are_those_of_the_target() -> None:
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_heads": 1, "hidden_dim": 8}
    model = Model(kind="transformer", source_len=5, target_len=7, **sizes)
    data = Data(task="seq2seq", tokenizer="byte")
    plan = build(Config(model=model, data=data, train=Train(global_batch_tokens=70)), 300, 1)
    assert (plan.work.global_batch_size, plan.work.tokens) == (10, 70)


def test_a_run_with_tokens_that_do_not_divide_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_project(tmp_path)
    said = refused(tmp_path, capsys, "train.global_batch_tokens=100", "--ranks", "2")
    assert said.startswith("error: train.global_batch_tokens = 100: not a multiple of 32 = ")
    assert said.rstrip().endswith("nearest that would do: train.global_batch_tokens = 96 or 128")


@pytest.mark.parametrize(("first", "second"), [pair for pair in INSTEAD if pair[0] != MIXTURE])  # it has tables
def test_one_of_the_two(config: Path, first: str, second: str) -> None:
    """Both on one level are refused; a later level wins, whichever of the two it gives."""
    section, name = second.split(".")
    with pytest.raises(UserError, match=rf"command line: {first}: given, and {second} too: .* give one of the two"):
        load(config, [f"{first}=160", f"{second}=5"])
    loaded = load(config, [f"{first}=160"])
    assert to_toml(loaded.config).count(f"\n{name} = ") == 0
    shown = {f"{line.section}.{line.key}": (line.value, line.origin) for line in describe(loaded)}
    assert shown[second] == ('"auto"', first)
    assert shown[first][1] == "command line"
    inner = config.with_name("inner.toml")
    inner.write_text(f'base = "run.toml"\n[{section}]\n{first.split(".")[1]} = 160\n')
    value = getattr(getattr(load(inner, [f"{second}=5"]).config, section), name)
    assert value == 5
    assert getattr(load(inner, [f"{second}=5"]).config.train, first.split(".")[1]) is None
    canceled = getattr(load(config, [f"{first}=auto"]).config, section)
    assert getattr(canceled, name) == getattr(load(config).config.train, name) != KEYS[second].default


def test_a_plan_says_the_number_of_steps_if_it_can(config: Path) -> None:
    folder = config.parent
    words = ("plan", "run.toml", "train.num_epochs=2")
    unknown = "steps 2 epochs, unknown until the data is prepared, which `codescent train` does first"
    assert unknown in " ".join(called(folder, *words).stdout.split())
    assert '"decay_steps": null' in called(folder, *words, "--json").stdout
    assert called(folder, "data", "corpus.txt", "--tokenizer", "byte").returncode == 0
    steps = 2 * per_epoch(folder)
    assert f"steps {steps:,} in 2 epochs" in " ".join(called(folder, *words).stdout.split())
    assert f'"decay_steps": {steps}' in called(folder, *words, "--json").stdout
    assert "steps 20 " in " ".join(called(folder, "plan", "run.toml").stdout.split())


def test_advice_on_the_steps_of_epochs_can_be_followed(config: Path) -> None:
    folder = config.parent
    assert called(folder, "data", "corpus.txt", "--tokenizer", "byte").returncode == 0
    steps = per_epoch(folder)
    words = ("parallel.ranks=2", f"parallel.average_every={steps - 1}", "train.eval_every=0", "checkpoint.every=0")
    for command in ("plan", "train"):
        done = called(folder, command, "run.toml", "train.num_epochs=1", *words)
        assert done.returncode == 2
        assert f"error: train.num_steps (of 1 epoch) = {steps}: not a multiple of" in done.stderr
        assert f'train.num_steps = {steps - 1} or {2 * steps - 2} and train.num_epochs = "auto"' in done.stderr
    config.write_text(config.read_text().replace("[train]", "[train]\nnum_epochs = 1"))
    followed = (f"train.num_steps={steps - 1}", "train.num_epochs=auto")
    assert called(folder, "plan", "run.toml", *words, *followed).returncode == 0


@pytest.mark.parametrize("epochs", ["train.num_epochs=1", "train.num_steps=9"])
def test_an_error_is_not_its_own_cause(config: Path, monkeypatch: pytest.MonkeyPatch, epochs: str) -> None:
    """Who looks for the first cause would never end."""
    monkeypatch.chdir(config.parent)
    given = load(config, [epochs, "parallel.ranks=2", "parallel.average_every=4", "train.eval_every=0"]).config
    for find in (partial(check, given, 2, resume=False), partial(plan_of, given, 2)):
        with pytest.raises(UserError, match=r"train.num_steps .*= \d+: not a multiple of") as caught:
            find()
        assert caught.value.__cause__ is not caught.value


def test_a_period_in_epochs_is_in_steps_where_the_data_is(config: Path) -> None:
    folder, words = (
        config.parent,
        ("parallel.ranks=2", "train.num_epochs=2", "train.eval_every=0", "checkpoint.every=0"),
    )
    period = (*words, "parallel.average_every=1 epoch")
    plan = json.loads(called(folder, "plan", "run.toml", *period, "--json").stdout)  # prepares the data
    assert plan["layout"]["average_every"] == per_epoch(folder)
    (folder / "corpus.txt").unlink()
    shutil.rmtree(folder / "datasets")
    done = called(folder, "plan", "run.toml", *period, "model.vocab_size=257")
    assert (done.returncode, done.stdout) == (2, "")
    assert 'parallel.average_every = "1 epoch": the steps of an epoch are unknown until the data is prep' in done.stderr
    done = called(folder, "plan", "run.toml", *words, "parallel.average_every=1e9 epochs")
    assert 'given "1e9 epochs"; must be a number of steps, or a number of epochs' in done.stderr
    assert "of at most 1,000,000" in done.stderr


def test_a_plan_of_tensors_knows_the_steps_if_they_need_no_file(tmp_path: Path) -> None:
    words = ("plan", "synthetic_transformer", "train.num_epochs=10", f"data.folder={tmp_path}")
    assert "steps 640 in 10 epochs" in " ".join(called(tmp_path, *words).stdout.split())
    said = called(tmp_path, *words, "data.format=safetensors").stdout
    assert "steps 10 epochs, unknown until" in " ".join(said.split())
    assert list(tmp_path.iterdir()) == []
