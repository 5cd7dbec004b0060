"""In: the URL and sha256 of a published file. Out: the path of a local copy, downloaded if there is none.
Does not accept or replace a local copy whose sha256 is wrong: this is an error."""

from __future__ import annotations

import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from codescent.base import writing
from codescent.base.cache import cache_folder
from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.published import in_words

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Published:
    """A public file: its path under the data folder, its size and hash, and its URL."""

    name: str
    size_bytes: int
    sha256: str
    url: str


SHAKESPEARE = Published(
    "tinyshakespeare/input.txt",
    1_115_394,
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
)
OPENWEBTEXT = Published(
    "openwebtext/openwebtext.tar.xz",
    12_880_189_440,
    "9fe39d154c5bc67da8c359415372b79510eb1e2edb0d035fe4f7fc3a732b9336",
    "https://zenodo.org/records/3834942/files/openwebtext.tar.xz",
)
GPT2_VOCABULARY = Published(
    "gpt2/encoder.json",
    1_042_301,
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
)
GPT2_MERGES = Published(
    "gpt2/vocab.bpe",
    456_318,
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
)
BERT_UNCASED = Published(
    "bert-base-uncased/vocab.txt",
    231_508,
    "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    "https://huggingface.co/google-bert/bert-base-uncased/resolve/main/vocab.txt",
)
BERT_CASED = Published(
    "bert-base-cased/vocab.txt",
    213_450,
    "eeaa9875b23b04b4c54ef759d03db9d1ba1554838f8fb26c5d96fa551df93d02",
    "https://huggingface.co/google-bert/bert-base-cased/resolve/main/vocab.txt",
)
SQUAD_TRAIN = Published(
    "squad/train-v1.1.json",
    30_288_272,
    "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
    "https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v1.1.json",
)
SQUAD_DEV = Published(
    "squad/dev-v1.1.json",
    4_854_279,
    "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9",
    "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v1.1.json",
)


def data_folder() -> Path | None:
    """CODESCENT_DATA_DIR, the user's folder of corpora; None if it is not set."""
    value = os.environ.get("CODESCENT_DATA_DIR")
    return expanded(value) if value else None


def found(published: Published) -> Path | None:
    """A copy in CODESCENT_DATA_DIR, else in the cache; its bytes are not checked. None: there is no copy."""
    paths = (folder / published.name for folder in (data_folder(), cache_folder()) if folder)
    return next((path for path in paths if path.is_file()), None)


def obtain(published: Published, advance: Callable[[int], None] = lambda _: None) -> Path:
    """The file from CODESCENT_DATA_DIR, else from the cache, else downloaded into the cache.

    Raises:
        UserError: the copy has another sha256, or there is no copy and the download fails (the message says where to
            put the file).
    """
    if path := found(published):
        _check(path, published, str(path))
        return path
    target = cache_folder() / published.name
    _download(published, target, advance)
    return target


def resized(published: Published) -> list[str]:
    """Why a copy cannot be the published file, by its size alone, which costs nothing. Empty: it can, or is missing."""
    path = found(published)
    size_bytes = published.size_bytes if path is None else path.stat().st_size
    if size_bytes == published.size_bytes:
        return []
    return [f"{path}: not the published {published.name}: {size_bytes} bytes, expected {published.size_bytes}"]


def _check(path: Path, published: Published, what: str) -> None:
    digest = sha256_of(path)
    if digest != published.sha256:
        raise UserError(
            f"{what}: not the published {published.name}: sha256 {digest}, expected {published.sha256} "
            f"({path.stat().st_size} bytes, expected {published.size_bytes})"
        )


def _download(published: Published, target: Path, advance: Callable[[int], None]) -> None:
    try:
        writing.make_parents(target.parent)
        handle, name = tempfile.mkstemp(prefix=".download-", dir=target.parent)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written: {error.strerror}. Set CODESCENT_DATA_DIR or XDG_CACHE_HOME"
        ) from error
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream, urllib.request.urlopen(published.url, timeout=TIMEOUT_S) as response:
            while data := response.read(1 << 16):
                stream.write(data)
                advance(len(data))
                if stream.tell() > published.size_bytes:
                    break
        _check(part, published, published.url)
        part.chmod(0o644)
        writing.replace(part, target)
    except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", None) or error
        reason = in_words(reason) if isinstance(reason, OSError) else reason
        raise UserError(
            f"{published.name} is missing and cannot be downloaded from {published.url} ({reason}): offline, put the "
            f"file (sha256 {published.sha256}) at $CODESCENT_DATA_DIR/{published.name} or {target}"
        ) from error
    finally:
        writing.remove_file(part, missing_ok=True)
