"""In: a file of JSON lines. Out: prompts with the answers of each line, checked, as messages; which are wanted.
Does not render messages as text (encode.py does). The forms are those of preference data sets of `trl`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent.base.errors import UserError
from codescent.tasks.conversations.conversations import TOOLS, json_objects
from codescent.tasks.conversations.messages import (
    ASSISTANT,
    HALF,
    USER,
    WEIGHT,
    Message,
    half_a_character,
    is_learned,
    tools_of,
    wrong_message,
    wrong_tools,
)
from codescent.tasks.conversations.problems import Problems

if TYPE_CHECKING:
    from codescent.config.sections import Data

Messages = tuple[Message, ...]
COMPLETION = "completion"
"""The key of an answer that `trl` has in data sets of single answers."""
PAIR, SINGLE = "a chosen and a rejected answer", "an answer and a label"


@dataclass(frozen=True)
class Judged:
    """A line: a prompt, and one or two answers to it.

    Attributes:
        where: the place of the line: "FILE:LINE".
        prompt: messages before the answer; those of the assistant have weight 0.
        answers: of a pair the chosen one and the rejected one.
        wanted: of each answer.
        is_text: whether prompt and answers are texts, which need no chat template.
        unused: the keys of the line that are not read and have a value.
    """

    where: str
    prompt: Messages
    answers: tuple[Messages, ...]
    wanted: tuple[bool, ...]
    is_text: bool
    tools: list[dict[str, Any]] | None = None
    unused: tuple[str, ...] = ()

    @property
    def line(self) -> int:
        """The number of the line in its file, from 1."""
        return int(self.where.rpartition(":")[2])


def read_judged(path: Path, data: Data, *, with_template: bool, singles: bool) -> list[Judged]:
    """The lines of a file, all of one kind. Lines of white space are skipped.

    Args:
        with_template: whether messages can be written as text.
        singles: whether an answer may be judged by itself; such lines have a label.

    Raises:
        UserError: lines that cannot be used, with their numbers.
    """
    problems, found = Problems(), list[Judged]()
    first_kind = first_where = ""
    for where, value in json_objects(path, problems):
        try:
            one = _judged(where, value, data, with_template=with_template, singles=singles)
        except UserError as error:
            for problem in error.problems:
                problems.add(where, problem)
            continue
        kind = PAIR if len(one.answers) > 1 else SINGLE
        if not first_kind:
            first_kind, first_where = kind, where
        if kind != first_kind:
            other = f"{kind}, but the first line ({first_where}) has {first_kind}: all lines must have one kind"
            problems.add(where, other)
        elif not (one.is_text or with_template):
            problems.add(
                where,
                "messages: data.chat_template is needed to write them as text: give the folder of the model that is "
                "tuned, its tokenizer_config.json or its chat_template.jinja",
            )
        else:
            found.append(one)
    problems.refuse(path)
    return found


def _judged(where: str, value: dict[str, Any], data: Data, *, with_template: bool, singles: bool) -> Judged:
    """A line. Raises UserError: why it cannot be used."""
    pair = data.chosen_key, data.rejected_key
    if singles and data.label_key in value and not any(key in value for key in pair):
        keys: tuple[str, ...] = (data.response_key if data.response_key in value else COMPLETION,)
        if not isinstance(label := value[data.label_key], bool):
            raise UserError(f'"{data.label_key}": true (wanted) or false is needed, found {json.dumps(label)[:40]}')
        wanted: tuple[bool, ...] = (label,)
    else:
        keys, wanted = pair, (True, False)
    _refuse_missing(value, keys, data, singles=singles)
    given, asked = [value[key] for key in keys], value.get(data.prompt_key)
    wrong = [f'"{key}": {why}' for key, answer in zip(keys, given, strict=True) for why in _wrong_answer(answer)]
    wrong += [] if asked is None else [f'"{data.prompt_key}": {why}' for why in _wrong_prompt(asked)]
    wrong += wrong_tools(tools_of(value)) if with_template else []
    if wrong:
        raise UserError(*wrong)
    prompt, answers = _split(asked, given, data)
    _refuse_equal(keys, answers)
    is_text = not any(isinstance(one, list) for one in (asked, *given))
    read = {*keys, data.prompt_key, *([] if len(keys) > 1 else [data.label_key]), *([TOOLS] if with_template else [])}
    unused = tuple(key for key, it in value.items() if key not in read and it not in (None, "", [], {}))
    return Judged(where, prompt, answers, wanted, is_text, tools_of(value) if with_template else None, unused)


def _refuse_missing(value: dict[str, Any], keys: tuple[str, ...], data: Data, *, singles: bool) -> None:
    """Raise UserError: the line lacks an answer."""
    missing = [key for key in keys if key not in value]
    if not missing:
        return
    there, named = ", ".join(map(str, value)) or "nothing", " and ".join(f'"{key}"' for key in missing)
    if data.label_key in value and not singles:
        raise UserError(
            f'no {named}, and a "{data.label_key}": answers that are judged one by one are learned with '
            'train.preference = "kto"'
        )
    more = " or a label (data.label_key)" if singles else ""
    raise UserError(
        f"no {named} (it has: {there}); a line needs a chosen and a rejected answer (data.chosen_key, "
        f"data.rejected_key){more}"
    )


def _wrong_answer(answer: Any) -> Iterator[str]:
    """Why an answer cannot be used: an empty one, or messages that do not end with the assistant's."""
    if isinstance(answer, str):
        if not answer:
            yield "the answer is empty"
        elif half_a_character(answer):
            yield HALF
        return
    if not isinstance(answer, list):
        yield f"a text or a list of messages is needed, found {type(answer).__name__}"
        return
    if not answer:
        yield "the list of messages is empty"
        return
    wrong = [f"message {number}: {why}" for number, item in enumerate(answer, 1) for why in wrong_message(item)]
    yield from wrong
    if not wrong and not is_learned(answer[-1]):
        yield f'the last message must be of the role "{ASSISTANT}", and not of weight 0'


def _wrong_prompt(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, str):
        if half_a_character(prompt):
            yield HALF
    elif not isinstance(prompt, list):
        yield f"a text or a list of messages is needed, found {type(prompt).__name__}"
    else:
        yield from (f"message {number}: {why}" for number, item in enumerate(prompt, 1) for why in wrong_message(item))


def _split(asked: Any, given: list[Any], data: Data) -> tuple[Messages, tuple[Messages, ...]]:
    """The messages of the prompt, and those of each answer.

    Without a prompt, or if the answers are whole conversations, what both begin with is the prompt, as in `trl`.
    Raises UserError: they begin with nothing in common.
    """
    whole = [isinstance(one, list) and one[0]["role"] != ASSISTANT for one in given]
    if any(whole) or asked is None:
        if len(given) == 1:
            raise UserError(f'no "{data.prompt_key}": an answer that is judged by itself needs a prompt')
        if isinstance(given[0], list) is not isinstance(given[1], list):
            raise UserError("one answer is a text, and the other one is a list of messages")
        if isinstance(given[0], list) and isinstance(asked, list):
            both = f'"{data.prompt_key}" and the answers begin with messages of other roles than "{ASSISTANT}"'
            raise UserError(f"{both}: the prompt would be there twice")
        asked, given = _in_common(given, data)
    prompt: list[Message] = [{"role": USER, "content": asked}] if isinstance(asked, str) else list(asked)
    prompt = [{**message, WEIGHT: 0} if message["role"] == ASSISTANT else message for message in prompt]
    answers = [({"role": ASSISTANT, "content": one},) if isinstance(one, str) else tuple(one) for one in given]
    return tuple(prompt), tuple(answers)


def _in_common(given: list[Any], data: Data) -> tuple[Any, list[Any]]:
    """What both answers begin with, and the rest of each: messages, or characters up to a space."""
    one, other = given
    if one == other:
        raise UserError(_EQUAL.format(data.chosen_key, data.rejected_key))
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    if isinstance(one, str) and same > 0 and one[same - 1] == " ":
        same -= 1
    if isinstance(one, list) and same and one[same - 1]["role"] == ASSISTANT and same == min(len(one), len(other)):
        same -= 1
    if not same:
        raise UserError(
            f'no "{data.prompt_key}", and "{data.chosen_key}" and "{data.rejected_key}" do not begin with the same one'
        )
    if min(len(one), len(other)) == same:
        raise UserError("one answer is the beginning of the other one, and there is no prompt: an answer is empty")
    return one[:same], [one[same:], other[same:]]


_EQUAL = '"{}" and "{}" are equal: nothing is preferred; leave the line out'


def _refuse_equal(keys: tuple[str, ...], answers: tuple[Messages, ...]) -> None:
    if len(answers) > 1 and answers[0] == answers[1]:
        raise UserError(_EQUAL.format(*keys))
