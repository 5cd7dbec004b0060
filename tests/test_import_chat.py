"""In: a Hugging Face folder with a chat template. Out: an imported run that keeps it; commands that work as printed.
Does not test weights (test_interchange.py does) or how a template is rendered (test_data_chat.py does)."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import CHATML, LLAMA3, TALK, write_model_folder
from runs import called, losses, make_project
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from codescent.config.load import load
from codescent.record import RunFolder
from codescent.tasks.conversations.kept import CHAT
from codescent.verbs.train import _sample

DOCS = Path(__file__).resolve().parent.parent / "docs"
BATCH = ("train.global_batch_size=2", "log.sample_tokens=4")
SHORT = ("train.num_steps=2", "train.eval_every=2", *BATCH)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
POSITIONS = 1100
WORDS = ("red", "green", "blue", "black", "white", "pink")


def write_chat_folder(folder: Path, template: str) -> Path:
    """A tiny Llama that reads long texts, with a tokenizer and a chat template."""
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES, intermediate_size=64, vocab_size=340, max_position_embeddings=POSITIONS)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_model_folder(folder, template)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|system|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    write_chat_folder(folder / "chat", CHATML)
    lines = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
        for word in WORDS * 6
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def commands(text: str) -> list[list[str]]:
    """The commands that `import` prints, without `codescent`."""
    return [shlex.split(line) for line in re.findall(r"^to \w+.*: codescent (.*)$", text, re.MULTILINE)]


def done_well(project: Path, *words: str) -> str:
    done = called(project, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_an_import_prints_works_as_printed(project: Path) -> None:
    told = done_well(project, "import", "chat", "runs/with corpus", "data.corpus=talks.jsonl", *SHORT)
    sample, train = commands(told)
    assert sample == ["sample", "runs/with corpus", "--prompt", "Hello"]
    assert done_well(project, *sample, "--tokens", "3").startswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert train == ["train", "runs/with corpus/config.toml", "run.folder=runs/with corpus-tuned"]
    told = done_well(project, *train)
    assert "weights of 15 parameters read from" in told
    tuned = RunFolder.open(project / "runs/with corpus-tuned")
    assert [row["step"] for row in tuned.read_metrics()] == [1, 2]
    assert tuned.plan["work"]["seq_len"] == 1024 < POSITIONS  # else samples would be as long as the model's positions
    # The text at the end answers the first validation example, and bare `sample` a greeting.
    assert re.search(r"the trained model:\n\n<\|im_start\|>user\n(\w+)<\|im_end\|>\n<\|im_start\|>assistant\n", told)[
        1
    ] in (WORDS)
    assert done_well(project, "sample", "runs/with corpus-tuned", "--tokens", "1").startswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


ASKS_FOR_A_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('begin with a system message') }}{% endif %}"
)


def test_a_prompt_that_the_template_refuses_is_named_as_the_user_can_set_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done_well(project, "import", "chat", "runs/refuses", "data.corpus=talks.jsonl", *SHORT)
    path = project / "runs/refuses"
    chat = json.loads((path / CHAT).read_text())
    (path / CHAT).write_text(json.dumps({**chat, "template": ASKS_FOR_A_SYSTEM + chat["template"]}))
    why = f"{path / CHAT}: begin with a system message"
    done = called(path.parent.parent, "sample", str(path))
    assert done.returncode == 2
    assert f"error: the prompt 'Hello', as --prompt is not given: {why}\n" in done.stderr
    assert f"error: --prompt 'Hi': {why}\n" in called(project, "sample", str(path), "--prompt", "Hi").stderr
    assert called(project, "export", str(path), "out of refuses").returncode == 0
    config = load(str(path / "config.toml")).config
    for prompt, told in (("", "no text (log.sample_tokens = 4): "), ("Hi", "log.sample_prompt 'Hi': ")):
        log = config.log.model_copy(update={"sample_prompt": prompt})
        _sample(config.model_copy(update={"log": log}), path, best=False)
        said = capsys.readouterr().err
        assert told in said
        assert ("sample_prompt" in said) == bool(prompt)


def test_an_import_without_a_corpus_asks_for_one(project: Path) -> None:
    told = done_well(project, "import", "chat", "runs/asks")
    assert "to train, with your file as CORPUS: " in told
    train = commands(told)[-1]
    done = called(project, *train)
    assert done.returncode == 2
    assert done.stderr.startswith("error: CORPUS: cannot be read: No such file or directory: a file of JSON lines with")
    assert not (project / "runs/asks-tuned").exists()
    done = called(project, "train", "--resume", "runs/asks")
    assert done.returncode == 2
    assert "error: runs/asks: was imported and has no training steps" in done.stderr
    assert done.stderr.endswith(f"with your file as CORPUS: codescent {shlex.join(train)}\n")


def in_jinja(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def unusable(folder: Path) -> None:
    """A template that reads a special token that no file defines: transformers renders it as empty text."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": CHATML + "{{ sep_token }}", "additional_special_tokens": []})
    )


@pytest.mark.parametrize(
    ("template", "change", "words", "task"),
    [
        (CHATML, None, (), "sft"),
        (LLAMA3, in_jinja, (), "sft"),
        (CHATML, None, ("data.task=lm",), None),
        (CHATML, None, ("data.corpus=corpus.txt",), None),
        (CHATML, unusable, (), None),
    ],
    ids=["config", "jinja", "lm", "text", "unusable"],
)
def test_an_export_has_the_template_of_the_import(
    project: Path, tmp_path: Path, template: str, change: Any, words: Sequence[str], task: str | None
) -> None:
    folder = shutil.copytree(project / "chat", tmp_path / "theirs")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    if change is not None:
        change(folder)
    run, out = tmp_path / "run", tmp_path / "out"
    told = done_well(project, "import", str(folder), str(run), *words)
    assert (run / CHAT).is_file()
    assert (f"data.task = {task}" in told) == (task is not None)
    assert ("the folder is not used for data.task = sft: data.chat_template: " in told) == (change is unusable)
    shown = done_well(project, "sample", str(run), "--prompt", "many", "--tokens", "1")
    assert shown.startswith("many") == (task is None)
    done_well(project, "export", str(run), str(out))
    before, after = (AutoTokenizer.from_pretrained(path) for path in (folder, out))
    assert after.chat_template == before.chat_template
    assert after.special_tokens_map == before.special_tokens_map
    for ask in (False, True):
        texts = [one.apply_chat_template(TALK, tokenize=False, add_generation_prompt=ask) for one in (before, after)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("form", [pytest.param("prompt", marks=pytest.mark.slow), "messages"])
def test_the_configs_of_the_page_run_as_printed(tmp_path: Path, form: str) -> None:
    """The sizes come from the folder's config.json. The overrides only make the run short."""
    found = "\n".join(re.sub(r"^    ", "", line) for line in (DOCS / "data_conversations.md").read_text().split("\n"))
    example = re.search(r'^\{"' + form + r'":.*?\}$', found, re.MULTILINE | re.DOTALL)
    text = re.search(r'^\[model\]\nweights.*?corpus = "(\w+\.jsonl)".*?\n\n', found[example.end() :], re.DOTALL | re.M)
    weights = re.search(r'weights = "(.*)"', text[0])[1]
    write_chat_folder(tmp_path / weights, LLAMA3)
    line = json.dumps(json.loads(example[0]))
    (tmp_path / text[1]).write_text(f"{line}\n" * 20)
    (tmp_path / "tune.toml").write_text(text[0])
    told = done_well(tmp_path, "train", "tune.toml", "train.num_steps=1", "train.eval_every=0", *BATCH)
    assert f"weights of 15 parameters read from {tmp_path / weights}" in told
    shown = done_well(tmp_path, "config", "tune.toml")
    assert re.search(rf"model.num_layers +2 +{weights[:9]}", shown)
    done_well(tmp_path, "train", "--resume", "runs/default", "train.num_steps=2")


def test_sizes_of_a_folder_are_refused_by_name(project: Path) -> None:
    for words, expected in (
        (("model.weights=absent",), "model.weights: "),
        (("model.weights=chat", "model.kind=bert"), 'config.json is of a llama, but model.kind = "bert"'),
    ):
        done = called(project, "plan", "finetune", *words)
        assert done.returncode == 2
        assert expected in done.stderr, done.stderr
    words = ("model.weights=chat", "model.num_layers=3", "data.tokenizer=chat/tokenizer.json", "data.seq_len=16")
    done = called(project, "train", "finetune", *words, "data.corpus=corpus.txt")
    assert "model.num_layers = 3: but model.weights = " in done.stderr  # a size that is given is not replaced


TUNED = """
[model]
weights = "chat"

[data]
corpus = "talks.jsonl"
task = "sft"
tokenizer = "chat/tokenizer.json"
chat_template = "chat"
seq_len = 64

[train]
num_steps = 4
global_batch_size = 2
eval_every = 2
eval_samples = 2
num_threads = 1
device = "cpu"
matmul = "exact"
allocator = "system"

[optimizer]
decay_steps = 4

[log]
tensorboard = false
"""


def overrides(text: str, folder: str) -> list[str]:
    """The overrides that a refusal names, with the new place of the folder."""
    (line,) = re.findall(r"NEW, add to the command: (.*)", text)
    return [word.replace("NEW", folder) for word in shlex.split(line)]


def places(run: RunFolder) -> list[str]:
    """Where the run's files are, by its config."""
    return re.findall(r'(?m)^(?:weights|tokenizer|chat_template) = "(.*)"$', (run.path / "config.toml").read_text())


@pytest.mark.slow
def test_a_tuned_run_goes_on_when_the_folder_of_its_base_has_moved(project: Path, tmp_path: Path) -> None:
    for name in ("chat", "talks.jsonl"):
        (shutil.copytree if name == "chat" else shutil.copy)(project / name, tmp_path / name)
    (tmp_path / "tuned.toml").write_text(TUNED)
    adapted = ("train", "tuned.toml", "lora.rank=2")
    done_well(tmp_path, *adapted, "run.name=whole")
    done_well(tmp_path, *adapted, "run.name=begun", "train.num_steps=2")
    done_well(tmp_path, "train", "tuned.toml", "run.name=plain", "train.num_steps=2")
    (tmp_path / "chat").rename(tmp_path / "away")
    refused = called(tmp_path, "train", "--resume", "runs/begun", "train.num_steps=4")
    assert refused.returncode == 2
    new = overrides(refused.stderr, "away")
    assert sorted(new) == ["data.chat_template=away", "data.tokenizer=away/tokenizer.json", "model.weights=away"]
    assert overrides(refused.stderr, "away")[0] == "model.weights=away"
    resume = ("train", "--resume", "runs/begun", "train.num_steps=4")
    tokenizer = tmp_path / "away" / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text.replace('"<|eot_id|>"', '"<|eox_id|>"'))
    refused = called(tmp_path, *resume, *new)
    assert refused.returncode == 2
    assert "data.tokenizer: the run in runs/begun has 'chat/tokenizer.json'" in refused.stderr
    tokenizer.write_text(text)
    done_well(tmp_path, *resume, *new)
    begun = RunFolder.open(tmp_path / "runs" / "begun")
    assert losses(begun) == losses(RunFolder.open(tmp_path / "runs" / "whole"))
    assert places(begun) == [f"{tmp_path}/away", f"{tmp_path}/away", "away/tokenizer.json"]
    done_well(tmp_path, "sample", "runs/begun", "--tokens", "1")
    said = done_well(tmp_path, "evaluate", "runs/begun")
    assert "(validation losses during the run were those of at most 2 samples: train.eval_samples)" in said
    # A run that is done needs the files for other commands alone.
    (tmp_path / "away").rename(tmp_path / "last")
    said = done_well(tmp_path, "train", "--resume", "runs/begun", *(word.replace("away", "last") for word in new))
    assert "runs/begun now has the new value of model.weights and data.tokenizer and data.chat_template" in said
    assert places(begun) == [f"{tmp_path}/last", f"{tmp_path}/last", "last/tokenizer.json"]
    done_well(tmp_path, "sample", "runs/begun", "--tokens", "1")
    # Without adapters the checkpoint has all weights. Naming their new folder is no change either.
    again = ("train", "--resume", "runs/plain", "train.num_steps=3")
    refused = called(tmp_path, *again)
    new = overrides(refused.stderr, "last")
    assert sorted(new) == ["data.chat_template=last", "data.tokenizer=last/tokenizer.json"]
    weights = tmp_path / "other"
    shutil.copytree(tmp_path / "last", weights)
    (file,) = weights.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, {"format": "pt"})
    assert "model.weights: the run in" in called(tmp_path, *again, *new, "model.weights=other").stderr
    done_well(tmp_path, *again, *new, "model.weights=last")
