"""In: the tokens of each split, in order. Out: shard files, and a journal by which a killed preparation continues.
Does not encode; knows nothing of text. What the journal does not describe to the last bit is made again."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.base.durable import sync_folder
from codescent.base.output import warn
from codescent.base.sealed import read_sealed, write_sealed
from codescent.data.prepared import JOURNAL, SPLITS, changed

SHARD_TOKENS = 1 << 26


class Misfit(Exception):
    """Which file of an interrupted preparation is not as the journal says."""


class SplitWriter:
    """The shards of one split: raw little-endian tokens, `train_000000.bin` and so on, of SHARD_TOKENS each.

    `state` is what `sync` returned before a kill; the file that was open is cut back to it. Raises Misfit: the files
    have other bytes.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], state: dict[str, Any] | None = None) -> None:
        state = state or {"shards": [], "characters": 0, "documents": 0, "open_tokens": 0}
        if problems := changed(folder, {shard["file"]: shard["sha256"] for shard in state["shards"]}):
            raise Misfit(problems[0])
        self._folder, self._split, self._dtype = folder, split, dtype
        self.shards: list[dict[str, Any]] = state["shards"]
        self.characters: int = state["characters"]
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
        """Append tokens, into as many shards as they need."""
        while len(tokens):
            if self._stream is None:
                self._stream = self._path().open("wb", buffering=0)  # nothing is left to flush when the disk is full
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
        """Bring what was written to the disk. Returns the state from which the constructor continues."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())
        opened = {"open_tokens": self._open_tokens, "open_sha256": self._digest.hexdigest()}
        return {"shards": self.shards, **opened, **self._counts()}

    def finish(self) -> dict[str, Any]:
        """Close the last shard. Returns the split's part of the dataset's description."""
        self._close_shard()
        return {**self._counts(), "tokens": self.num_tokens, "shards": self.shards}

    def abandon(self) -> None:
        """Close the open file; what it holds past the last `sync` does not count."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _counts(self) -> dict[str, Any]:
        return {"characters": self.characters, "documents": self.documents}

    def _path(self) -> Path:
        return self._folder / f"{self._split}_{len(self.shards):06d}.bin"

    def _reopen(self, sha256: str) -> io.FileIO:
        """The open shard, cut back to its tokens, whose sha256 is given. Raises Misfit: it has others."""
        path, left_bytes = self._path(), self._open_tokens * self._dtype.itemsize
        try:
            stream = path.open("r+b", buffering=0)
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

    The journal is written after the data that it describes is on the disk: a kill at any moment leaves a valid
    journal, and at worst some bytes past it that `SplitWriter` cuts off. Where journal, shards and tokenizer do not fit
    each other, all shards are made again, which is said on the standard error.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], tokenizer_sha256: str) -> None:
        self._folder, self._dtype, self._tokenizer_sha256 = folder, dtype, tokenizer_sha256
        try:
            self._go_on(self._read_journal())
        except Misfit as problem:
            warn(f"{problem}: the tokens of this preparation are made again")
            for made in (folder / JOURNAL, *(path for split in SPLITS for path in folder.glob(f"{split}_*.bin"))):
                made.unlink(missing_ok=True)
            self._go_on({})

    def _go_on(self, state: dict[str, Any]) -> None:
        self.chunks_done: int = state.get("chunks_done", 0)
        self.forced_cuts: int = state.get("forced_cuts", 0)
        self.splits = {split: SplitWriter(self._folder, split, self._dtype, state.get(split)) for split in SPLITS}

    def _read_journal(self) -> dict[str, Any]:
        path = self._folder / JOURNAL
        if not path.exists():
            return {}
        state = read_sealed(path)
        if state is None:
            raise Misfit(f"{path}: damaged, or of an earlier version")
        if state["tokenizer"] != self._tokenizer_sha256:
            raise Misfit(f"{path}: of another tokenizer")
        return state

    def journal(self) -> None:
        """Note what is done, so that a killed preparation continues after it."""
        state = {split: writer.sync() for split, writer in self.splits.items()}
        sync_folder(self._folder)
        counts = {"chunks_done": self.chunks_done, "forced_cuts": self.forced_cuts}
        write_sealed(self._folder / JOURNAL, {"tokenizer": self._tokenizer_sha256, **counts, **state})

    def finish(self) -> dict[str, Any]:
        """Close all shards. Returns the part "splits" of the dataset's description."""
        described = {split: writer.finish() for split, writer in self.splits.items()}
        sync_folder(self._folder)
        return described

    def abandon(self) -> None:
        """Close the open files without a journal entry."""
        for writer in self.splits.values():
            writer.abandon()
