"""In: a folder of weights, model and tokenizer of a run that begins with them. Out: the folder, or why it cannot.
Does not read the weights and does not import torch: it is asked before any rank is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from codescent.base.errors import UserError
from codescent.huggingface import KINDS, tokens
from codescent.huggingface.folder import CONFIG, Folder, open_folder
from codescent.models import Shape


def fitting(path: Path, kind: str, shape: Shape, tokenizer_text: str | None, tokenizer: str) -> Folder:
    """The folder, if its weights are for this model and this tokenizer.

    Args:
        path: of the folder (`model.weights`).
        kind: of the run's model, as for `shape`.
        shape: its sizes.
        tokenizer_text: the tokenizer of the run's data, as a file has it; None: it is not known.
        tokenizer: its name, as the user wrote it (`data.tokenizer`).

    Raises:
        UserError: what is wrong with the folder, or every size that differs, and the tokenizer if it does.
    """
    try:
        folder = open_folder(path)
    except UserError as error:
        raise UserError(*(f"model.weights: {problem}" for problem in error.problems)) from error
    if folder.kind.name != kind:
        here = f'model.kind = "{kind}"' if kind in KINDS else f'model.kind = "{kind}", which has no such folders'
        raise UserError(f"model.weights: {path / CONFIG} is of a {folder.kind.name}, but {here}")
    names = [field.name for field in dataclasses.fields(shape) if field.name not in folder.kind.free]
    problems = [
        f"model.{name} = {_shown(run)}: but model.weights = {path} has {_shown(folders)}"
        for name, folders, run in ((name, getattr(folder.shape, name), getattr(shape, name)) for name in names)
        if folders != run
    ]
    theirs = tokens.tokenizer_text(path)
    if tokenizer_text and theirs and (other := tokens.differing_tokens(tokenizer_text, theirs)):
        shown = ", ".join(map(repr, other[:3]))
        file = path / tokens.TOKENIZER
        hint = f"; give data.tokenizer = {file}" if file.is_file() else ""
        problems.append(
            f"data.tokenizer = {tokenizer}: {len(other)} of its tokens ({shown}{', …' * (len(other) > 3)}) have "
            f"not the same number in the tokenizer of model.weights = {path}{hint}"
        )
    if problems:
        raise UserError(*problems)
    return folder


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
