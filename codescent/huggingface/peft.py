"""In: a kind's table, a model's sizes, its LoRA settings. Out: tensor names and adapter_config.json of a `peft` export.
Does not read or write files: codescent/verbs/export_run.py does."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from codescent import models
from codescent.base.hub_name import is_hub_name, parse
from codescent.huggingface.correspond import Row, Theirs, TheirTensor, correspond, words
from codescent.huggingface.folder import parts_of
from codescent.huggingface.kind import Kind
from codescent.models.lora.declare import MAGNITUDE, A, B, is_adapter
from codescent.plan.model import Lora

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What `peft` writes before the name of a module."""
_RANK = "R"  # the axis of the adapter's rank: no table uses this letter


class Adapters:
    """The contents of a `peft` folder: a model's adapters, and the layers that are trained whole.

    Attributes:
        parts: every tensor of the folder, with the parameter of ours that it comes from. If our matrix is several of
            theirs (q, k and v), each of them repeats our A and has its own rows of our B. A tied embedding appears
            twice, because `peft` unties it from the head.
    """

    def __init__(self, kind: Kind, shape: models.Shape, lora: Lora) -> None:
        self._kind, self._lora, self._rows = kind, lora, list(kind.rows(shape))
        self._routed = shape.num_experts > 0
        self.parts = _parts(kind, shape, lora, self._rows)
        tensors = [part.tensor for of_one in parts_of(kind, shape).values() for part in of_one]
        self._modules = list(dict.fromkeys(_owner(name) for name in (*tensors, *kind.tied)))
        self._whole = [p.tensor.removeprefix(PREFIX) for p in self.parts if not is_adapter(p.parameter)]

    def refusals(self) -> Iterator[str]:
        """Why `peft` cannot load the folder: it copies a layer trained whole without modules inside or tied to it. In
        models with experts it takes adapters of other feed-forwards for some of experts."""
        beside = [p.parameter.name for p in self.parts if is_adapter(p.parameter) and ".mlp." in p.parameter.name]
        if self._routed and beside:
            yield (
                "peft takes adapters of an MLP beside experts for adapters of experts; export them merged, or train "
                'with lora.targets = "attn.qkv, attn.out"'
            )
        for module in dict.fromkeys(map(_owner, self._whole)):
            inside = [other for other in self._modules if other.startswith(f"{module}.")]
            lacking = [name for name in self._kind.tied if _owner(name) == module and name not in self._whole]
            if inside or lacking:
                yield f"peft cannot load {module} apart from {', '.join([*inside, *lacking])}"

    def settings(self, task_type: str | None, base: str) -> str:
        """The text of adapter_config.json. `task_type`: `peft`'s name of the task. `base`: folder of base weights, or
        their name at a hub: then the file has their repository and revision."""
        named = parse(base) if is_hub_name(base) else None
        names = [p.tensor.removeprefix(PREFIX) for p in self.parts if is_adapter(p.parameter)]
        targets = list(dict.fromkeys(_module(name.rpartition(".lora_")[0]) for name in names))
        values = {
            "peft_type": "LORA",
            "task_type": task_type,
            "base_model_name_or_path": base if named is None else named.repo,
            "revision": None if named is None else named.revision,
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "lora_dropout": self._lora.dropout,
            "bias": "none",
            "fan_in_fan_out": _transposed(self._rows),
            "target_modules": _targets(targets, set(map(_module, self._modules))),
            "modules_to_save": _ends(list(dict.fromkeys(map(_owner, self._whole))), self._modules) or None,
            "use_rslora": self._lora.rslora,
            "use_dora": self._lora.dora,
            "inference_mode": True,
        }
        return json.dumps(values, indent=2) + "\n"


def _parts(kind: Kind, shape: models.Shape, lora: Lora, rows: Sequence[Row]) -> list[TheirTensor]:
    trained = [p for p in models.parameters_of(kind.name, shape, lora) if p.trained]
    table = [
        *(adapter for row in rows if len(words(row.dims)) > 1 for adapter in _adapter(row)),
        *(replace(row, theirs=tuple(replace(one, name=PREFIX + one.name) for one in row.theirs)) for row in rows),
    ]
    by_parameter = correspond(trained, table, kind.axes(shape))
    found = [part for parameter in trained for part in by_parameter[parameter.name]]
    heads = {PREFIX + name: head for head, name in kind.tied.items()}
    tied = [part for part in found if part.tensor in heads and len(part.parameter.depths) > 1]
    return found + [replace(part, tensor=PREFIX + heads[part.tensor]) for part in tied]


def _adapter(row: Row) -> Iterator[Row]:
    """The table rows of a matrix's adapter, from the matrix's row: B has the matrix's outputs, A its inputs."""
    owner, (*outputs, inputs) = _owner(row.parameter), words(row.dims)
    theirs_a: list[Theirs] = []
    theirs_b: list[Theirs] = []
    magnitudes: list[Theirs] = []
    for one in row.theirs:
        module = PREFIX + _owner(one.name)
        (their_outputs,) = (word for word in words(one.dims) if word != inputs)
        adapter_a = Theirs(f"{module}.lora_A.weight", f"{_RANK} {inputs}")
        theirs_a += [adapter_a] if adapter_a not in theirs_a else []  # one of all pieces of a matrix
        magnitudes.append(replace(one, name=f"{module}.lora_magnitude_vector", dims=their_outputs))
        theirs_b.append(replace(one, name=f"{module}.lora_B.weight", dims=f"{their_outputs} {_RANK}"))
    yield Row(f"{owner}.{A}", f"{_RANK} {inputs}", tuple(theirs_a))
    yield Row(f"{owner}.{B}", " ".join([*outputs, _RANK]), tuple(theirs_b))
    yield Row(f"{owner}.{MAGNITUDE}", " ".join(outputs), tuple(magnitudes))


def _owner(name: str) -> str:
    """The name of the module that has this tensor: "a.b.weight" gives "a.b"."""
    return name.rpartition(".")[0]


def _ends(whole: Sequence[str], modules: Collection[str]) -> list[str]:
    """Name endings by which `peft` finds these modules; the whole name if another module has the same ending."""
    others = [module for module in modules if module not in whole]
    ends = [_module(module) for module in whole]
    unique = [not any(other.endswith(end) for other in others) for end in ends]
    return list(dict.fromkeys(end if one else module for module, end, one in zip(whole, ends, unique, strict=True)))


def _module(name: str) -> str:
    """The name of their module inside its layer: "self_attn.q_proj"."""
    return re.split(r"\.\d+\.", name, maxsplit=1)[-1]


def _targets(targets: Sequence[str], modules: Collection[str]) -> list[str] | str:
    """Name endings by which `peft` finds modules; a regular expression if other modules have the same ending."""
    others = [module for module in modules if module not in targets]
    if any(other.endswith(f".{target}") for other in others for target in targets):
        return rf".*\.\d+\.(?:{'|'.join(map(re.escape, targets))})"
    return list(targets)


def _transposed(rows: Sequence[Row]) -> bool:
    """Whether their matrices are [inputs, outputs]."""
    row = next(row for row in rows if "#" in row.parameter and len(words(row.dims)) > 1)
    return words(row.theirs[0].dims)[0] == words(row.dims)[-1]
