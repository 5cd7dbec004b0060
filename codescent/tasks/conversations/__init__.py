"""In: prompts with responses, or conversations. Out: the task "sft": predict the tokens of the responses only.
Does not build samples: dataset.py does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from codescent.base.command import resume_command
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.output import warn
from codescent.base.reading import open_regular
from codescent.base.sealed import digest
from codescent.data.prepared import AGAIN, DESCRIPTION, user_file_sha256
from codescent.data.samples import AnyDataset, Source
from codescent.data.text.compressed import BAD_ARCHIVE, unpacking
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.tasks.conversations.chat_files import ChatFiles, read_chat_files
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens
from codescent.tasks.conversations.conversations import PAIR, TURNS, first_kind
from codescent.tasks.conversations.dataset import PLAIN, ResponseDataset, chat_of, parse_template, write_examples
from codescent.tasks.conversations.kept import CHAT, exported, file_of, has_chat_template, saved_chat
from codescent.tasks.folder import FolderTask, tokenizer_identity
from codescent.tasks.task import Prompts, Task, TaskRequest, is_given

if TYPE_CHECKING:
    from codescent.config.sections import Data

FIELDS = ("template", "prompt_key", "response_key", "messages_key", "validation_fraction")
"""Keys of [data] that the samples depend on, in addition to the corpus, the tokenizer and the chat template."""
TEMPLATED = ("sft", "dpo", "grpo")
"""The tasks that use a chat template."""
PAIR_KEYS = ("prompt_key", "response_key")
MOST_LINE_BYTES = 1 << 24
"""A longer first line of a corpus is not read to find out what the corpus is."""
PACKED = 1
"""Increase it when `packed.packs_of` gives other samples."""
FIRST_MESSAGE = "Hello"
"""The message of the user that `sample` sends to a model with a chat template if it gets no prompt."""


class Conversations(FolderTask):
    """Respond to a prompt, or as the assistant of a conversation: supervised fine-tuning."""

    name = "sft"
    aim = "predict the responses to prompts"
    lines = "prompts and responses, or with messages"
    form = "prepared prompts and responses"
    kinds = ("gpt2", "llama")
    keys = (*Task.keys, "template", "chat_template", "prompt_key", "response_key", "messages_key", "documents")
    undivided = ""
    ignores: tuple[str, ...] = ("data.text_key", "data.as_text")
    extras = True
    equal_losses = False
    files = (CHAT,)
    kept = MappingProxyType({**Task.kept, "data.chat_template": CHAT})
    unit = "tokens of responses"
    peft_task_type = "CAUSAL_LM"
    fields: tuple[str, ...] = FIELDS
    dataset: type[ResponseDataset] = ResponseDataset

    def refuse(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`."""
        yield from super().refuse(request)
        if request.compile == "model":
            yield (
                f'train.compile = "model": data.task = "{self.name}" has tokens without a target, which the '
                'compiled head does not support; take train.compile = "blocks"'
            )

    def refuse_other(self, request: TaskRequest, name: str) -> Iterator[str]:
        """See `Task`."""
        if request.data.chat_template is not None and name not in TEMPLATED:
            yield (
                f'data.chat_template: only data.task = "{self.name}" uses a chat template, and data.task is "{name}"; '
                f'give data.task = "{self.name}", or leave the template out'
            )

    def unused(self, request: TaskRequest) -> Iterator[tuple[str, str]]:
        """See `Task`: the keys of messages if lines have prompts and responses, and the other way round."""
        yield from super().unused(request)
        data, keys = request.data, (*PAIR_KEYS, "messages_key")
        if self.dataset.is_at(data.corpus) or not any(is_given(data, name) for name in keys):
            return
        if data.chat_template is None:
            yield "data.messages_key", "needs data.chat_template"
            return
        kind = first_kind(expanded(data.corpus), data, with_template=True)
        for name in {TURNS: PAIR_KEYS, PAIR: ("messages_key",)}.get(kind or "", ()):
            yield f"data.{name}", f"is for other lines than those of {data.corpus}, which have {kind}"

    def parts(self, request: TaskRequest) -> Mapping[str, Any]:
        """See `FolderTask`."""
        data = request.data
        parts: dict[str, Any] = {
            **{name: getattr(data, name) for name in self.fields},
            "template": partial(_checked_template, data),
            "chat_template": lambda: None if (chat := template_of(request)) is None else chat.files.as_json(),
            "tokenizer": partial(_identity, data.tokenizer),
            "corpus": partial(self._sha256, expanded(data.corpus)),
        }
        if data.validation is not None:
            del parts["validation_fraction"]
            parts["validation"] = partial(self._sha256, expanded(data.validation))
        return parts

    def _sha256(self, path: Path) -> str:
        if (path / DESCRIPTION).is_file():
            raise UserError(f"{path}: prepared, but not in the format {self.dataset.format!r}: {AGAIN}")
        return user_file_sha256(path, f"a file of JSON lines with {self.lines}")

    def refuse_prepared(self, request: TaskRequest, path: Path) -> None:
        """Raise UserError: keys that have neither their default nor the value that the folder was prepared with."""
        before, data = self.dataset.read_description(path)["request"], request.data
        problems = [
            f"data.{name} = {getattr(data, name)!r}: {path} was prepared with {before.get(name)!r}; leave it out"
            for name in self.fields
            if getattr(data, name) not in (type(data).model_fields[name].default, before.get(name))
        ]
        chat, wanted = chat_of(path, before), template_of(request)
        if wanted is not None and (chat is None or not chat.is_same(wanted.files)):
            other = "none" if chat is None else "another one"
            problems.append(f"data.chat_template: {wanted.name}: {path} was prepared with {other}; leave it out")
        if problems:
            raise UserError(*problems)

    def open(self, request: TaskRequest, path: Path) -> ResponseDataset:
        """See `Task`; data.documents decides whether a sample has several examples."""
        found = self.dataset.open(path)
        if request.data.documents == "joined":
            return found
        return replace(found, packs=True, fingerprint=digest(["packed", PACKED, found.fingerprint]))

    def write(self, request: TaskRequest, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """See `FolderTask`."""
        return write_examples(request.data, template_of(request), folder, progress)

    def pin(self, request: TaskRequest) -> Mapping[str, Any]:
        """The chat template at data.chat_template with its date, which is the saved one if the run has saved one."""
        if request.data.chat_template is None:
            return {}
        files, saved = read_chat_files(request.data.chat_template), saved_chat(request)
        if saved is not None and not saved.is_same(files):
            raise UserError(
                f"data.chat_template: {files.name}: not the template that the run started with, which is in "
                f"{saved.name}; start a new run, or undo the change"
            )
        return asdict(replace(files, day=(saved and saved.day) or date.today().isoformat()))

    def carry(self, dataset: AnyDataset) -> Mapping[str, str]:
        """See `Task`; with the chat template, if there is one."""
        assert isinstance(dataset, ResponseDataset)
        return {**super().carry(dataset), **file_of(dataset.chat)}

    def carry_unprepared(self, request: TaskRequest) -> Mapping[str, str]:
        """See `Task`."""
        pinned = self.pin(request)
        return file_of(ChatTemplate(ChatFiles(**pinned)).files if pinned else None)

    def refuse_resume(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """See `Task`; the data must be prepared with the chat template in the run's folder."""
        assert isinstance(dataset, ResponseDataset)
        before, now = saved_chat(request), dataset.chat
        if before is not None and (now is None or now.as_json() != before.as_json()):
            yield (
                f"{dataset.path}: not prepared with the chat template that the run in {request.run} started with "
                f"({request.run / CHAT}); start a new run, or give the data.corpus of its start"
            )

    def beforehand(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """See `Task`: samples of a chat template that writes the date."""
        assert isinstance(dataset, ResponseDataset)
        if dataset.chat is not None and dataset.chat.day is not None and not self.dataset.is_at(request.data.corpus):
            yield (
                f"data.chat_template: {dataset.chat.name}: writes the date, {dataset.chat.day}: a run that begins on "
                f"another day prepares the samples again, without a network. data.corpus={dataset.path} keeps the "
                "samples of this day"
            )

    def prompts(self, request: TaskRequest, tokenizer: Tokenizer) -> Prompts:
        """See `Task`; with a chat template, a prompt becomes a message of the user."""
        chat = _chat(request, tokenizer)
        if chat is None:
            return Prompts(tokenizer)
        return Prompts(tokenizer, chat.encode_prompt, end_of_turn(chat), default=FIRST_MESSAGE)

    def chat(self, request: TaskRequest, tokenizer: Tokenizer) -> ChatTokens | None:
        """See `Task`."""
        return _chat(request, tokenizer)

    def example(self, open_validation: Callable[[], Source]) -> list[int] | None:
        """See `Task`: the first validation example up to the response, or to the assistant's first words."""
        if (source := open_validation()).num_samples < 1:
            return None
        samples = source.read(np.arange(1))
        before = int(np.argmax(samples.targets[0] >= 0))  # the position whose target is the first token of the answer
        prompt: list[int] = samples.inputs[0, : before + 1].tolist()
        return prompt

    def keys_of_folder(
        self, folder: Path, tokenizer: Tokenizer, data: Data, *, has_corpus: bool
    ) -> Mapping[str, str | Path]:
        """See `Task`; of a folder with a chat template, for a corpus of conversations or without one."""
        if data.chat_template is not None or data.template != PLAIN or not has_chat_template(folder):
            return {}
        if has_corpus and not _is_of_messages(data):
            return {}
        ChatTokens(ChatTemplate(read_chat_files(folder)), tokenizer).end()  # refuses a template that cannot be used
        return {"task": self.name, "chat_template": folder}

    def export(
        self,
        request: TaskRequest,
        tokenizer: Tokenizer,
        texts: dict[str, str],
        ends: dict[str, Any],
        *,
        is_trained: bool,
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """See `Task`; with the chat template, its special tokens, and the token that ends a turn."""
        if (chat := _chat(request, tokenizer)) is None:
            return texts, ends
        eos, end = None, end_of_turn(chat) if is_trained else None
        known = ends.get("eos_token_id")  # an id, or a list of ids
        if end is not None and end not in (known if isinstance(known, list) else [known]):
            ends = {**ends, "eos_token_id": end}
        if end is not None and not chat.template.reads_eos:  # else the template would render another text
            eos = chat.text_of(end)
        return exported(chat.template.files, texts, eos), ends


def template_of(request: TaskRequest) -> ChatTemplate | None:
    """The chat template: the pinned one, else the run's saved one, else the one at data.chat_template; None: none.
    Raises UserError: it cannot be read or compiled.
    """
    files = saved_chat(request) if request.pinned is None else ChatFiles(**request.pinned) if request.pinned else None
    if files is None and request.data.chat_template is not None:
        files = read_chat_files(request.data.chat_template)
    return None if files is None else ChatTemplate(files)


def _checked_template(data: Data) -> str:
    parse_template(data.template)
    if data.chat_template is not None and data.template != PLAIN:
        raise UserError("data.template, data.chat_template: both define the text of an example; leave one of them out")
    return data.template


def _identity(tokenizer: str) -> str:
    if tokenizer == "char" or tokenizer.startswith("bpe:"):
        raise UserError(
            f'data.tokenizer = "{tokenizer}": it is built from a corpus of text, and prompts and responses '
            "are not one; take byte, gpt2, or the tokenizer.json of the model that is tuned"
        )
    return tokenizer_identity(tokenizer, "a tokenizer, or byte, gpt2, bert")


def _chat(request: TaskRequest, tokenizer: Tokenizer) -> ChatTokens | None:
    """The chat template and tokenizer to prompt a trained model with; None: it was tuned without a template.
    Raises UserError: the template is damaged, or an earlier version did not save it.
    """
    saved, given = saved_chat(request), request.data.chat_template
    if saved is None and given is not None:
        raise UserError(
            f"{request.run / CHAT}: missing: an earlier version, which did not save the chat template, made this run; "
            f"`{resume_command(request.run)}` saves it if {given} has not changed since"
        )
    return None if saved is None else ChatTokens(ChatTemplate(saved), tokenizer)


def end_of_turn(chat: ChatTokens) -> int | None:
    """The token that ends a turn of the assistant. A template that refuses a short conversation is warned of: None."""
    try:
        return chat.end()
    except UserError as error:
        warn(f"no token is known that ends the assistant's turn, as the chat template refuses a short example: {error}")
        return None


def _is_of_messages(data: Data) -> bool:
    """Whether the first line of the corpus is a JSON object with messages or a prompt. A missing file: its suffix."""
    path = expanded(data.corpus)
    try:
        with open_regular(path) as file:
            first = json.loads(unpacking(path, file).readline(MOST_LINE_BYTES))
    except FileNotFoundError:
        return ".jsonl" in path.suffixes
    except (OSError, *BAD_ARCHIVE, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and (data.messages_key in first or data.prompt_key in first)
