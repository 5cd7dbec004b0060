"""In: chunks of text, in order. Out: each with its token ids, in order, encoded by worker processes or here.
Does not hold more than two chunks per worker at a time."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from codescent.base.cores import available_cores
from codescent.base.errors import UserError
from codescent.data.text.chunks import Chunk
from codescent.data.text.worker import read_answer, write_request
from codescent.data.tokenizers.tokenizer import Tokenizer, encode_segments, token_dtype

WORTH_WORKERS_S = 1.0  # smaller work is finished before workers have started

Encoded = tuple[Chunk, npt.NDArray[Any]]


def choose_workers(asked: int | None, tokenizer: Tokenizer, characters: int) -> int:
    """Number of worker processes: `asked`, or by default one per core if the work is worth their start."""
    if asked is not None:
        return asked
    return available_cores() if characters / tokenizer.chars_per_s > WORTH_WORKERS_S else 1


def encode_here(chunks: Iterable[Chunk], tokenizer: Tokenizer, separate: bool) -> Iterator[Encoded]:
    """Encode in this process."""
    for chunk in chunks:
        yield chunk, encode_segments(tokenizer, chunk.segments, separate)


class WorkerPool:
    """Processes that encode (codescent.data.text.worker), one thread of this process for each.

    Unlike multiprocessing's children they do not import the main module. They end with their input, so that none
    outlives a killed parent.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, separate: bool, num_workers: int) -> None:
        self._dtype = token_dtype(vocab_size)
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers)
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        root = str(Path(__file__).resolve().parents[3])  # workers import the same codescent
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
        }
        mode = "separate" if separate else "join"
        command = [sys.executable, "-m", "codescent.data.text.worker", str(tokenizer_path), mode]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(num_workers):
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
                self._processes.append(process)
                self._idle.put(process)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[Encoded]:
        """Encode chunks; results are in the order of the chunks.

        Raises:
            UserError: a worker was killed (by the system, for memory, or by the user).
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
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for stream in cast(tuple[BinaryIO, BinaryIO], (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):  # its buffer may hold data for the dead process
                    stream.close()

    def _ask(self, chunk: Chunk) -> npt.NDArray[Any]:
        process = self._idle.get()
        try:
            write_request(cast(BinaryIO, process.stdin), chunk.segments)
            data = read_answer(cast(BinaryIO, process.stdout))
        except BrokenPipeError:
            data = None
        finally:
            self._idle.put(process)
        if data is None:
            raise UserError(_cause_of_death(process))
        return np.frombuffer(data, self._dtype)


def _cause_of_death(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"a tokenizer process (pid {process.pid}) {how}, perhaps for want of memory: what was prepared is kept; "
        "run the same command again to continue, with fewer workers if it happens again"
    )
