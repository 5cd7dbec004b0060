"""In: a name of a hub. Out: where the cache of huggingface_hub holds it, and the commit that the cache knows.
Does not ask a hub: it looks at the cache alone (HF_HUB_CACHE, else HF_HOME/hub)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.extra import library
from codescent.base.hub_name import HubName, is_hub_name, parse
from codescent.base.reading import read_text
from codescent.base.secret import without_user
from codescent.base.writing import make_parents

TOKENIZER_FILE = "tokenizer.json"


def settings() -> ModuleType:
    """What huggingface_hub reads of the environment, when it is imported: HF_HOME and others.

    Raises UserError: it is not installed, or it cannot read a variable.
    """
    try:
        found = library("huggingface_hub.constants", "hf://OWNER/NAME, a name of the hub,", "hub")
        urlsplit(found.ENDPOINT).port  # noqa: B018 - other modules of it look at the port when they are imported
    except ValueError as error:
        raise UserError(f"HF_ENDPOINT, or another variable HF_* of the environment, cannot be read: {error}") from error
    return found


def is_offline() -> bool:
    """Whether the user forbids every request: HF_HUB_OFFLINE=1."""
    return bool(settings().HF_HUB_OFFLINE)


def hub_shown() -> str:
    """The address of the hub, for messages and files: HF_ENDPOINT may have a password."""
    return without_user(settings().ENDPOINT)


def root() -> Path:
    """The folder of the cache."""
    return Path(settings().HF_HUB_CACHE)


def folder_of(name: HubName) -> Path:
    """The folder of a repository in the cache."""
    return root() / f"{name.kind}s--{name.repo.replace('/', '--')}"


def snapshot_of(name: HubName) -> Path:
    """The folder of the files of a pinned name. They may be missing."""
    assert name.is_pinned, name
    return folder_of(name) / "snapshots" / name.revision


def known_commit(name: HubName) -> str | None:
    """The commit of a name, as far as the cache knows it; None: it does not."""
    if name.is_pinned:
        return name.revision
    try:
        commit = read_text(_ref(name)).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return commit if name.at(commit).is_pinned else None


def note_commit(name: HubName, commit: str) -> None:
    """Note the commit of a branch or tag, as huggingface_hub does. Raises OSError: the cache cannot be written."""
    if not name.is_pinned and known_commit(name) != commit:
        make_parents(_ref(name).parent)
        replace_file(_ref(name), commit)


def _ref(name: HubName) -> Path:
    return folder_of(name) / "refs" / name.revision


def place_of(value: str) -> str:
    """The path of a value of data.corpus in the cache, if it is a name of a hub whose commit the cache knows.

    Other values are returned unchanged. The files may be missing.
    """
    name = known(value)
    return value if name is None else str(snapshot_of(name) / name.path)


def tokenizer_place(value: str) -> str:
    """As `place_of`, for a value of data.tokenizer: the path of its tokenizer.json."""
    name = known(value)
    return value if name is None else str(snapshot_of(name) / TOKENIZER_FILE)


def weights_place(value: Path | str) -> Path:
    """The folder of a value of model.weights: a path, or a name of a hub. It may be missing."""
    return Path(place_of(value)) if isinstance(value, str) else value


def known(value: str) -> HubName | None:
    """The pinned name in a value; None: it names no hub, or the cache does not know its commit."""
    if not is_hub_name(value):
        return None
    name = parse(value)
    commit = known_commit(name)
    return None if commit is None else name.at(commit)
