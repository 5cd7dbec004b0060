"""In: the devices of a machine, the variables that say which of them a process sees. Out: the devices of a rank.
Does not ask which devices there are (device_tools.py does), and does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from codescent.base.device_kinds import CUDA, GPUS, kind_of

CUDA_VISIBLE, HIP_VISIBLE, ROCR_VISIBLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
AFFINITY, HIERARCHY, COMPOSITE = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE"
Devices = list[Mapping[str, str]]


def visible(every: Sequence[Mapping[str, str]], env: Mapping[str, str], program: str = "nvidia-smi") -> Devices:
    """The devices that a process sees, in its order, as the library of their maker reads its variables.

    An entry of CUDA and ROCm is a number or the begin of a UUID. The first entry that is no device ends the list. A
    part of a device (MIG), which nvidia-smi does not list, is a device of its own. Level Zero counts the stacks of
    Intel's GPUs, or, with ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE, the GPUs; 1.0 is the first stack of the second GPU.

    Args:
        every: the devices of the machine.
        env: environment variables of the process.
        program: that has listed them (`device_tools`).
    """
    if program == "xpu-smi":
        return _of_level_zero(every, env)
    found = list(every)
    for variable in _read_by(program, env):
        found = _listed(found, env[variable])
    return found


def visible_by(env: Mapping[str, str], kind: str, program: str = "") -> str:
    """The variables that say what a process sees of a kind of device, with their values; "": none is set.

    `program`: that has listed the devices. Where none has, the first variable that is set counts.
    """
    if program and kind == CUDA:
        return ", ".join(f"{name}={env[name]}" for name in _read_by(program, env))
    return next((f"{name}={env[name]}" for name in kind_of(kind).visible if name in env), "")


def _read_by(program: str, env: Mapping[str, str]) -> list[str]:
    """The variables that are read, in this order. With ROCm numbers of the second one count what the first leaves."""
    if program != "rocm-smi":
        return [name for name in (CUDA_VISIBLE,) if name in env]
    of_hip = next((name for name in (HIP_VISIBLE, CUDA_VISIBLE) if name in env), None)
    return [name for name in (ROCR_VISIBLE, of_hip) if name is not None and name in env]


def _listed(every: Sequence[Mapping[str, str]], text: str) -> Devices:
    numbered = {str(number): device for number, device in enumerate(every)}
    found: Devices = []
    for entry in (part.strip() for part in text.split(",")):
        one = numbered.get(entry) or next((device for device in every if _begins(device["uuid"], entry)), None)
        if entry.startswith("MIG-"):
            one = {"index": entry, "uuid": entry, "name": "MIG"}
        if one is None or one in found:
            break
        found.append(one)
    return found


def _begins(uuid: str, entry: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)


def _of_level_zero(every: Sequence[Mapping[str, str]], env: Mapping[str, str]) -> Devices:
    """What Level Zero shows. A GPU with all its stacks is named by its first one."""
    gpus = [stack for stack in every if stack.get("tile", "0") == "0"]
    shown = gpus if env.get(HIERARCHY) == COMPOSITE else list(every)
    if not env.get(AFFINITY):
        return shown
    found: Devices = []
    for entry in (part.strip() for part in env[AFFINITY].split(",")):
        card, dot, tile = entry.partition(".")
        if dot:
            one = next((stack for stack in every if (stack.get("card"), stack.get("tile")) == (card, tile)), None)
        else:
            one = shown[int(card)] if card.isdecimal() and int(card) < len(shown) else None
        if one is not None and one not in found:
            found.append(one)
    return found


def chosen(seen: Sequence[Mapping[str, str]], local_rank: int) -> Mapping[str, str] | None:
    """The device that a rank takes, as train/devices.choose_devices does: the only one, or that of its local rank."""
    if len(seen) == 1:
        return seen[0]
    return seen[local_rank] if local_rank < len(seen) else None


def label_of(kind: str) -> str:
    """What devices of a kind are called: CUDA devices where no program says what there is."""
    return kind_of(kind if kind in GPUS else CUDA).label
