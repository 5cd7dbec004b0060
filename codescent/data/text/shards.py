"""In: the tokens of each split, in order. Out: shard files, and a journal from which a killed preparation continues.
Does not encode text. Does not continue files that differ from the journal: then all shards are written again."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.base import writing
from codescent.base.durable import sync_folder
from codescent.base.output import warn
from codescent.base.sealed import read_sealed, write_sealed
from codescent.data.prepared import JOURNAL, SPLITS, hash_problems
from codescent.data.text.request import FORMAT

SHARD_TOKENS = 1 << 26


class Misfit(Exception):
    """A file of an interrupted preparation does not match the journal; the message names it."""


class SplitWriter:
    """The shards of one split: raw little-endian tokens, `train_000000.bin` and so on, of SHARD_TOKENS each.

    `state` is a return value of `sync`: writing continues from there, and later bytes are cut off. Raises Misfit: the
    files do not match `state`.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], state: dict[str, Any] | None = None) -> None:
        state = state or {"shards": [], "characters": 0, "bytes": 0, "documents": 0, "open_tokens": 0}
        if problems := hash_problems(folder, {shard["file"]: shard["sha256"] for shard in state["shards"]}):
            raise Misfit(problems[0])
        self._folder, self._split, self._dtype = folder, split, dtype
        self.shards: list[dict[str, Any]] = state["shards"]
        self.characters: int = state["characters"]
        self.num_bytes: int = state["bytes"]  # of the text, in UTF-8
        self.documents: int = state["documents"]
        self._open_tokens: int = state["open_tokens"]
        self._digest = hashlib.sha256()
        self._stream: io.FileIO | None = self._reopen(state["open_sha256"]) if self._open_tokens else None

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        closed: int = sum(shard["tokens"] for shard in self.shards)
        return closed + self._open_tokens

    def write(self, tokens: npt.NDArray[Any]) -> None:
        """Append tokens, in as many shards as they need."""
        while len(tokens):
            if self._stream is None:
                self._stream = writing.open_new(self._path(), anew=True)  # closing it on a full disk flushes nothing
            part = tokens[: SHARD_TOKENS - self._open_tokens].astype(self._dtype, copy=False)
            data = part.tobytes()
            rest = memoryview(data)
            while rest:
                rest = rest[self._stream.write(rest) :]
            self._digest.update(data)
            self._open_tokens += len(part)
            tokens = tokens[len(part) :]
            if self._open_tokens == SHARD_TOKENS:
                self._close_shard()

    def sync(self) -> dict[str, Any]:
        """Force the written tokens to the disk (fsync). Returns the state from which a new `SplitWriter` continues."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())
        opened = {"open_tokens": self._open_tokens, "open_sha256": self._digest.hexdigest()}
        return {"shards": self.shards, **opened, **self._counts()}

    def finish(self) -> dict[str, Any]:
        """Close the last shard. Returns the split's part of the dataset's description."""
        self._close_shard()
        return {**self._counts(), "tokens": self.num_tokens, "shards": self.shards}

    def abandon(self) -> None:
        """Close the open file. A new `SplitWriter` cuts off the tokens after the last `sync`."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _counts(self) -> dict[str, Any]:
        return {"characters": self.characters, "bytes": self.num_bytes, "documents": self.documents}

    def _path(self) -> Path:
        return self._folder / f"{self._split}_{len(self.shards):06d}.bin"

    def _reopen(self, sha256: str) -> io.FileIO:
        """Reopen the unfinished shard, cut after its recorded tokens. Raises Misfit: they do not have `sha256`."""
        path, left_bytes = self._path(), self._open_tokens * self._dtype.itemsize
        try:
            stream = writing.open_own(path, self._folder.parent)
        except FileNotFoundError as error:
            raise Misfit(f"{path}: missing") from error
        while data := stream.read(min(left_bytes, 1 << 20)):
            self._digest.update(data)
            left_bytes -= len(data)
        if self._digest.hexdigest() != sha256:
            stream.close()
            raise Misfit(f"{path}: changed: sha256 {self._digest.hexdigest()}, expected {sha256}")
        stream.truncate()
        return stream

    def _close_shard(self) -> None:
        if self._stream is None:
            return
        self.sync()
        self._stream.close()
        name, sha256 = self._path().name, self._digest.hexdigest()
        self.shards.append({"file": name, "tokens": self._open_tokens, "sha256": sha256})
        self._stream, self._open_tokens, self._digest = None, 0, hashlib.sha256()


class ShardWriter:
    """Both splits and the journal of a preparation with one tokenizer.

    The journal is written after its data is on the disk. So a kill at any moment leaves a valid journal, and at worst
    some later bytes, which `SplitWriter` cuts off. If journal, shards and tokenizer do not match, a warning is printed
    and all shards are written again.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], tokenizer_sha256: str) -> None:
        self._folder, self._dtype, self._tokenizer_sha256 = folder, dtype, tokenizer_sha256
        try:
            self._start_from(self._read_journal())
        except Misfit as problem:
            warn(f"{problem}: all tokens of this preparation are encoded again")
            for stale in (folder / JOURNAL, *(path for split in SPLITS for path in folder.glob(f"{split}_*.bin"))):
                writing.remove_file(stale, folder.parent, missing_ok=True)
            self._start_from({})

    def _start_from(self, state: dict[str, Any]) -> None:
        self.chunks_done: int = state.get("chunks_done", 0)
        self.forced_cuts: int = state.get("forced_cuts", 0)
        self.splits = {split: SplitWriter(self._folder, split, self._dtype, state.get(split)) for split in SPLITS}

    def _read_journal(self) -> dict[str, Any]:
        path = self._folder / JOURNAL
        if not path.exists():
            return {}
        state = read_sealed(path)
        if state is None or state.get("format") != FORMAT:
            raise Misfit(f"{path}: damaged, or of an earlier version")
        if state["tokenizer"] != self._tokenizer_sha256:
            raise Misfit(f"{path}: written with another tokenizer")
        return state

    def journal(self) -> None:
        """Write the journal: a killed preparation continues from this point."""
        state = {split: writer.sync() for split, writer in self.splits.items()}
        sync_folder(self._folder)
        counts = {"chunks_done": self.chunks_done, "forced_cuts": self.forced_cuts}
        write_sealed(self._folder / JOURNAL, {"format": FORMAT, "tokenizer": self._tokenizer_sha256, **counts, **state})

    def finish(self) -> dict[str, Any]:
        """Close all shards. Returns the part "splits" of the dataset's description."""
        described = {split: writer.finish() for split, writer in self.splits.items()}
        sync_folder(self._folder)
        return described

    def abandon(self) -> None:
        """Close the open files without a journal entry."""
        for writer in self.splits.values():
            writer.abandon()
