"""In: prompts with responses, or conversations. Out: the task "sft": what is said in response alone is wanted.
Does not make samples: dataset.py does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.data.prepared import AGAIN, DESCRIPTION, given_sha256
from codescent.data.samples import AnyDataset
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.tasks.conversations.chat_files import JINJA, TOKENIZER_CONFIG, ChatFiles, read_chat_files
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens
from codescent.tasks.conversations.dataset import PLAIN, ResponseDataset, chat_of, parse_template, write_examples
from codescent.tasks.folder import FolderTask, tokenizer_identity
from codescent.tasks.task import Prompts, Task, TaskRequest

if TYPE_CHECKING:
    from codescent.config.sections import Data

FIELDS = ("template", "prompt_key", "response_key", "messages_key", "validation_fraction")
"""Keys of [data] that the samples depend on, with the corpus, the tokenizer and the chat template."""
CHAT = "chat.json"
"""What a run keeps of its chat template: its text, its special tokens, the day that it takes for today."""


class Conversations(FolderTask):
    """Respond to a prompt, or as the assistant of a conversation: supervised fine-tuning."""

    name = "sft"
    kinds = ("gpt2", "llama")
    keys = (*Task.keys, "template", "chat_template", "prompt_key", "response_key", "messages_key")
    extras = True
    files = (CHAT,)
    unit = "tokens of responses"
    peft_task_type = "CAUSAL_LM"
    dataset = ResponseDataset

    def refuse(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`."""
        yield from super().refuse(request)
        if request.compile == "model":
            yield (
                f'train.compile = "model": data.task = "{self.name}" has tokens of which nothing is wanted, and the '
                'compiled head does not know them; take train.compile = "blocks"'
            )

    def refuse_other(self, request: TaskRequest, name: str) -> Iterator[str]:
        """See `Task`."""
        if request.data.chat_template is not None:
            yield (
                f'data.chat_template: conversations are what data.task = "{self.name}" learns from, and here it is '
                f'"{name}"; give data.task = "{self.name}", or leave the template out'
            )

    def parts(self, request: TaskRequest) -> Mapping[str, Any]:
        """See `FolderTask`."""
        data = request.data
        return {
            **{name: getattr(data, name) for name in FIELDS},
            "template": partial(_checked_template, data),
            "chat_template": lambda: None if (chat := _template(request)) is None else chat.files.kept(),
            "tokenizer": partial(_identity, data.tokenizer),
            "corpus": partial(_corpus_sha256, expanded(data.corpus)),
        }

    def refuse_prepared(self, request: TaskRequest, path: Path) -> None:
        """Raise UserError where a key that is not at its default differs from what the folder was prepared with."""
        before, data = self.dataset.described(path)["request"], request.data
        problems = [
            f"data.{name} = {getattr(data, name)!r}: {path} was prepared with {before.get(name)!r}; leave it out"
            for name in FIELDS
            if getattr(data, name) not in (type(data).model_fields[name].default, before.get(name))
        ]
        chat, wanted = chat_of(path, before), _template(request)
        if wanted is not None and (chat is None or not chat.is_same(wanted.files)):
            other = "none" if chat is None else "another one"
            problems.append(f"data.chat_template: {wanted.name}: {path} was prepared with {other}; leave it out")
        if problems:
            raise UserError(*problems)

    def write(self, request: TaskRequest, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """See `FolderTask`."""
        return write_examples(request.data, _template(request), folder, progress)

    def pin(self, request: TaskRequest) -> Mapping[str, Any]:
        """The chat template at data.chat_template, with its day; where a run keeps one, that day stands."""
        if request.data.chat_template is None:
            return {}
        files, kept = read_chat_files(request.data.chat_template), _kept(request)
        if kept is not None and not kept.is_same(files):
            raise UserError(
                f"data.chat_template: {files.name}: not the template with which the run began, which is in "
                f"{kept.name}; begin a new run, or undo what was changed"
            )
        return asdict(replace(files, day=(kept and kept.day) or date.today().isoformat()))

    def carry(self, dataset: AnyDataset) -> Mapping[str, str]:
        """See `Task`; and the chat template, if there is one."""
        assert isinstance(dataset, ResponseDataset)
        return {**super().carry(dataset), **_file_of(dataset.chat)}

    def carry_unprepared(self, request: TaskRequest) -> Mapping[str, str]:
        """See `Task`."""
        pinned = self.pin(request)
        return _file_of(ChatTemplate(ChatFiles(**pinned)).files if pinned else None)

    def refuse_resume(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """See `Task`; the data must have been prepared by the chat template that the run keeps."""
        assert isinstance(dataset, ResponseDataset)
        before, now = _kept(request), dataset.chat
        if before is not None and (now is None or now.kept() != before.kept()):
            yield (
                f"{dataset.path}: prepared by another chat template than the run in {request.run} began with, which is "
                f"in {request.run / CHAT}; begin a new run, or give data.corpus as it was"
            )

    def prompts(self, request: TaskRequest, tokenizer: Tokenizer) -> Prompts:
        """See `Task`; a prompt is what a user says to the assistant, where there is a chat template."""
        chat = _chat(request, tokenizer)
        return Prompts(tokenizer) if chat is None else Prompts(tokenizer, chat.ask, chat.end())

    def export(
        self, request: TaskRequest, tokenizer: Tokenizer, texts: dict[str, str], ends: dict[str, int | None]
    ) -> tuple[dict[str, str], dict[str, int | None]]:
        """See `Task`; with the chat template, its special tokens, and the token that ends a turn."""
        if (chat := _chat(request, tokenizer)) is None:
            return texts, ends
        files = chat.template.files
        settings = json.loads(texts[TOKENIZER_CONFIG]) | files.special
        if (end := chat.end()) is not None:
            ends = {**ends, "eos_token_id": end}
            if not chat.template.asks_for_end:  # else the template would write other texts
                settings["eos_token"] = chat.text_of(end)
        return {**texts, JINJA: files.text, TOKENIZER_CONFIG: json.dumps(settings, indent=2) + "\n"}, ends


def _template(request: TaskRequest) -> ChatTemplate | None:
    """What writes messages as text: the pinned or the kept chat template, or that at data.chat_template.
    Raises UserError: it cannot be read or compiled.
    """
    files = _kept(request) if request.pinned is None else ChatFiles(**request.pinned) if request.pinned else None
    if files is None and request.data.chat_template is not None:
        files = read_chat_files(request.data.chat_template)
    return None if files is None else ChatTemplate(files)


def _checked_template(data: Data) -> str:
    parse_template(data.template)
    if data.chat_template is not None and data.template != PLAIN:
        raise UserError("data.template, data.chat_template: both say how an example reads; leave one of them out")
    return data.template


def _corpus_sha256(path: Path) -> str:
    if (path / DESCRIPTION).is_file():
        raise UserError(f"{path}: prepared, but not in the format {ResponseDataset.format!r}: {AGAIN}")
    return given_sha256(path, "a file of JSON lines with prompts and responses, or with messages")


def _identity(tokenizer: str) -> str:
    if tokenizer == "char" or tokenizer.startswith("bpe:"):
        raise UserError(
            f'data.tokenizer = "{tokenizer}": it is made of a corpus of text, and prompts and responses are '
            "not; take byte, gpt2, or the tokenizer.json of the model that is tuned"
        )
    return tokenizer_identity(tokenizer, "a tokenizer, or byte, gpt2, bert")


def _kept(request: TaskRequest) -> ChatFiles | None:
    """The chat template that a run keeps; None: it keeps none. Raises UserError: it is damaged."""
    if CHAT not in request.kept:
        return None
    path = request.run / CHAT
    try:
        return ChatFiles.of_kept(str(path), json.loads(request.kept[CHAT]))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON object ({error})") from error


def _chat(request: TaskRequest, tokenizer: Tokenizer) -> ChatTokens | None:
    """How a user asks a trained model: by the template that the run keeps; None: it was tuned without one.
    Raises UserError: the template is damaged, or an earlier version did not keep it.
    """
    kept, wanted = _kept(request), request.data.chat_template
    if kept is None and wanted is not None:
        raise UserError(
            f"{request.run / CHAT}: is not there: an earlier version, which kept no chat template, made this run; "
            f"`codescent train {request.run}/config.toml --resume` puts it there while {wanted} is as it was"
        )
    return None if kept is None else ChatTokens(ChatTemplate(kept), tokenizer)


def _file_of(chat: ChatFiles | None) -> dict[str, str]:
    """The file that a run keeps of a chat template."""
    return {} if chat is None else {CHAT: json.dumps(chat.kept(), indent=1) + "\n"}
