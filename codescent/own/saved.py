"""In: a path, a module, its optimizer, the user's values. Out: a checkpoint there, complete or absent, and back.
Does not write or read a file (`checkpoint` does), and neither writes nor reads a pickle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as distribute

from codescent.base.agreement import rank, together
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import CODE_DTYPES, DTYPE_CODES
from codescent.checkpoint.checkpoints import Checkpoints, Saved, read_tensors
from codescent.checkpoint.manifest import DEEPEST, StoredTensor, is_too_deep, read_manifest
from codescent.own.divide import state_like
from codescent.strategies.fully_shard import free_gathered
from codescent.train.alike import Copies, compare

Names = Mapping[torch.Tensor, str]
States = dict[torch.Tensor, dict[str, torch.Tensor]]


def save(path: str | PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer, **extra: Any) -> Path:
    """Save what training needs to go on, on any number of ranks and by any strategy. Collective.

        codescent.save("run/last", model, optimizer, epoch=epoch, scheduler=scheduler.state_dict())

    Each save is a folder in `path` (`step_00000007` is the seventh), which appears when all of it is on the disk; then
    the one before is deleted: there is always a whole one. Tensors are in safetensors files, each with its SHA-256.

    Args:
        path: a folder, made if need be, on a file system that all the ranks share.
        module, optimizer: parameters and persistent buffers, state and the settings of groups are saved.
        extra: values that JSON knows, rank 0's: what `load` returns.

    Returns:
        The folder of this save.

    Raises:
        UserError: the path is a file, the disk is full, or a value is nothing for JSON; parameters or optimizer state
            that ranks hold alike differ (the ranks and the tensors are named); on every rank.
    """
    checkpoints = Checkpoints(Path(path), keep_last=1, keep_best=False)
    free_gathered(module)
    values: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}

    def look() -> int:
        _refuse_file(Path(path))
        _refuse([f"the values are nested deeper than {DEEPEST} levels"] if is_too_deep([extra]) else [])
        _refuse(problem for name, value in extra.items() for problem in _no_json(name, value))
        settings, states = _optimizer_values(optimizer, _names(module))
        values.update(settings)
        tensors.update(_model_tensors(module) | states)
        _refuse(
            f"{name.removeprefix('model.')}: is of {tensor.dtype}, which files cannot hold: make it of another, or, a "
            "buffer, with persistent=False"
            for name, tensor in tensors.items()
            if tensor.dtype not in DTYPE_CODES
        )
        last = checkpoints.latest()
        return last.step + 1 if last else 1

    number = together(UserError, look)[0]
    compare(_replicated_tensors(module, tensors), f"codescent.save: {path}")
    if rank() == 0:
        checkpoints.clean()
    # Subclasses of dict and list, a tuple: as they will be read.
    state = {"extra": json.loads(json.dumps(extra)), "optimizer": {"kind": type(optimizer).__name__, **values}}
    return checkpoints.save(number, tensors, state)


def load(
    path: str | PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load the last save into the module and the optimizer, however they are distributed now. Collective.

        extra = codescent.load("run/last", model, optimizer)

    Nothing changes before every byte is verified. Without an optimizer only the module is loaded: in a program of one
    process too, that has not called `codescent.init`.

    Args:
        path: what `save` was given, whose `extra` is returned.
        module: of the same parameters and buffers, by name, shape and dtype.
        optimizer: of the same class, its groups of the same parameters; its learning rate becomes the saved one.

    Raises:
        UserError: there is no checkpoint, it is damaged (each file is named), or it is of another module or optimizer;
            on every rank.
    """
    free_gathered(module)
    saved = _latest(Path(path))
    model = _model_tensors(module)
    if optimizer is None:
        wholes = read_tensors(saved.path, _only_model(saved, model))
        with torch.no_grad():
            for name, tensor in model.items():
                _fill(tensor, wholes[name])
        return dict(saved.state["extra"])
    names, kept = _names(module), saved.state["optimizer"]
    together(UserError, lambda: _refuse_optimizer(saved.path, kept, optimizer, names))
    states = _states(saved, optimizer, names)
    tensors = {f"optimizer.{key}.{names[p]}": value for p, state in states.items() for key, value in state.items()}
    Checkpoints(Path(path), keep_last=1, keep_best=False).load(saved, {**model, **tensors})
    optimizer.state.clear()
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = {**states.get(parameter, {}), **kept["values"].get(names[parameter], {})}
        if state:
            optimizer.state[parameter] = state
    for group, settings in zip(optimizer.param_groups, kept["groups"], strict=True):
        _settle(group, {key: value for key, value in settings.items() if key != "params"})
    return dict(saved.state["extra"])


def _names(module: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: _plain(name) for name, parameter in module.named_parameters()}


def _plain(name: str) -> str:
    """A name as it is without torch.compile, which puts the module into another."""
    return name.replace("_orig_mod.", "")


def _model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, of a tensor with several names the first."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"codescent: {name} is no tensor: save what get_extra_state returns beside, as a value")
        if id(value) not in seen:
            seen.add(id(value))
            found[f"model.{_plain(name)}"] = value.detach()
    return found


def _replicated_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Copies:
    """Parameters and optimizer state by the part that a rank has of them; buffers may be of each rank's own samples."""
    parameters = {f"model.{_plain(name)}" for name, _ in module.named_parameters()}
    copies: Copies = defaultdict(dict)
    for name, tensor in tensors.items():
        if name.startswith("optimizer.") or name in parameters:
            if not isinstance(tensor, DTensor):
                copies["whole"][name] = tensor
            elif any(not placement.is_shard() for placement in tensor.placements):
                at = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements)
                shard = [index for index, placement in at if placement.is_shard()]
                copies[f"shard {shard} of {tensor.placements} on {tensor.device_mesh.mesh.tolist()}"][name] = tensor
    return copies


def _refuse_file(path: Path) -> None:
    above = next(place for place in (path, *path.absolute().parents) if place.exists() or place.is_symlink())
    if not above.is_dir():
        raise UserError(f"codescent.save: {above} is a file: a checkpoint is a folder: choose another path")


def _refuse(problems: Iterable[str]) -> None:
    if found := [f"codescent.save: {problem}" for problem in problems]:
        raise UserError(*found)


def _no_json(name: str, value: Any) -> Iterator[str]:
    """Where a value is nothing for JSON, or would come back as another one: a key that is no text becomes one."""
    if isinstance(value, dict):
        if keys := [key for key in value if not isinstance(key, str)]:
            yield (
                f"{name}: a dict with keys that are no texts, such as {keys[0]!r}: nothing for JSON, which would make "
                "texts of them: give a list of pairs, or make it anew when you load"
            )
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _no_json(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _no_json(f"{name}[{number}]", inner)
    elif not isinstance(value, str | int | float | bool | None):
        yield f"{name}: nothing for JSON (a {type(value).__name__}): give numbers, texts, lists, dicts"


def _optimizer_values(optimizer: torch.optim.Optimizer, names: Names) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An optimizer's settings and plain values as JSON, and its tensors by "optimizer.STATE.PARAMETER"."""
    _refuse_strangers(optimizer, names)
    groups = []
    for group in optimizer.param_groups:
        # A learning rate may be a tensor.
        numbers = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in group.items()}
        groups.append({**numbers, "params": [names[parameter] for parameter in group["params"]]})
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{key}.{names[parameter]}"] = value
            else:
                values.setdefault(names[parameter], {})[key] = value
    try:
        json.dumps([groups, values])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"codescent.save: {type(optimizer).__name__} has state that is nothing for JSON: {error}"
        ) from None
    return {"groups": groups, "values": values}, tensors


def _refuse_strangers(optimizer: torch.optim.Optimizer, names: Names) -> None:
    if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError("codescent: the optimizer has parameters that are not this module's: give the two together")


def _latest(path: Path) -> Saved:
    """The newest checkpoint, the same on every rank."""

    seen: list[Saved] = []

    def look() -> int:
        found = Checkpoints(path, keep_last=1, keep_best=False).latest()
        if found is None:
            raise UserError(f"codescent.load: {path}: there is no checkpoint of codescent.save")
        if set(found.state) != {"extra", "optimizer"}:
            raise UserError(f"codescent.load: {found.path}: is a run's checkpoint, not one of codescent.save")
        seen.append(found)
        return found.step

    steps = sorted(set(together(UserError, look)))
    if len(steps) > 1:
        raise UserError(
            f"codescent.load: {path}: the ranks see different saves ({steps}): it has to be a shared folder"
        )
    return seen[0]


def _refuse_optimizer(path: Path, kept: dict[str, Any], optimizer: torch.optim.Optimizer, names: Names) -> None:
    _refuse_strangers(optimizer, names)
    if kept["kind"] != type(optimizer).__name__:
        raise UserError(f"codescent.load: {path}: is of {kept['kind']}, this optimizer is {type(optimizer).__name__}")
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in kept["groups"]]:
        before = [len(group["params"]) for group in kept["groups"]]
        raise UserError(
            f"codescent.load: {path}: its optimizer has groups of {before} parameters, this one of "
            f"{[len(group) for group in groups]}, or others in them: make the same groups"
        )


def _states(saved: Saved, optimizer: torch.optim.Optimizer, names: Names) -> States:
    """Memory for the optimizer's tensors that the checkpoint has, divided as the parameters are now."""
    groups = {names[parameter]: (parameter, group) for group in optimizer.param_groups for parameter in group["params"]}
    states: States = {}
    for name, stored in read_manifest(saved.path).tensors.items():
        kind, _, rest = name.partition(".")
        key, _, owner = rest.partition(".")
        if kind == "optimizer" and owner in groups:
            parameter, group = groups[owner]
            states.setdefault(parameter, {})[key] = _memory(parameter, key, stored, group)
    return states


def _memory(parameter: torch.Tensor, key: str, stored: StoredTensor, group: Mapping[str, Any]) -> torch.Tensor:
    """As torch's optimizers lay it out: counts of steps are on the CPU unless a fused kernel reads them."""
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    dtype = CODE_DTYPES[stored.dtype]
    if stored.shape == tuple(parameter.shape) and stored.shape:
        return torch.zeros_like(parameter, dtype=dtype).detach()
    made = torch.zeros(stored.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    divided: torch.Tensor = state_like(parameter, made)
    return divided


def _settle(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """A group's saved settings; which kernels compute is this run's affair."""
    for key, value in settings.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        elif key not in ("foreach", "fused", "capturable"):
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _only_model(saved: Saved, model: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the module's tensors, all of which the checkpoint must have in their shapes, and no others."""
    stored = {name: s for name, s in read_manifest(saved.path).tensors.items() if name.startswith("model.")}
    problems = [
        f"{name.removeprefix('model.')}: {'not in the checkpoint' if name not in stored else 'not in this module'}"
        for name in sorted(set(stored) ^ set(model))
    ]
    problems += [
        f"{name.removeprefix('model.')}: {list(stored[name].shape)} in the checkpoint, {list(tensor.shape)} here"
        for name, tensor in model.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    ]
    if problems:
        raise UserError(f"codescent.load: {saved.path} is of another module:", *problems)
    return list(model)


def _fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        parts = distribute(whole.to(tensor.to_local().device), tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(parts.to_local())
    else:
        tensor.copy_(whole)
