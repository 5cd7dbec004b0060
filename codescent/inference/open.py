"""In: a run folder, one of its checkpoints, or a Hugging Face folder. Out: an engine with its tokenizer and template.
Does not serve or print: the commands do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.inference.engine import Engine
from codescent.tasks.conversations.chat_template import ChatTokens
from codescent.tasks.task import Prompts


@dataclass(frozen=True)
class Opened:
    """An engine, and what a user may want to know of its model.

    Attributes:
        engine: it.
        tokenizer: of the model.
        prompts: encodes a prompt, and knows which token ends a text.
        chat: the model's chat template; None: it has none.
        name: of the run or folder.
        which: what of it is used, in words, such as "step 400".
        seq_len: tokens of a text that the model sees at most.
    """

    engine: Engine
    tokenizer: Tokenizer
    prompts: Prompts
    chat: ChatTokens | None
    name: str
    which: str
    seq_len: int


def open_engine(
    path: Path,
    *,
    best: bool = False,
    step: int | None = None,
    ema: bool = False,
    device: str = "auto",
    rows: int = 16,
    memory: int | None = None,
) -> Opened:
    """Open a model for generation.

    Args:
        path: a run folder, a checkpoint in it, or a Hugging Face folder.
        best, step, ema: which checkpoint of a run: see `trained.find`. Not for a Hugging Face folder.
        device: "auto", "cpu", "cuda", "xpu" or "mps".
        rows: requests that run at a time.
        memory: bytes for keys and values; None: a share of what is free.

    Raises:
        UserError: all problems: no such folder, no tokenizer, a model that generates no text, and so on.
    """
    raise NotImplementedError
