"""In: the path of a Hugging Face folder. Out: `Folder`: the model's sizes and the file of each tensor, all checked.
Does not read the tensors' values or import torch, because preflight opens the folder before any rank starts."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from codescent import models
from codescent.base.dtypes import FLOATS, NUMBER_FORMATS
from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import open_regular, read_json, refuse_unreadable
from codescent.base.safetensors_header import read_header
from codescent.huggingface import KINDS, NAMES, Kind, kind_of, tokens
from codescent.huggingface.any_model import differing
from codescent.huggingface.correspond import TheirTensor, correspond
from codescent.huggingface.kind import is_same
from codescent.plan import ModelFacts, Parameter

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {NUMBER_FORMATS[name].code: name for name in FLOATS}
_PICKLES = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.ckpt.index",
    "tf_model.h5",
    "flax_model.msgpack",
)
_REAL = ("norm_eps",)  # sizes that need not be whole numbers
_REAL_KEYS = ("rope_theta", "rope_local_theta", "norm_eps", "dropout", "score_cap", "logit_cap")
_SHOWN = 12
MOST_SIZE = (1 << 31) - 1
"""No size of a model is larger."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder: its file, its name in the file, its shape and its dtype (a key of DTYPES)."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Folder:
    """A checked folder: its files contain what its config.json implies."""

    path: Path
    kind: Kind
    shape: models.Shape
    sizes: Mapping[str, Any]  # the shape as keys of our [model]
    tensors: Mapping[str, Stored]  # by the tensor names of the kind's table
    missing: Collection[str]  # our parameters that the folder lacks, if it has no head
    spare: Collection[str]  # tensors that our model does not use
    inert: Collection[str]  # keys of config.json that change neither a tensor nor a product

    @cached_property
    def parts(self) -> dict[str, tuple[TheirTensor, ...]]:
        """See `parts_of`."""
        return parts_of(self.kind, self.shape)

    def has(self, parameter: Parameter) -> bool:
        """Whether a parameter can be read from this folder. The parameter's model may have another head."""
        parts = self.parts.get(parameter.name, ())
        return parameter.name not in self.missing and any(part.parameter.shape == parameter.shape for part in parts)

    @property
    def dtypes(self) -> set[str]:
        """Number formats of the tensors that our model uses."""
        names = {part.tensor for parts in self.parts.values() for part in parts}
        return {DTYPES[stored.dtype] for name, stored in self.tensors.items() if name in names}

    def fingerprint(self) -> str:
        """SHA-256 of all files with tensors. It does not depend on the folder's path."""
        with ThreadPoolExecutor(4) as pool:
            return hashlib.sha256("".join(pool.map(sha256_of, self._files())).encode()).hexdigest()

    def identity(self) -> dict[str, Any]:
        """The fingerprint, and the size and time of each file, for JSON: see `matches`."""
        return {"fingerprint": self.fingerprint(), "files": self._stamps()}

    def matches(self, identity: Mapping[str, Any]) -> bool:
        """Whether the weights are those of `identity`. Files are not read if their sizes and times are unchanged."""
        return self._stamps() == identity.get("files") or self.fingerprint() == identity.get("fingerprint")

    def _files(self) -> list[Path]:
        return sorted({stored.file for stored in self.tensors.values()})

    def _stamps(self) -> dict[str, list[int]]:
        return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in self._files()}


def parts_of(kind: Kind, shape: models.Shape) -> dict[str, tuple[TheirTensor, ...]]:
    """Their tensors for each parameter, by its name. Includes parameters that the folder has and our model lacks."""
    full = kind.full(shape)
    return correspond(models.parameters_of(kind.name, full), kind.rows(full), kind.axes(full))


def open_folder(path: Path, model: ModelFacts | None = None) -> Folder:
    """Open and check a folder.

    Args:
        path: of the folder.
        model: of the run that reads it. A kind that reads any config.json reads the folder as its own.

    Raises:
        UserError: no folder; a model that codescent does not have; tensors that are missing, unknown, truncated or of
            another shape, each by its name.
    """
    settings = _settings(path)
    sizes: dict[str, Any] = {}
    shape: models.Shape | None = None
    if model is not None and model.kind in models.READ_CONFIG:
        shape = models.shape_of_facts(model)
        kind = kind_of(model.kind, shape)
        problems = [f"{path / CONFIG}: {problem}" for problem in differing(shape, settings)]
    else:
        kind = _kind(path, settings)
        sizes, shape, problems = _shape(path, kind, settings)
    found, unread = _tensors(path, kind, settings)
    problems += unread
    if shape is not None and not unread and shape.num_layers > len(found):  # do not name each of them
        problems.append(f"{path}: {shape.num_layers} layers by {CONFIG}, but only {len(found)} tensors in all")
    if problems or shape is None:
        raise UserError(*problems)
    shape = kind.held(shape, {} if model is None else model.sizes, found)
    parts = parts_of(kind, shape)
    whole = kind.architectures(shape)
    named = settings.get("architectures") or whole
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise UserError(f"{path / CONFIG}: architectures: given {named!r}; must be a list of names")
    headless = set(named).isdisjoint(whole)
    wanted = {part.tensor: part for of_one in parts.values() for part in of_one}
    absent = tuple(name for name in kind.fresh if headless and any(p.tensor not in found for p in parts.get(name, ())))
    without = {part.tensor for name in absent for part in parts[name]}
    spare = tuple(name for name in found if re.fullmatch(kind.spare(shape), name) and name not in wanted)
    found = {name: stored for name, stored in found.items() if name not in spare}
    problems += _misfits(path, kind, {name: part for name, part in wanted.items() if name not in without}, found)
    if problems:
        raise UserError(*problems)
    inert = () if kind.name in models.READ_CONFIG else _inert(kind, settings)
    return Folder(path, kind, shape, sizes, found, absent, spare, inert)


def keys_of_model(path: Path) -> dict[str, Any]:
    """The kind and the sizes in a folder's config.json, as keys of [model]. Does not look at other files.

    Raises UserError: no folder, or a model that codescent does not have.
    """
    settings = _settings(path)
    sizes, _, problems = _shape(path, _kind(path, settings), settings)
    if problems:
        raise UserError(*problems)
    return as_keys(sizes)


def as_keys(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """`Folder.sizes` with the types that the keys of [model] have, and without sizes that are no keys."""
    given = {name: value for name, value in sizes.items() if value is not None and name != "head"}
    return given | {name: float(given[name]) for name in _REAL_KEYS if name in given}


def fitting(path: Path, model: ModelFacts, tokenizer_text: str | None, tokenizer: str) -> Folder:
    """Open a folder, and check that its weights fit the run's model and tokenizer.

    Args:
        path: path of the folder (`model.weights`).
        model: of the run.
        tokenizer_text: content of the tokenizer file of the run's data; None: unknown.
        tokenizer: name of the tokenizer, as the user wrote it (`data.tokenizer`).

    Raises:
        UserError: the problems of the folder; or each size that differs, and a tokenizer that differs.
    """
    kind, shape = model.kind, models.shape_of_facts(model)
    try:
        folder = open_folder(path, model)
    except UserError as error:
        raise UserError(*(f"model.weights: {problem}" for problem in error.problems)) from error
    if folder.kind.name != kind:
        of_run = f'model.kind = "{kind}"'
        if kind not in NAMES:
            of_run += ", which cannot be read from a Hugging Face folder"
        raise UserError(f"model.weights: {path / CONFIG} is of a {folder.kind.name}, but {of_run}")
    names = [field.name for field in dataclasses.fields(shape) if field.name not in folder.kind.free]
    problems = [
        f"model.{name} = {_shown(run)}: but model.weights = {path} has {_shown(folders)}"
        + (f": {more_rows(run)}" if name == "vocab_size" and run > folders else "")
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
            f"another id in the tokenizer of model.weights = {path}{hint}"
        )
    if problems:
        raise UserError(*problems)
    return folder


def more_rows(vocab_size: int) -> str:
    """What to do with weights that have fewer rows than a tokenizer has tokens."""
    return (
        "codescent makes no rows for new tokens; in transformers, call "
        f"model.resize_token_embeddings({vocab_size}) and save model and tokenizer into a new folder"
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _misfits(path: Path, kind: Kind, wanted: Mapping[str, TheirTensor], found: Mapping[str, Stored]) -> Iterator[str]:
    """Error messages for tensors that are missing, unknown, or different from what config.json implies."""
    tied = {name: other for name, other in kind.tied.items() if name not in wanted}
    yield from _few(path, "missing, though config.json implies it", [name for name in wanted if name not in found])
    extra = [name for name in found if name not in wanted and name not in tied]
    yield from _few(path, "not a tensor of this model", extra)
    for name, part in wanted.items():
        if name in found and found[name].shape != part.whole:
            yield f"{found[name].file}: {name} is {list(found[name].shape)}, not {list(part.whole)}"
        if name in found and found[name].dtype not in DTYPES:
            yield f"{found[name].file}: {name} is {found[name].dtype}, not one of {', '.join(DTYPES)}"
    for name, other in tied.items():
        if name in found:
            yield from _differ(found, name, other)


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "no such folder"
        raise UserError(
            f"{path}: {what}: weights are read from a Hugging Face folder; a model of the hub is named hf://OWNER/NAME"
        )
    try:
        settings = read_json(path / CONFIG)
    except OSError as error:
        raise UserError(f"{path / CONFIG}: {error.strerror}: not a Hugging Face folder") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path / CONFIG}: not JSON ({json_problem(error)})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path / CONFIG}: not a JSON object")
    return settings


def _kind(path: Path, settings: Mapping[str, Any]) -> Kind:
    by_type = {kind.model_type: kind for kind in KINDS}
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in by_type:
        known, near = ", ".join(by_type), difflib.get_close_matches(str(name), by_type, n=2)
        nearest = f"; the nearest: {', '.join(near)}" if near else ""
        raise UserError(f"{path / CONFIG}: model_type = {name!r}: known are {known}{nearest}; {models.OTHER_MODELS}")
    return by_type[name]


def _shape(
    path: Path, kind: Kind, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], models.Shape | None, list[str]]:
    """Our sizes and shape, or None and error messages for what our model does not support."""
    where = path / CONFIG
    known = {*kind.sizes.values(), *kind.fixed, *kind.ignored.split(), *kind.handled, *_inert(kind, settings)}
    unknown = (
        f"not known for {kind.model_type}: codescent cannot know what it changes in the model; if transformers "
        f"gives the same logits without it, delete it from {CONFIG}"
    )
    problems = [f"{where}: {key} = {json.dumps(settings[key])}: {unknown}" for key in settings if key not in known]
    for key, alike in kind.fixed.items():
        value = settings.get(key, alike[0])
        if not any(is_same(value, one) for one in alike):
            only = f"codescent's {kind.name} supports only {json.dumps(alike[0])}"
            problems.append(f"{where}: {key} = {json.dumps(value)}: {only}")
    try:
        sizes = dict(kind.defaults(settings))
        sizes |= {ours: settings[key] for ours, key in kind.sizes.items() if settings.get(key) is not None}
        problems += [f"{where}: {key}: missing" for ours, key in kind.sizes.items() if ours not in sizes]
        kinds = {ours: (int, float) if ours in _REAL else (int,) for ours in kind.sizes}
        wrong = [key for ours, key in kind.sizes.items() if type(sizes.get(ours, 0)) not in kinds[ours]]
        wrong += [key for ours, key in kind.sizes.items() if key not in wrong and sizes.get(ours, 0) > MOST_SIZE]
        problems += [f"{where}: {key} = {json.dumps(settings.get(key))}: not a size" for key in wrong]
        if wrong:  # to look for sizes that would fit takes minutes
            return {}, None, problems
        rest, unlike = kind.read(settings)
        problems += [f"{where}: {problem}" for problem in unlike]
        if problems:
            return {}, None, problems
        preset, dropout = rest.pop("preset", None), rest.pop("dropout", 0.0)
        sizes |= rest
        shape = models.shape_of(kind.name, sizes, preset, dropout=dropout, where=str(where))
        return {"kind": kind.name, "preset": preset, "dropout": dropout, **sizes}, shape, []
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        return {}, None, [*problems, f"{where}: not the config of a {kind.model_type} ({error})"]
    except UserError as error:
        return {}, None, [*problems, *error.problems]


def _inert(kind: Kind, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of config.json that are not read, because they change neither a tensor nor a product."""
    read = {*kind.sizes.values(), *kind.fixed, *kind.ignored.split(), *kind.handled}
    return tuple(key for key, value in settings.items() if key not in read and kind.changes_nothing(key, value))


def spare_tensors(folder: Folder) -> str:
    """A sentence that names the tensors that are not read."""
    shown, more = sorted(folder.spare)[:_SHOWN], len(folder.spare) - _SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return f"left out, because this {folder.kind.name} does not use them: {', '.join(shown)}{rest}"


def inert_keys(folder: Folder) -> str:
    """A sentence that names the keys of config.json that are not read."""
    return f"{CONFIG}: not read, because no tensor and no product depends on them: {', '.join(folder.inert)}"


def _tensors(path: Path, kind: Kind, settings: Mapping[str, Any]) -> tuple[dict[str, Stored], list[str]]:
    """Every tensor except old buffers, by its name in the table; and error messages for the files."""
    files, problems = _files(path, settings)
    found: dict[str, Stored] = {}
    for file, listed in files.items():
        try:
            refuse_unreadable(file)
            with safe_open(file, framework="np") as opened:
                names = set(opened.keys())
                problems += [f"{file}: {name}: missing, though {INDEX} lists it" for name in sorted(listed - names)]
                for name in sorted(names):
                    view = opened.get_slice(name)
                    stored = Stored(file, name, tuple(view.get_shape()), view.get_dtype())
                    if name in found:
                        problems.append(f"{file}: {name}: is in {found[name].file}, too")
                    found[name] = stored
        except (SafetensorError, OSError) as error:
            problems.append(f"{file}: not a whole safetensors file: {error}")
    if found and not any(name.startswith(kind.prefix) for name in found):
        found = {name if name in kind.tied else kind.prefix + name: stored for name, stored in found.items()}
    for pattern, name in kind.renamed:
        found = {re.sub(pattern, name, old): stored for old, stored in found.items()}
    return {name: stored for name, stored in found.items() if not re.fullmatch(kind.buffers, name)}, problems


def _files(path: Path, settings: Mapping[str, Any]) -> tuple[dict[Path, set[str]], list[str]]:
    """The files with tensors, each with the tensor names that the index lists for it; and error messages."""
    if (path / WEIGHTS).is_file():
        return {path / WEIGHTS: set()}, []
    index = path / INDEX
    if index.is_file():
        try:
            listed = read_json(index)["weight_map"]
            files: dict[Path, set[str]] = {}
            for name, file in listed.items():
                if Path(file).name != file or not file.endswith(".safetensors"):
                    raise ValueError(f"{file!r} is not the name of a safetensors file in the same folder")
                files.setdefault(path / file, set()).add(str(name))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return {}, [f"{index}: not an index of shards ({json_problem(error)})"]
        absent = [file for file in files if not file.is_file()]
        present = {file: names for file, names in files.items() if file not in absent}
        return present, [f"{file}: missing, though {INDEX} lists it" for file in absent]
    pickle = next((path / name for name in _PICKLES if (path / name).exists()), None)
    if pickle is None:
        return {}, [f"{path}: has neither {WEIGHTS} nor {INDEX}: no weights"]
    convert = (
        f"python -c 'from transformers import {_class(settings)} as M; "
        f"""M.from_pretrained("{path}").save_pretrained("NEW")'"""
    )
    return {}, [f"{pickle}: not read: a pickle may run any code. If you trust it, convert it: {convert}"]


def _class(settings: Mapping[str, Any]) -> str:
    """The class of `transformers` that loads the folder with its head."""
    match settings.get("architectures"):
        case [str(first), *_] if first.isidentifier():
            return first
    return "AutoModel"


def _few(path: Path, why: str, names: Collection[str]) -> Iterator[str]:
    shown = sorted(names)[:_SHOWN]
    yield from (f"{path}: {name}: {why}" for name in shown)
    if len(names) > len(shown):
        yield f"{path}: and {len(names) - len(shown)} more: {why}"


def _differ(found: Mapping[str, Stored], name: str, other: str) -> Iterator[str]:
    """Error message if two stored copies of a tied matrix differ: `transformers` would use only one of them."""
    if other not in found:
        return
    first, second = found[name], found[other]
    if (first.shape, first.dtype) != (second.shape, second.dtype) or digest_of(first) != digest_of(second):
        yield f"{first.file}: {name} differs from {other}, though config.json has tie_word_embeddings = true"


def digest_of(stored: Stored) -> bytes:
    """SHA-256 of a tensor's bytes. The header of its file says where they are."""
    entries, first = read_header(stored.file)
    start, stop = entries[stored.name]["data_offsets"]
    with open_regular(stored.file) as file:
        file.seek(first + start)
        digest, left = hashlib.sha256(), stop - start
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
        return digest.digest()
