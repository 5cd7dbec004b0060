"""In: a trained decoder; a text file, or the run's validation text. Out: its loss, perplexity and bits per byte.
Does not read the run folder (inference/trained.py does). Does not stream: all tokens of the text are in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from codescent.base.device import offered, wide_dtype
from codescent.base.errors import UserError
from codescent.data.documents import separate_samples
from codescent.data.loader import Batch
from codescent.data.prepared import TOKENIZER
from codescent.data.samples import Samples
from codescent.data.text import corpora
from codescent.data.text.dataset import Dataset
from codescent.data.text.records import Reading
from codescent.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer, document_end
from codescent.tasks.language_model.separate import SeparateDataset
from codescent.tasks.score import fitting
from codescent.tasks.scores import Scores
from codescent.tasks.task import ScoreRequest

DECODED_AT_ONCE = 1 << 16
LARGEST_LOSS = 700.0  # exp of a larger loss overflows
LONGEST_CHARACTER = 4  # bytes in UTF-8
Tokens = npt.NDArray[np.int64]


def score_text(request: ScoreRequest) -> Scores:
    """Score a text, or the run's validation split: each token is predicted from the tokens before it in its window.
    Raises UserError: the text cannot be read, or has no token that could be predicted.
    """
    seq_len, module = request.work.seq_len, request.make_module()
    remarks: list[str] = []
    separate = request.task.data.documents == "separate"
    if request.data is None:
        dataset = request.open_dataset()
        text = dataset.text if isinstance(dataset, SeparateDataset) else dataset
        assert isinstance(text, Dataset)
        name, (tokens, num_bytes, remarks) = request.validation_name(text), _of_split(text)
    else:
        name, (tokens, num_bytes, remarks) = str(request.data), _encoded(request.data, request)
    if len(tokens) < 2:
        raise UserError(f"{name}: {len(tokens)} tokens: at least 2 are needed, to predict one")
    end = _end(request) if separate else None
    predicted = len(tokens) - 1 - (0 if end is None else int((tokens[:-1] == end).sum()))
    nats = _nats(module, tokens, seq_len, request.device, end)
    loss = nats / max(1, predicted)
    perplexity = math.exp(min(loss, LARGEST_LOSS))
    if separate:
        remarks = [*remarks, "(documents are separate: the first token of each is not predicted, so no bits per byte)"]
    bits_per_byte = nats / math.log(2) / num_bytes if num_bytes and not separate else None
    bits = "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte"
    said = [
        f"{name}: {predicted:,} tokens, {num_bytes:,} bytes, in windows of {seq_len}",
        f"loss {loss:.4f}, perplexity {perplexity:.4g}{bits}",
        *remarks,
    ]
    facts = {
        "data": name,
        "tokens": predicted,
        "bytes": num_bytes or None,
        "window": seq_len,
        "loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": bits_per_byte,
        "remarks": remarks,
    }
    return Scores(said, facts)


def _end(request: ScoreRequest) -> int:
    """The token that ends a document. Raises UserError: the run's tokenizer is missing."""
    tokenizer = request.open_tokenizer()
    if tokenizer is None:  # token shards of others: the text has GPT-2's
        dataset = request.open_dataset()
        assert isinstance(dataset, SeparateDataset)
        return dataset.end
    return document_end(tokenizer)[-1]


def _nats(module: nn.Module, tokens: Tokens, seq_len: int, device: torch.device, end: int | None = None) -> float:
    """The sum of the losses of all tokens but the first, in windows of `seq_len`, one after the other.

    `end`: the last token of a document, if no document sees another one.
    """
    whole = (len(tokens) - 1) // seq_len
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len] if whole else tokens[None][:0]
    step = fitting(module, seq_len, device)
    pieces = [windows[first : first + step] for first in range(0, whole, step)]
    if whole * seq_len + 1 < len(tokens):
        pieces.append(tokens[None, whole * seq_len :])
    nats = torch.zeros((), dtype=wide_dtype(device), device=device)
    for piece in pieces:
        samples = _samples(piece, end)
        batch = Batch.of(samples)
        batch = (batch.pinned() if offered(device).pins else batch).to(device, torch.float32)
        with torch.no_grad():
            nats += module(batch.inputs, batch.targets, **batch.extras).to(nats.dtype)
    return nats.item()


def _samples(piece: Tokens, end: int | None) -> Samples:
    """Windows [n, T + 1] as samples of T positions."""
    inputs, targets = piece[:, :-1].copy(), piece[:, 1:].copy()
    return Samples(inputs, targets) if end is None else separate_samples(inputs, targets, end)


def _of_split(dataset: Dataset) -> tuple[Tokens, int, list[str]]:
    """The tokens of a validation split, the number of bytes that are predicted, and lines about this number.

    The split is scored as `_encoded` scores its text: `_front` is in front, and no separator at the end. The bytes are
    those of the text, because a tokenizer may lose letters. Data without them gives the bytes of its tokens.
    """
    split, tokenizer = dataset.validation, dataset.tokenizer
    tokens = split.span(0, split.num_tokens)
    if tokenizer is None:
        return tokens, 0, []
    front, extra = _front(tokenizer), len(document_end(tokenizer)) - len(tokenizer.closing)
    if extra and len(tokens) and tokens[-1] == tokenizer.separator:
        tokens = tokens[:-extra]
    if tokens[: len(front)].tolist() != front:
        tokens = np.append(np.array(front, np.int64), tokens)
    num_bytes: int | None = dataset.description["splits"]["validation"].get("bytes")
    if num_bytes is not None:
        return tokens, num_bytes - (0 if front else sum(_bytes_of(tokens[:1], tokenizer))), []
    remark = (
        "(the bytes are those of the decoded tokens: this data does not record the bytes of its text; they differ if "
        "the tokenizer loses letters)"
    )
    return tokens, sum(_bytes_of(tokens[1:], tokenizer)), [remark]


def _front(tokenizer: Tokenizer) -> list[int]:
    """The ids before the first token of a text that is scored: what begins each text, or else the separator."""
    separator = () if tokenizer.separator is None else (tokenizer.separator,)
    return list(tokenizer.opening or separator)


def _encoded(data: Path, request: ScoreRequest) -> tuple[Tokens, int, list[str]]:
    """The tokens of a text, the number of bytes that are predicted, and lines about how it was read.

    Each text begins and ends as the tokenizer says, such as with <s>. If nothing begins it, the separator is put in
    front, if there is one. So the first token is predicted too.
    """
    tokenizer = request.open_tokenizer()
    if tokenizer is None:
        raise UserError(f"{request.task.run / TOKENIZER}: the run has no tokenizer, which is needed to read {data}")
    reading = Reading(request.task.data.text_key, request.task.data.as_text)
    texts = list(_documents(data, reading))
    begin, front = list(tokenizer.opening), _front(tokenizer)
    parts = [np.array(front[len(begin) :], np.int64)]
    for number, text in enumerate(texts):
        end = document_end(tokenizer) if number + 1 < len(texts) else tokenizer.closing
        parts += [np.array(begin, np.int64), tokenizer.encode(text).astype(np.int64), np.array(end, np.int64)]
    tokens = np.concatenate(parts)
    num_bytes = sum(len(text.encode("utf-8", "surrogateescape")) for text in texts)
    if not front and len(tokens):  # the first token is not predicted
        num_bytes -= sum(_bytes_of(tokens[:1], tokenizer))
    return tokens, num_bytes, list(reading.noticed.remarks())


def _documents(data: Path, reading: Reading) -> Iterator[str]:
    parts: list[str] = []
    for source in corpora.resolve(str(data)).sources:
        for block in source.blocks(reading):
            parts.append(block.text)
            if block.ends_document:
                yield "".join(parts)
                parts.clear()


def _bytes_of(tokens: Tokens, tokenizer: Tokenizer) -> Iterator[int]:
    """Number of UTF-8 bytes of each block of tokens. No character is split between two blocks."""
    controls = {*tokenizer.opening, *document_end(tokenizer)}
    text_tokens = tokens[~np.isin(tokens, list(controls))] if controls else tokens
    first = 0
    while first < len(text_tokens):
        stop = min(first + DECODED_AT_ONCE, len(text_tokens))
        text = tokenizer.decode(text_tokens[first:stop].tolist())
        while text.endswith(REPLACEMENT) and stop < min(first + DECODED_AT_ONCE + LONGEST_CHARACTER, len(text_tokens)):
            stop += 1
            text = tokenizer.decode(text_tokens[first:stop].tolist())
        yield len(text.encode("utf-8", "surrogateescape"))
        first = stop
