"""In: an empty folder. Out: `SUBJECTS`: a project there, the files to damage, the commands that must survive it.
Does not damage anything and does not run what it names."""

from __future__ import annotations

import importlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chats import CHATML, TALK, tokenizer_text
from fuzz.served_commands import briefly, served_body
from questions import files as squad_files
from questions import vocabulary
from reported import make_run
from runs import make_project

from codescent.data.text.request import make_request

ONE = ("train.num_steps=1", "train.eval_every=0", "run.name=one")
HALVES = ("parallel.tp=2",)
TINY = ("model.num_layers=1", "model.hidden_dim=8")
TENSORS = (
    *("model.kind=transformer", "model.num_layers=auto", "model.seq_len=auto", "model.num_encoder_layers=1"),
    *("model.num_decoder_layers=1", "model.embedding=none", "model.source_len=2", "model.target_len=3"),
    *("data.task=tensors", "train.global_batch_size=4"),
)


@dataclass(frozen=True)
class Subject:
    """What is fuzzed.

    Attributes:
        make: writes the project into an empty folder.
        files: glob patterns of the files to damage.
        commands: each is tried; they run in the project's folder.
        before: commands that complete the project.
        checked: the files are verified: after a damage a command says the same as before, or refuses. Other files are
            the user's own words, and another result is right.
        finish: completes the project after these commands.
        planted: the files are not damaged, but links, pipes and devices take their place (strangers.py), also of names
            that are not there yet.
        runs: runs the words of a command, and returns its exit code; None: they are words of `codescent`.
    """

    make: Callable[[Path], object]
    files: Sequence[str]
    commands: Sequence[Sequence[str]]
    before: Sequence[Sequence[str]] = field(default_factory=tuple)
    finish: Callable[[Path], object] = bool
    checked: bool = False
    planted: bool = False
    runs: Callable[[list[str]], int] | None = None


def _lines(folder: Path) -> None:
    make_project(folder)
    rng = random.Random(3)
    words = ["many", "workers", "one", "descent", "é", "😀"]
    lines = [{"text": " ".join(rng.choice(words) for _ in range(20))} for _ in range(100)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _preferences(folder: Path) -> None:
    make_project(folder)
    lines = [{"prompt": f"Say {n}", "chosen": "é" * (1 + n % 3), "rejected": f"not {n}"} for n in range(30)]
    (folder / "judged.jsonl").write_text(
        "".join(json.dumps(line, ensure_ascii=n % 2 == 0) + "\n" for n, line in enumerate(lines))
    )


def _rows(folder: Path) -> None:
    """The texts of `_lines` in every form of a table. pyarrow and zstandard are needed for this subject alone."""
    _lines(folder)
    pyarrow, zstandard = importlib.import_module("pyarrow"), importlib.import_module("zstandard")
    lines = (folder / "corpus.jsonl").read_bytes()
    texts = [json.loads(line)["text"] for line in lines.splitlines()]
    rows = pyarrow.table({"id": range(len(texts)), "text": texts})
    importlib.import_module("pyarrow.parquet").write_table(rows, folder / "rows.parquet", row_group_size=30)
    (folder / "saved").mkdir()
    with pyarrow.ipc.new_stream(str(folder / "saved" / "data.arrow"), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=30)
    (folder / "saved" / "dataset_info.json").write_text('{"splits": {"train": {}}}')
    (folder / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}], "_split": null}')
    (folder / "rows.csv").write_text("id,text\n" + "".join(f'{number},"{text}"\n' for number, text in enumerate(texts)))
    (folder / "rows.jsonl.zst").write_bytes(zstandard.compress(lines))


def _pairs(folder: Path) -> None:
    make_project(folder)
    lines = [{"prompt": f"what is {n}", "response": f"it is {n}"} for n in range(80)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _chat(folder: Path) -> None:
    make_project(folder)
    (folder / "talks.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 60)
    (folder / "tokenizer.json").write_text(tokenizer_text())
    (folder / "chat_template.jinja").write_text(CHATML)


def _asked(folder: Path) -> None:
    """A run of conversations, bodies of requests to it, lines that a user types, and a log of requests."""
    _chat(folder)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "?"}]
    common = {"model": "one", "max_tokens": 3, "temperature": 0.5, "seed": 1, "top_k": 5, "stop": ["q"]}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    bodies = {
        "completions": {**common, "prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "logit_bias": {"5": -1}},
        "chat": {**common, "messages": turns, "stream": True, "stream_options": {"include_usage": True}},
        "grammar": {**common, "prompt": [1, 2], "response_format": schema, "top_p": 0.9, "min_p": 0.1},
    }
    for name, body in bodies.items():
        (folder / f"{name}.json").write_text(json.dumps(body))
    (folder / "typed.txt").write_text("hi\n/system you\ngo \\\non\n/reset\n/help\n//x\n")
    line = {
        "version": 1, "time_s": 1.7e9, "which": "step 1", "path": "/v1/completions", "request": {"prompt": "é"},
        "texts": ["x", "y"], "finish": ["stop", "length"], "prompt_tokens": [5], "tokens": [3, 4], "seconds": 0.5,
        "prompt_losses": [2.5],
    }  # fmt: skip
    (folder / "log.jsonl").write_text((json.dumps(line) + "\n") * 70)
    (folder / "log.jsonl").chmod(0o600)
    (folder / "token").write_text("secret\n")
    (folder / "token").chmod(0o600)


def _questions(folder: Path) -> None:
    make_project(folder)
    squad_files(folder)
    vocabulary(folder)


def _reported(folder: Path) -> None:
    """Runs as a run leaves them, made without training."""
    make_run(folder / "runs" / "a", 2, *HALVES, keys="tp = 2\n")
    make_run(folder / "runs" / "b", 2, *HALVES, keys="tp = 2\n", slower={1: 1.3})


def _study(folder: Path) -> None:
    make_project(folder)
    (folder / "study.toml").write_text(STUDY)


def _own(folder: Path) -> None:
    """The file of tensors that was generated becomes the user's own."""
    made = max(
        (path for path in folder.glob("datasets/*/*") if path.suffix != ".json"), key=lambda path: path.stat().st_size
    )
    made.rename(folder / f"own{made.suffix}")
    shutil.rmtree(folder / "datasets")
    shutil.rmtree(folder / "runs")


def _all_own(folder: Path) -> None:
    """The files of tensors that were generated become the user's own."""
    for ending in (".h5", ".pt", ".safetensors"):
        made = next(path for path in folder.glob(f"datasets/*/train{ending}"))
        made.rename(folder / f"own{ending}")


def _unfinished(folder: Path) -> None:
    make_project(folder)
    request = make_request(str(folder / "corpus.txt"), "byte", 0.1, "text", None)
    request.partial_folder(folder / "datasets").mkdir(parents=True)


UNFINISHED = (
    *("progress.json", "scan.json", "tokenizer.json", "tokenizer.new", "description.json"),
    *("train_000000.bin", "validation_000000.bin"),
)
SCRIPT = ("launch", "run.toml", "--to", "slurm", "--devices", "1", "site.time=01:00:00", "site.devices=none")
SYNTHETIC = ("data.corpus=synthetic:40:1",)
CHAT = (
    *("train", "run.toml", *ONE, "data.task=sft", "data.corpus=talks.jsonl", "model.seq_len=128"),
    *("data.tokenizer=tokenizer.json", "data.chat_template=chat_template.jinja", "train.global_batch_size=2"),
)
QUESTIONS = (
    *("train", "run.toml", *ONE, "model.kind=bert", "data.task=qa", "model.seq_len=64", "data.stride=16"),
    *("data.corpus=train.json", "data.validation=dev.json", "data.tokenizer=bert:vocab.txt", "data.question_len=16"),
    "train.global_batch_size=2",
)
TALKS = tuple(word for word in CHAT if word != "train.eval_every=0")
SHORT = ("train", "run.toml", "run.name=a", "train.num_steps=2", "optimizer.decay_steps=4", "checkpoint.every=1")
FOLDER = ("export", "runs/a", "folder")
IMPORT = ("import", "folder", "runs/imported", "--config", "run.toml")

TUNED = ("train", "run.toml", *ONE, "run.name=tuned", "model.weights=folder", "lora.rank=2", "lora.dora=true")
DPO = ("train", "run.toml", *ONE, "data.task=dpo", "model.seq_len=64", "train.global_batch_size=2")

STUDY = """
[study]
name = "tiny"
config = "run.toml"
kind = "threads"
repeats = 2
steps = 3
warmup = 1
baseline = { threads = 1 }
[set]
data.folder = "datasets"
[axes]
threads = [1, 2]
"""
THREADS = {"a": 1, "b": 1, "c": 2}
OF_STUDY = ("train", "run.toml", "data.folder=datasets", "train.num_steps=4", "train.eval_every=0", "log.every=1")
COLLECTED = ("study", "study.toml", "--folder", "s", "--collect", "runs/a", "runs/b", "runs/c")
TABLE = "threads,step_s,repeat\n1,0.5,1\n1,0.51,2\n2,0.3,1\n2,0.31,2\n"
TWO = ("parallel.ranks=2", "train.microbatch_size=1", "model.num_layers=1")
REPORTS = (
    ("report", "runs/a", "runs/b", "--markdown"),
    ("report", "runs/b", "--out", "page.html"),
    ("compare", "runs/a", "runs/b"),
    ("compare", "runs/a", "runs/b", "--fail-above", "3%"),
)

SUBJECTS: dict[str, Subject] = {
    "config": Subject(make_project, ["run.toml"], [["config", "run.toml"], ["plan", "run.toml"]]),
    "text": Subject(
        make_project,
        ["corpus.txt"],
        [["train", "run.toml", *ONE], ["train", "run.toml", *ONE, "data.tokenizer=bpe:300"]],
    ),
    "lines": Subject(_lines, ["corpus.jsonl"], [["train", "run.toml", *ONE, "data.corpus=corpus.jsonl"]]),
    "rows": Subject(
        _rows,
        ["rows.*", "saved/*"],
        [["data", name, "--tokenizer", "byte"] for name in ("rows.parquet", "rows.csv", "rows.jsonl.zst", "saved")],
    ),
    "pairs": Subject(
        _pairs, ["pairs.jsonl"], [["train", "run.toml", *ONE, "data.task=sft", "data.corpus=pairs.jsonl"]]
    ),
    "preferences": Subject(
        _preferences,
        ["judged.jsonl"],
        [
            [*DPO, "data.corpus=judged.jsonl"],
            [*DPO, "data.corpus=judged.jsonl", "train.preference=kto", "data.answers_per_sample=2"],
        ],
    ),
    "conversations": Subject(_chat, ["talks.jsonl"], [CHAT]),
    "templates": Subject(_chat, ["chat_template.jinja"], [CHAT]),
    "tokenizers": Subject(
        _chat, ["tokenizer.json"], [CHAT, ["train", "run.toml", *ONE, "data.tokenizer=tokenizer.json"]]
    ),
    "questions": Subject(_questions, ["train.json", "dev.json"], [QUESTIONS]),
    "vocabularies": Subject(_questions, ["vocab.txt"], [QUESTIONS]),
    **{
        kind: Subject(
            make_project,
            [f"own{ending}"],
            [["train", "run.toml", *ONE, *TENSORS, f"data.corpus=own{ending}"]],
            before=[["train", "run.toml", *ONE, *TENSORS, "data.corpus=synthetic:40:1", f"data.format={kind}"]],
            finish=_own,
        )
        for kind, ending in (("hdf5", ".h5"), ("pt", ".pt"), ("safetensors", ".safetensors"))
    },
    "huggingface": Subject(make_project, ["folder/*.json", "folder/*.safetensors"], [IMPORT], before=[SHORT, FOLDER]),
    "adapters of peft": Subject(
        make_project,
        ["adapters/*.json", "adapters/*.safetensors"],
        [[*IMPORT, "model.adapters=adapters"], [*TUNED, "run.name=on", "lora.weights=adapters"]],
        before=[SHORT, FOLDER, TUNED, ("export", "runs/tuned", "adapters", "--adapters")],
    ),
    "prepared": Subject(
        make_project,
        ["datasets/*/*"],
        [["train", "run.toml", *ONE]],
        before=[SHORT],
        checked=True,
    ),
    "checkpoints": Subject(
        make_project,
        ["runs/a/checkpoints/step_*/*"],
        [["evaluate", "runs/a"], ["export", "runs/a", "out"]],
        before=[SHORT],
        checked=True,
    ),
    "run folders": Subject(
        make_project,
        ["runs/a/*.json", "runs/a/*.jsonl", "runs/a/*.csv", "runs/a/*.toml"],
        [
            ["evaluate", "runs/a"],
            ["sample", "runs/a", "--tokens", "5"],
            ["export", "runs/a", "out"],
            [*SHORT, "train.num_steps=4", "--resume"],
        ],
        before=[SHORT],
        checked=True,
    ),
    "reports": Subject(_reported, ["runs/*/*.*"], REPORTS),
    "bodies of requests": Subject(
        _asked,
        ["completions.json", "chat.json", "grammar.json"],
        [
            ["/v1/completions", "completions.json"],
            ["/v1/chat/completions", "chat.json"],
            ["/v1/completions", "grammar.json"],
        ],
        before=[TALKS],
        runs=served_body,
    ),
    "chats": Subject(
        _asked,
        ["typed.txt", "runs/one/*.json", "runs/one/checkpoints/step_*/*"],
        [["chat", "runs/one", "--tokens", "3"]],
        before=[TALKS],
    ),
    "chats with folders": Subject(
        make_project,
        ["folder/*.json", "folder/*.safetensors"],
        [["chat", "folder", "--tokens", "3"]],
        before=[SHORT, FOLDER],
        finish=lambda folder: (folder / "typed.txt").write_text("hi\n"),
    ),
    "logs of requests": Subject(
        _asked,
        ["log.jsonl"],
        [["report", "runs/one", "--requests", "log.jsonl", "--markdown"]],
        before=[TALKS],
    ),
    "study files": Subject(_study, ["study.toml", "run.toml"], [["study", "study.toml", "--list"]]),
    "tables": Subject(
        lambda folder: (_study(folder), (folder / "table.csv").write_text(TABLE)),
        ["table.csv"],
        [["study", "study.toml", "--table", "table.csv"]],
    ),
    "studies": Subject(
        _study,
        ["s/study.json", "s/study.csv", "s/*/*.json", "s/*/*/*.*", "runs/*/*.*"],
        [["study", "s"], ["study", "study.toml", "--folder", "s", "--list"], ["report", "s", "--markdown"], COLLECTED],
        before=[
            *([*OF_STUDY, f"run.name={name}", f"train.num_threads={threads}"] for name, threads in THREADS.items()),
            COLLECTED,
        ],
    ),
    "profiles": Subject(
        make_project,
        ["runs/a/profile/*", "runs/a/plan.json", "runs/a/events.jsonl"],
        [["report", "--profile", "runs/a"], ["report", "runs/a", "--markdown"]],
        before=[["train", "run.toml", "run.name=a", *TWO, "train.num_steps=6", "profile.active=2", "profile.wait=2"]],
    ),
    "strangers: run folders": Subject(
        make_project,
        [
            *("runs/a/*", "runs/a/checkpoints/*", "runs/a/checkpoints/*/*", "runs/a/.writer", "runs/a/logs"),
            *("runs/a/profile", "runs/a/tensorboard", "runs/a/.config.toml.partial", "runs/a/memory.csv"),
        ],
        [
            ["evaluate", "runs/a"],
            ["export", "runs/a", "out"],
            ["report", "runs/a", "--markdown"],
            [*SHORT, "train.num_steps=4", "--resume"],
            [*SHORT, "train.num_steps=4", "--resume"],
        ],
        before=[SHORT],
        planted=True,
    ),
    "strangers: what is served": Subject(
        _asked,
        ["log.jsonl", "token", "runs/one/*", "runs/one/checkpoints/*/*"],
        [
            ["serve", "runs/one", "--port", "0", "--log", "log.jsonl", "--token-file", "token"],
            ["report", "runs/one", "--requests", "log.jsonl", "--out", "page.html"],
        ],
        before=[TALKS],
        planted=True,
        runs=briefly,
    ),
    "strangers: data": Subject(
        make_project,
        ["datasets/*", "datasets/*/*", "corpus.txt", "run.toml", "job.sh"],
        [
            ["train", "run.toml", *ONE],
            ["data", "corpus.txt", "--folder", "datasets"],
            [*SCRIPT, "--out", "job.sh"],
        ],
        before=[SHORT],
        planted=True,
    ),
    "strangers: unfinished data": Subject(
        _unfinished,
        ["datasets/.partial-*", *(f"datasets/.partial-*/{name}" for name in UNFINISHED)],
        [["train", "run.toml", *ONE]],
        planted=True,
    ),
    "strangers: studies": Subject(
        _study,
        ["s/*", "s/*/*", "s/*/*/*", "runs/*/*", "s/.lock", "s/study.csv", "page.html"],
        [
            ["study", "s"],
            ["study", "study.toml", "--folder", "s", "--list"],
            ["report", "s", "--out", "page.html"],
            COLLECTED,
        ],
        before=[
            *([*OF_STUDY, f"run.name={name}", f"train.num_threads={threads}"] for name, threads in THREADS.items()),
            COLLECTED,
        ],
        planted=True,
    ),
    "strangers: tensors and folders of weights": Subject(
        make_project,
        ["own.h5", "own.pt", "own.safetensors", "folder/*", "corpus.txt"],
        [
            *(
                ["train", "run.toml", *ONE, *TENSORS, f"data.corpus=own{ending}"]
                for ending in (".h5", ".pt", ".safetensors")
            ),
            IMPORT,
        ],
        before=[
            *(
                [
                    "train",
                    "run.toml",
                    *ONE,
                    *TENSORS,
                    "data.corpus=synthetic:40:1",
                    f"data.format={kind}",
                    f"run.name={kind}",
                ]
                for kind in ("hdf5", "pt", "safetensors")
            ),
            [*SHORT, "run.name=a"],
            FOLDER,
        ],
        finish=_all_own,
        planted=True,
    ),
}
