"""In: runs that are killed, interrupted or continued under another name. Out: the same losses, bitwise, or a refusal.
Does not test the checkpoint's files: test_checkpoint does."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import tokenizers as library
from forker import Forker
from runs import called, losses, make_project, start, started_by, train

from codescent.checkpoint.checkpoints import Checkpoints, read_tensors
from codescent.huggingface.tokens import library_text
from codescent.record import RunFolder
from codescent.train.dues import steps_between_rows

ENDLESS = ("train.num_steps=100000", "optimizer.decay_steps=60", "checkpoint.every=10", "model.dropout=0.1")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "two": (2, ()),
    "pp": (2, ("parallel.pp=2", "train.microbatch_size=4")),
    "dp_shard": (2, ("parallel.dp_shard=2",)),
    "muon": (2, ("optimizer.kind=muon", "parallel.dp_shard=2")),
}


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Return as soon as the run has recorded `step`."""
    while process.poll() is None:
        rows = RunFolder.open(run).read_metrics() if (run / "metrics.csv").is_file() else []
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"ended before step {step}: {process.communicate()}")


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(
    "layout",
    ["one", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("two", "pp", "dp_shard", "muon"))],
)
def test_kill_and_resume_is_bitwise(project: Path, forker: Forker, layout: str) -> None:
    ranks, keys = LAYOUTS[layout]
    keys = (*ENDLESS, *keys)
    name = f"killed-{layout}"
    process = start(project, "train", "run.toml", f"run.name={name}", *keys, "--ranks", str(ranks))
    wait_for_step(process, project / "runs" / name, 12)
    children = family(process)
    victim = (started_by(process.pid) or [psutil.Process(process.pid)])[-1]
    victim.kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert psutil.wait_procs(children, timeout=10)[1] == []
    last = len(losses(RunFolder.open(project / "runs" / name))) + 15
    keys = (*keys, f"train.num_steps={last}")
    expected = forker.train(project, f"whole-{layout}", ranks, *keys)
    if layout == "dp_shard":  # as a user does it; other layouts without a new start of Python
        run = train(project, name, *keys, "--ranks", str(ranks), "--resume")
    else:
        run = forker.train(project, name, ranks, *keys, resume=True)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, last + 1))
    assert losses(run) == losses(expected)
    for column in ("val_loss", "grad_norm", "learning_rate"):
        assert [row[column] for row in run.read_metrics()] == [row[column] for row in expected.read_metrics()]
    with (run.path / "metrics.csv").open() as file:
        assert [float(row["train_loss"]) for row in csv.DictReader(file)] == losses(run)
    assert any(event["kind"] == "resume" for event in run.read_events())


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        ("pp", signal.SIGINT),
        pytest.param("one", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("pp", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("two", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("dp_shard", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("dp_shard", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_leaves_no_process(project: Path, forker: Forker, layout: str, number: int) -> None:
    name = f"stopped-{layout}-{number}"
    ranks, keys = LAYOUTS[layout]
    keys = (*ENDLESS, *keys)
    words = ("train", "run.toml", f"run.name={name}", *keys, "--ranks", str(ranks))
    process = start(project, *words, start_new_session=True)
    wait_for_step(process, project / "runs" / name, 15)
    children = family(process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"codescent train --resume runs/{name}\n" in out
    assert "Traceback" not in out + err
    assert psutil.wait_procs(children, timeout=10)[1] == []
    run = RunFolder.open(project / "runs" / name)
    (stop,) = [event for event in run.read_events() if event["kind"] == "stop"]
    assert (run.checkpoints / f"step_{stop['step']:08}").is_dir()
    again = forker.train(project, name, ranks, *keys, f"train.num_steps={stop['step'] + 5}", resume=True)
    assert [row["step"] for row in again.read_metrics()] == list(range(1, stop["step"] + 6))
    undisturbed = forker.train(
        project, f"undisturbed-{layout}-{number}", ranks, *keys, f"train.num_steps={stop['step'] + 5}"
    )
    assert losses(again) == losses(undisturbed)


def test_resume_on_another_number_of_ranks(project: Path, forker: Forker) -> None:
    words = ("train.precision=fp64", "train.num_steps=30", "checkpoint.every=10", "optimizer.decay_steps=30")
    expected = forker.train(project, "four", 1, *words)
    run = forker.train(project, "two-then-one", 2, *words, "train.num_steps=10")
    run = forker.train(project, "two-then-one", 1, *words, resume=True)
    assert losses(run) == pytest.approx(losses(expected), rel=1e-10)


def test_resume_before_the_first_checkpoint_begins_again(project: Path, forker: Forker) -> None:
    words = ("train.num_steps=100000", "optimizer.decay_steps=120", "checkpoint.every=0")
    process = start(project, "train", "run.toml", "run.name=early", *words)
    wait_for_step(process, project / "runs" / "early", 5)
    process.kill()
    process.communicate()
    run = forker.train(project, "early", 1, *words, "train.num_steps=30", resume=True)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 31))
    assert "num_steps = 30" in run.config_text


@pytest.mark.slow
def test_what_a_user_gets_by_default_resumes_bitwise(project: Path) -> None:
    words = ("train.matmul=auto", "train.allocator=auto", "train.num_steps=30", "checkpoint.every=10")
    begun = train(project, "levers", *words, "train.num_steps=20", "optimizer.decay_steps=30")
    tried = begun.read_environment()["matmul"]["trial"]
    run = train(project, "levers", *words, "optimizer.decay_steps=30", "--resume")
    # Which kernels are faster may come out differently in each run on a busy machine; the resumed one kept its own.
    chosen = run.read_environment()["matmul"]["choice"]
    expected = train(project, "levers-through", *words, f"train.matmul={chosen}")
    assert losses(run) == losses(expected)
    assert run.read_environment()["matmul"]["trial"] == "as at the beginning"
    assert set(tried) == {"exact", "fast"}


def test_a_choice_of_kernels_is_obeyed_on_resume(project: Path, forker: Forker) -> None:
    words = ("optimizer.decay_steps=20", "train.matmul=fast")
    forker.train(project, "kernels", 1, *words, "train.num_steps=10")
    run = forker.train(project, "kernels", 1, *words, "train.matmul=exact", resume=True)
    assert run.read_environment()["matmul"]["choice"] == "exact"


def test_scaled_learning_rates_follow_the_ranks_and_are_never_changed_silently(project: Path, forker: Forker) -> None:
    words = ("optimizer.scale_learning_rate=linear", "optimizer.decay_steps=20", "train.num_steps=5")
    one = forker.train(project, "scaled-1", 1, *words).read_metrics()
    two = forker.train(project, "scaled-2", 2, *words).read_metrics()
    assert [row["learning_rate"] for row in two] == [2 * row["learning_rate"] for row in one]
    done = called(project, "train", "run.toml", "run.name=scaled-2", *words, "train.num_steps=10", "--resume")
    assert done.returncode == 2
    assert "scale_learning_rate" in done.stderr
    assert "add optimizer.scale_ranks=2, which keeps the learning rate" in done.stderr
    more = (*words[:2], "train.num_steps=8", "optimizer.scale_ranks=2")
    longer = forker.train(project, "scaled-2", 1, *more, resume=True).read_metrics()
    whole = forker.train(project, "scaled-2-whole", 2, *words[:2], "train.num_steps=8").read_metrics()
    assert [row["learning_rate"] for row in longer] == [row["learning_rate"] for row in whole]


def test_a_run_has_one_writer(project: Path) -> None:
    words = ("train.num_steps=100000", "optimizer.decay_steps=120", "checkpoint.every=10")
    process = start(project, "train", "run.toml", "run.name=held", *words)
    wait_for_step(process, project / "runs" / "held", 15)
    done = called(project, "train", "run.toml", "run.name=held", *words, "--resume")
    process.kill()
    process.communicate()
    assert done.returncode == 2
    assert f"process {process.pid}" in done.stderr


def test_a_reader_that_goes_away_does_not_end_the_run(project: Path) -> None:
    process = start(project, "train", "run.toml", "run.name=unread", "log.every=1", "train.num_steps=100")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) in (0, 141)
    assert losses(RunFolder.open(project / "runs" / "unread"))[-1] > 0
    assert len(losses(RunFolder.open(project / "runs" / "unread"))) == 100


def test_fewer_rows_than_steps(project: Path, forker: Forker) -> None:
    """With validation losses, and the last step of each command; a resume writes a metrics.csv that is empty anew."""
    words = ("log.metrics_every=7", "checkpoint.every=7", "train.eval_every=10", "optimizer.schedule=constant")
    run = forker.train(project, "few", 1, *words)
    assert [row["step"] for row in run.iter_metrics()] == [7, 10, 14, 20]
    (run.path / "metrics.csv").write_bytes(b"")
    forker.train(project, "few", 1, *words, "train.num_steps=27", resume=True)
    assert [row["step"] for row in run.iter_metrics()] == [7, 10, 14, 20, 21, 27]
    assert [row["step"] for row in run.iter_metrics() if row["val_loss"]] == [10, 20, 27]
    assert len((run.path / "metrics.csv").read_text().splitlines()) == 7
    assert [steps_between_rows(steps) for steps in (1, 100_000, 100_001, 10**6)] == [1, 1, 2, 10]


def test_an_existing_run_is_never_overwritten(project: Path, forker: Forker) -> None:
    run = forker.train(project, "taken", 1)
    before = run.read_metrics()
    done = called(project, "train", "run.toml", "run.name=taken")
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "run.name" in done.stderr
    assert RunFolder.open(run.path).read_metrics() == before


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_another_config_is_refused_key_by_key(project: Path, forker: Forker, ranks: str) -> None:
    name = f"other-{ranks}"
    run = forker.train(project, name, 1)
    before = (run.path / "config.toml").read_bytes()
    words = ("optimizer.learning_rate=0.5", "model.num_layers=3", "--resume", "--ranks", ranks)
    done = called(project, "train", "run.toml", f"run.name={name}", *words)
    assert done.returncode == 2
    assert "optimizer.learning_rate: the run in" in done.stderr
    assert "model.num_layers: the run in" in done.stderr
    assert done.stderr.count("optimizer.learning_rate") == 1
    assert (run.path / "config.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("begun", "resumed", "told"),
    [
        (("average_every=5",), (), {"average_every: 5, 0"}),
        (("average_every=5", "wire=int4"), ("average_every=5",), {"wire: 'int4', 'none'"}),
        ((), ("gossip=ring", "gossip_every=5"), {"gossip: 'none', 'ring'", "gossip_every: 1, 5"}),
    ],
)
def test_another_method_is_told_by_the_keys_of_the_configs(
    project: Path, forker: Forker, begun: tuple[str, ...], resumed: tuple[str, ...], told: set[str]
) -> None:
    """Not by keys that have an effect with one of the methods only, and the same value in both configs."""
    name = f"method-{len(begun)}{len(resumed)}"
    forker.train(project, name, 2, *(f"parallel.{word}" for word in begun), "train.num_steps=10")
    words = ("--resume", "--ranks", "2", "train.num_steps=20", "optimizer.decay_steps=10")
    done = called(project, "train", "run.toml", f"run.name={name}", *(f"parallel.{word}" for word in resumed), *words)
    assert done.returncode == 2
    found = re.findall(r"error: parallel\.(\w+): the run in runs/\S+ has (\S+), this config (\S+)\n", done.stderr)
    assert {f"{key}: {old}, {new}" for key, old, new in found} == told
    assert "None" not in done.stderr


def test_nothing_to_resume(project: Path) -> None:
    done = called(project, "train", "run.toml", "run.name=nowhere", "--resume")
    assert done.returncode == 2
    assert "no such run folder" in done.stderr


def test_another_corpus_under_the_same_name_is_refused(tmp_path: Path, forker: Forker) -> None:
    make_project(tmp_path)
    forker.train(tmp_path, "run", 1, "train.num_steps=10", "optimizer.decay_steps=20")
    text = (tmp_path / "corpus.txt").read_text()
    (tmp_path / "corpus.txt").write_text(text.replace("many", "much"))
    words = ("run.name=run", "train.num_steps=20", "optimizer.decay_steps=20", "--resume")
    done = called(tmp_path, "train", "run.toml", *words)
    assert done.returncode == 2
    assert "not the tokens that the run" in done.stderr


@pytest.mark.parametrize("key", ["data.tokenizer=bare:tokenizer.json", "data.as_text=true"])
def test_a_run_of_an_earlier_version_has_its_tokens_by_a_key_that_is_named(
    key: str, tmp_path: Path, forker: Forker
) -> None:
    make_project(tmp_path)
    inner = library.Tokenizer.from_str(library_text('{"codescent_tokenizer": "byte"}'))
    inner.post_processor = library.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    lines = "".join(json.dumps({"text": line}) + "\n" for line in (tmp_path / "corpus.txt").read_text().split("\n"))
    (tmp_path / "lines.txt").write_text(lines)
    corpus, tokenizer = ("lines.txt", "byte") if "as_text" in key else ("corpus.txt", "tokenizer.json")
    words = (f"data.corpus={corpus}", f"data.tokenizer={tokenizer}", "optimizer.decay_steps=20", "run.name=run")
    assert forker.run(tmp_path, 1, [*words, key, "train.num_steps=2"]).codes == [0]
    for file in ("config.toml", "plan.json"):  # as that version wrote them
        path = tmp_path / "runs" / "run" / file
        path.write_text(re.sub(r'bare:|,\s*"as_text": true|as_text = true\n', "", path.read_text()))
    done = forker.run(tmp_path, 1, [*words, "train.num_steps=4"], resume=True)
    assert done.codes == [2]
    assert f"if an earlier version of codescent began the run, give {key.partition(':')[0]}" in done.said
    assert forker.run(tmp_path, 1, [*words, key, "train.num_steps=4"], resume=True).codes == [0]


def test_changed_checkpoint_is_refused_and_left(project: Path, forker: Forker) -> None:
    run = forker.train(project, "changed", 1, "train.num_steps=10", "optimizer.decay_steps=20")
    (file,) = (run.checkpoints / "step_00000010").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    words = ("run.name=changed", "train.num_steps=20", "optimizer.decay_steps=20", "--resume")
    done = called(project, "train", "run.toml", *words)
    assert done.returncode == 2
    assert file.name in done.stderr
    assert "Traceback" not in done.stderr
    assert file.read_bytes() == data


def test_a_checkpoint_without_the_state_of_a_training_is_refused(project: Path, forker: Forker) -> None:
    words = ("train.num_steps=4", "optimizer.decay_steps=20")
    run = forker.train(project, "stateless", 1, *words)
    Checkpoints(run.checkpoints, 1, keep_best=False).save(4, read_tensors(run.checkpoints / "step_00000004"), {})
    done = forker.run(project, 1, ["run.name=stateless", *words, "train.num_steps=8"], resume=True)
    assert done.codes == [2]
    assert "not a checkpoint of `codescent train`: its state names no dataset" in done.said


def test_what_is_not_read_may_be_damaged_and_a_damaged_plan_is_refused(project: Path, forker: Forker) -> None:
    """The samples do not depend on the kept tokenizer of a text, and its validation split is scored without it."""
    run = forker.train(project, "damaged", 1, "train.num_steps=2")
    (run.path / "tokenizer.json").write_bytes(b"\xff")
    words = ("train", "run.toml", "run.name=damaged", "train.num_steps=2", "--resume")
    for command in (words, ("evaluate", "runs/damaged")):
        done = called(project, *command)
        assert done.returncode == 0, done.stderr
    plan = json.loads((run.path / "plan.json").read_text())
    for damaged in (plan | {"model": plan["model"] | {"sizes": 3}}, {"format": plan["format"]}):
        (run.path / "plan.json").write_text(json.dumps(damaged))
        done = called(project, *words)
        assert done.returncode == 2
        assert done.stderr.startswith("error: runs/damaged/plan.json: damaged: not the plan of a run (")


def test_a_run_of_an_earlier_version_goes_on(project: Path, forker: Forker) -> None:
    """Its plan.json has neither model nor task: the plan is built again from its config."""
    keys = ("train.num_steps=8", "train.eval_every=4", "optimizer.decay_steps=8")
    expected = forker.train(project, "earlier-whole", 1, *keys)
    run = forker.train(project, "earlier", 1, *keys[1:], "train.num_steps=4")
    plan = json.loads((run.path / "plan.json").read_text())
    model, task = plan.pop("model"), plan.pop("task")
    before = {"kind": model["kind"], "vocab_size": model["vocab_size"], "task": task["name"], "beside": task["extras"]}
    (run.path / "plan.json").write_text(json.dumps({"mesh": plan["mesh"], "work": plan["work"] | before}))
    done = forker.run(project, 1, ["run.name=earlier", *keys, "optimizer.learning_rate=1.0"], resume=True)
    assert done.codes == [2]
    assert "optimizer.learning_rate: the run in" in done.said
    run = forker.train(project, "earlier", 1, *keys, resume=True)
    assert losses(run) == losses(expected)
    assert "model" in json.loads((run.path / "plan.json").read_text())
