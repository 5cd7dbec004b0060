"""In: nvidia-smi, the variables that say which CUDA devices a process sees. Out: the devices of a rank, who uses them.
Does not import torch, and does not open a device."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_S = 20.0
"""nvidia-smi answers within seconds, unless a driver is broken."""
_DEVICES, _PROCESSES = "index,uuid,name,memory.total,memory.used,driver_version", "gpu_uuid,pid,used_memory"


def devices() -> dict[str, Any]:
    """The devices of this machine ("all") by nvidia-smi, and why it cannot say so ("problem"; "": it can, or there is
    no nvidia-smi)."""
    rows, problem = _asked("gpu", _DEVICES)
    return {"all": [dict(zip(_DEVICES.split(","), row, strict=True)) for row in rows], "problem": problem}


def processes() -> list[dict[str, str]]:
    """Processes with memory on a device: "gpu_uuid", "pid", "used_memory"."""
    rows, _ = _asked("compute-apps", _PROCESSES)
    return [dict(zip(_PROCESSES.split(","), row, strict=True)) for row in rows]


def _asked(what: str, fields: str) -> tuple[list[list[str]], str]:
    """Rows of nvidia-smi, and what is wrong with it."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    words = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
    if done.returncode != 0:
        return [], f"nvidia-smi ends with {done.returncode}: {(done.stdout + done.stderr).strip().splitlines()[-1:]}"
    return [row for row in rows if len(row) == fields.count(",") + 1], ""


def visible(every: Sequence[Mapping[str, str]], env: Mapping[str, str]) -> list[Mapping[str, str]]:
    """The devices that a process sees, in its order, as CUDA reads CUDA_VISIBLE_DEVICES.

    An entry is a number or the begin of a UUID. The first entry that is no device ends the list. A part of a device
    (MIG), which nvidia-smi does not list, is a device of its own.
    """
    if VISIBLE not in env:
        return list(every)
    found: list[Mapping[str, str]] = []
    for entry in (part.strip() for part in env[VISIBLE].split(",")):
        one = next((device for device in every if device["index"] == entry or _begins(device["uuid"], entry)), None)
        if entry.startswith("MIG-"):
            one = {"index": entry, "uuid": entry, "name": "MIG"}
        if one is None or one in found:
            break
        found.append(one)
    return found


def _begins(uuid: str, entry: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)


def chosen(seen: Sequence[Mapping[str, str]], local_rank: int) -> Mapping[str, str] | None:
    """The device that a rank takes, as train/devices.choose_device does: the only one, or that of its local rank."""
    if len(seen) == 1:
        return seen[0]
    return seen[local_rank] if local_rank < len(seen) else None
