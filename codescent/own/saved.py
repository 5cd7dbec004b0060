"""In: a path, a module, its optimizer, JSON values. Out: `save` writes all of them to a checkpoint; `load` copies the
saved tensors into module and optimizer and returns the JSON values.
Does not write or read the files itself (codescent/checkpoint does), and never uses pickle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as distribute

from codescent.base import output
from codescent.base.agreement import from_first, rank, together
from codescent.base.counted import a_type
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import CODE_DTYPES, DTYPE_CODES
from codescent.checkpoint.checkpoints import Checkpoints, Saved, read_tensors
from codescent.checkpoint.manifest import DEEPEST, MANIFEST, StoredTensor, is_too_deep, read_manifest
from codescent.own import metrics, registry, replicas
from codescent.own.arguments import MODULE, OPTIMIZER, PATH, TRUE_OR_FALSE, public
from codescent.own.divide import state_like
from codescent.own.session import joined, joined_or_alone
from codescent.own.steps import set_steps, steps_of
from codescent.strategies.fully_shard import free_gathered
from codescent.train.alike import Copies, compare

Names = Mapping[torch.Tensor, str]
States = dict[torch.Tensor, dict[str, torch.Tensor]]


@public("codescent.save", collective=True, path=PATH, module=MODULE, optimizer=OPTIMIZER)
def save(path: str | PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer, **extra: Any) -> Path:
    """Save a checkpoint, from which training can continue on any number of ranks with any strategy. Collective.

        codescent.save("run/last", model, optimizer, epoch=epoch, scheduler=scheduler.state_dict())

    Each save is a folder in `path`, named by the number of optimizer steps since `codescent.init` or, after
    `codescent.load`, since the first run began: `step_00000007` is after the seventh `optimizer.step()`. It appears
    when all its files are on the disk; then the previous save is deleted. So there is always a complete save. Tensors
    are in safetensors files with SHA-256 hashes.

    Of ranks that train apart (`average_every`) it has the mean of weights and optimizer state, and each rank's own.

    Args:
        path: a folder, on a file system that all ranks share. It is created if it does not exist.
        module: its parameters and persistent buffers are saved.
        optimizer: its state and the settings of its groups are saved.
        extra: values of rank 0 that JSON can represent. `load` returns them.

    Returns:
        The folder of this save.

    Raises:
        UserError: on every rank: the module is not distributed, the path is a file, the disk is full, JSON cannot
            represent a value, or copies of parameters or optimizer state differ between ranks (ranks and tensors are
            named).
    """
    joined("save")
    checkpoints = Checkpoints(Path(path), keep_last=1, keep_best=False)
    free_gathered(module)
    values: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}

    def look() -> tuple[int, bool, Any]:
        registry.refuse_other(module, "save")
        replicas.refuse_lent(registry.exchanging(module, "save"), "save")
        _refuse_file(Path(path))
        _refuse([f"the values are nested deeper than {DEEPEST} levels"] if is_too_deep([extra]) else [])
        _refuse(problem for name, value in extra.items() for problem in _json_problems(name, value))
        settings, states = _optimizer_values(optimizer, _names(module))
        values.update(settings)
        tensors.update(_model_tensors(module) | states)
        _refuse(
            f"{name.removeprefix('model.')}: is of {tensor.dtype}, which checkpoints cannot store: change its dtype, "
            "or register a buffer with persistent=False"
            for name, tensor in tensors.items()
            if tensor.dtype not in DTYPE_CODES
        )
        return steps_of(optimizer), (checkpoints.newest_step() or 0) > steps_of(optimizer), settings["values"]

    found = together(UserError, look)
    number, is_behind, _ = found[0]
    # JSON converts tuples and subclasses of dict and list: store the values that `load` will return.
    state = {"extra": json.loads(json.dumps(extra)), "optimizer": {"kind": type(optimizer).__name__, **values}}
    state["metrics"] = metrics.rows_before(Path(path))
    with ExitStack() as stack:
        own: dict[str, torch.Tensor] = {}
        if (known := registry.exchanging(module, "save")) is not None:
            state["replicas"] = replicas.record(known, [of_rank for *_, of_rank in found])
            own = stack.enter_context(replicas.as_means(known, tensors, _tensor_names(module)))
        compare(_replicated_tensors(module, tensors), f"codescent.save: {path}")
        if rank() == 0:
            checkpoints.clean()
        folder = checkpoints.save(number, {**tensors, **own}, state, rotates=not is_behind)
    if is_behind:
        from_first(UserError, lambda: _replace_later(checkpoints, number))
    return folder


def _replace_later(checkpoints: Checkpoints, number: int) -> None:
    """Delete the saves of a longer run that was not loaded, so that the new save is the newest."""
    names = ", ".join(path.name for path in checkpoints.delete_after(number))
    checkpoints.rotate()
    output.warn(f"codescent.save: {checkpoints.folder}: replaced {names}, the save of a run that was not loaded")


@overload
def load(
    path: str | PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    missing_ok: Literal[False] = False,
) -> dict[str, Any]: ...


@overload
def load(
    path: str | PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    missing_ok: bool,
) -> dict[str, Any] | None: ...


@public(
    "codescent.load", collective=True, path=PATH, module=MODULE, optimizer=OPTIMIZER.or_none(), missing_ok=TRUE_OR_FALSE
)
def load(
    path: str | PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    missing_ok: bool = False,
) -> dict[str, Any] | None:
    """Load the last save into the module and the optimizer. Collective.

        extra = codescent.load("run/last", model, optimizer)

    Strategy and number of ranks may differ from those of the save. Other values of `average_every`, `outer_*` and
    `wire` are refused, if both have some. No tensor changes before all files are verified.
    Rows of `codescent.Metrics` that were written after the save are deleted: their steps come again. Without an
    optimizer only the module is loaded. Then it need not be distributed, a single process need not call
    `codescent.init`, and no rows are deleted.

    Args:
        path: the path given to `save`, or the folder that `save` returned.
        module: must have the same parameters and buffers, by name, shape and dtype.
        optimizer: must have the same class, and groups with the same parameters. It takes the saved learning rate.
        missing_ok: return None where nothing was saved yet, and change no tensor. So one script begins a run and
            continues it. With an optimizer, all rows of `codescent.Metrics` are deleted: their steps come again.

    Returns:
        The values `extra` of the save; None: there is no save, and `missing_ok` is True.

    Raises:
        UserError: on every rank: there is no checkpoint, it is damaged (each bad file is named), it belongs to
            another module or optimizer, the module is not distributed, or has means (`codescent.averaged`).
    """
    if optimizer is None:
        joined_or_alone("load")
    else:
        joined("load")
        together(UserError, lambda: registry.refuse_other(module, "load"))
    known = registry.exchanging(module, "load")
    together(UserError, lambda: replicas.refuse_lent(known, "load"))
    free_gathered(module)
    saved = _latest(Path(path), missing_ok=missing_ok)
    if saved is None:
        if optimizer is not None:
            from_first(UserError, metrics.begin)
        return None
    model = _model_tensors(module)
    if optimizer is None:
        _load_model(saved, model)
        replicas.Continued(known, None, ()).end()
        return dict(saved.state["extra"])
    names, stored = _names(module), saved.state["optimizer"]
    together(UserError, lambda: _refuse_optimizer(saved.path, stored, optimizer, names))
    inside = read_manifest(saved.path).tensors
    going_on = replicas.Continued(known, saved.state.get("replicas"), inside)
    together(UserError, going_on.refuse)
    states = _states(inside, optimizer, names, going_on.optimizer)
    tensors = {going_on.name(name): tensor for name, tensor in model.items()}
    for parameter, state in states.items():
        tensors |= {f"{going_on.optimizer}{key}.{names[parameter]}": value for key, value in state.items()}
    tensors |= going_on.tensors(_tensor_names(module))
    Checkpoints(saved.path.parent, keep_last=1, keep_best=False).load(saved, tensors, going_on.is_optional)
    values = going_on.values(stored["values"])
    optimizer.state.clear()
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = {**states.get(parameter, {}), **values.get(names[parameter], {})}
        if state:
            optimizer.state[parameter] = state
    going_on.end()
    for group, settings in zip(optimizer.param_groups, stored["groups"], strict=True):
        _set(group, {key: value for key, value in settings.items() if key != "params"})
    set_steps(optimizer, saved.step)
    from_first(UserError, lambda: metrics.continue_from(saved.path.resolve().parent, saved.state.get("metrics", {})))
    return dict(saved.state["extra"])


def _load_model(saved: Saved, model: Mapping[str, torch.Tensor]) -> None:
    """Load a module alone. Raises UserError: the checkpoint has other names or shapes."""
    wholes = read_tensors(saved.path, _only_model(saved, model))
    with torch.no_grad():
        for name, tensor in model.items():
            _fill(tensor, wholes[name])


def _names(module: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: _plain(name) for name, parameter in module.named_parameters()}


def _tensor_names(module: nn.Module) -> dict[torch.Tensor, str]:
    """Parameters and buffers by the names of a checkpoint."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {tensor: f"model.{_plain(name)}" for name, tensor in named}


def _plain(name: str) -> str:
    """A parameter's name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def _model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a tensor with several names is listed under the first."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"codescent: {name} is not a tensor: pass what get_extra_state returns to save as a value")
        if id(value) not in seen:
            seen.add(id(value))
            found[f"model.{_plain(name)}"] = value.detach()
    return found


def _replicated_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Copies:
    """Parameters and optimizer state that other ranks hold, too, by shard, or by device. Tensors of several devices are
    not hashed together; other ranks have other devices, in the same order. Buffers are left out: they may differ."""
    order = {device: number for number, device in enumerate(dict.fromkeys(one.device for one in tensors.values()))}
    parameters = {f"model.{_plain(name)}" for name, _ in module.named_parameters()}
    copies: Copies = defaultdict(dict)
    for name, tensor in tensors.items():
        if name.startswith(("optimizer.", replicas.SHARED)) or name in parameters:
            if not isinstance(tensor, DTensor):
                copies[f"whole on device {order[tensor.device]}"][name] = tensor
            elif any(not placement.is_shard() for placement in tensor.placements):
                at = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements)
                shard = [index for index, placement in at if placement.is_shard()]
                copies[f"shard {shard} of {tensor.placements} on {tensor.device_mesh.mesh.tolist()}"][name] = tensor
    return copies


def _refuse_file(path: Path) -> None:
    above = next(place for place in (path, *path.absolute().parents) if place.exists() or place.is_symlink())
    if not above.is_dir():
        raise UserError(f"codescent.save: {above} is a file, but a checkpoint is a folder: choose another path")


def _refuse(problems: Iterable[str]) -> None:
    if found := [f"codescent.save: {problem}" for problem in problems]:
        raise UserError(*found)


def _json_problems(name: str, value: Any) -> Iterator[str]:
    """Why JSON cannot represent a value, or would change it (it makes strings of all keys); nothing if it can."""
    if isinstance(value, dict):
        if keys := [key for key in value if not isinstance(key, str)]:
            yield (
                f"{name}: a dict whose keys are not strings, such as {keys[0]!r}: JSON would convert them to strings: "
                "save a list of pairs, or build the dict again after load"
            )
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _json_problems(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _json_problems(f"{name}[{number}]", inner)
    elif not isinstance(value, str | int | float | bool | None):
        yield f"{name}: JSON cannot represent {a_type(value)}: give numbers, strings, lists or dicts"


def _optimizer_values(optimizer: torch.optim.Optimizer, names: Names) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An optimizer's settings and state that is no tensor, as JSON; its tensors, named "optimizer.STATE.PARAMETER"."""
    _refuse_foreign_parameters(optimizer, names)
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
            f"codescent.save: {type(optimizer).__name__} has state that JSON cannot represent: {error}"
        ) from None
    return {"groups": groups, "values": values}, tensors


def _refuse_foreign_parameters(optimizer: torch.optim.Optimizer, names: Names) -> None:
    if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError("codescent: the optimizer has parameters that are not this module's: give its own module")


def _latest(path: Path, *, missing_ok: bool) -> Saved | None:
    """The newest checkpoint in a folder, or the one that the folder itself is; None: there is none, and it may be so.

    Raises UserError on every rank if ranks find different ones, or none.
    """
    seen: list[Saved] = []

    def look() -> int:
        found = Checkpoints(path, keep_last=1, keep_best=False).latest()
        if found is None and (path / MANIFEST).is_file():
            manifest = read_manifest(path)
            found = Saved(manifest.step, path, manifest.validation_loss, manifest.state)
        if found is None and missing_ok:
            return -1
        if found is None:
            raise UserError(f"codescent.load: {path}: has no checkpoint of codescent.save")
        if not {"extra", "optimizer"} <= set(found.state):
            raise UserError(f"codescent.load: {found.path}: a checkpoint of `codescent train`, not of codescent.save")
        seen.append(found)
        return found.step

    steps = sorted(set(together(UserError, look)))
    if len(steps) > 1:
        saves = ", ".join("none" if step < 0 else f"step {step}" for step in steps)
        raise UserError(
            f"codescent.load: {path}: the ranks see different saves ({saves}): the folder must be shared by all ranks"
        )
    return seen[0] if seen else None


def _refuse_optimizer(path: Path, stored: dict[str, Any], optimizer: torch.optim.Optimizer, names: Names) -> None:
    _refuse_foreign_parameters(optimizer, names)
    if stored["kind"] != type(optimizer).__name__:
        raise UserError(f"codescent.load: {path}: is of {stored['kind']}, this optimizer is {type(optimizer).__name__}")
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in stored["groups"]]:
        before = [len(group["params"]) for group in stored["groups"]]
        raise UserError(
            f"codescent.load: {path}: its optimizer has groups of {before} parameters, this one of "
            f"{[len(group) for group in groups]}, or the groups have other parameters: create the same groups"
        )


def _states(stored: Mapping[str, StoredTensor], optimizer: torch.optim.Optimizer, names: Names, prefix: str) -> States:
    """Memory for the optimizer state whose names begin with `prefix`, sharded as the parameters are now."""
    groups = {names[parameter]: (parameter, group) for group in optimizer.param_groups for parameter in group["params"]}
    states: States = {}
    for name, one in stored.items():
        key, _, owner = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and owner in groups:
            parameter, group = groups[owner]
            states.setdefault(parameter, {})[key] = _memory(parameter, key, one, group)
    return states


def _memory(parameter: torch.Tensor, key: str, stored: StoredTensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Allocate one tensor of optimizer state as torch does: "step" is on the CPU unless a fused kernel reads it."""
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    dtype = CODE_DTYPES[stored.dtype]
    if stored.shape == tuple(parameter.shape) and stored.shape:
        return torch.zeros_like(parameter, dtype=dtype).detach()
    whole = torch.zeros(stored.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    sharded: torch.Tensor = state_like(parameter, whole)
    return sharded


def _set(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set a group's saved settings, except the choice of kernels (foreach, fused, capturable)."""
    for key, value in settings.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        elif key not in ("foreach", "fused", "capturable"):
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _only_model(saved: Saved, model: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the module's tensors. Raises UserError if the checkpoint has other names or shapes."""
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
        raise UserError(f"codescent.load: {saved.path} belongs to another module:", *problems)
    return list(model)


def _fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        parts = distribute(whole.to(tensor.to_local().device), tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(parts.to_local())
    else:
        tensor.copy_(whole)
