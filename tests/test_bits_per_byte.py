"""In: texts, and tokenizers that keep or lose letters. Out: bits per byte of a run's own split, which are those of its
text by --data. Does not train: a fixed table of pairs of tokens scores."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from questions import vocabulary
from torch import Tensor, nn
from torch.nn import functional

from codescent.base.sealed import write_sealed
from codescent.config.sections import Data, Model
from codescent.data.text.dataset import Dataset
from codescent.data.tokenizers.tokenizer import load
from codescent.plan import Work
from codescent.tasks.language_model import LanguageModel
from codescent.tasks.language_model.evaluate import score_text
from codescent.tasks.task import ScoreRequest, TaskRequest

PROSE = "the man said that the world is large and round. " * 90
ODD = "Der Käufer sagt: »Größe ist schön«. 北京市 и Москва – ½ Preis!\n" * 12
ROWS = [ODD, "é", "", PROSE[:200], ODD * 2]


class Pairs(nn.Module):
    """The sum of the losses of a fixed, random table: a logit for each pair of tokens."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.table = nn.Parameter(table)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return functional.cross_entropy(self.table[inputs_BT].flatten(0, 1), targets_BT.flatten(), reduction="sum")


def scored(data: Data, path: Path, file: Path | None = None) -> list[str]:
    """What `codescent evaluate` says of the validation split, or of a file."""
    task, request = LanguageModel(), TaskRequest(data, Model(kind="gpt2"))
    dataset = task.open(request, path)
    assert isinstance(dataset, Dataset)
    module = Pairs(dataset.vocab_size)
    score = ScoreRequest(
        request,
        Work(16, 1, 1, 1, "fp32"),
        torch.device("cpu"),
        lambda: module,
        lambda: dataset,
        lambda: load(path / "tokenizer.json"),
        file,
    )
    scores = score_text(score)
    facts = scores.facts
    assert f"{facts['tokens']:,} tokens, {facts['bytes'] or 0:,} bytes, in windows of" in scores.lines[0]
    assert f"loss {facts['loss']:.4f}, perplexity {facts['perplexity']:.4g}" in scores.lines[1]
    assert facts["bits_per_byte"] is None or f"{facts['bits_per_byte']:.4f} bits per byte" in scores.lines[1]
    return list(scores.lines)


def prepared(tmp_path: Path, tokenizer: str, **keys: object) -> tuple[Data, Path]:
    data = Data.model_construct(tokenizer=tokenizer, folder=tmp_path / "datasets", **keys)
    return data, LanguageModel().prepare(TaskRequest(data, Model(kind="gpt2")), progress=False)


@pytest.mark.parametrize("tokenizer", ["bert", "byte", "char", "bpe:300"])
@pytest.mark.parametrize("form", ["text", "rows", "fraction"])
def test_the_bytes_are_those_of_the_text(tmp_path: Path, tokenizer: str, form: str) -> None:
    """BERT's tokenizer drops accents and case, and has one token for an unknown word."""
    rows = [json.dumps({"text": row}, ensure_ascii=row == "é") for row in ROWS]
    held = tmp_path / ("held.jsonl" if form == "rows" else "held.txt")
    held.write_text("\n".join(rows) if form == "rows" else ODD)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(("é" if form == "rows" else "") + PROSE + ODD)
    name = f"bert:{vocabulary(tmp_path)}" if tokenizer == "bert" else tokenizer
    keys = {"validation_fraction": len(ODD) / len(PROSE + ODD)} if form == "fraction" else {"validation": str(held)}
    data, path = prepared(tmp_path, name, corpus=str(corpus), **keys)
    own, other = scored(data, path), scored(data, path, held)
    assert [line.partition(": ")[2] or line for line in own] == [line.partition(": ")[2] or line for line in other]
    size = len("".join(ROWS).encode()) if form == "rows" else len(ODD.encode())
    unseen = len(ODD[0].encode()) if tokenizer == "char" else 0  # the first token is not predicted
    (count,) = re.findall(r"([\d,]+) bytes", own[0])
    assert int(count.replace(",", "")) == size - unseen
    loss, bits = float(re.findall(r"loss ([\d.]+)", own[1])[0]), float(re.findall(r"([\d.]+) bits", own[1])[0])
    (tokens,) = re.findall(r": ([\d,]+) tokens", own[0])
    assert bits == pytest.approx(loss * int(tokens.replace(",", "")) / math.log(2) / (size - unseen), rel=1e-3)


def test_data_of_an_earlier_format_is_read_and_says_what_it_does_not_record(tmp_path: Path) -> None:
    held, corpus = tmp_path / "held.txt", tmp_path / "corpus.txt"
    held.write_text(ODD)
    corpus.write_text(PROSE + ODD)
    name = f"bert:{vocabulary(tmp_path)}"
    fraction = len(ODD) / len(PROSE + ODD)
    data, path = prepared(tmp_path, name, corpus=str(corpus), validation_fraction=fraction)
    description = json.loads((path / "description.json").read_text())
    for split in description["splits"].values():
        split.pop("bytes")
    write_sealed(path / "description.json", {**description, "format": "codescent tokens 2"})
    assert prepared(tmp_path, name, corpus=str(corpus), validation_fraction=fraction)[1] == path
    own, other = scored(data, path), scored(data, path, held)
    assert own[1].partition(" bits")[0] != other[1].partition(" bits")[0]
    assert own[2:] == [
        "(the bytes are those of the decoded tokens: this data does not record the bytes of its text; they differ if "
        "the tokenizer loses letters)"
    ]


def test_of_token_shards_the_bytes_are_those_of_the_decoded_tokens(tmp_path: Path) -> None:
    ids = np.frombuffer((PROSE + ODD).encode(), np.uint8).astype("<u2")
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes(ids.tobytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps({"codescent_tokenizer": "byte"}))
    own = scored(Data.model_construct(corpus=str(tmp_path)), tmp_path)
    assert f"{len(ids):,} tokens, {len(ids):,} bytes" in own[0]
    assert own[2].startswith("(the bytes are those of the decoded tokens")
