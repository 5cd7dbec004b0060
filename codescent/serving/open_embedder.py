"""In: the run folder of an encoder, such as BERT. Out: what gives embeddings of texts with its weights.
Does not listen or compute (http_server.py and embedder.py do)."""

from __future__ import annotations

from pathlib import Path

from codescent.base.errors import UserError
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.inference.trained import device_of, find, module_of
from codescent.models.bert.module import Bert
from codescent.serving.embedder import Embedder


def open_embedder(
    run: Path, *, best: bool = False, step: int | None = None, ema: bool = False, device: str = "auto"
) -> tuple[Embedder, str, str]:
    """The embedder of a run's checkpoint, the name of the run, and what of it is used, in words.

    Raises UserError: no such checkpoint or device, or the run has no WordPiece tokenizer.
    """
    where = device_of(device)
    if isinstance(where, str):
        raise UserError(where)
    trained = find(run, best=best, step=step, ema=ema)
    tokenizer = trained.tokenizer
    if not isinstance(tokenizer, WordPiece):
        lacks = "no tokenizer" if tokenizer is None else "a tokenizer without [CLS] and [SEP]"
        raise UserError(f"{run}: has {lacks}, so texts cannot be read")
    module = module_of(trained, where).eval()
    assert isinstance(module, Bert)
    return Embedder(module, tokenizer), trained.folder.path.name, trained.which
