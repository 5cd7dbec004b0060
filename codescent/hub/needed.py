"""In: the listing of a repository, what it is for. Out: the files that are needed of it, or why it cannot be used.
Does not download, and reads no file: names alone decide."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import PurePosixPath

from codescent.base.errors import UserError
from codescent.base.hub_name import HubName
from codescent.hub.cache import TOKENIZER_FILE
from codescent.hub.listing import HubFile, HubFiles

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)
"""The files of a folder that say how texts become tokens, beside config.json."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
"""Ends of names of files that run code when they are opened."""
WHY_NO_PICKLES = "a pickle may run any code when it is opened, so none is downloaded"
TEXTS = (".txt", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".tar", ".tgz", ".txz")
PACKED = (".gz", ".xz", ".bz2", ".zst", ".lzma")
ABOUT = {"dataset_infos.json", "dataset_info.json", "state.json", "requirements.txt", "license.txt"}
"""Files about a data set."""
MOST_SHOWN = 8
_MAGIC = re.compile(r"[*?\[]")


def for_config(name: HubName, listing: HubFiles) -> list[HubFile]:
    """config.json. Raises UserError: there is none."""
    if CONFIG not in listing.files:
        raise UserError(f"{name}: has no {CONFIG}: not a model of transformers; it has {shown(listing.files)}")
    return [listing.files[CONFIG]]


def for_tokenizer(name: HubName, listing: HubFiles) -> list[HubFile]:
    """The files of a tokenizer. Raises UserError: there is no tokenizer.json."""
    if TOKENIZER_FILE not in listing.files:
        raise UserError(
            f"{name}: has no {TOKENIZER_FILE}; in transformers load its tokenizer, save it into a new folder NEW, and "
            f"give NEW/{TOKENIZER_FILE}; it has {shown(listing.files)}"
        )
    return [listing.files[file] for file in (CONFIG, *TOKENIZER_FILES) if file in listing.files]


def for_weights(name: HubName, listing: HubFiles) -> list[HubFile]:
    """The files of a model: its config, its tokenizer, its tensors. Raises UserError: it has no safetensors."""
    files = for_config(name, listing)
    files += [listing.files[file] for file in TOKENIZER_FILES if file in listing.files]
    if WEIGHTS in listing.files:
        return [*files, listing.files[WEIGHTS]]
    if INDEX in listing.files:
        shards = [file for path, file in listing.files.items() if SHARD.fullmatch(path)]
        return [*files, listing.files[INDEX], *shards]
    pickles = [path for path in listing.files if path.endswith(PICKLES)]
    if pickles:
        raise UserError(
            f"{name}: has its weights only as {shown(pickles)}: {WHY_NO_PICKLES}; take a revision or a repository with "
            f"{WEIGHTS} (many have one at revision refs/pr/1), or convert it yourself where you trust it"
        )
    raise UserError(f"{name}: has neither {WEIGHTS} nor {INDEX}: no weights; it has {shown(listing.files)}")


def corpus_name(name: HubName, listing: HubFiles) -> HubName:
    """The name with a path: of a data set with one file of text, that file. Raises UserError: which paths there are."""
    if name.path:
        return name
    texts = [path for path in listing.files if _is_text(path)]
    if len(texts) == 1:
        return HubName(name.repo, name.is_dataset, name.revision, texts[0])
    if not texts:
        raise UserError(f"{name}: has no file of text; it has {shown(listing.files)}")
    patterns = dict.fromkeys(re.sub(r"\d+", "*", path) for path in texts)
    raise UserError(
        f"{name}: has {len(texts)} files, and a corpus may not mix training and test data; add the path of a file, a "
        f"folder or a pattern: {shown([f'{name}/{pattern}' for pattern in patterns])}"
    )


def for_corpus(name: HubName, listing: HubFiles) -> list[HubFile]:
    """The files of a corpus whose name has a path. Raises UserError: no file has that path, or one is a pickle."""
    path = name.path.rstrip("/")
    found = [file for inner, file in listing.files.items() if inner == path]
    found = found or [file for inner, file in listing.files.items() if inner.startswith(f"{path}/")]
    if not found and _MAGIC.search(path):
        try:
            pattern = _expression(path)
        except re.error as error:
            raise UserError(f"{name}: {path} is not a pattern (glob): {error}") from error
        found = [file for inner, file in listing.files.items() if pattern.fullmatch(inner)]
    found = [file for file in found if not _is_hidden(file.path, path)]
    if not found:
        near = [inner for inner in listing.files if _is_text(inner)] or list(listing.files)
        raise UserError(f"{name}: no file of the data set has the path {path}; it has {shown(near)}")
    if pickles := [file.path for file in found if file.path.endswith(PICKLES)]:
        raise UserError(f"{name}: {shown(pickles)}: {WHY_NO_PICKLES}; give the path of a text")
    return found


def shown(names: Iterable[str]) -> str:
    """The first names in a row, and how many more there are; "no file" if there are none."""
    listed: Collection[str] = list(names)
    first = ", ".join(list(listed)[:MOST_SHOWN])
    return f"{first or 'no file'}{f' and {len(listed) - MOST_SHOWN} more' * (len(listed) > MOST_SHOWN)}"


def _is_text(path: str) -> bool:
    plain = path.lower()
    for packed in PACKED:
        plain = plain.removesuffix(packed)
    is_about = PurePosixPath(plain).name in ABOUT or _is_hidden(path, "")
    return not is_about and plain.endswith(TEXTS)


def _is_hidden(path: str, given: str) -> bool:
    """Whether a part of a path is hidden, and the user has not named hidden ones, as for folders of the disk."""
    names_hidden = any(part.startswith(".") for part in given.split("/"))
    return not names_hidden and any(part.startswith(".") for part in path.split("/"))


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """A pattern (glob) as an expression: * and ? stay inside a name, ** is any folders."""
    text = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]*\])", pattern):
        kinds = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        if part.startswith("[") and part.endswith("]") and len(part) > 2:
            inner = part[1:-1].replace("\\", r"\\")
            text += f"[{'^' + inner[1:] if inner.startswith('!') else inner}]"
        else:
            text += kinds.get(part, re.escape(part))
    return re.compile(text)
