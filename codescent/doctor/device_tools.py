"""In: the programs that makers of devices install: nvidia-smi, rocm-smi, xpu-smi. Out: the devices of this machine, in
the words of nvidia-smi, and the processes on them.
Does not say which of them a process sees (devices.py does), and does not import torch."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from codescent.base.device_kinds import CUDA, XPU

ASK_S = 20.0
"""Such a program answers within seconds, unless a driver is broken."""
KIB, MIB = 2**10, 2**20
Row = dict[str, str]
"""Of a device: "index", "uuid", "name", "memory.total" (MiB), "memory.used" (MiB), "driver_version"; what the program
does not say is missing. Of a stack of an Intel GPU also "card" and "tile". Of a process: "gpu_uuid", "pid",
"used_memory" (MiB)."""
_DEVICES, _PROCESSES = "index,uuid,name,memory.total,memory.used,driver_version", "gpu_uuid,pid,used_memory"


class _NoAnswer(Exception):
    """The program ends with an error, or says something else."""


@dataclass(frozen=True)
class DeviceTool:
    """A program of a maker.

    Attributes:
        program: its name.
        kind: torch's name of its devices.
        devices: those of this machine.
        processes: those with memory on a device.
    """

    program: str
    kind: str
    devices: Callable[[], list[Row]]
    processes: Callable[[], list[Row]]


def devices() -> dict[str, Any]:
    """The devices of this machine by the first program that lists some.

    Returns:
        "all": their rows. "program", "kind": of `DeviceTool`; "" where no program is installed. "problem": why the
        program cannot list them; "": it can, or there is none.
    """
    said: list[dict[str, Any]] = []
    for tool in _installed():
        found: dict[str, Any] = {"all": [], "program": tool.program, "kind": tool.kind, "problem": ""}
        try:
            found["all"] = tool.devices()
        except _NoAnswer as error:
            found["problem"] = str(error)
        if found["all"]:
            return found
        said.append(found)
    broken = next((one for one in said if one["problem"]), None)
    return broken or {"all": [], "program": "", "kind": "", "problem": ""}


def processes() -> list[Row]:
    """Processes with memory on a device. rocm-smi does not say on which one, so it is not asked."""
    found: list[Row] = []
    for tool in _installed():
        try:
            found += tool.processes()
        except _NoAnswer:  # `devices` says it
            continue
    return found


def _installed() -> Iterator[DeviceTool]:
    return (tool for tool in TOOLS if shutil.which(tool.program) is not None)


def _asked(words: Sequence[str]) -> str:
    """What a program prints. Raises _NoAnswer: it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NoAnswer(f"{words[0]} does not answer: {error}") from error
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise _NoAnswer(f"{words[0]} ends with {done.returncode}: {last}")
    return done.stdout


def _json(words: Sequence[str]) -> dict[str, Any]:
    """The JSON object that a program prints. Raises _NoAnswer: it prints something else."""
    text = _asked(words)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _NoAnswer(f"{words[0]} prints no JSON: {text.strip()[:80]!r}") from error
    if not isinstance(found, dict) or "error" in found:
        raise _NoAnswer(f"{words[0]} answers {text.strip()[:80]!r}")
    return found


def _rows(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _mib(size: object, unit: int = 1) -> str:
    """A number of units of bytes in MiB; "": it is no number."""
    return str(int(str(size)) * unit // MIB) if str(size).isdecimal() else ""


# -- NVIDIA


def _of_nvidia(what: str, fields: str) -> list[Row]:
    text = _asked(["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"])
    rows = ([cell.strip() for cell in row] for row in csv.reader(text.splitlines()))
    names = fields.split(",")
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


# -- AMD


def _of_amd() -> list[Row]:
    """Devices in the order of HIP. Older programs write "Card series"."""
    words = ["--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--showdriverversion", "--json"]
    found = _json(["rocm-smi", *words])
    cards = [name for name, value in found.items() if name.startswith("card") and isinstance(value, dict)]
    system = found.get("system")
    driver = str(system.get("Driver version", "")) if isinstance(system, dict) else ""
    rows = []
    for index, name in enumerate(sorted(cards, key=lambda card: (len(card), card))):
        facts = {key.lower(): str(value) for key, value in found[name].items() if value != "N/A"}
        unique = facts.get("unique id", "").removeprefix("0x")
        row = {
            "index": str(index),
            "uuid": f"GPU-{unique}" if unique else name,
            "name": facts.get("card series") or facts.get("device name", ""),
            "memory.total": _mib(facts.get("vram total memory (b)")),
            "memory.used": _mib(facts.get("vram total used memory (b)")),
            "driver_version": driver,
        }
        rows.append({key: value for key, value in row.items() if value})
    return rows


# -- Intel


def _of_intel() -> list[Row]:
    """Devices as torch counts them: each stack (tile) of a GPU is one, with its share of the memory."""
    rows: list[Row] = []
    for card in _rows(_json(["xpu-smi", "discovery", "-j"]).get("device_list")):
        number = str(card.get("device_id", ""))
        facts = card | _json(["xpu-smi", "discovery", "-d", number, "-j"])
        tiles = int(facts["number_of_tiles"]) if str(facts.get("number_of_tiles")).isdecimal() else 1
        uuid = str(facts.get("uuid") or facts.get("pci_bdf_address") or f"card {number}")
        for tile in range(tiles):
            row = {
                "index": str(len(rows)),
                "uuid": f"{uuid}.{tile}" if tiles > 1 else uuid,
                "name": str(facts.get("device_name", "")),
                "memory.total": _mib(facts.get("memory_physical_size_byte")),
                "driver_version": str(facts.get("driver_version", "")),
                "card": number,
                "tile": str(tile),
            }
            if tiles > 1 and row["memory.total"]:
                row["memory.total"] = str(int(row["memory.total"]) // tiles)
            rows.append({key: value for key, value in row.items() if value})
    return rows


def _on_intel() -> list[Row]:
    """Processes by GPU, on each of its stacks. The program lists itself, too."""
    every = _json(["xpu-smi", "ps", "-j"]).get("device_util_by_proc_list")
    cards = _of_intel()
    return [
        {
            "gpu_uuid": card["uuid"],
            "pid": str(one.get("process_id")),
            "used_memory": _mib(one.get("mem_size"), KIB),
        }
        for one in _rows(every)
        for card in cards
        if card.get("card") == str(one.get("device_id")) and one.get("process_name") != "xpu-smi"
    ]


TOOLS = (
    DeviceTool("nvidia-smi", CUDA, lambda: _of_nvidia("gpu", _DEVICES), lambda: _of_nvidia("compute-apps", _PROCESSES)),
    DeviceTool("rocm-smi", CUDA, _of_amd, list),
    DeviceTool("xpu-smi", XPU, _of_intel, _on_intel),
)
"""In the order in which they are asked."""
