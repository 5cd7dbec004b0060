"""In: a folder of Hugging Face: saved by `save_to_disk`, prepared in its cache, or downloaded from the hub.
Out: the files that hold its documents, without what describes them; or that it has several splits.
Does not read documents, and imports nothing of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_json, read_text

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""`Dataset.save_to_disk` writes STATE and INFO, `DatasetDict.save_to_disk` also SPLITS. The cache has INFO alone."""
_DESCRIBES = re.compile(r"readme(\.md|\.txt)?|licen[cs]e(\.md|\.txt)?|dataset_infos\.json|.*\.(py|lock)", re.IGNORECASE)
"""Files at the root of a downloaded data set that hold none of its documents."""
_SPLIT_OF_NAME = re.compile(
    r"(?:^|[^a-z0-9])(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?=[^a-z0-9]|$)"
)
"""Words that name a split in a path, as in `huggingface.co/docs/hub/datasets-file-names-and-splits`."""
_CACHED = re.compile(r"-([\w.]+?)(?:-\d{5}-of-\d{5})?\.arrow")


def data_root(folder: Path) -> Path:
    """The folder itself; of a folder `datasets--NAME` of the hub's cache, the snapshot that is read.
    Raises UserError: it has no snapshot, or several and none of them is `main`.
    """
    snapshots = folder / "snapshots"
    if not (folder.absolute().name.startswith("datasets--") and snapshots.is_dir()):
        return folder
    named = _commit(folder / "refs" / "main")
    found = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if snapshots / named in found:
        return snapshots / named
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise UserError(f"{folder}: which snapshot? give one of its folders in {snapshots}: {names}")
    return found[0]


def data_folders(folder: Path, names: list[str]) -> list[str]:
    """The subfolders of one folder that are read, of the given ones: in the hub's cache those of one snapshot alone.
    Raises UserError: see `data_root`.
    """
    here = folder.absolute()
    if here.name.startswith("datasets--") and "snapshots" in names:
        return ["snapshots"]
    if here.name == "snapshots" and here.parent.name.startswith("datasets--"):
        return [data_root(here.parent).name]
    return names


def data_files(folder: Path, names: list[str]) -> list[str]:
    """The names of the files of one folder that hold documents; `names`: all its files that are not hidden.
    Raises UserError: what describes a saved data set is damaged, or names a file that is not there.
    """
    if STATE in names and INFO in names:
        return _of_state(folder, names)
    kept = [name for name in names if name != SPLITS]
    if INFO in names and (arrows := [name for name in names if name.endswith(".arrow")]):
        splits = _fields(folder / INFO).get("splits") or {}
        if not isinstance(splits, dict):
            raise UserError(f"{folder / INFO}: not the description of a data set: splits is no JSON object")
        return [name for name in arrows if _cached_split(name) in splits]
    if _snapshot_of(folder) == folder.absolute():
        return [name for name in kept if not _DESCRIBES.fullmatch(name)]
    return kept


def refuse_splits(files: Iterable[Path]) -> None:
    """Raise UserError if files are of several splits of a data set: all of them would be trained on."""
    found: dict[Path, dict[str, str]] = {}
    for file in files:
        if known := _split_of(file):
            group, split, example = known
            found.setdefault(group, {})[split] = example
    problems = [
        f"{group}: a data set with several splits ({', '.join(sorted(splits))}): give one of them, such as data.corpus "
        f'= "{splits.get("train", min(splits.values()))}", and another one as data.validation'
        for group, splits in sorted(found.items())
        if len(splits) > 1
    ]
    if problems:
        raise UserError(*problems)


def _of_state(folder: Path, names: list[str]) -> list[str]:
    """The files that `state.json` of a saved data set lists."""
    path = folder / STATE
    state = _fields(path)
    try:
        listed = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not the description of a saved data set: no list _data_files of filenames") from error
    if state.get("_indices_data_files"):
        raise UserError(
            f"{folder}: its rows are chosen by a file of indices: save it again after `dataset.flatten_indices()`"
        )
    wrong = [f"{folder / name}: missing, and {STATE} names it" for name in listed if name not in names]
    wrong += [f"{path}: names {name} twice" for name in dict.fromkeys(listed) if listed.count(name) > 1]
    if wrong:
        raise UserError(*wrong)
    return listed


def _split_of(file: Path) -> tuple[Path, str, str] | None:
    """The data set of a file that has splits, the name of its split, and what gives this split alone."""
    folder = file.parent
    if (folder.parent / SPLITS).is_file():
        return folder.parent, folder.name, str(folder)
    if (folder / INFO).is_file() and not (folder / STATE).is_file() and (split := _cached_split(file.name)):
        return folder, split, str(folder / f"*-{split}*.arrow")
    if root := _snapshot_of(folder):
        words = _SPLIT_OF_NAME.findall(file.absolute().relative_to(root).as_posix().lower())
        if words:
            return root, words[-1], str(root / "**" / f"*{words[-1]}*")
    return None


def _cached_split(name: str) -> str | None:
    """The split of a file of the cache, such as train of wikitext-train-00000-of-00002.arrow."""
    found = _CACHED.search(name)
    return found.group(1) if found else None


def _snapshot_of(folder: Path) -> Path | None:
    """The snapshot of the hub's cache in which a folder lies: datasets--NAME/snapshots/REVISION."""
    here = folder.absolute()
    for path in (here, *here.parents):
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("datasets--"):
            return path
    return None


def _commit(ref: Path) -> str:
    """The commit that a file of the hub's cache names; "": there is no such file, or it is damaged."""
    try:
        return read_text(ref).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _fields(path: Path) -> dict[str, Any]:
    try:
        fields = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {json_problem(error)}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path}: a JSON object is needed, found {type(fields).__name__}")
    return fields
