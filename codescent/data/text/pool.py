"""In: chunks of text, a tokenizer. Out: the chunks in the same order with their token ids, encoded by several threads.
Does not hold more than two chunks per thread at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy.typing as npt

from codescent.data.text.chunks import TextChunk
from codescent.data.tokenizers.tokenizer import Tokenizer, encode_segments

Encoded = tuple[TextChunk, npt.NDArray[Any]]


def encode_chunks(
    chunks: Iterable[TextChunk], tokenizer: Tokenizer, separate: bool, num_threads: int
) -> Generator[Encoded, None, None]:
    """Encode chunks. tiktoken and the tokenizers library compute ids beside Python, so threads do so at the same time.

    Raises UserError: the tokenizer refused a text.
    """
    threads = ThreadPoolExecutor(num_threads)
    waiting: deque[tuple[TextChunk, Future[npt.NDArray[Any]]]] = deque()
    try:
        for chunk in chunks:
            future = threads.submit(encode_segments, tokenizer, chunk.segments, separate, chunk.begins)
            waiting.append((chunk, future))
            if len(waiting) >= 2 * num_threads:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    finally:
        threads.shutdown(cancel_futures=True)
