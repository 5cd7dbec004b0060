"""In: prompts, a tokenizer, perhaps a chat template. Out: the tokens of each prompt and its line, in files.
Does not check lines (lines.py does) and does not write answers (train/rollouts.py does)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.output import warn
from codescent.data.prepared import SPLITS, TOKENIZER, write_array
from codescent.data.progress import stage
from codescent.data.text.request import remark_on, tokenizer_of
from codescent.data.tokenizers.tokenizer import NO_END, Tokenizer, document_end, token_dtype
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens
from codescent.tasks.conversations.dataset import parse_template
from codescent.tasks.conversations.problems import Problems
from codescent.tasks.rewarded.lines import PromptLine, read_asked

if TYPE_CHECKING:
    from codescent.config.sections import Data

ARRAYS = ("tokens", "begins", "lines", "texts", "text_begins")
Encode = Callable[[PromptLine], list[int]]


def write_prompts(data: Data, template: ChatTemplate | None, folder: Path, progress: bool) -> dict[str, Any]:
    """Write the tokens and lines of both splits. The validation split is data.validation, or the last
    data.validation_fraction of the lines.

    Returns the description's fields. Raises UserError: every problem of the lines, or of the tokenizer.
    """
    path, tokenizer = expanded(data.corpus), tokenizer_of(data.tokenizer)
    if progress and (remark := remark_on(data.tokenizer)):
        warn(remark)
    parts = _splits(path, data, with_template=template is not None)
    encode, end = _encoder(data, template, tokenizer)
    if end is None and progress:
        warn(f"{path}: no token ends an answer, so each has as many tokens as train.new_tokens allows: {NO_END}")
    splits, problems = dict[str, Any](), Problems()
    with stage(f"tokenising {path.name}", sum(len(one.text) for part in parts for one in part), progress) as advance:
        for split, part in zip(SPLITS, parts, strict=True):
            arrays = _arrays(part, encode, token_dtype(tokenizer.vocab_size), problems, advance)
            for name, array in zip(ARRAYS, arrays, strict=True):
                write_array(folder / f"{split}_{name}.npy", array)
            splits[split] = {"prompts": len(part), "tokens": len(arrays[0])}
    problems.refuse(path)
    tokenizer.save(folder / TOKENIZER)
    fields = {"kind": data.tokenizer, "vocab_size": tokenizer.vocab_size}
    sources = {"source": str(path), **({"validation": data.validation} if data.validation else {})}
    return {**sources, "tokenizer": fields, "splits": splits, "end": end}


def _splits(path: Path, data: Data, *, with_template: bool) -> tuple[list[PromptLine], ...]:
    """The lines of each split. Raises UserError: lines that cannot be used, or too few of them."""
    lines = read_asked(path, data, with_template=with_template)
    if data.validation is not None:
        other = read_asked(expanded(data.validation), data, with_template=with_template)
        for name, part in ((path, lines), (data.validation, other)):
            if not part:
                raise UserError(f"{name}: no lines")
        return lines, other
    num_train = len(lines) - max(1, round(data.validation_fraction * len(lines)))
    if num_train < 1:
        raise UserError(f"{path}: {counted(len(lines), 'line')}: too few to split into train and validation")
    return lines[:num_train], lines[num_train:]


def _encoder(data: Data, template: ChatTemplate | None, tokenizer: Tokenizer) -> tuple[Encode, int | None]:
    """A function from a line to the tokens of its prompt; the token that ends an answer, if there is one."""
    if template is not None:
        chat = ChatTokens(template, tokenizer)
        return lambda one: chat.encode_turns(one.messages, one.tools), _end_of_turn(chat, tokenizer)
    before, between, after = parse_template(data.template)
    if after:
        raise UserError(
            f"data.template: {data.template!r}: the model writes what follows {{response}}; end the template with it"
        )
    ends = document_end(tokenizer)
    opening = list(tokenizer.opening)

    def encode(one: PromptLine) -> list[int]:
        assert isinstance(one.prompt, str)
        ids = [*opening, *tokenizer.encode(f"{before}{one.prompt}{between}").tolist()] or list(ends)
        if not ids:
            raise UserError(f"the prompt {one.prompt!r} has no tokens with this tokenizer: an answer needs a prompt")
        return ids

    return encode, ends[0] if ends else None


def _end_of_turn(chat: ChatTokens, tokenizer: Tokenizer) -> int | None:
    """The control token that ends a turn; where the template has none, the tokenizer's separator."""
    try:
        found = chat.end()
    except UserError:  # the template refuses the shortest conversation
        found = None
    return tokenizer.separator if found is None else found


def _arrays(
    part: Sequence[PromptLine], encode: Encode, dtype: np.dtype[Any], problems: Problems, advance: Callable[[int], None]
) -> tuple[npt.NDArray[Any], ...]:
    """The arrays of ARRAYS, see `samples.RewardedSource`. Lines that fail are added to `problems`."""
    tokens, begins, texts, text_begins = [np.empty(0, dtype)], [0], [np.empty(0, np.uint8)], [0]
    for one in part:
        try:
            ids = encode(one)
        except UserError as error:
            for problem in error.problems:
                problems.add(one.where, problem)
            continue
        text = np.frombuffer(one.text.encode(), np.uint8)
        tokens.append(np.array(ids, dtype))
        texts.append(text)
        begins.append(begins[-1] + len(ids))
        text_begins.append(text_begins[-1] + len(text))
        advance(len(one.text))
    lines = np.array([one.line for one in part], np.int64)
    return (
        *(np.concatenate(tokens), np.array(begins, np.int64), lines),
        *(np.concatenate(texts), np.array(text_begins, np.int64)),
    )
