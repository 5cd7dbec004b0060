"""In: a tokenizer's path, then texts on standard input. Out: their token ids on standard output, until the input ends.
Does not import torch and does not open other files. A parent's death ends the input, and so the worker."""

from __future__ import annotations

import os
import signal
import struct
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from codescent.base.errors import UserError
from codescent.data.tokenizers.tokenizer import encode_segments, load

COUNT = struct.Struct("<Q")
SEGMENT = struct.Struct("<QB")  # bytes of UTF-8, whether a document ends with them
ANSWER = struct.Struct("<BQ")  # outcome, number of bytes that follow (token ids, or the error)
FAILED, ENCODED, REFUSED = range(3)


def write_request(stream: BinaryIO, segments: Sequence[tuple[str, bool]]) -> None:
    """Send texts to a worker."""
    texts = [(text.encode(), ends_document) for text, ends_document in segments]
    heads = (SEGMENT.pack(len(data), ends_document) for data, ends_document in texts)
    stream.write(b"".join([COUNT.pack(len(texts)), *heads, *(data for data, _ in texts)]))
    stream.flush()


def read_request(stream: BinaryIO) -> list[tuple[str, bool]] | None:
    """The texts of a request, or None at the end of the input."""
    head = stream.read(COUNT.size)
    if len(head) < COUNT.size:
        return None
    (count,) = COUNT.unpack(head)
    heads = list(SEGMENT.iter_unpack(stream.read(count * SEGMENT.size)))
    return [(stream.read(size).decode(), bool(ends_document)) for size, ends_document in heads]


def read_answer(stream: BinaryIO) -> bytes | None:
    """The token ids of a request as bytes; None: the worker has ended.

    Raises:
        UserError: the tokenizer refused the text.
        RuntimeError: the worker failed, with its traceback.
    """
    head = stream.read(ANSWER.size)
    if len(head) < ANSWER.size:
        return None
    outcome, size = ANSWER.unpack(head)
    data = stream.read(size)
    if len(data) < size:
        return None
    if outcome == REFUSED:
        raise UserError(data.decode())
    if outcome == FAILED:
        raise RuntimeError(f"a tokenizer process failed:\n{data.decode()}")
    return data


def serve(tokenizer_path: Path, separate: bool, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the input ends."""
    tokenizer = load(tokenizer_path)
    while (segments := read_request(requests)) is not None:
        try:
            data, outcome = encode_segments(tokenizer, segments, separate).tobytes(), ENCODED
        except UserError as error:
            data, outcome = str(error).encode(), REFUSED
        except Exception:  # the parent raises it
            data, outcome = traceback.format_exc().encode(), FAILED
        answers.write(ANSWER.pack(outcome, len(data)) + data)
        answers.flush()


def main() -> None:
    """Serve on the standard streams. Other output goes to the standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(Path(sys.argv[1]), sys.argv[2] == "separate", sys.stdin.buffer, answers)
    except BrokenPipeError:
        os._exit(1)  # the parent is gone


if __name__ == "__main__":
    main()
