"""In: a text such as hf://Qwen/Qwen3-0.6B@main. Out: its parts: repository, revision, path.
Does not ask a hub and looks at no file (codescent/hub does)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

PREFIX = "hf://"
DATASETS = "datasets/"
MAIN = "main"
"""The revision of a name that gives none."""
FORM = "hf://OWNER/NAME or hf://OWNER/NAME@REVISION, such as hf://Qwen/Qwen3-0.6B"
CORPUS_FORM = (
    "hf://datasets/OWNER/NAME, then @REVISION and the path of a file, a folder or a pattern, as needed, such as "
    "hf://datasets/roneneldan/TinyStories/TinyStoriesV2-GPT4-train.txt"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_MODEL = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@\s]+))?")
_DATASET = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>refs/(?:pr|convert)/[^@/\s]+|[^@/\s]+))?(?:/(?P<path>.+))?"
)
_PAGE = re.compile(
    rf"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<data>datasets/)?(?P<repo>{_PART}/{_PART})(?=[/?#]|$)"
)
_FILE = re.compile(r"\.[a-z]{2,5}$")
_NO_REPO = re.compile(r"--|\.\.|\.git$")
"""A hub has no such names: the cache writes -- for /."""


@dataclass(frozen=True)
class HubName:
    """A repository of a hub of Hugging Face at a revision, or a path in it.

    Attributes:
        repo: OWNER/NAME.
        is_dataset: whether the hub has it among its data sets; else it is a model.
        revision: a branch, a tag or a commit.
        path: of a file or folder of a data set, or a pattern (glob); "": none is given.
    """

    repo: str
    is_dataset: bool = False
    revision: str = MAIN
    path: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{quote(self.revision, safe='')}"
        return f"{PREFIX}{DATASETS * self.is_dataset}{self.repo}{revision}{'/' * bool(self.path)}{self.path}"

    @property
    def kind(self) -> str:
        """What the hub calls it: "dataset" or "model"."""
        return "dataset" if self.is_dataset else "model"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is the hash of a commit, so that its files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubName:
        """The same at another revision."""
        return replace(self, revision=revision)

    def names_same(self, other: HubName) -> bool:
        """Whether both name the same thing, at whatever revision."""
        return self.at(MAIN) == other.at(MAIN)


def is_hub_name(value: object) -> bool:
    """Whether a value is meant as a name of a hub."""
    return isinstance(value, str) and value.startswith(PREFIX)


def parse(text: str) -> HubName:
    """The parts of a name. Raises ValueError: what is wrong, and what would be right."""
    inner = text.removeprefix(PREFIX)
    is_dataset = inner.startswith(DATASETS)
    found = (_DATASET if is_dataset else _MODEL).fullmatch(inner.removeprefix(DATASETS))
    path = "" if found is None else found.groupdict().get("path") or ""
    revision = MAIN if found is None else unquote(found["revision"] or MAIN)
    is_odd = found is not None and (
        (bool(path) and not is_inside(path.rstrip("/")))
        or not is_inside(revision)
        or not f"{path}{revision}".isprintable()
        or _NO_REPO.search(found["repo"]) is not None
    )
    if not text.startswith(PREFIX) or found is None or is_odd:
        raise ValueError(f"write {CORPUS_FORM if is_dataset else FORM}")
    return HubName(found["repo"], is_dataset, revision, path)


def is_inside(path: str) -> bool:
    """Whether a path with / stays in the folder where it begins: no part is empty, "." or ".."."""
    return {"", ".", ".."}.isdisjoint(path.split("/")) and "\\" not in path


def parse_model(text: str) -> HubName:
    """The parts of a model's name. Raises ValueError: see `parse`, or it is a data set."""
    name = parse(text)
    if name.is_dataset:
        raise ValueError(f"names a data set, and a model is needed: write {FORM}")
    return name


def parse_dataset(text: str) -> HubName:
    """The parts of a data set's name. Raises ValueError: see `parse`, or it is a model."""
    if not text.startswith(PREFIX + DATASETS):
        raise ValueError(f"names a model, and a corpus is a data set: write {CORPUS_FORM}")
    return parse(text)


def meant(text: str, *, is_dataset: bool = False) -> str:
    """The name of a hub that a text may stand for, as people write it elsewhere: OWNER/NAME, or its page; empty: none.

    A path of two parts looks like OWNER/NAME, unless it ends like the name of a file.
    """
    found = _PAGE.match(text)
    if found is None and (_FILE.search(text) or not _MODEL.fullmatch(text)):
        return ""
    is_page_of_data = found is not None and found["data"] is not None
    return f"{PREFIX}{DATASETS * (is_dataset or is_page_of_data)}{text if found is None else found['repo']}"
