"""In: programs that answer as nvidia-smi, rocm-smi and xpu-smi do. Out: devices, processes, what a rank sees, a price.
Does not run the programs of the makers. What rocm-smi and xpu-smi print is as their sources and users show it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from codescent.base.errors import UserError
from codescent.doctor import device_tools
from codescent.doctor.device_tools import devices, processes
from codescent.doctor.devices import chosen, visible, visible_by
from codescent.verbs.cluster_here import cluster_here

GIB = 2**30
AMD = {
    f"card{number}": {
        "Unique ID": f"0x{number}a", "Card Series": "AMD Instinct MI300X OAM", "GUID": "1",
        "VRAM Total Memory (B)": str(192 * GIB), "VRAM Total Used Memory (B)": str(GIB),
    }
    for number in (0, 1, 10, 2)
} | {"system": {"Driver version": "6.12.12"}}  # fmt: skip
MAX_1550 = "Intel(R) Data Center GPU Max 1550"
INTEL = {"device_list": [{"device_id": number, "device_name": MAX_1550, "uuid": f"u{number}"} for number in (0, 1)]}
DETAILS = {"driver_version": "1.3.3", "memory_physical_size_byte": str(128 * GIB), "number_of_tiles": 2}
ON_INTEL = {
    "device_util_by_proc_list": [
        {"device_id": 1, "mem_size": 2048, "process_id": 77, "process_name": "python"},
        {"device_id": 1, "mem_size": 8, "process_id": 78, "process_name": "xpu-smi"},
    ]
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is alone in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(path: Path, name: str, answers: Mapping[str, Any], code: int = 0) -> None:
    """A program that prints the first answer whose words are among its arguments."""
    cases = [f"*' {words} '*) printf '%s\\n' '{json.dumps(said)}' ;;" for words, said in answers.items()]
    lines = [f"#!{shutil.which('sh', path=os.defpath)}", 'case " $* " in', *cases, "*) ;;", "esac", f"exit {code}"]
    (path / name).write_text("\n".join(lines) + "\n")
    (path / name).chmod(0o755)


def intel(path: Path) -> list[dict[str, str]]:
    program(path, "xpu-smi", {"-d 0 -j": DETAILS, "-d 1 -j": DETAILS, "discovery -j": INTEL, "ps -j": ON_INTEL})
    found: list[dict[str, str]] = devices()["all"]
    return found


def test_a_machine_without_programs_has_no_device(path: Path) -> None:
    assert devices() == {"all": [], "program": "", "kind": "", "problem": ""}
    assert processes() == []


def test_devices_of_amd_in_the_order_of_hip(path: Path) -> None:
    """card10 comes after card2, as a number: else ranks would be told of other devices than they take."""
    program(path, "rocm-smi", {"--json": AMD})
    found = devices()
    assert (found["program"], found["kind"], found["problem"]) == ("rocm-smi", "cuda", "")
    assert [one["uuid"] for one in found["all"]] == ["GPU-0a", "GPU-1a", "GPU-2a", "GPU-10a"]
    assert found["all"][3] == {
        "index": "3", "uuid": "GPU-10a", "name": "AMD Instinct MI300X OAM", "memory.total": str(192 * 1024),
        "memory.used": "1024", "driver_version": "6.12.12",
    }  # fmt: skip


def test_a_stack_of_an_intel_gpu_is_a_device(path: Path) -> None:
    found = intel(path)
    assert [(one["index"], one["uuid"], one["card"], one["tile"]) for one in found] == [
        ("0", "u0.0", "0", "0"), ("1", "u0.1", "0", "1"), ("2", "u1.0", "1", "0"), ("3", "u1.1", "1", "1"),
    ]  # fmt: skip
    assert {(one["name"], one["memory.total"], one["driver_version"]) for one in found} == {
        (MAX_1550, str(64 * 1024), "1.3.3")
    }
    assert processes() == [{"gpu_uuid": uuid, "pid": "77", "used_memory": "2"} for uuid in ("u1.0", "u1.1")]


@pytest.mark.parametrize(
    ("answers", "code", "problem"),
    [
        ({}, 3, r"rocm-smi ends with 3"),
        ({"--json": "no object"}, 0, "rocm-smi answers"),
        ({}, 0, "rocm-smi prints no JSON"),
    ],
)
def test_a_broken_program_is_a_problem_and_the_next_one_is_asked(
    path: Path, answers: dict[str, Any], code: int, problem: str
) -> None:
    program(path, "rocm-smi", answers, code)
    found = devices()
    assert (found["all"], found["program"]) == ([], "rocm-smi")
    assert found["problem"].startswith(problem)
    assert len(intel(path)) == 4


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, "0123"),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, "20"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "1"}, "3"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, "3"),  # the second of what ROCR leaves
        ({"ROCR_VISIBLE_DEVICES": "GPU-2a"}, "2"),
    ],
)
def test_visible_devices_of_rocm(path: Path, env: dict[str, str], seen: str) -> None:
    program(path, "rocm-smi", {"--json": AMD})
    assert "".join(one["index"] for one in visible(devices()["all"], env, "rocm-smi")) == seen


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, ["u0.0", "u0.1", "u1.0", "u1.1"]),
        ({"ZE_AFFINITY_MASK": "3"}, ["u1.1"]),
        ({"ZE_AFFINITY_MASK": "1.0,0.1"}, ["u1.0", "u0.1"]),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, ["u0.0", "u1.0"]),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "1"}, ["u1.0"]),
        ({"ZE_AFFINITY_MASK": "9"}, []),
    ],
)
def test_visible_devices_of_level_zero(path: Path, env: dict[str, str], seen: list[str]) -> None:
    every = intel(path)
    assert [one["uuid"] for one in visible(every, env, "xpu-smi")] == seen
    assert chosen(visible(every, {"ZE_AFFINITY_MASK": "2"}, "xpu-smi"), 3) == every[2]


def test_the_variable_is_named() -> None:
    assert visible_by({"ZE_AFFINITY_MASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, "xpu") == "ZE_AFFINITY_MASK=1"
    assert visible_by({"ZE_AFFINITY_MASK": "1"}, "cuda") == ""


def test_a_plan_is_priced_on_the_devices_that_are_there(path: Path) -> None:
    program(path, "rocm-smi", {"--json": AMD})
    found = cluster_here()
    assert (found.name, found.devices, found.device.name) == ("mi300x", 4, "MI300X")
    assert cluster_here(["node.devices=8"]).devices == 8
    (path / "rocm-smi").unlink()
    intel(path)
    found = cluster_here()  # not aurora, which is a certain machine
    assert (found.name, found.devices, found.device.name) == ("max-1550", 4, "Max 1550, one of two stacks")


def test_no_price_without_devices(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="nvidia-smi, rocm-smi, xpu-smi: none of them lists a device; give the name"):
        cluster_here()
    other = {"card0": {"Card Series": "Radeon"}}
    program(path, "rocm-smi", {"--json": other})
    with pytest.raises(UserError, match="no shipped cluster has devices of the name 'Radeon'"):
        cluster_here()
    program(path, "rocm-smi", {"--json": AMD | other})
    with pytest.raises(UserError, match=r"different devices \(Radeon, AMD Instinct MI300X OAM\)"):
        cluster_here()
    monkeypatch.setattr(device_tools, "ASK_S", 0.0)
    with pytest.raises(UserError, match="rocm-smi does not answer"):
        cluster_here()


def test_odd_answers_of_rocm_end_no_command(path: Path) -> None:
    """A name "N/A" hides the one that is there; a system that is no object, or bytes that are no UTF-8: tracebacks."""
    card = {"Card Series": "N/A", "Device Name": "AMD Instinct MI300X", "Unique ID": "N/A"}
    program(path, "rocm-smi", {"--json": {"card0": card, "system": "N/A"}})
    assert devices()["all"] == [{"index": "0", "uuid": "card0", "name": "AMD Instinct MI300X"}]
    program(path, "rocm-smi", {"--json": {"card0": {}}})
    with pytest.raises(UserError, match="devices of the name 'a device without a name'"):
        cluster_here()
    (path / "rocm-smi").write_text(f"#!{shutil.which('sh', path=os.defpath)}\nprintf '\\377'\n")
    assert devices()["problem"].startswith("rocm-smi prints no JSON")


def test_the_variables_that_count_are_named() -> None:
    """HIP reads its own variable before CUDA's: the wrong one would be unset, and the ranks still share a device."""
    env = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "2"}
    assert visible_by(env, "cuda", "rocm-smi") == "ROCR_VISIBLE_DEVICES=2, HIP_VISIBLE_DEVICES=1"
    assert visible_by(env, "cuda", "nvidia-smi") == "CUDA_VISIBLE_DEVICES=0"
