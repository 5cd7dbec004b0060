"""In: conversations with tools, templates in the shapes of those that models have. Out: the texts and tokens of
transformers, losses of the assistant's words only, and what is named or refused.
Does not train."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from asked import responses
from chats import CHATML, TALK, ZEPHYR, tokenizer_text, write_model_folder
from test_data_chat import chat, ours, said, template, theirs
from tool_chats import ANSWER, ASK, CALLS, HERMES, LINES, QWEN, RESULT, SHAPES, TAGGED, WEATHER
from transformers import AutoTokenizer

from codescent.base.errors import UserError
from codescent.base.sealed import write_sealed
from codescent.data.tokenizers.tokenizer import load
from codescent.tasks.conversations.chat_files import ChatFiles, read_chat_files
from codescent.tasks.conversations.chat_template import ChatTemplate
from codescent.tasks.conversations.conversations import Conversation
from codescent.tasks.conversations.dataset import ResponseDataset
from codescent.tasks.conversations.kept import exported
from codescent.tasks.conversations.lost import lost_parts

pytestmark = pytest.mark.timeout(120)


@cache
def referee(shape: str, line: str, ask: bool = False, tokenize: bool = False) -> Any:
    """The text or tokens of transformers; None: it raises an error."""
    try:
        return theirs().apply_chat_template(
            LINES[line]["messages"],
            tools=LINES[line].get("tools"),
            chat_template=SHAPES[shape],
            tokenize=tokenize,
            add_generation_prompt=ask,
            return_dict=False,
        )
    except Exception:  # jinja's, or those of the template
        return None


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_texts_and_tokens_are_those_of_transformers(shape: str, line: str) -> None:
    messages, tools = LINES[line]["messages"], LINES[line].get("tools")
    for ask in (False, True):
        expected = referee(shape, line, ask)
        if expected is None:
            with pytest.raises(UserError):
                template(SHAPES[shape]).render(messages, tools, ask=ask)
            return
        assert template(SHAPES[shape]).render(messages, tools, ask=ask) == expected
    pieces, wanted = chat(SHAPES[shape]).encode(messages, tools)
    assert pieces.ids.tolist() == referee(shape, line, tokenize=True)
    found = [ours().decode(pieces.ids[begin:end].tolist()) for begin, end in wanted]
    assert len(found) == sum(message["role"] == "assistant" for message in messages)
    for text, message in zip(found, (it for it in messages if it["role"] == "assistant"), strict=True):
        assert ("wetter" in text) == bool(message.get("tool_calls"))
        assert "18 °C" in text or "No." in text or message.get("tool_calls")
        assert "tool_response" not in text
        assert "RESULTS" not in text


def test_every_shape_writes_most_lines() -> None:
    """So that the table of the test above is no table of refusals."""
    for shape in SHAPES:
        assert sum(referee(shape, line) is not None for line in LINES) >= len(LINES) - 5, shape


@pytest.mark.parametrize("shape", ["qwen", "tagged"])
def test_a_message_of_weight_0_has_no_losses(shape: str) -> None:
    messages = [*TALK[:1], {**TALK[1], "weight": 0}, *TALK[2:3], {**TALK[3], "weight": 1}]
    assert [text.strip() for text in said(SHAPES[shape], messages)] == ["It is.<|im_end|>"]
    plain = [{key: value for key, value in it.items() if key != "weight"} for it in messages]
    assert template(SHAPES[shape]).render(messages) == template(SHAPES[shape]).render(plain)


def test_tags_that_are_not_one_for_each_message_are_refused_with_weight_0() -> None:
    text = TAGGED.replace("{%- generation %}", "{%- generation %}{{ 'x' }}{%- endgeneration %}{%- generation %}", 1)
    messages = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    with pytest.raises(UserError, match=r"4 texts in .* for 2 messages of the assistant"):
        said(text, messages)


def lost(text: str, *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> list[str]:
    return lost_parts(Conversation("a:1", messages, tools), template(text))


@pytest.mark.parametrize(
    ("text", "messages", "tools", "expected"),
    [
        (QWEN, (ASK, CALLS, {"role": "tool", "content": "18"}, ANSWER), [WEATHER], []),
        (QWEN, (ASK, CALLS, RESULT, ANSWER), None, ['"name" of the role "tool"', '"tool_call_id" of the role "tool"']),
        (CHATML, (ASK, ANSWER), [WEATHER], ['"tools"']),
        (CHATML, (ASK, {**ANSWER, "tool_calls": CALLS["tool_calls"]}), None, ['"tool_calls" of the role "assistant"']),
        (SHAPES["llama"], (ASK, {**CALLS, "content": "I look."}), None, ['"content" of the role "assistant"']),
        (
            SHAPES["llama"],
            ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "x": 1}]}, ANSWER),
            None,
            ['"content" of the role "user"'],
        ),
        (
            QWEN,
            (ASK, {"role": "developer", "content": "Be brief."}, {**ANSWER, "weight": 1}, {**ASK, "weight": 1}),
            None,
            ['"content" of the role "developer"', '"weight" of the role "user"'],
        ),
        (CHATML, (ASK, {**ANSWER, "name": "Bo", "content": " 18 °C"}), [], ['"name" of the role "assistant"']),
        (ZEPHYR, (ASK, {"role": "tool", "content": "18 °C"}, ANSWER), None, ['"content" of the role "tool"']),
        (CHATML, ({**ASK, "name": None, "tool_calls": [], "content": " "}, ANSWER), None, []),
        (
            QWEN.replace("if message.content", "if message.content and loop.last"),
            (ASK, ANSWER, ASK, ANSWER),
            None,
            ['"content" of the role "assistant"'],
        ),
        (
            SHAPES["llama"],
            ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "b", "text": 1}]}, ANSWER),
            None,
            ['"content" of the role "user"'],
        ),
    ],
)
def test_what_a_template_does_not_write(
    text: str, messages: tuple[dict[str, Any], ...], tools: list[dict[str, Any]] | None, expected: list[str]
) -> None:
    found = lost(text, *messages, tools=tools)
    assert [it for it in found if '"id"' not in it] == expected


def test_a_template_for_tools_beside_the_default_one(tmp_path: Path) -> None:
    """In tokenizer_config.json and in files, as transformers takes and saves them; an export has both."""
    folder = write_model_folder(tmp_path / "model", CHATML)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    line = LINES["words beside a call"]
    for number in range(2):
        other = AutoTokenizer.from_pretrained(folder)
        files = read_chat_files(folder)
        assert ChatFiles.from_json(files.name, json.loads(json.dumps(files.as_json()))) == files
        made = ChatTemplate(files)
        assert made.render(TALK) == other.apply_chat_template(TALK, tokenize=False)
        text = other.apply_chat_template(line["messages"], tools=line["tools"], tokenize=False)
        assert made.render(line["messages"], line["tools"]) == text
        assert "</tools>" in text
        if not number:
            texts = exported(files, {"tokenizer_config.json": json.dumps(config)})
            folder = tmp_path / "exported"
            (folder / "additional_chat_templates").mkdir(parents=True)
            for name, content in {**texts, "tokenizer.json": tokenizer_text()}.items():
                (folder / name).write_text(content)


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_file_says_once_what_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model_folder(tmp_path / "model", QWEN)
    full = {**LINES["called"], "größe": 7, "tools": json.dumps([WEATHER]), "meta": {}}  # tables hold tools as text
    corpus = write(tmp_path / "a.jsonl", *[full] * 3, {"messages": TALK, "score": 1})
    request = responses(corpus, str(model / "tokenizer.json"), chat_template=model)
    dataset = ResponseDataset.open(request.prepare(tmp_path / "datasets"))
    err = capsys.readouterr().err
    expected = (
        '"größe" (3 lines), "name" of the role "tool" (3 lines), "tool_call_id" of the role "tool" (3 lines), "score" '
        "(1 line)"
    )
    assert err.count("no effect") == 1
    assert all(part in err for part in expected.split(", "))
    assert dataset.summary()[-1].startswith("parts of lines that have no effect: ")
    tokens = dataset.arrays["train_tokens"][: int(dataset.arrays["train_begins"][:][1])].tolist()
    assert load(model / "tokenizer.json").decode(tokens) == referee("qwen", "called")


def test_responses_of_an_earlier_format_are_read_and_are_not_taken_for_the_same_file(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", QWEN)
    corpus = write(tmp_path / "a.jsonl", *[LINES["called"]] * 4)
    request = responses(corpus, str(model / "tokenizer.json"), chat_template=model)
    folder = request.prepare(tmp_path / "datasets")
    description = json.loads((folder / "description.json").read_text())
    description["request"]["format"] = description["format"] = "codescent responses 2"
    del description["unused"]
    old = folder.rename(tmp_path / "datasets" / "old")
    write_sealed(old / "description.json", description)
    assert ResponseDataset.is_at(str(old))
    assert len(ResponseDataset.open(old).summary()) == 3
    assert responses(str(old), "byte").locate(tmp_path) == old
    assert request.prepare(tmp_path / "datasets") == folder


PAIR = {"prompt": "a", "response": "b"}


@pytest.mark.parametrize(
    ("lines", "keys", "expected"),
    [
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4,
            {},
            'preferences ("chosen" and "rejected"): data.task = "dpo"',
        ),
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4,
            {"response_key": "chosen"},
            'preferences ("chosen" and "rejected"): data.task = "dpo"',
        ),
        ([{"chosen": [ASK, ANSWER], "rejected": [ASK]}] * 4, {}, 'preferences ("chosen" and "rejected")'),
        ([{"messages": [ASK], "chosen": [ANSWER], "rejected": [ASK]}] * 4, {}, 'preferences ("chosen" and "rejected")'),
        ([{"prompt": [ASK], "completion": [ANSWER], "label": True}] * 4, {}, 'preferences ("completion" and "label")'),
        ([{**PAIR, "label": False}] * 4, {}, 'preferences ("response" and "label")'),
        (
            [{"input": {}, "preferred_output": [], "non_preferred_output": []}] * 4,
            {},
            'preferences ("preferred_output" and "non_preferred_output")',
        ),
        (
            [{"instruction": "Add.", "input": "1 2", "output": "3"}] * 3
            + [{"instruction": "Go.", "input": "", "output": "3"}],
            {"prompt_key": "instruction", "response_key": "output"},
            'the form of Alpaca: "instruction", "input" and "output"; a prompt is read from one key',
        ),
        ([{"instruction": "Add.", "context": "1 2", "response": "3"}] * 3, {}, "the form of Dolly"),
        ([{"conversations": [{"from": "human", "value": "a"}]}] * 3, {}, "the form of ShareGPT"),
        ([{**PAIR, "input": "x"}] * 2, {"template": "{prompt} {input} {response}"}, '"input" is a key of 2 lines'),
    ],
)
def test_lines_that_would_be_learned_in_part_are_refused(
    tmp_path: Path, lines: list[object], keys: dict[str, object], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        responses(write(tmp_path / "a.jsonl", *lines), "byte", **keys).prepare(tmp_path / "datasets")
    (problem,) = caught.value.problems
    assert expected in problem
    assert "set data.prompt_key" not in problem
    assert not list((tmp_path / "datasets").glob("*"))


def test_alpaca_without_inputs_is_pairs_and_a_name_that_no_line_has_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"instruction": f"Say {n}", "input": "", "output": "b"} for n in range(4)]
    keys = {"prompt_key": "instruction", "response_key": "output", "template": "{prompt} {other} {response}"}
    responses(write(tmp_path / "a.jsonl", *lines), "byte", **keys).prepare(tmp_path / "datasets")
    err = capsys.readouterr().err
    assert "data.template: {other} is written as it stands" in err
    assert "no effect" not in err


def test_what_the_template_refuses_is_said_once_with_its_count(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", SHAPES["llama"])
    two = LINES["two calls"]
    silent = {"messages": [ASK, ANSWER, *two["messages"]], "tools": two["tools"]}
    corpus = write(tmp_path / "a.jsonl", *[two] * 30, silent, {"messages": [ASK, ANSWER]})
    with pytest.raises(UserError) as caught:
        responses(corpus, str(model / "tokenizer.json"), chat_template=model).prepare(tmp_path / "datasets")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{corpus}:1: ")
    assert problem.endswith("one call at once (and 30 more lines)")


def test_a_call_that_the_template_does_not_write_is_refused(tmp_path: Path) -> None:
    text = CHATML.replace("message['content']", "(message.content or '')")
    with pytest.raises(UserError, match=r'message 2: it has "tool_calls" and no words, and a\.jinja does not write'):
        lost(text, ASK, CALLS)


def test_a_list_of_parts_that_the_template_does_not_take_is_refused() -> None:
    with pytest.raises(UserError, match=r"a\.jinja: it does not take a content that is a list of parts \(a\.jin"):
        lost(CHATML, *LINES["parts"]["messages"])


def test_a_preparation_says_its_begin_and_end_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": "a" * 400_000, "response": "b"}] * 3
    responses(write(tmp_path / "a.jsonl", *lines), "byte").prepare(tmp_path / "datasets", progress=True)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "tokenising a.jsonl: 1 MB"
    assert said[-1].startswith("tokenising a.jsonl: done in ")
