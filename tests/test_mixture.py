"""In: corpora of a project, as a mixture. Out: their samples, losses of runs on several layouts, what commands say.
Does not test the order of the samples (test_mixed_order.py) or the keys of the config (test_config_mixture.py)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from forker import Forker
from runs import called, losses, make_project

from codescent.base.errors import UserError
from codescent.build import task_request
from codescent.config.load import load
from codescent.data.mixture import MixedDataset, MixedSource, order_of, uses
from codescent.preflight import without_effect
from codescent.record import RunFolder
from codescent.tasks import TaskRequest, prepare_and_open, refusals

MIXTURE = """
[[data.mixture]]
corpus = "corpus.txt"
name = "words"
weight = 3
[[data.mixture]]
corpus = "digits.txt"
weight = 1
[[data.mixture]]
corpus = "tiny.txt"
weight = 0.5
"""
NAMES = ["words", "digits", "tiny"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    config = make_project(folder)
    config.write_text(config.read_text().replace('corpus = "corpus.txt"\n', "") + MIXTURE)
    (folder / "digits.txt").write_text("".join(f"{number:05d}\n" for number in range(0, 30_000, 17)))
    (folder / "tiny.txt").write_text("abcdefghijklmnopqrstuvwxyz " * 20)
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 1 =", "response": f" {n + 1}"}) + "\n" for n in range(60))
    )
    return folder


@pytest.fixture
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    return project


def request(*words: str) -> TaskRequest:
    return task_request(load("run.toml", words).config)


def opened(*words: str) -> MixedDataset:
    found = prepare_and_open(request(*words), progress=False)
    assert isinstance(found, MixedDataset)
    return found


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        opened(*words)
    return "\n".join(caught.value.problems)


# Samples


def test_a_sample_of_the_mixture_is_that_of_its_corpus(inside: Path) -> None:
    """A wrong offset between corpora reads another sample than the order has chosen."""
    source = opened().source("train", 16, 16)
    numbers = order_of(source, 7, 30).indices_of_steps(0, 1, 0, 30)[0]
    found, ends = source.read(numbers), np.cumsum([one.num_samples for one in source.corpora.values()])
    assert {int(np.searchsorted(ends, number, "right")) for number in numbers} == {0, 1, 2}
    for row, number in enumerate(numbers.tolist()):
        corpus = int(np.searchsorted(ends, number, "right"))
        own = list(source.corpora.values())[corpus]
        alone = own.read(np.array([number - (int(ends[corpus]) - own.num_samples)]))
        assert found.inputs[row].tolist() == alone.inputs[0].tolist()
        assert found.targets[row].tolist() == alone.targets[0].tolist()
    assert source.losses(numbers).tolist() == [16] * 30
    with pytest.raises(IndexError):
        source.read(np.array([source.num_samples]))


def test_documents_of_all_corpora_are_kept_apart(inside: Path) -> None:
    """Samples of one corpus have more documents than those of another: their ends do not fit into one array."""
    for name, words in (("short", 2), ("long", 300)):
        lines = [json.dumps({"text": "ab" * words}) for _ in range(6000 // words)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    corpora = 'data.mixture=[{corpus="short.jsonl", weight=1}, {corpus="long.jsonl", weight=1}]'
    source = opened(corpora, "data.documents=separate").source("train", 64, 64)
    short, long = source.corpora.values()
    both = source.read(np.array([0, short.num_samples]))
    for row, one in enumerate((short, long)):
        alone = one.read(np.array([0]))
        assert np.array_equal(both.targets[row], alone.targets[0])
        assert np.array_equal(both.extras["begins_BT"][row], alone.extras["begins_BT"][0])
        ends, width = both.extras["ends_BM"][row], alone.extras["ends_BM"].shape[1]
        assert np.array_equal(ends[:width], alone.extras["ends_BM"][0])
        assert (ends[width:] == 64).all()
    assert len(both.extras["ends_BM"][1]) > long.read(np.array([0])).extras["ends_BM"].shape[1]


def test_weights_of_sizes_follow_the_temperature(inside: Path) -> None:
    """T = 1 is a concatenation: every corpus has equally many epochs. A high T takes all corpora equally often."""
    words = ['data.mixture=[{corpus="corpus.txt"}, {corpus="digits.txt"}, {corpus="tiny.txt"}]']
    epochs = [use.epochs for use in uses(opened(*words).source("train", 16, 16), 8, 4000)]
    assert max(epochs) / min(epochs) < 1.02
    flat = opened(*words, "data.mixture_temperature=1000").source("train", 16, 16)
    assert all(0.32 < float(share) < 0.34 for share in flat.shares)
    middle = opened(*words, "data.mixture_temperature=2").source("train", 16, 16)
    sizes = [corpus.num_samples for corpus in middle.corpora.values()]
    wanted = [math.sqrt(size) / sum(map(math.sqrt, sizes)) for size in sizes]
    assert [float(share) for share in middle.shares] == pytest.approx(wanted, rel=1e-8)


def test_conversations_mix_with_their_own_numbers_of_losses(inside: Path) -> None:
    """The mean loss divides by the losses of all samples of a step, which differ from sample to sample."""
    words = ["data.task=sft", "data.template={prompt}{response}"]
    words.append('data.mixture=[{corpus="pairs.jsonl", weight=2}, {corpus="more.jsonl", weight=1}]')
    (inside / "more.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}", "response": "x" * (1 + n % 5)}) + "\n" for n in range(40))
    )
    source = opened(*words).source("train", 16, 16)
    assert source.losses_per_sample is None
    numbers = np.arange(source.num_samples)
    found = source.read(numbers)
    assert (found.targets >= 0).sum(1).tolist() == source.losses(numbers).tolist()
    assert sorted(found.extras) == ["lengths_B"]
    assert len(found.extras["lengths_B"]) == source.num_samples


def test_a_corpus_may_have_its_own_validation(inside: Path) -> None:
    """Then all of it is for training."""
    (inside / "held.txt").write_text("0123456789\n" * 40)
    words = ["data.mixture.digits.validation=held.txt"]
    whole, cut = (opened(*some).source("train", 16, 16).corpora["digits"].num_samples for some in (words, []))
    assert cut < 0.92 * whole
    assert opened(*words).source("validation", 16, 16).corpora["digits"].num_samples == (440 - 1) // 16


# What does not mix


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.tokenizer=char"], 'data.tokenizer = "char": it is made from one corpus'),
        (["data.tokenizer=bpe:300"], 'data.tokenizer = "bpe:300": it is made from one corpus'),
        (["data.mixture.tiny.corpus=none.txt", "data.mixture.words.corpus=gone/"], "data.mixture.tiny: "),
    ],
)
def test_what_cannot_be_mixed_is_refused(inside: Path, words: list[str], said: str) -> None:
    found = refused(*words)
    assert said in found
    if "none.txt" in words[0]:  # both are named at once
        assert "data.mixture.words: " in found


def test_tasks_that_have_no_common_samples_are_refused(inside: Path) -> None:
    bert = ["model.kind=bert", "data.tokenizer=byte", 'data.mixture=[{corpus="squad"}, {corpus="tiny.txt"}]']
    assert "the corpora are for different tasks (squad for qa, tiny for mlm)" in refused(*bert)
    asked = ["model.kind=bert", "data.task=qa", 'data.mixture=[{corpus="squad"}, {corpus="tiny.txt"}]']
    assert any('the corpora of data.task = "qa" cannot be mixed' in one for one in refusals(request(*asked)))


def test_tokens_of_another_tokenizer_are_refused(inside: Path) -> None:
    """Ids of one tokenizer would be read as those of another one."""
    made = called(inside, "data", "tiny.txt", "--tokenizer", "char")
    folder = made.stdout.splitlines()[-1]
    found = refused(f"data.mixture.tiny.corpus={folder}")
    assert "data.mixture.tiny: its tokens are of another tokenizer (vocabulary of" in found


def test_a_corpus_that_is_too_small_for_its_share_is_refused(inside: Path) -> None:
    """Else a step would have one of its samples twice."""
    words = ["run.name=never", "data.mixture.tiny.weight=4", "train.global_batch_size=80"]
    done = called(inside, "train", "run.toml", *words)
    assert done.returncode == 2, done.stdout
    assert "has 30 training samples of 16 positions, and a step takes up to 40 of it" in done.stderr
    done = called(inside, "train", "run.toml", "run.name=never", "data.seq_len=600", "model.seq_len=600")
    assert "data.mixture.tiny: " in done.stderr
    assert "has 0 training samples" in done.stderr
    assert not (inside / "runs" / "never").exists()


# Runs

WORDS = ("train.precision=fp64", "train.num_steps=12", "train.eval_every=6", "checkpoint.every=4")


@pytest.fixture(scope="module")
def alone(project: Path, forker: Forker) -> RunFolder:
    return forker.train(project, "alone", 1, *WORDS)


def test_the_share_of_each_corpus_is_in_each_row(alone: RunFolder) -> None:
    """What is recorded are the samples that the step has read."""
    rows = alone.read_metrics()
    assert all(sum(row[f"share.{name}"] for name in NAMES) == pytest.approx(1) for row in rows)
    means = [np.mean([row[f"share.{name}"] for row in rows]) for name in NAMES]
    assert means == pytest.approx([3 / 4.5, 1 / 4.5, 0.5 / 4.5], abs=0.05)
    json_rows = [json.loads(line) for line in (alone.path / "metrics.jsonl").read_text().splitlines()]
    assert json_rows[0]["share.words"] == rows[0]["share.words"]


def test_the_validation_loss_is_that_of_the_corpora_by_their_weights(alone: RunFolder) -> None:
    """A large corpus with a small weight must not decide which checkpoint is the best."""
    row = alone.read_metrics()[5]
    each = [row[f"val_loss.{name}"] for name in NAMES]
    assert row["val_loss"] == pytest.approx(np.average(each, weights=[3, 1, 0.5]), rel=1e-12)
    assert alone.read_metrics()[4]["val_loss.words"] is None


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, ["train.microbatch_size=2"]), (2, ["parallel.pp=2"]), (2, ["parallel.dp_shard=2", "parallel.zero_stage=3"])],
)
def test_losses_do_not_depend_on_the_layout(
    project: Path, forker: Forker, alone: RunFolder, ranks: int, layout: list[str]
) -> None:
    run = forker.train(project, f"ranks{'-'.join(layout).replace('.', '_')}", ranks, *WORDS, *layout)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-9)
    for name in NAMES:
        found, wanted = ([row[f"val_loss.{name}"] for row in one.read_metrics()][5] for one in (run, alone))
        assert found == pytest.approx(wanted, rel=1e-9)


def test_a_resumed_run_has_the_same_samples(project: Path, forker: Forker, alone: RunFolder) -> None:
    """The order needs no state: a run that is continued goes on as if it had not ended."""
    run = forker.train(project, "twice", 1, *WORDS, "train.num_steps=4", "optimizer.decay_steps=12")
    run = forker.train(project, "twice", 1, *WORDS, "optimizer.decay_steps=12", resume=True)
    assert losses(run) == losses(alone)
    assert [row["share.tiny"] for row in run.read_metrics()] == [row["share.tiny"] for row in alone.read_metrics()]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.mixture.tiny.weight=2", "data.mixture.tiny.weight: the run in runs/alone has 0.5, this config 2.0"),
        (
            'data.mixture=[{corpus="corpus.txt", name="words", weight=3}, {corpus="digits.txt", weight=1}]',
            "data.mixture: the run in runs/alone has 'words, digits, tiny', this config 'words, digits'",
        ),
        ("data.corpus=corpus.txt", "data.corpus: the run in runs/alone has None, this config"),
    ],
)
def test_another_mixture_is_refused_at_a_resume(project: Path, alone: RunFolder, change: str, said: str) -> None:
    """It would be another run, under the same name. The message says how to begin the next phase."""
    words = [*WORDS, "train.num_steps=14", "optimizer.decay_steps=12", change]
    done = called(project, "train", "--resume", "runs/alone", *words)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    if "mixture" in change:
        assert "codescent export runs/alone runs/alone-weights" in done.stderr


def test_commands_say_what_they_know_of_each_corpus(project: Path, alone: RunFolder, forker: Forker) -> None:
    plan = called(project, "plan", "run.toml", *WORDS)
    assert "words: 66.7% of the samples" in plan.stdout, plan.stdout + plan.stderr
    assert "mixture of words, digits, tiny" in plan.stdout
    before = called(project, "plan", "run.toml", *WORDS, "data.folder=elsewhere")
    assert "tiny: 11.1% of the samples, epochs unknown until the data is prepared" in before.stdout
    evaluated = called(project, "evaluate", "runs/alone")
    assert "words: " in evaluated.stdout, evaluated.stderr
    assert "mixture: loss" in evaluated.stdout
    forker.train(project, "heavier", 1, *WORDS, "data.mixture.tiny.weight=0.7")
    again = called(project, "compare", "runs/alone", "runs/heavier")
    assert "data.mixture.tiny.weight  0.5 | 0.7" in again.stdout
    assert "validation of tiny: " in again.stdout, again.stderr
    report = called(project, "report", "runs/alone", "--out", "report.html")
    assert report.returncode == 0, report.stderr
    assert "tiny" in (project / "report.html").read_text()


FEW = '{corpus="digits.txt", name="plain"%s}, {corpus="pairs.jsonl", name="lines"%s}'
NO_COLUMNS = "needs JSON lines or tables, and there are none in the corpus digits.txt"


@pytest.mark.parametrize(
    ("keys", "words", "said"),
    [
        (("x", "prompt"), [], [f'data.mixture.plain.text_key = "x" has no effect: it {NO_COLUMNS}']),
        ((None, "prompt"), ["data.as_text=false"], []),
        ((None, None), ["data.text_key=prompt"], []),
        ((None, "prompt"), ["data.text_key=y"], ['data.text_key = "y" has no effect: it is for corpora without a ']),
        (
            ("x", "prompt"),
            ["data.task=sft"],
            [f"data.mixture.{name}.text_key = " for name in ("plain", "lines")],
        ),
        (("x", "y"), ["data.as_text=true"], [f"data.mixture.{name}.text_key = " for name in ("plain", "lines")]),
    ],
)
def test_a_text_key_without_effect_is_named(
    inside: Path, keys: tuple[str | None, str | None], words: list[str], said: list[str]
) -> None:
    """A column that nobody reads: of a corpus without columns, of a task that reads others."""
    mixture = FEW % tuple("" if key is None else f', text_key="{key}"' for key in keys)
    task = [] if any("data.task" in word for word in words) else ["data.task=lm"]
    found = without_effect(load("run.toml", [f"data.mixture=[{mixture}]", *task, *words]))
    of_keys = [sentence for sentence in found if "text_key" in sentence]
    assert len(of_keys) == len(said), found
    assert all(part in sentence for part, sentence in zip(said, of_keys, strict=True)), found


def test_the_source_of_one_corpus_is_no_mixture(inside: Path) -> None:
    """A run of one corpus keeps the order that it had before there were mixtures."""
    found = prepare_and_open(request("data.corpus=corpus.txt"), progress=False).source("train", 16, 16)
    assert not isinstance(found, MixedSource)
    assert uses(found, 8, 10) == []
