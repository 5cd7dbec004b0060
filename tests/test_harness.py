"""In: tasks of files, a trained run. Out: lm-evaluation-harness gives one score to the run, its export and its server.
Does not download tasks' data: the tests write it. Without the package lm-eval these tests are skipped, and say so."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import called, codescent, make_project, train
from served import engine, opened, served, tiny

from codescent.inference.open import open_engine
from codescent.inference.prompt_logprobs import continuation_scores

harness = pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install "codescent[lm-eval]"')

CHOICES = """
task: word_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{folder}/choices.jsonl"}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""
ROLLING = """
task: word_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/choices.jsonl"}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{long}}}}"
metric_list: [{{metric: bits_per_byte}}]
metadata: {{version: 1.0}}
"""
UNTIL = """
task: word_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/choices.jsonl"}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{greedy}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
metadata: {{version: 1.0}}
"""
WORDS = ["many", "workers", "one", "descent", "loss", "gradient", "step", "rank", "sum", "mean"]
NAMES = "word_choice,word_perplexity,word_until"


def write_tasks(folder: Path) -> Path:
    """A folder of three tasks and their data."""
    folder.mkdir()
    rng = random.Random(5)
    lines = []
    for _ in range(24):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))
        fields = {"text": text, "choices": [f" {word}" for word in rng.sample(WORDS, 3)], "answer": rng.randint(0, 2)}
        lines.append({**fields, "long": " ".join(rng.choice(WORDS) for _ in range(30)), "greedy": " one"})
    (folder / "choices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("choice", CHOICES), ("rolling", ROLLING), ("until", UNTIL)):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder


def test_continuations_are_scored_as_if_each_were_alone() -> None:
    """Fault: padding, the order of lengths, the cut at the left, or pieces of logits change a score."""
    module = tiny(seq_len=16)
    rng = random.Random(1)
    texts = [([rng.randrange(257) for _ in range(n)], [rng.randrange(257) for _ in range(m)]) for n, m in
             ((1, 1), (3, 9), (12, 4), (30, 5), (1, 16), (16, 1))]  # fmt: skip
    found = continuation_scores(module, texts)
    for (before, scored), (total, is_greedy) in zip(texts, found, strict=True):
        ids = torch.tensor([*before, *scored])[-17:]
        logits_TV = module(ids[None, :-1])[0].detach().log_softmax(-1)[-len(scored) :]
        own = logits_TV.gather(1, torch.tensor(scored)[:, None])
        assert total == pytest.approx(float(own.sum()), abs=1e-4)
        assert is_greedy == (logits_TV.argmax(-1).tolist() == scored)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_export_and_server_have_one_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: our scores differ from those of transformers, or those that a client of our server computes."""
    make_project(tmp_path)
    train(tmp_path, "scored", "model.seq_len=64", "data.seq_len=64", "train.num_steps=60", "train.eval_every=0")
    tasks = write_tasks(tmp_path / "tasks")
    done = codescent(tmp_path, "evaluate", "runs/scored", "--tasks", NAMES, "--tasks-folder", "tasks", "--json")
    assert done.returncode == 0, done.stderr
    ours = json.loads(done.stdout)["tasks"]
    assert ours["word_choice"]["samples"] == 24
    assert codescent(tmp_path, "export", "runs/scored", "out").returncode == 0
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    export = str(tmp_path / "out")
    theirs = scored("hf", {"pretrained": export, "tokenizer": export, "dtype": "float32"}, tasks, device="cpu")
    assert_like(ours, theirs)
    run = open_engine(tmp_path / "runs/scored")
    with served(run.engine, rows=16, waiting=64) as server:
        arguments = {
            "model": "tiny", "base_url": f"{server.url}/v1/completions", "tokenizer": export, "num_concurrent": 4,
            "tokenized_requests": True, "max_length": 64, "tokenizer_backend": "huggingface",
        }  # fmt: skip
        # The harness's client leaves room for a new token, so its windows are shorter.
        assert_like(ours, scored("local-completions", arguments, tasks), bits=0.01)


def scored(model: str, arguments: dict[str, Any], tasks: Path, **options: Any) -> Any:
    """What the harness says with one of its own models."""
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=str(tasks))
    options = {**options, "tasks": NAMES.split(","), "task_manager": manager, "log_samples": False}
    return harness.simple_evaluate(model=model, model_args=arguments, **options)["results"]


def assert_like(ours: Any, theirs: Any, bits: float = 1e-4) -> None:
    """Shares are equal, and bits per byte as far as `bits` says, relatively."""
    for name in ("word_choice acc,none", "word_choice acc_norm,none", "word_until exact_match,none"):
        task, metric = name.split()
        assert ours[task][metric] == pytest.approx(theirs[task][metric], abs=1e-9), task
    mine = ours["word_perplexity"]["bits_per_byte,none"]
    assert mine == pytest.approx(theirs["word_perplexity"]["bits_per_byte,none"], rel=bits)


@pytest.mark.slow
def test_what_is_not_there_is_said_and_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a traceback of a library, a download, or an unknown task that is left out."""
    make_project(tmp_path)
    train(tmp_path, "few", "train.num_steps=1", "train.eval_every=0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "wrong.yaml").write_text("task: wrong\noutput_type: nonsense\n", encoding="utf-8")
    for words, said in (
        (["--tasks", "hellaswag"], "--tasks: the data of a task is not on this machine, and nothing is downloaded: "),
        (["--tasks", "helaswag,arc_easy,zzz"], "no task 'helaswag' in lm-evaluation-harness; did you mean hellaswag"),
        (["--tasks", ","], "--tasks: give names of tasks"),
        (["--tasks", "hellaswag", "--tasks-folder", "none"], "none: no such folder"),
        (["--tasks", "hellaswag", "--data", "corpus.txt"], "--data: has no effect with --tasks; leave it out"),
        (["--tasks", "wrong", "--tasks-folder", "wrong"], "--tasks-folder wrong: lm-evaluation-harness failed with "),
        (["--limit", "3"], "--limit: needs --tasks; leave it out"),
    ):
        run = codescent if words == ["--tasks", "hellaswag"] else called
        done = run(tmp_path, "evaluate", "runs/few", *words)
        assert (done.returncode, done.stdout) == (2, ""), (words, done.stderr)
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_tasks_without_the_package_name_its_extra(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a traceback where the extra is not installed."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = called(project, "evaluate", "runs/absent", "--tasks", "hellaswag")
    assert done.returncode == 2
    assert "runs/absent: no such run folder" in done.stderr or "codescent[lm-eval]" in done.stderr


def our_harness() -> Any:
    """The module that needs the package."""
    return importlib.import_module("codescent.inference.harness")


def test_the_harness_reads_our_engine() -> None:
    """Fault: a name that the harness asks for is missing: texts without context, stops, lengths."""
    model = our_harness().HarnessModel(opened(engine()))
    assert (model.eot_token_id, model.prefix_token_id, model.max_length) == (256, 256, 64)
    instance = type("Instance", (), {})
    requests = []
    for arguments in (("", "ab"), ("x y", " z")):
        requests.append(instance())
        requests[-1].args = arguments
    scores = model.loglikelihood(requests, disable_tqdm=True)
    expected = continuation_scores(tiny(), [([256], list(b"ab")), (list(b"x y"), list(b" z"))])
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected])
    requests[0].args = ("ab", {"until": ["\x00none"], "max_gen_toks": 5})
    requests[1].args = ("a" * 100, {"until": "\x00none", "max_gen_toks": 3})
    texts = model.generate_until(requests, disable_tqdm=True)
    assert all(texts)
