"""In: conversations as JSON lines, a chat template. Out: their samples, runs on two ranks, and what is refused.
Does not test how templates are found and rendered (test_data_chat.py does)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from asked import responses
from chats import CHATML, TALK, write_model_folder
from forker import Forker
from hypothesis import given
from hypothesis import strategies as st
from runs import assert_same, losses, make_project, refused, train
from transformers import AutoTokenizer

from codescent.base.errors import UserError
from codescent.config.sections import Data
from codescent.data.tokenizers.tokenizer import load
from codescent.tasks.conversations.chat_files import ChatFiles, read_chat_files
from codescent.tasks.conversations.chat_template import ChatTemplate
from codescent.tasks.conversations.conversations import read_conversations
from codescent.tasks.conversations.dataset import ResponseDataset, ResponseSource
from codescent.verbs.cli import run as cli
from codescent.verbs.sample import sample_run

WORDS = ("red", "green", "blue", "black", "white", "pink")
CHAT = (
    "data.task=sft",
    "data.corpus=talks.jsonl",
    "data.chat_template=model",
    "data.tokenizer=model/tokenizer.json",
    "model.seq_len=80",
    "train.num_steps=6",
    "train.eval_every=6",
)
pytestmark = pytest.mark.timeout(120)


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def talk(word: str, turns: int) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for turn in range(turns)
        for role, content in (("user", word), ("assistant", word[::-1] + "!" * turn))
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    make_project(folder)
    write_model_folder(folder / "model", CHATML)
    write(folder / "talks.jsonl", *({"messages": talk(word, 1 + n % 2)} for n, word in enumerate(WORDS * 8)))
    return folder


def test_samples_want_every_turn_as_far_as_there_is_room(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", CHATML)
    corpus = write(tmp_path / "a.jsonl", {"talk": TALK}, {"talk": TALK[:2]}, {"talk": TALK, "prompt": "ignored"})
    request = responses(
        corpus, str(model / "tokenizer.json"), messages_key="talk", validation_fraction=0.3, chat_template=model
    )
    dataset = ResponseDataset.open(request.prepare(tmp_path / "datasets"))
    assert request.prepare(tmp_path / "datasets") == dataset.path
    tokenizer = load(model / "tokenizer.json")

    def wanted(seq_len: int) -> list[str]:
        source = dataset.source("train", seq_len, seq_len)
        numbers = np.arange(source.num_samples)
        samples = source.read(numbers)
        found = samples.targets >= 0
        assert source.losses(numbers).tolist() == found.sum(axis=1).tolist()
        assert (samples.targets[:, :-1][found[:, :-1]] == samples.inputs[:, 1:][found[:, :-1]]).all()
        return [tokenizer.decode(row[row >= 0].tolist()) for row in samples.targets]

    first, second = (f"{message['content']}<|im_end|>" for message in TALK if message["role"] == "assistant")
    assert wanted(200) == [first + second, first]
    cut = wanted(60)
    assert cut[1] == first
    assert (first + second).startswith(cut[0])
    assert wanted(12) == []  # the first question fills the sample
    assert dataset.source("train", 12, 12).left_out == 2


@given(
    examples=st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3), min_size=1),
    seq_len=st.integers(1, 20),
)
def test_losses_are_the_targets_of_every_sample(examples: list[list[tuple[int, int]]], seq_len: int) -> None:
    """Each example is pieces (tokens before, tokens wanted)."""
    begins, wanted, at = [0], [], 0
    for pieces in examples:
        for before, count in pieces:
            wanted.append((at + before, at + before + count))
            at += before + count
        begins.append(at)
    source = ResponseSource("train", np.arange(at), np.array(begins), np.array(wanted), seq_len)
    numbers = np.arange(source.num_samples)
    samples = source.read(numbers)
    counts = (samples.targets >= 0).sum(axis=1)
    assert source.losses(numbers).tolist() == counts.tolist()
    assert (counts > 0).all()
    assert source.num_samples == sum(pieces[0][0] <= seq_len for pieces in examples)
    assert source.num_samples + source.left_out == len(examples)


def test_prompts_and_responses_become_two_messages(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", CHATML)
    pairs = [{"prompt": f"say {n}", "response": f"{n}"} for n in range(4)]
    talks = [
        {"messages": [{"role": "user", "content": it["prompt"]}, {"role": "assistant", "content": it["response"]}]}
        for it in pairs
    ]
    folders = [
        responses(
            write(tmp_path / f"{name}.jsonl", *lines), str(model / "tokenizer.json"), chat_template=model
        ).prepare(tmp_path / "datasets")
        for name, lines in (("pairs", pairs), ("talks", talks))
    ]
    files = sorted(path.name for path in folders[0].glob("*.npy"))
    assert len(files) == 6
    for name in files:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_two_ranks_walk_the_trajectory_of_one(project: Path, forker: Forker) -> None:
    words = (*CHAT, "train.precision=fp64")
    alone = forker.train(project, "alone", 1, *words)
    assert losses(alone)[-1] < losses(alone)[0]
    for name in ("dp_shard", "tp"):
        assert_same(forker.train(project, name, 2, *words, f"parallel.{name}=2"), alone, 1e-9)


def test_the_command_line_tunes_and_scores(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    run = train(project, "scored", *CHAT, "parallel.ranks=2")
    assert cli(["evaluate", "runs/scored"]) == 0
    told = capsys.readouterr().out
    assert float(re.search(r"loss ([\d.]+)", told)[1]) == pytest.approx(run.read_metrics()[-1]["val_loss"], abs=1e-3)
    assert "tokens of responses" in told
    resumed = ["train", "run.toml", "run.name=scored", *CHAT, "parallel.ranks=2", "data.chat_template=elsewhere"]
    assert cli([*resumed, "--resume"]) == 2
    assert re.search(r"no such folder or file: data.chat_template = \S*/elsewhere", capsys.readouterr().err)


def test_a_model_that_has_learnt_to_chat_answers_and_ends_its_turn(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    words = [*CHAT, "train.num_steps=120", "model.hidden_dim=32", "train.eval_every=0"]
    forker.train(project, "learned", 1, *words)
    assert cli(["sample", "runs/learned", "--prompt", "blue", "--tokens", "40", "--temperature", "0"]) == 0
    told = capsys.readouterr().out
    assert told == "<|im_start|>user\nblue<|im_end|>\n<|im_start|>assistant\neulb\n"
    # The text at the end of a run answers a validation example; bare `sample` answers a greeting.
    (text,) = sample_run(Path("runs/learned"), tokens=40, temperature=0, device="cpu", example=True)
    (word,) = re.findall(r"^<\|im_start\|>user\n(\w+)<\|im_end\|>\n<\|im_start\|>assistant\n", text)
    assert word in WORDS
    assert text.endswith(f"assistant\n{word[::-1]}")
    assert cli(["sample", "runs/learned", "--tokens", "1"]) == 0
    assert "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" in capsys.readouterr().out
    # The run has its template: it may be moved, and what it was read from may be gone.
    expected = ChatTemplate(read_chat_files(project / "model")).render(TALK)
    (project / "runs" / "learned").rename(project / "moved")
    (project / "model").rename(project / "away")
    try:
        assert cli(["sample", "moved", "--prompt", "blue", "--tokens", "40", "--temperature", "0"]) == 0
        assert capsys.readouterr().out == told
        assert cli(["export", "moved", "out"]) == 0
    finally:
        (project / "away").rename(project / "model")
    exported = AutoTokenizer.from_pretrained(project / "out")
    assert exported.apply_chat_template(TALK, tokenize=False) == expected
    # An exported model ends where the assistant's turn does.
    assert exported.eos_token == "<|im_end|>"
    config = json.loads((project / "out" / "config.json").read_text())
    assert config["eos_token_id"] == exported.convert_tokens_to_ids("<|im_end|>")
    capsys.readouterr()
    assert cli(["sample", "moved", "--prompt", "\udcff", "--prompt", "red"]) == 2
    assert r"--prompt '\udcff': holds half of a surrogate pair" in capsys.readouterr().err


def test_a_run_goes_on_by_the_template_it_began_with(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    write_model_folder(Path("other"), CHATML + "{{ strftime_now('') }}")
    words = [*CHAT, "data.chat_template=other", "data.tokenizer=other/tokenizer.json", "train.eval_every=0"]
    words.append("optimizer.decay_steps=9")
    run = forker.train(project, "kept", 1, *words, "train.num_steps=1")
    kept = json.loads((run.path / "chat.json").read_text())
    assert kept == ChatTemplate(read_chat_files(Path("other"))).files.as_json()
    assert kept["day"]
    (run.path / "chat.json").write_text(json.dumps({**kept, "day": "2024-02-29"}))  # as if it had begun then
    again = ["train", "run.toml", "run.name=kept", *words, "train.num_steps=2", "--resume"]
    assert cli(again) == 0
    assert json.loads((run.path / "chat.json").read_text())["day"] == "2024-02-29"
    write_model_folder(Path("other"), CHATML)
    assert cli(again) == 2
    assert "not the template that the run started with, which is in runs/kept/chat.json" in capsys.readouterr().err
    assert cli(["evaluate", "runs/kept"]) == 0
    (run.path / "chat.json").unlink()  # as earlier versions left it
    assert cli(["sample", "runs/kept", "--prompt", "a"]) == 2
    assert "chat.json: missing: an earlier version, which did not save the chat template" in capsys.readouterr().err


def test_a_prepared_folder_has_its_template(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    request = responses("talks.jsonl", "model/tokenizer.json", chat_template=Path("model"))
    folder = request.prepare(Path("datasets"))
    words = ["model.seq_len=80", "train.num_steps=1", "train.eval_every=0", f"data.corpus={folder}"]
    run = forker.train(project, "prepared", 1, *words)
    assert ChatFiles.from_json("x", json.loads((run.path / "chat.json").read_text())).is_same(
        read_chat_files(Path("model"))
    )
    assert cli(["sample", "runs/prepared", "--prompt", "blue", "--tokens", "1"]) == 0
    assert "<|im_start|>user\nblue<|im_end|>" in capsys.readouterr().out
    Path("else.jinja").write_text(CHATML + " ")
    others = ("data.chat_template=else.jinja", "data.prompt_key=question", "data.validation_fraction=0.2")
    assert cli(["train", "run.toml", "run.name=never", *words, *others]) == 2
    told = capsys.readouterr().err
    assert f"{folder} was prepared with another one; leave it out" in told
    assert f"data.prompt_key = 'question': {folder} was prepared with 'prompt'; leave it out" in told
    assert f"data.validation_fraction = 0.2: {folder} was prepared with 0.1; leave it out" in told
    assert cli(["train", "run.toml", "run.name=same", *words, "data.chat_template=model"]) == 0


def test_of_an_imported_run_the_template_is_kept(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    forker.train(project, "plain", 1, *CHAT, "train.num_steps=1", "train.eval_every=0")
    assert cli(["export", "runs/plain", "theirs"]) == 0
    assert cli(["import", "theirs", "runs/ours", "data.task=sft", "data.chat_template=theirs"]) == 0
    assert json.loads(Path("runs/ours/chat.json").read_text())["template"] == CHATML
    assert cli(["sample", "runs/ours", "--prompt", "blue", "--tokens", "1"]) == 0


def test_a_pair_beside_messages_is_taken_where_there_is_no_template(tmp_path: Path) -> None:
    line = {"messages": [ASKED, SAID], "prompt": "a", "response": "b"}
    corpus = Path(write(tmp_path / "a.jsonl", line))
    for with_template, expected in ((False, ["a", "b"]), (True, ["no?", "yes"])):
        (found,) = read_conversations(corpus, Data.model_construct(), with_template=with_template)
        assert [message["content"] for message in found.messages] == expected


def test_that_nothing_ends_a_turn_is_said_when_data_is_prepared(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    template = project / "endless.jinja"
    template.write_text(text + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    tokenizer = str(project / "model" / "tokenizer.json")
    request = responses(str(project / "talks.jsonl"), tokenizer, chat_template=template)
    for told in (1, 0):
        request.prepare(project / "datasets", progress=True)
        assert capsys.readouterr().err.count("no control token ends the assistant's turn") == told


SAID = {"role": "assistant", "content": "yes"}
ASKED = {"role": "user", "content": "no?"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"messages": {}}, '"messages": a list of messages is needed, found dict'),
        ({"messages": None}, '"messages": a list of messages is needed, found NoneType'),
        ({"messages": []}, '"messages": the list is empty'),
        ({"messages": ["hello", SAID]}, "message 1: an object with a role and a content is needed, found str"),
        ({"messages": [{"content": "a"}, SAID]}, "message 1: no role: it must be one of system, developer, user"),
        ({"messages": [{**ASKED, "role": "human"}, SAID]}, 'message 1: the role "human": it must be one of system, de'),
        ({"messages": [{**ASKED, "role": ["user"]}, SAID]}, 'message 1: the role ["user"]: it must be one of'),
        ({"messages": [ASKED, {"role": "assistant"}]}, 'message 2: the "content" of the role "assistant" is missing'),
        (
            {"messages": [{**ASKED, "content": [1]}, SAID]},
            'message 1: part 1 of the "content" of the role "user": an object with a type is needed, found int',
        ),
        (
            {"messages": [{**ASKED, "content": [{"type": "image_url"}]}, SAID]},
            'message 1: part 1 of the "content" of the role "user": the type is "image_url"; models read text only',
        ),
        (
            {"messages": [{**ASKED, "content": [{"type": "text"}]}, SAID]},
            'message 1: part 1 of the "content" of the role "user": it has no "text"',
        ),
        ({"messages": [{**ASKED, "content": 1}, SAID]}, 'message 1: the "content" of the role "user" is int, not text'),
        ({"messages": [ASKED, {**SAID, "content": None}]}, 'message 2: the "content" of the role "assistant" is NoneT'),
        (
            {"messages": [ASKED, {**SAID, "content": [], "tool_calls": []}]},
            "message 2: the content of the assistant is",
        ),
        (
            {"messages": [ASKED, {**SAID, "tool_calls": "f()"}]},
            'message 2: its "tool_calls": a list of objects is need',
        ),
        ({"messages": [ASKED, {**SAID, "weight": 0.5}]}, "message 2: its weight is 0.5: it must be 0 (no losses) or 1"),
        ({"messages": [ASKED, {**SAID, "weight": 0}]}, 'every message of the role "assistant" has weight 0: there is'),
        ({"messages": [ASKED, SAID], "tools": {}}, '"tools": a list of objects, one for each tool, is needed, found d'),
        (
            {"messages": [ASKED, SAID], "tools": "[1]"},
            '"tools": a list of objects, one for each tool, is needed, found',
        ),
        (
            {"messages": [ASKED, SAID], "tools": "[{"},
            '"tools": a list of objects, one for each tool, is needed, found s',
        ),
        ({"messages": [ASKED, SAID], "tools": [{"a": "\ud800"}]}, '"tools" holds half of a surrogate pair'),
        ({"messages": [{**ASKED, "content": "\ud800"}, SAID]}, 'message 1: its "content" holds half of a surrogate'),
        ({"messages": [{**ASKED, "a": [{"\udc00": 1}]}, SAID]}, 'message 1: its "a" holds half of a surrogate'),
        ({"messages": [ASKED, {**SAID, "content": ""}]}, "message 2: the content of the assistant is empty"),
        ({"messages": [ASKED]}, 'no message of the role "assistant": there is nothing to learn from'),
        ({"prompt": "a", "response": "b"}, "a prompt and a response, but the first line ("),
    ],
)
def test_lines_that_are_no_conversations(tmp_path: Path, line: object, expected: str) -> None:
    corpus = Path(write(tmp_path / "a.jsonl", {"messages": [ASKED, SAID]}, line, [1]))
    with pytest.raises(UserError) as caught:
        read_conversations(corpus, Data.model_construct(), with_template=True)
    assert caught.value.problems[0].startswith(f"{corpus}:2: {expected}")
    assert caught.value.problems[1] == f"{corpus}:3: a JSON object is needed, found list"


def test_messages_after_a_prompt_are_refused_and_each_problem_is_told_once(tmp_path: Path) -> None:
    pair = {"prompt": "a", "response": "b"}
    wrong = [{"messages": [{**ASKED, "role": f"r{n}"}, SAID]} for n in range(25)]
    corpus = Path(write(tmp_path / "a.jsonl", pair, *[{"messages": [ASKED, SAID]}] * 30))
    with pytest.raises(UserError) as caught:
        read_conversations(corpus, Data.model_construct(), with_template=True)
    assert caught.value.problems == (
        f"{corpus}:2: messages, but the first line ({corpus}:1) has a prompt and a response: all lines must have one "
        "kind (and 29 more lines)",
    )
    write(corpus, *wrong)
    with pytest.raises(UserError) as caught:
        read_conversations(corpus, Data.model_construct(), with_template=True)
    assert caught.value.problems[19].startswith(f"{corpus}:20: message 1: the role ")
    assert caught.value.problems[20:] == (f"{corpus}: 5 more problems",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("data.chat_template=auto",), 'talks.jsonl:1: "messages": data.chat_template is needed to write messages'),
        (("data.task=lm",), 'data.chat_template: only data.task = "sft" uses a chat template'),
        (("data.task=auto", "data.chat_template=auto"), 'conversations are read by data.task = "sft"'),
        (("data.template=Say {prompt}: {response}",), "data.template, data.chat_template: both define the text"),
        (("data.chat_template=absent",), "/absent: cannot be read"),
        (("data.chat_template=strict.jinja",), "/strict.jinja: no pink"),
        (("data.messages_key=talk",), 'talks.jsonl:1: no text under "prompt" (it has: messages)'),
        (("data.tokenizer=bpe:300",), 'data.tokenizer = "bpe:300"'),
        (("data.corpus=old",), f"old: prepared, but not in the format '{ResponseDataset.format}'"),
    ],
)
def test_what_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    strict = "{% if messages and messages[0].content == 'red' %}{{ raise_exception('no pink') }}{% endif %}" + CHATML
    (project / "strict.jinja").write_text(strict)
    (project / "old").mkdir(exist_ok=True)
    write(project / "old" / "description.json", {"format": "codescent responses 1"})
    assert expected in refused(project, capsys, *CHAT, *words)
