"""In: a folder of adapters as `peft` writes it. Out: `PeftFolder`: its settings and the file of each tensor, checked.
Does not read the tensors' values (read.py and merged.py do) and does not write a folder (peft.py does)."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_json, refuse_unreadable
from codescent.huggingface.correspond import TheirTensor
from codescent.huggingface.folder import DTYPES, Folder, Stored, digest_of
from codescent.huggingface.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, Adapters
from codescent.models.lora.declare import A
from codescent.plan.model import Lora

_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # With the others (PiSSA, OLoRA, LoftQ and more) training began with other base weights than the base has.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
_FREE = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "modules_to_save", "layers_pattern"),
    *("layers_to_transform", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "runtime_config"),
    "ensure_weight_tying",
)
"""Keys that training alone reads, or whose effect is in the names of the tensors."""
_SHOWN = 6
_DIMS = 2


@dataclass(frozen=True)
class PeftFolder:
    """A checked folder of adapters.

    Attributes:
        rank, alpha, rslora, dora: see `Lora`.
        tensors: the tensors by their names in the file.
        parts: of each parameter that a run reads from the folder (`read.box`); empty if it is merged.
    """

    path: Path
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    tensors: Mapping[str, Stored]
    parts: Mapping[str, tuple[TheirTensor, ...]]

    @property
    def scale(self) -> float:
        """Factor on the product of an adapter, as `Lora.scale`."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file with tensors, and of what scales them."""
        return f"{sha256_of(self.path / ADAPTER_WEIGHTS)} {self.scale!r}"


def open_peft(path: Path) -> PeftFolder:
    """Open a folder, and check its settings key by key.

    Raises:
        UserError: no folder of `peft`; each key that codescent does not support; a damaged file.
    """
    settings = _settings(path)
    where = path / ADAPTER_CONFIG
    if problems := [f"{where}: {problem}" for problem in _wrong(settings)]:
        raise UserError(*problems)
    rank, alpha = settings["r"], float(settings.get("lora_alpha", 8))
    tensors = _tensors(path / ADAPTER_WEIGHTS)
    return PeftFolder(path, rank, alpha, bool(settings.get("use_rslora")), bool(settings.get("use_dora")), tensors, {})


def open_start(path: Path, base: Folder, lora: Lora) -> PeftFolder:
    """Open a folder with which a run begins: the run trains exactly what is in it.

    Args:
        path: of the folder (`lora.weights`).
        base: the folder of the frozen weights.
        lora: the adapters of the run.

    Raises:
        UserError: see `open_peft`; keys of [lora] that differ from the folder; tensors that the run does not train, or
            that the folder lacks; q, k and v with different matrices A.
    """
    opened = open_peft(path)
    theirs: dict[str, Any] = {
        "rank": opened.rank, "alpha": opened.alpha, "rslora": opened.rslora, "dora": opened.dora,
    }  # fmt: skip
    problems = [
        f"lora.{name} = {_toml(getattr(lora, name))}: but lora.weights = {path} has {_toml(value)}"
        for name, value in theirs.items()
        if getattr(lora, name) != value
    ]
    parts = Adapters(base.kind, base.shape, lora).parts
    wanted = {part.tensor: part for part in parts}
    problems += _few(
        f"lora.weights = {path}: lacks what the run trains", [n for n in wanted if n not in opened.tensors]
    )
    spare = [name for name in opened.tensors if name not in wanted]
    problems += _few(f"lora.weights = {path}: has what the run does not train (lora.targets, lora.whole)", spare)
    if not problems:
        problems += _few(f"lora.weights = {path}", _other_sizes(opened, {n: part.whole for n, part in wanted.items()}))
    if problems:
        raise UserError(*problems)
    by_parameter: dict[str, list[TheirTensor]] = {}
    for part in parts:
        by_parameter.setdefault(part.parameter.name, []).append(part)
    for name, pieces in by_parameter.items():
        if name.endswith(f".{A}") and len({digest_of(opened.tensors[piece.tensor]) for piece in pieces}) > 1:
            modules = ", ".join(piece.tensor.removeprefix(PREFIX).removesuffix(".lora_A.weight") for piece in pieces)
            raise UserError(
                f"lora.weights = {path}: {modules} have different matrices A, and a run has one for all of them; merge "
                f"the adapters into the weights instead: model.adapters = {path}, without lora.weights"
            )
    return replace(opened, parts={name: tuple(pieces) for name, pieces in by_parameter.items()})


def open_merged(adapters: Path, folder: Folder) -> PeftFolder:
    """Open a folder of adapters that are merged into weights (`model.adapters`).

    Raises:
        UserError: see `open_peft`; adapters of layers that the model lacks, or of other sizes.
    """
    opened = open_peft(adapters)
    known = {name: shape for parts in folder.parts.values() for part in parts for name, shape in _known(part, opened)}
    read = {part.tensor for parts in folder.parts.values() for part in parts}
    ties = {other: name for other, name in folder.kind.tied.items() if other not in read}
    known |= {PREFIX + other: known[PREFIX + name] for other, name in ties.items() if PREFIX + name in known}
    spare = [name for name in opened.tensors if name not in known]
    problems = _few(f"model.adapters = {adapters}: not of this model", spare)
    problems += _few(f"model.adapters = {adapters}", _other_sizes(opened, known))
    problems += [f"model.adapters = {adapters}: {problem}" for problem in _incomplete(opened)]
    tied = [other for other, name in ties.items() if {PREFIX + other, PREFIX + name} & set(opened.tensors)]
    if tied:
        problems.append(f"model.adapters = {adapters}: {', '.join(tied)} is tied in this model, and trained by itself")
    if problems:
        raise UserError(*problems)
    return opened


def name_of(part: TheirTensor, matrix: str) -> str:
    """The name of a part of the adapter of a matrix, such as "lora_A.weight"."""
    return f"{PREFIX}{part.tensor.rpartition('.')[0]}.{matrix}"


def _known(part: TheirTensor, adapters: PeftFolder) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a folder may have for a tensor."""
    yield PREFIX + part.tensor, part.whole
    if len(part.shape) == _DIMS and part.tensor.endswith(".weight"):
        outputs, inputs = part.whole[::-1] if part.ours_of[0] > part.ours_of[-1] else part.whole
        yield name_of(part, "lora_A.weight"), (adapters.rank, inputs)
        yield name_of(part, "lora_B.weight"), (outputs, adapters.rank)
        if adapters.dora:
            yield name_of(part, "lora_magnitude_vector"), (outputs,)


def _other_sizes(adapters: PeftFolder, known: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The tensors that have other sizes than `known` says."""
    return [
        f"{name} is {list(stored.shape)}, not {list(known[name])}"
        for name, stored in adapters.tensors.items()
        if stored.shape != known.get(name, stored.shape)
    ]


def _incomplete(adapters: PeftFolder) -> Iterator[str]:
    """Adapters that lack a part."""
    wanted = ("lora_A.weight", "lora_B.weight", *(("lora_magnitude_vector",) if adapters.dora else ()))
    modules = {name.rpartition(".lora_")[0] for name in adapters.tensors if ".lora_" in name}
    if not modules:
        yield "has no adapter"
    for module in sorted(modules):
        lacking = [part for part in wanted if f"{module}.{part}" not in adapters.tensors]
        if lacking:
            yield f"{module} has no {', '.join(lacking)}"


def _settings(path: Path) -> dict[str, Any]:
    where = path / ADAPTER_CONFIG
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; a folder of peft has {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    try:
        settings = read_json(where)
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}: not a folder of peft") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({json_problem(error)})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{where}: not a JSON object")
    return settings


def _wrong(settings: Mapping[str, Any]) -> Iterator[str]:
    """Each key that would change the model in a way that codescent does not have."""
    for key, only in _ONLY.items():
        value = settings.get(key)
        if not any(value is one or (isinstance(value, str) and value == one) for one in only):
            yield f"{key} = {_toml(value)}: codescent reads {', '.join(map(_toml, only))}"
    for key in ("use_rslora", "use_dora"):
        if settings.get(key) not in (True, False, None):
            yield f"{key} = {_toml(settings[key])}: must be true or false"
    rank, alpha = settings.get("r"), settings.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1:
        yield f"r = {_toml(rank)}: must be a whole number >= 1"
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        yield f"lora_alpha = {_toml(alpha)}: must be a number > 0"
    for key, value in settings.items():
        if key in _READ or key in _ONLY or key in _FREE:
            continue
        if value not in (None, False, {}, [], ""):
            yield f"{key} = {_toml(value)}: not supported: codescent has no adapters with it"


def _tensors(file: Path) -> dict[str, Stored]:
    if not file.is_file():
        pickle = file.with_name("adapter_model.bin")
        if pickle.exists():
            raise UserError(f"{pickle}: not read: a pickle may run any code; save it as safetensors by peft")
        raise UserError(f"{file}: no such file")
    found: dict[str, Stored] = {}
    try:
        refuse_unreadable(file)
        with safe_open(file, framework="np") as opened:
            for name in sorted(opened.keys()):
                view = opened.get_slice(name)
                found[name] = Stored(file, name, tuple(view.get_shape()), view.get_dtype())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a whole safetensors file: {error}") from error
    wrong = [f"{file}: {name} is {one.dtype}, not one of {', '.join(DTYPES)}" for name, one in found.items()]
    if problems := [line for line, one in zip(wrong, found.values(), strict=True) if one.dtype not in DTYPES]:
        raise UserError(*problems)
    return found


def _few(problem: str, names: Collection[str]) -> list[str]:
    shown = ", ".join(sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{problem}: {shown}{more}"] if names else []


def _toml(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
