"""In: hosts that are namespaces, planted faults. Out: ranks of `codescent doctor` on them, and what rank 0 reports.
Does not know which fault is which (tests/test_doctor_faults.py does). A host has its own network, processes, mounts."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts

PORT = 29_400
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Fault:
    """What is wrong on one host or several.

    Attributes:
        before: lines of bash on a host, before its ranks start.
        env: more variables of the ranks of a host.
        prefix: words before the command of the ranks of a host.
        slots: ranks of each host.
        words: of the command line.
        names: wrong entries of /etc/hosts on a host.
    """

    before: Mapping[int, str] = field(default_factory=dict)
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    prefix: Mapping[int, Sequence[str]] = field(default_factory=dict)
    slots: Sequence[int] = (1, 1, 1, 1)
    words: Sequence[str] = ("--no-bandwidth",)
    names: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


@dataclass
class Examined:
    """What the hosts have said: exit code and standard error of each; the report of rank 0 (empty: none)."""

    codes: list[int]
    errors: list[str]
    report: dict[str, Any]

    @property
    def found(self) -> set[tuple[str, str, tuple[str, ...]]]:
        """Severity, check and hosts of each finding."""
        return {(one["severity"], one["check"], tuple(one["where"])) for one in self.report["findings"]}


def examine(cluster: hosts.Hosts, folder: Path, fault: Fault, *, wait_s: int = 30) -> Examined:
    """Run `codescent doctor` on all hosts, with the fault."""
    token, first = secrets.token_hex(16), 0
    processes: list[subprocess.Popen[str]] = []
    for host, slots in enumerate(fault.slots):
        (folder / f"hosts{host}").write_text(host_names(len(fault.slots), fault.names.get(host, {})))
        words = [*fault.prefix.get(host, ()), sys.executable, "-m", "codescent", "doctor", *fault.words, "--json=-"]
        command = shlex.join([*words, f"--wait={wait_s}"])
        lines = [f"hostname host{host}", f"mount --bind {folder}/hosts{host} /etc/hosts", fault.before.get(host, "")]
        lines += [f"cd {shlex.quote(str(folder))}", "codes=0", "pids=()"]
        for local in range(slots):
            own = f"RANK={first + local} LOCAL_RANK={local} LOCAL_WORLD_SIZE={slots} WORLD_SIZE={sum(fault.slots)}"
            lines += [f"{own} {command} & pids+=($!)"]
        lines += ['for pid in "${pids[@]}"; do wait "$pid" || codes=$?; done', "exit $codes"]
        first += slots
        hidden = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")  # set for tests of other things
        env = {name: text for name, text in os.environ.items() if name not in hidden}
        env |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(PORT), "CODESCENT_TOKEN": token}
        env |= {"PYTHONPATH": str(ROOT), **fault.env.get(host, {})}
        inside = ["unshare", "-umpf", "--mount-proc", "--propagation", "private", "bash", "-c", "\n".join(lines)]
        argv = ["nsenter", f"--net=/run/netns/{cluster.name(host)}", "--", *inside]
        processes.append(subprocess.Popen(argv, env=env, text=True, stdout=-1, stderr=-1, stdin=subprocess.DEVNULL))
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    report = json.loads(said[0][0]) if said[0][0].strip() else {}
    return Examined([process.returncode for process in processes], [err for _, err in said], report)


def host_names(count: int, wrong: Mapping[str, str]) -> str:
    """The text of /etc/hosts, with some wrong entries."""
    right = {f"host{host}": hosts.address(host) for host in range(count)}
    return "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **right, **wrong}.items())


def on_host(cluster: hosts.Hosts, host: int, *words: str) -> None:
    """Run a command of the network on a host."""
    subprocess.run(["nsenter", f"--net=/run/netns/{cluster.name(host)}", "--", *words], check=True, timeout=20)
