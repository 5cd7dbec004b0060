"""In: chunks of text, a tokenizer. Out: the chunks in the same order with their token ids, encoded by worker processes.
Does not hold more than two chunks per worker at a time. A worker (this file, run by -m) does not import torch."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.data.text.chunks import TextChunk
from codescent.data.tokenizers.tokenizer import Tokenizer, encode_segments, load

Encoded = tuple[TextChunk, npt.NDArray[Any]]


def encode_in_process(chunks: Iterable[TextChunk], tokenizer: Tokenizer, separate: bool) -> Iterator[Encoded]:
    """Encode in this process."""
    for chunk in chunks:
        yield chunk, encode_segments(tokenizer, chunk.segments, separate, chunk.begins)


class WorkerPool:
    """Worker processes that encode text, with one thread of this process for each worker.

    Unlike the children of multiprocessing, a worker does not import the main module. A worker ends when its connection
    closes, so it does not outlive a killed parent.
    """

    def __init__(self, tokenizer_path: Path, separate: bool, num_workers: int) -> None:
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers)
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._idle: queue.SimpleQueue[tuple[subprocess.Popen[bytes], Connection]] = queue.SimpleQueue()
        root = str(Path(__file__).resolve().parents[3])  # workers import the same codescent
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-m", __name__, str(tokenizer_path), "separate" if separate else "join"]
        try:
            for _ in range(num_workers):
                ours, theirs = Pipe()
                with theirs:  # the worker inherits a copy; its standard output goes to the standard error
                    handle = theirs.fileno()
                    process = subprocess.Popen(
                        [*command, str(handle)],
                        stdin=subprocess.DEVNULL,
                        stdout=2,
                        env=environment,
                        pass_fds=[handle],
                    )
                self._workers.append((process, ours))
                self._idle.put((process, ours))
        except BaseException:
            self.close()
            raise

    def encode(self, chunks: Iterable[TextChunk]) -> Iterator[Encoded]:
        """Encode chunks; results are in the order of the chunks.

        Raises UserError: the tokenizer refused a text, or a worker was killed; RuntimeError: a worker failed.
        """
        waiting: deque[tuple[TextChunk, Future[npt.NDArray[Any]]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, self._threads.submit(self._encode_chunk, chunk)))
            if len(waiting) >= 2 * self._num_workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()

    def close(self) -> None:
        """Kill the workers and wait for them."""
        for process, _ in self._workers:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process, connection in self._workers:
            process.wait()
            connection.close()

    def _encode_chunk(self, chunk: TextChunk) -> npt.NDArray[Any]:
        process, connection = worker = self._idle.get()
        try:
            texts = [text.encode() for text, _ in chunk.segments]
            ends = [ends_document for _, ends_document in chunk.segments]
            _send(connection, {"bytes": list(map(len, texts)), "ends": ends, "begins": chunk.begins}, b"".join(texts))
            answer, tokens = _receive(connection)
        except (EOFError, OSError) as error:
            raise UserError(_why_it_ended(process)) from error
        finally:
            self._idle.put(worker)
        if "refused" in answer:
            raise UserError(*answer["refused"])
        if "failed" in answer:
            raise RuntimeError(f"a tokenizer process failed:\n{answer['failed']}")
        return np.frombuffer(tokens, answer["dtype"])


def _why_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"a tokenizer process (pid {process.pid}) {how}, perhaps because memory ran out: the finished part is saved; "
        "run the same command again to continue; if the error comes back, use fewer workers"
    )


def _send(connection: Connection, header: dict[str, Any], data: bytes) -> None:
    """Send one message: a JSON header, then bytes."""
    connection.send_bytes(json.dumps(header).encode())
    connection.send_bytes(data)


def _receive(connection: Connection) -> tuple[dict[str, Any], bytes]:
    """Receive one message of `_send`: its header and bytes."""
    return json.loads(connection.recv_bytes()), connection.recv_bytes()


def _answer(tokenizer: Tokenizer, header: dict[str, Any], data: bytes, separate: bool) -> tuple[dict[str, Any], bytes]:
    """The reply to a request: a header and the tokens, or a header with the error, which the parent raises."""
    stops = list(accumulate(header["bytes"], initial=0))
    texts = (data[begin:stop].decode() for begin, stop in pairwise(stops))
    try:
        segments = zip(texts, header["ends"], strict=True)
        tokens = encode_segments(tokenizer, segments, separate, header["begins"])
        return {"dtype": tokens.dtype.str}, tokens.tobytes()
    except UserError as error:
        return {"refused": error.problems}, b""
    except Exception:
        return {"failed": traceback.format_exc()}, b""


def _serve(tokenizer_path: str, mode: str, handle: str) -> None:
    """Answer requests until the parent ends the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    tokenizer, connection = load(Path(tokenizer_path)), Connection(int(handle))
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            _send(connection, *_answer(tokenizer, *_receive(connection), mode == "separate"))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
