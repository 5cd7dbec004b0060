"""In: a run folder, one of its checkpoints, or a Hugging Face folder. Out: an engine with its tokenizer and template.
Does not serve or print: the commands do."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from codescent import models
from codescent.base.cores import memory_bytes
from codescent.base.device import free_memory
from codescent.base.device_kinds import GPUS
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.published import in_words
from codescent.base.reading import read_json
from codescent.build import saved_plan
from codescent.data.tokenizers.tokenizer import Tokenizer, of_text
from codescent.huggingface.folder import CONFIG, Folder, open_folder
from codescent.huggingface.read import box
from codescent.huggingface.tokens import GENERATION, tokenizer_text
from codescent.inference.engine import Engine
from codescent.inference.layouts import store_for_few_tokens_
from codescent.inference.reader import page_bytes
from codescent.inference.schedule import Capacity
from codescent.inference.trained import Trained, computes_bf16, device_of, find, module_of
from codescent.models.decoder import Decoder
from codescent.operators.products import sum_wide
from codescent.record import CHECKPOINTS, RunFolder
from codescent.tasks.conversations import end_of_turn
from codescent.tasks.conversations.chat_files import read_chat_files
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens
from codescent.tasks.conversations.kept import has_chat_template
from codescent.tasks.task import Prompts

PAGE_SIZE = 16
STEP_TOKENS = 512
COPIES_SHARE = 0.25
"""Of the memory that copies of matrices may take (`layouts`)."""
_SHARE = {"cpu": 0.5}
"""Of the memory that keys and values may take if the user does not say it; of a GPU 0.9 of what is free."""


@dataclass(frozen=True)
class Opened:
    """An engine, and what a user may want to know of its model.

    Attributes:
        engine: it.
        tokenizer: of the model.
        prompts: encodes a prompt, and knows which token ends a text.
        chat: the model's chat template; None: it has none.
        name: of the run or folder.
        which: what of it is used, in words, such as "step 400"; "": all there is.
    """

    engine: Engine
    tokenizer: Tokenizer
    prompts: Prompts
    chat: ChatTokens | None
    name: str
    which: str

    @property
    def seq_len(self) -> int:
        """Tokens of a text that the model sees at most."""
        return self.engine.seq_len


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
    where = device_of(device)
    if isinstance(where, str):
        raise UserError(where)
    path = Path(path)
    if _is_huggingface(path):
        if given := [name for name, value in (("best", best), ("step", step is not None), ("ema", ema)) if value]:
            raise UserError(f"{path}: a Hugging Face folder has one set of weights; leave out {', '.join(given)}")
        return _of_folder(path, where, rows, memory)
    run, of_path = _run_of(path)
    if of_path is not None and (best or step is not None):
        raise UserError(f"{path}: names a checkpoint already; leave out best and step")
    trained, tokenizer = find_generating(run, best=best, step=of_path if step is None else step, ema=ema)
    task, request = trained.task, trained.request
    prompts, chat = task.prompts(request, tokenizer), task.chat(request, tokenizer)
    engine = engine_of(trained, tokenizer, where, stops_of(prompts), rows=rows, memory=memory)
    return Opened(engine, tokenizer, prompts, chat, trained.folder.path.name, trained.which)


def find_generating(run: Path, *, best: bool, step: int | None, ema: bool) -> tuple[Trained, Tokenizer]:
    """A run whose model generates text, and its tokenizer; see `trained.find`.

    Raises UserError: all that is missing, at once.
    """
    folder = RunFolder.open(run)
    kind = saved_plan(folder).model.kind
    problems = []
    if not models.generates(kind):
        able = " and ".join(models.GENERATING)
        problems.append(f'{folder.path}: model.kind = "{kind}": only {able} can generate text')
    if not folder.tokenizer.is_file():
        problems.append(f"{folder.tokenizer}: the run folder has no tokenizer, so tokens cannot be decoded to text")
    try:
        trained = find(run, best=best, step=step, ema=ema)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    if problems or trained.tokenizer is None:
        raise UserError(*problems)
    return trained, trained.tokenizer


def engine_of(
    trained: Trained,
    tokenizer: Tokenizer,
    device: torch.device,
    stops: Collection[int],
    *,
    rows: int,
    memory: int | None = None,
) -> Engine:
    """The engine of a run's checkpoint. Releases the lock on it. Raises UserError: see `trained.module_of`."""
    return _engine(module_of(trained, device, as_trained=True), tokenizer, stops, rows, memory)


def stops_of(prompts: Prompts) -> list[int]:
    """The tokens that end a text."""
    return [] if prompts.stop is None else [prompts.stop]


def capacity_of(module: Decoder, rows: int, memory: int | None = None) -> Capacity:
    """Pages for `rows` texts of the model's length, as far as the memory has room.

    Raises UserError: it has no room for one page.
    """
    device, each = module.tok.weight.device, page_bytes(module, PAGE_SIZE)
    if memory is None:
        share = _SHARE.get(device.type, 0.9)
        memory = int(share * (free_memory(device) if device.type in GPUS else memory_bytes()))
    wanted = rows * -(-module.shape.seq_len // PAGE_SIZE)
    pages = min(wanted, memory // each)
    if pages < 1:
        raise UserError(
            f"memory for keys and values: {memory:,} bytes, and a page of {PAGE_SIZE} tokens takes {each:,} bytes"
        )
    return Capacity(rows, pages, PAGE_SIZE, max(STEP_TOKENS, rows))


def _engine(
    module: torch.nn.Module, tokenizer: Tokenizer, stops: Collection[int], rows: int, memory: int | None
) -> Engine:
    assert isinstance(module, Decoder)
    module.eval()
    if module.tok.weight.device.type == "cpu":
        store_for_few_tokens_(module, int(COPIES_SHARE * memory_bytes()))
    capacity = capacity_of(module, rows, memory)
    return Engine(module, tokenizer, capacity, stops=stops, vocab_size=tokenizer.vocab_size)


def _run_of(path: Path) -> tuple[Path, int | None]:
    """The run folder of a path, and the step of the checkpoint that it names; None: it names the run."""
    _, _, number = path.name.rpartition("_")
    if path.parent.name == CHECKPOINTS and number.isdecimal():
        return path.parent.parent, int(number)
    return path, None


def _is_huggingface(path: Path) -> bool:
    """Whether a folder is of Hugging Face, and not a run."""
    return (path / CONFIG).is_file() and not (path / "plan.json").exists()


def _of_folder(path: Path, device: torch.device, rows: int, memory: int | None) -> Opened:
    folder, problems = open_folder(path), list[str]()
    if not models.generates(folder.kind.name):
        able = " and ".join(models.GENERATING)
        problems.append(f'{path}: model_type = "{folder.kind.model_type}": only {able} can generate text')
    if folder.missing:
        problems.append(f"{path}: {', '.join(folder.missing)}: missing: the folder's model has no head")
    text = tokenizer_text(path)
    if text is None:
        problems.append(f"{path}: has no tokenizer that the tokenizers library can read")
    stops, damaged = _ends(path, folder.shape.vocab_size)
    problems += damaged
    if problems or text is None:
        raise UserError(*problems)
    tokenizer = of_text(text, json.loads(text), str(path))
    chat = ChatTokens(ChatTemplate(read_chat_files(path)), tokenizer) if has_chat_template(path) else None
    end = None if chat is None else end_of_turn(chat)
    stops |= set() if end is None else {end}
    if not stops and tokenizer.separator is not None:
        stops = {tokenizer.separator}
    encode = None if chat is None else chat.encode_prompt
    prompts = Prompts(tokenizer, encode, end, default="" if chat is None else "Hello")
    engine = _engine(_module_of(folder, device), tokenizer, stops, rows, memory)
    return Opened(engine, tokenizer, prompts, chat, path.resolve().name, "")


def _ends(path: Path, vocab_size: int) -> tuple[set[int], list[str]]:
    """The tokens that end a text by generation_config.json, else by config.json; and what is wrong with these files."""
    for name in (GENERATION, CONFIG):
        try:
            found: Any = read_json(path / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            return set(), [f"{path / name}: {in_words(error)}"]
        except (ValueError, RecursionError) as error:
            return set(), [f"{path / name}: not JSON ({json_problem(error)})"]
        ends = found.get("eos_token_id") if isinstance(found, dict) else None
        ids = {token for token in (ends if isinstance(ends, list) else [ends]) if type(token) is int}
        if wrong := sorted(token for token in ids if not 0 <= token < vocab_size):
            said = ", ".join(map(str, wrong))
            return set(), [f"{path / name}: eos_token_id {said}: outside the vocabulary of {vocab_size}"]
        if ids:
            return ids, []
    return set(), []


def _module_of(folder: Folder, device: torch.device) -> torch.nn.Module:
    """The folder's model: bf16 if it has only bf16 numbers and the device multiplies them, else fp32 or fp64."""
    facts = models.facts_of(folder.kind.name, folder.shape)
    tensors = {
        name: box(folder, name, tuple(slice(0, size) for size in parts[0].parameter.shape))
        for name, parts in folder.parts.items()
    }
    narrow = computes_bf16(device) and set(folder.dtypes) == {"bf16"}
    module = models.construct(facts)
    wide = torch.float64 if "fp64" in folder.dtypes else torch.float32
    module.load_state_dict({name: tensor.to(wide) for name, tensor in tensors.items()}, assign=True)
    sum_wide()
    return module.to(device, torch.bfloat16 if narrow else None)
