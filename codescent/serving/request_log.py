"""In: requests and their answers. Out: a file of JSON lines that only its owner may read.
Does not read the file: results/answered.py does."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.errors import UserError
from codescent.base.output import warn_once
from codescent.base.published import in_words
from codescent.inference.prompt_logprobs import prompt_logprobs
from codescent.serving.answers import TextAnswer
from codescent.serving.engine_thread import EngineThread
from codescent.serving.refused import RefusedRequest
from codescent.serving.schemas import ChatRequest, CompletionRequest

VERSION = 1
"""Of the lines. Increase it when a field changes its meaning."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Entry:
    """A request and its answer.

    Attributes:
        time_s: when it was answered, in seconds since 1970.
        which: what of the model has answered, in words.
        path: of the endpoint.
        request: its fields, as they came.
        texts: what was answered.
        finish: why each text ended.
        prompts: the ids of its prompts, which are not written.
        prompt_tokens: how many ids each prompt has.
        tokens: how many each text has.
        seconds: from the request to the end of its answer.
    """

    time_s: float
    which: str
    path: str
    request: dict[str, Any]
    texts: list[str]
    finish: list[str | None]
    prompts: Sequence[Sequence[int]]
    prompt_tokens: list[int]
    tokens: list[int]
    seconds: float

    @classmethod
    def of(
        cls,
        which: str,
        path: str,
        request: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        answer: TextAnswer,
        seconds: float,
    ) -> Entry:
        """Of an answer that is complete."""
        return cls(
            time.time(),
            which,
            path,
            request.model_dump(exclude_unset=True, by_alias=True),
            [text.text for text in answer.texts],
            [text.finish for text in answer.texts],
            prompts,
            [len(prompt) for prompt in prompts],
            [text.tokens for text in answer.texts],
            seconds,
        )


class RequestLog:
    """A file to which each answered request adds a line.

    A line has the mean loss of each prompt by the model that answered it. So a report sees whether texts are less
    likely than those of the validation split. This costs one more pass over the prompt, between two
    steps of the engine. If the file is moved away or deleted, as programs do that rotate logs, a new one is made.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or create it with the mode 0600. Raises UserError: others may read it, or it cannot be."""
        self.path = path
        self._file: FileIO | None = None
        self._is_torn = False
        try:
            self._is_new = not path.exists()
            self._current()
        except OSError as error:
            raise UserError(f"--log {path}: {in_words(error)}") from error

    async def write(self, entry: Entry, thread: EngineThread) -> None:
        """Add the line of a request. What cannot be written is said once, and loses lines, not answers."""
        losses: list[float | None] = []
        with suppress(RefusedRequest):  # the engine has failed meanwhile
            losses = [await thread.call(partial(_mean_loss, thread, ids)) for ids in entry.prompts]
        fields = {name: value for name, value in asdict(entry).items() if name != "prompts"}
        fields["prompt_losses"] = losses or [None] * len(entry.prompts)
        line = json.dumps({"version": VERSION, **fields}, ensure_ascii=False).encode("utf-8", "replace")
        try:
            file = self._current()
            before, self._is_torn = b"\n" * self._is_torn, True
            writing.write_all(file, before + line + b"\n")
            self._is_torn = False
        except (OSError, UserError) as error:
            warn_once(f"requests are not logged: {_in_words(error, self.path)}")

    def _current(self) -> FileIO:
        """The file that has the path now. Raises OSError; UserError: others may read it."""
        if self._file is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                    return self._file
            self.close()
        self._file, self._is_torn = _opened(self.path), False
        if os.fstat(self._file.fileno()).st_mode & OTHERS:
            self.close()
            said = f"--log {self.path}: other users may read it, and it would hold requests: chmod 600 {self.path}"
            raise UserError(said)
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def undo(self) -> None:
        """Close the file, and delete it if it is new: nothing was served."""
        self.close()
        if self._is_new:
            with suppress(OSError):
                writing.remove_file(self.path)


def _in_words(error: OSError | UserError, path: Path) -> str:
    return f"--log {path}: {in_words(error)}" if isinstance(error, OSError) else str(error)


def _opened(path: Path) -> FileIO:
    try:
        return writing.open_new(path, 0o600, path.parent)
    except FileExistsError:
        return writing.open_own(path, appends=True)


def _mean_loss(thread: EngineThread, ids: Sequence[int]) -> float | None:
    """The mean loss of a prompt's tokens but the first, in nats; None: it has one token, or the loss is not finite."""
    values = [one.logprob for one in prompt_logprobs(thread.engine.module, ids, 0) if one is not None]
    mean = -sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None
