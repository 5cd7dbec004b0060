"""In: chat templates, conversations, a tokenizer. Out: texts and tokens of transformers, and what of them is wanted.
Does not train (test_sft_chat.py does)."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as library
from chats import CHATML, ENDS, MISTRAL, TALK, TEMPLATES, ZEPHYR, tokenizer_text, write_model_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from codescent.base.errors import UserError
from codescent.data.tokenizers.bpe import LibraryTokenizer
from codescent.data.tokenizers.tokenizer import ByteTokenizer
from codescent.tasks.conversations import chat_renderer
from codescent.tasks.conversations.chat_files import ChatFiles, read_chat_files
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief."}
pytestmark = pytest.mark.timeout(60)


@cache
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=library.Tokenizer.from_str(tokenizer_text()), **SPECIAL)


@cache
def ours() -> LibraryTokenizer:
    return LibraryTokenizer.from_json(tokenizer_text(), "here")


@cache
def template(text: str) -> ChatTemplate:
    return ChatTemplate(ChatFiles("a.jinja", text, SPECIAL))


@cache
def chat(text: str) -> ChatTokens:
    return ChatTokens(template(text), ours())


def said(text: str, messages: list[dict[str, Any]]) -> list[str]:
    """What is wanted of a conversation, turn by turn."""
    pieces, wanted = chat(text).encode(messages)
    return [ours().decode(pieces.ids[begin:end].tolist()) for begin, end in wanted]


def conversations(system: bool) -> st.SearchStrategy[list[dict[str, str]]]:
    text = st.text(st.sampled_from("ab é😀\n .<|you"), max_size=12)
    said = text.filter(lambda it: bool(it.strip()))
    turns = st.lists(st.tuples(text, said), min_size=1, max_size=4)
    opening = st.lists(st.just(SYSTEM), max_size=1 if system else 0)
    return st.tuples(opening, turns).map(
        lambda drawn: [
            *drawn[0],
            *(
                {"role": role, "content": content}
                for turn in drawn[1]
                for role, content in zip(("user", "assistant"), turn)
            ),
        ]
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_tokens_are_those_of_transformers(name: str) -> None:
    text = TEMPLATES[name]
    for messages in (TALK, TALK[:1], TALK[:3], [] if name == "mistral" else [SYSTEM, *TALK]):
        if not messages:
            continue
        for ask in (False, True):
            expected = theirs().apply_chat_template(
                messages, chat_template=text, tokenize=False, add_generation_prompt=ask
            )
            assert template(text).render(messages, ask=ask) == expected
        if len(messages) > 1:
            expected = theirs().apply_chat_template(messages, chat_template=text, return_dict=False)
            assert chat(text).encode(messages)[0].ids.tolist() == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_turn_of_the_assistant_and_its_end_are_wanted(name: str) -> None:
    end = ENDS[name]
    expected = [f"{TALK[1]['content']}{end}", f"{TALK[3]['content']}{end}"]
    assert said(TEMPLATES[name], TALK) == expected
    assert said(TEMPLATES[name], TALK[:3]) == expected[:1]
    if name != "mistral":
        assert said(TEMPLATES[name], [SYSTEM, *TALK, TALK[3]]) == [*expected, expected[1]]


@pytest.mark.timeout(1200)  # thousands of examples with the deep profile
@pytest.mark.parametrize("name", TEMPLATES)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_conversations(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(system=name != "mistral"))
    text = TEMPLATES[name]
    assert chat(text).encode(messages)[0].ids.tolist() == theirs().apply_chat_template(
        messages, chat_template=text, return_dict=False
    )
    contents = [it["content"] for it in messages if it["role"] == "assistant"]
    if name in ("llama3", "dated"):
        contents = [content.strip() for content in contents]
    for found, content in zip(said(text, messages), contents, strict=True):
        # A token of line ends may have begun in the header.
        assert found.removesuffix(ENDS[name]).lstrip("\n") == content.lstrip("\n")
        assert found.endswith(ENDS[name])


def test_tags_give_the_mask_of_transformers() -> None:
    found = theirs().apply_chat_template(
        TALK, chat_template=TEMPLATES["dated"], return_dict=True, return_assistant_tokens_mask=True
    )
    pieces, wanted = chat(TEMPLATES["dated"]).encode(TALK)
    mask = np.zeros(len(pieces.ids), np.int64)
    for begin, end in wanted:
        mask[begin:end] = 1
    assert mask.tolist() == found["assistant_masks"]


def test_the_begin_of_a_text_is_not_doubled_and_plain_text_keeps_its_rule() -> None:
    ids = chat(TEMPLATES["llama3"]).encode(TALK)[0].ids.tolist()
    assert ids.count(0) == 1
    assert ids[:2] == [0, theirs().convert_tokens_to_ids("<|start_header_id|>")]
    assert 0 not in ours().encode("<s>").tolist()  # elsewhere text that spells a control token is ordinary


def test_a_control_token_that_takes_white_space_along_is_not_wanted() -> None:
    fields = json.loads(tokenizer_text())
    for token in fields["added_tokens"]:
        token["rstrip"] = True
    tokenizer = LibraryTokenizer.from_json(json.dumps(fields), "here")
    text = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
    text += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    messages = [TALK[0], {"role": "assistant", "content": "  yes"}]
    pieces, wanted = ChatTokens(template(text), tokenizer).encode(messages)
    assert [tokenizer.decode(pieces.ids[begin:end].tolist()) for begin, end in wanted] == ["yes</s>"]


def test_bytes_know_the_end_of_a_document() -> None:
    text = "{% for m in messages %}{{ m.role[0] + ': ' + m.content + '<|endoftext|>\n' }}{% endfor %}"
    text += "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
    pieces, wanted = ChatTokens(ChatTemplate(ChatFiles("a", text, {})), ByteTokenizer()).encode(TALK)
    tokens = pieces.ids.tolist()
    assert tokens.count(256) == len(TALK)
    found = [ByteTokenizer().decode(tokens[begin:end]) for begin, end in wanted]
    assert found == [f"{it['content']}<|endoftext|>" for it in TALK if it["role"] == "assistant"]


def test_where_templates_lie(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", CHATML)
    config = folder / "tokenizer_config.json"
    special = {**SPECIAL, "pad_token": None}
    for path in (folder, config):
        assert read_chat_files(path) == ChatFiles(str(config), CHATML, special)
    older = folder / "chat_template.json"
    older.write_text(json.dumps({"chat_template": ZEPHYR}))
    assert read_chat_files(older) == ChatFiles(str(older), ZEPHYR, special)
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": ZEPHYR}]
    config.write_text(json.dumps({**SPECIAL, "chat_template": several}))
    assert read_chat_files(folder).text == ZEPHYR
    jinja = folder / "chat_template.jinja"
    jinja.write_text(MISTRAL)
    for path in (folder, jinja):  # it comes before tokenizer_config.json, which still tells the special tokens
        assert read_chat_files(path) == ChatFiles(str(jinja), MISTRAL, SPECIAL)
    config.unlink()
    assert read_chat_files(jinja).special == {}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "neither chat_template.jinja nor tokenizer_config.json is in this folder"),
        ({"tokenizer_config.json": "{}"}, 'tokenizer_config.json: no template under "chat_template"'),
        ({"tokenizer_config.json": "[]"}, "a JSON object is needed, found list"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: not JSON"),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "rag", "template": "x"}]}'},
            'none of its chat templates is called "default" (their names: rag)',
        ),
        ({"chat_template.jinja": " \n"}, "chat_template.jinja: empty"),
        ({"chat_template.jinja": "a\n{% if x %}\n{% endfor %}"}, "chat_template.jinja: line 3 of the template: "),
        ({"chat_template.jinja": "{{ 10**5000 }}"}, "chat_template.jinja: cannot be compiled: ValueError: "),
        ({"chat_template.jinja": "{% for x in y %}" * 30 + "{% endfor %}" * 30}, "be compiled: SyntaxError: "),
        ({"chat_template.jinja": "{{ " + "(" * 9000 + ")" * 9000 + " }}"}, "cannot be compiled: RecursionError"),
        ({"chat_template.jinja": "x" * ((1 << 22) + 1)}, "a template of 4,194,305 characters: more than 4 million"),
        (
            {"tokenizer_config.json": '{"chat_template": "\\ud800", "bos_token": "\\udfff"}'},
            "tokenizer_config.json: the template, bos_token: holds half of a surrogate pair",
        ),
        (
            {"chat_template.jinja": "{{ bos_token }}", "tokenizer_config.json": '{"eos_token": "a"}'},
            "it reads bos_token, but neither tokenizer_config.json",
        ),
        ({"chat_template.jinja": "{{ x | nothing }}"}, "line 1 of the template: No filter named 'nothing'"),
        (
            {"chat_template.jinja": "{{ bos_token }}{{ eos_token }}"},
            "it reads bos_token, eos_token, but neither tokenizer_config.json nor special_tokens_map.json next to it",
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        ChatTemplate(read_chat_files(tmp_path))
    assert str(caught.value).startswith("data.chat_template: ")
    with pytest.raises(UserError, match="cannot be read"):
        ChatTemplate(read_chat_files(tmp_path / "absent.jinja"))


@pytest.mark.parametrize(
    "greedy",
    [
        "{{ 'x' * 10**10 }}",
        "{% for m in messages %}{{ [m.content] * 10**10 }}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for m in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{{ messages | tojson(indent=10**10) }}",
        "{% set n = namespace(l=[]) %}{% for m in range(9999) %}"
        "{% set n.l = n.l + ['x' * 10**6 ~ loop.index] %}{% endfor %}{{ n.l | length }}",
    ],
    ids=["text", "list", "doubled", "indent", "many texts, each of which is small"],
)
def test_a_template_that_asks_for_too_much_memory_is_refused(greedy: str) -> None:
    with pytest.raises(UserError, match=r"a\.jinja: (asks for too much memory|OverflowError|.*perhaps memory ran out)"):
        template(greedy).render(TALK)
    assert template(CHATML).render(TALK)
    large = template("{% for m in messages[:1] %}{{ (m.role * 10**8) | length }}{% endfor %}")
    assert large.render(TALK)  # what the greedy one made does not count against it


def test_a_template_that_asked_for_too_much_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: each of a million conversations takes the seconds in which a gigabyte is filled."""
    monkeypatch.setattr(chat_renderer, "_greedy", {})
    found = template("{% for m in messages %}{{ m.content * 10**10 }}{% endfor %}")
    with pytest.raises(UserError, match=r"a\.jinja: asks for too much memory"):
        found.render(TALK)
    monkeypatch.setattr(chat_renderer.Renderer, "ask", None)
    with pytest.raises(UserError, match=r"a\.jinja: asks for too much memory"):
        found.render(TALK[:2])
    monkeypatch.undo()
    assert template(CHATML).render(TALK)


TREES = (
    "{% set n = namespace(a=[], b=[]) %}{% for m in range(45) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}"
)
"""Lists that share their entries: 90 of them, and 2**45 comparisons, which Python makes without a break."""


@pytest.mark.parametrize(
    "slow",
    ["{{ (messages | length) ** (10 ** 9) }}", "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, TREES],
    ids=["power", "loops", "trees of shared lists"],
)
def test_a_template_that_takes_too_long_is_refused(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = template(slow)
    monkeypatch.setattr(chat_renderer, "LIMIT_S", 0.2)
    monkeypatch.setattr(chat_renderer, "_greedy", {})
    with pytest.raises(UserError, match=r"a\.jinja: takes more than 0 s for one conversation"):
        found.render(TALK)
    monkeypatch.setattr(chat_renderer, "Renderer", None)  # it is not tried again for the next conversation
    with pytest.raises(UserError, match=r"a\.jinja: takes more than 0 s for one conversation"):
        found.render(TALK[:2])
    monkeypatch.undo()
    assert template(CHATML).render(TALK)


def test_the_limit_counts_rendering_and_not_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that starts slowly, as on a cold disk, and of one that does not start."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1.2)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(chat_renderer, "LIMIT_S", 1.0)
    monkeypatch.setattr(chat_renderer, "_greedy", {})
    chat_renderer.end_renderer()  # the next one starts here
    assert template(CHATML).render(TALK)
    monkeypatch.setattr(chat_renderer, "START_S", 0.2)
    chat_renderer.end_renderer()
    with pytest.raises(UserError, match="the process that renders chat templates does not start within 0 s"):
        template(CHATML).render(TALK)
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)\n")
    monkeypatch.setattr(chat_renderer, "START_S", 60.0)
    with pytest.raises(UserError, match="the process that renders chat templates ended while it started"):
        template(CHATML).render(TALK)
    monkeypatch.undo()
    assert template(CHATML).render(TALK)  # the template is not blamed


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('the one of the working directory')\n")
    monkeypatch.chdir(tmp_path)
    chat_renderer.end_renderer()  # the next one starts here
    assert ChatTemplate(ChatFiles("a.jinja", CHATML, SPECIAL)).render(TALK)


QWEN3 = CHATML.replace("message['content']", "('' if loop.last else 'earlier ') + message['content']")
HEADLESS = CHATML.partition("{% if add_generation_prompt")[0]
ALWAYS_ASKING = CHATML.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")


CALLS = [TALK[0], {**TALK[1], "tool_calls": [{"a": 1}]}]
ESCAPE = "{% set ns = namespace() %}{% set ns.__html__ = messages[0].copy %}{{ ns|e }}"
ASKS_OTHERWISE = CHATML.replace("assistant\n'", "assistant\n<think>'")
NESTED = "{% generation %}{% generation %}x{% endgeneration %}y{% endgeneration %}" + CHATML
CHANGED = "{% set it %}{% generation %}x{% endgeneration %}{% endset %}{{ it | length }}" + CHATML


@pytest.mark.parametrize(
    ("text", "messages", "expected"),
    [
        (MISTRAL, TALK[1:], "a.jinja: Conversation roles must alternate user/assistant/user/assistant/..."),
        (MISTRAL, [TALK[0], SYSTEM, TALK[1]], "a.jinja: Only user and assistant roles are supported!"),
        ("{{ messages[0].content.nothing.at_all }}", TALK, "has no attribute 'nothing'"),
        ("{{ 1 + messages }}", TALK, "a.jinja: TypeError: "),
        ("{{ ''.__class__.mro() }}", TALK, "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ '\\ud800' }}", TALK, "a.jinja: its text holds half of a surrogate pair"),
        ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", TALK, "a.jinja: writes more than 67,108,864 char"),
        ('{{ dict.update(messages[1].tool_calls[0], {"a": 2}) }}', CALLS, "._Dict object' has no attribute 'update'"),
        (ESCAPE, TALK, "a.jinja: a field of a namespace may not begin with an underscore: '__html__'"),
        ("{% set ns = namespace(_a=1) %}", TALK, "a.jinja: a field of a namespace may not begin"),
        ("{{ messages.append(1) }}", TALK, "a.jinja: access to attribute 'append' of 'list' object is unsafe"),
        (
            ASKS_OTHERWISE,
            TALK[:2],
            "has the generation prompt '<|im_start|>assistant\\n<think>', but the turn does not begin",
        ),
        (NESTED, TALK, "a.jinja: {% generation %} … {% endgeneration %} inside {% generation %}"),
        (CHANGED, TALK, "a.jinja: it changes the text of {% generation %} … {% endgeneration %} afterwards"),
        (
            QWEN3,
            TALK,
            "message 2, the assistant's: a.jinja renders the messages up to it differently when others follow",
        ),
        (HEADLESS, TALK, "message 2, the assistant's: a.jinja ignores add_generation_prompt"),
        (ALWAYS_ASKING, TALK[:2], "message 2, the assistant's: a.jinja ignores add_generation_prompt"),
        (
            "{{ messages[1].content }}" + CHATML,
            TALK,
            "to find where it begins, the messages before it are rendered alone",
        ),
        ("{% generation %}{% endgeneration %}" + CHATML, TALK, "for this conversation it writes no text in {% gen"),
        ("{% generation %}x{% endgeneration %}", TALK, "no token of its text is the assistant's"),
        ("{% if add_generation_prompt %}{% endif %}", TALK, "a.jinja ignores add_generation_prompt"),
    ],
)
def test_conversations_that_are_refused(text: str, messages: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        chat(text).encode(messages)


def test_what_the_template_does_not_get_is_nothing_as_transformers_has_it() -> None:
    text = "{{ nothing }}{% if bos_token is defined %}b{% endif %}" + CHATML
    alone = ChatTemplate(ChatFiles("a", text, {"bos_token": None}))
    assert alone.render(TALK) == PreTrainedTokenizerFast(
        tokenizer_object=library.Tokenizer.from_str(tokenizer_text())
    ).apply_chat_template(TALK, chat_template=text, tokenize=False)


def test_marks_in_a_conversation_are_refused_where_they_matter() -> None:
    marked = [TALK[0], {"role": "assistant", "content": "a\ufdd0b"}]
    assert said(CHATML, marked) == ["a\ufdd0b<|im_end|>"]
    with pytest.raises(UserError, match="which are reserved to mark the text in"):
        said(TEMPLATES["dated"], marked)


def test_template_and_tokenizer_of_different_models_are_refused() -> None:
    with pytest.raises(UserError, match=r"its eos_token '<eot>' is not a token of data\.tokenizer"):
        ChatTokens(ChatTemplate(ChatFiles("a", ZEPHYR, {"eos_token": "<eot>"})), ours())


def test_older_folders_tell_special_tokens_as_transformers_reads_them(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", ZEPHYR)
    config = {"chat_template": ZEPHYR, "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    for decoder in ({}, {"added_tokens_decoder": {"0": {"content": "<s>"}}, "eos_token": "</s>"}):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | decoder))
        found = ChatTemplate(read_chat_files(folder))
        assert found.special == {"eos_token": decoder.get("eos_token", "<|im_end|>")}
        expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tokenize=False)
        assert found.render(TALK) == expected


def test_what_a_template_does_to_messages_stays_with_it() -> None:
    messages = [TALK[0], {**TALK[1], "tool_calls": [{"a": 1}]}]
    text = "{% for m in messages %}{{ m }}{% endfor %}"
    assert template(text).render(messages) == theirs().apply_chat_template(messages, chat_template=text, tokenize=False)
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UserError, match="nested too deeply"):
        template(text).render([{**TALK[0], "deep": deep}])
    with pytest.raises(UserError, match="nested too deeply"):
        template(text).render(TALK, [{"deep": deep}])


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_of_transformers(name: str) -> None:
    text = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}"
    messages = [TALK[0], {**TALK[1], name: "hm"}]
    assert template(text).render(messages) == theirs().apply_chat_template(messages, chat_template=text, tokenize=False)
    assert "hm|hm|Well" in template(text).render(messages)


TAGGED = "{% for m in messages %}{% generation %}{{ m.content + TAIL }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("'<|im_end|>\n'", "<|im_end|>"),
        ("'</s> \n\n'", "</s>"),
        ("'<|im_end|>\n</s>'", "<|im_end|>"),  # Phi-3's
        ("'</s>!'", None),
        ("'\n'", None),
    ],
)
def test_the_end_of_a_turn_is_the_first_control_token_behind_the_words(tail: str, expected: str | None) -> None:
    found = chat(TAGGED.replace("TAIL", tail)).end()
    assert (None if found is None else ours().decode([found])) == expected


def test_white_space_that_is_a_control_token_ends_nothing() -> None:
    fields = json.loads(tokenizer_text())
    number = max(token["id"] for token in fields["added_tokens"])
    fields["added_tokens"][number]["content"] = "\n\n"
    fields["model"]["vocab"]["\n\n"] = fields["model"]["vocab"].pop("<|assistant|>")
    tokenizer = LibraryTokenizer.from_json(json.dumps(fields), "here")
    made = ChatTokens(template(TAGGED.replace("TAIL", "'</s>\n\n'")), tokenizer)
    end = made.end()
    assert end is not None
    assert made.text_of(end) == "</s>"


def test_a_template_of_phi_3_serves_one_turn_and_not_two() -> None:
    text = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    text += "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    assert said(text, TALK[:2]) == [f"{TALK[1]['content']}<|im_end|>\n</s>"]
    end = chat(text).end()
    assert end is not None
    assert chat(text).text_of(end) == "<|im_end|>"
    with pytest.raises(UserError, match="differently when others follow"):
        chat(text).encode(TALK)


def test_a_template_has_the_day_that_it_was_given() -> None:
    text = "{{ strftime_now('%d.%m.%Y %H:%M') }}" + CHATML
    dated = ChatTemplate(ChatFiles("a", text, SPECIAL, "2024-02-29"))
    assert dated.render(TALK).startswith("29.02.2024 00:00")
    assert ChatFiles.from_json("a", json.loads(json.dumps(dated.files.as_json()))) == dated.files
    assert dated.files.day == "2024-02-29"
    assert ChatTemplate(ChatFiles("a", CHATML, SPECIAL, "2024-02-29")).files.day is None
    with pytest.raises(UserError, match=r"here/chat\.json: damaged: an object with"):
        ChatFiles.from_json("here/chat.json", {"template": 1})


def test_a_tokenizer_that_puts_a_space_before_a_text() -> None:
    inner = library.Tokenizer(library.models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = library.decoders.Metaspace(prepend_scheme="first")
    trainer = library.trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"], show_progress=False
    )
    inner.train_from_iterator([message["content"] for message in TALK] * 9 + ["\n user assistant system"], trainer)
    tokenizer = LibraryTokenizer.from_json(inner.to_str(), "here")
    made = ChatTokens(template(CHATML), tokenizer)
    pieces, wanted = made.encode(TALK)
    other = PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)
    assert pieces.ids.tolist() == other.apply_chat_template(TALK, chat_template=CHATML, return_dict=False)
    found = [tokenizer.decode(pieces.ids[begin:end].tolist()).strip() for begin, end in wanted]
    assert found == [f"{it['content']}<|im_end|>" for it in TALK if it["role"] == "assistant"]
    end = made.end()
    assert end is not None
    assert made.text_of(end) == "<|im_end|>"
