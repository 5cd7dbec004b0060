"""In: a config.json, or a shape of the kind "transformers". Out: its settings as one line; the kind with which folders
of this model are read and written: the names of transformers, every tensor as it is.
Does not import transformers (models/transformers/library.py does) and does not read tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_json
from codescent.huggingface.correspond import Row, same
from codescent.huggingface.kind import COMMON_IGNORED, INERT, Kind
from codescent.models import Shape
from codescent.models.transformers.declare import NAME, TransformersShape, observed, settings_text, values_of
from codescent.plan import Parameter

_DIMS = "abcdefgh"
"""Letters for the dims of a tensor."""


def read_settings(path: Path) -> str:
    """The value of model.config for a config.json, or for a folder with one. Raises UserError: there is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = read_json(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}: no config.json") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({json_problem(error)})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{file}: not a JSON object")
    return settings_text(settings)


def kind_of_shape(shape: Shape) -> Kind:
    """The kind of a model of transformers."""
    assert isinstance(shape, TransformersShape)
    seen, settings = observed(shape), json.loads(shape.config)
    rows = [_row(one, seen.stored[seen.theirs[one.name]], seen.layers) for one in seen.parameters]
    table = {row.parameter: row for row in rows}  # blocks are alike
    return Kind(
        name=NAME,
        model_type=settings["model_type"],
        architectures=lambda _shape: (seen.class_name,),
        prefix="",
        sizes={},
        fixed={},
        ignored="",
        rows=lambda _shape: table.values(),
        axes=lambda _shape: {},
        read=lambda _settings: ({}, []),
        write=lambda _shape: settings,
        handled=(),
        buffers="|".join(map(re.escape, seen.buffers)) or r"(?!)",
        tied={seen.stored[name]: seen.stored[other] for name, other in seen.tied.items()},
    )


def differing(shape: Shape, settings: Mapping[str, Any]) -> Iterator[str]:
    """A message for each key of a folder's config.json that differs from the run's model.config."""
    assert isinstance(shape, TransformersShape)
    if (name := json.loads(shape.config)["model_type"]) != settings.get("model_type"):
        yield f"model_type = {settings.get('model_type')!r}, but model.config has {name!r}"
        return
    ours, theirs = values_of(shape.config), values_of(settings_text(settings))
    for key in sorted({*ours, *theirs}.difference(COMMON_IGNORED.split(), INERT.split())):
        if ours.get(key) != theirs.get(key):
            run, folder = (json.dumps(one.get(key), default=str) for one in (ours, theirs))
            yield f"{key} = {folder}, but model.config has {run}; leave out model.config to take that of the folder"


def _row(parameter: Parameter, theirs: str, layers: str) -> Row:
    """The row of a parameter, which is one of their tensors. `layers`: their name of the list of blocks."""
    dims = " ".join(_DIMS[: len(parameter.shape)])
    _, _, rest = theirs.removeprefix(f"{layers}.").partition(".")
    in_block = theirs.startswith(f"{layers}.")
    return same(_pattern(parameter.name), f"{layers}.#.{rest}" if in_block else _pattern(theirs), dims)


def _pattern(name: str) -> str:
    """A name with "#" for its first number, as rows of a table have it."""
    return re.sub(r"\.\d+\.", ".#.", name, count=1)
