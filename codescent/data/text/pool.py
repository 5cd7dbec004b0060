"""In: chunks of text, in order. Out: each with its token ids, in order, encoded by worker processes or by this one.
Does not hold more than two chunks per worker at a time. A worker (this file, run by -m) does not import torch."""

from __future__ import annotations

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
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.data.text.chunks import Chunk
from codescent.data.tokenizers.tokenizer import Tokenizer, encode_segments, load

Encoded = tuple[Chunk, npt.NDArray[Any]]


def encode_here(chunks: Iterable[Chunk], tokenizer: Tokenizer, separate: bool) -> Iterator[Encoded]:
    """Encode in this process."""
    for chunk in chunks:
        yield chunk, encode_segments(tokenizer, chunk.segments, separate)


class WorkerPool:
    """Processes that encode, and one thread of this process for each.

    Unlike multiprocessing's children they do not import the main module. They end when their connection does, so that
    none outlives a killed parent.
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
        command = [sys.executable, "-m", __name__, str(tokenizer_path), "separate" if separate else "join"]
        try:
            for _ in range(num_workers):
                ours, theirs = Pipe()
                with theirs:  # the child has its copy; what its libraries print goes to the standard error
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

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[Encoded]:
        """Encode chunks; results are in the order of the chunks.

        Raises UserError: the tokenizer refused a text, or a worker was killed; RuntimeError: a worker failed.
        """
        waiting: deque[tuple[Chunk, Future[npt.NDArray[Any]]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, self._threads.submit(self._ask, chunk)))
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

    def _ask(self, chunk: Chunk) -> npt.NDArray[Any]:
        process, connection = worker = self._idle.get()
        try:
            connection.send(chunk.segments)
            answer: npt.NDArray[Any] | Exception = connection.recv()
        except (EOFError, OSError) as error:
            raise UserError(_cause_of_death(process)) from error
        finally:
            self._idle.put(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _cause_of_death(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"a tokenizer process (pid {process.pid}) {how}, perhaps for want of memory: what was prepared is kept; "
        "run the same command again to continue, with fewer workers if it happens again"
    )


def _answer(tokenizer: Tokenizer, segments: list[tuple[str, bool]], separate: bool) -> npt.NDArray[Any] | Exception:
    try:
        return encode_segments(tokenizer, segments, separate)
    except UserError as error:
        return error
    except Exception:  # the parent raises it
        return RuntimeError(f"a tokenizer process failed:\n{traceback.format_exc()}")


def _serve(tokenizer_path: str, mode: str, handle: str) -> None:
    """Answer requests until the parent ends the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    tokenizer, connection = load(Path(tokenizer_path)), Connection(int(handle))
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            connection.send(_answer(tokenizer, connection.recv(), mode == "separate"))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
