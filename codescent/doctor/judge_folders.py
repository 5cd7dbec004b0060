"""In: what each host sees of the folders of a run, processes that are left. Out: findings: a folder that is not shared,
not writable or too small; processes of other runs. Does not look at a disk (folders.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.base.amounts import of_bytes
from codescent.base.command import command
from codescent.doctor.facts import Host
from codescent.doctor.finding import WARNING, WRONG, Finding, listed
from codescent.doctor.judge_network import Pair, blamed, either

LEAST_FREE_BYTES = 1 << 30


def judge_folder(
    what: str,
    looks: Mapping[str, Mapping[str, Any]],
    unseen: Sequence[Pair],
    needs_bytes: int | None,
    key: str,
) -> Iterator[Finding]:
    """Findings of one folder.

    Args:
        what: "run folder" or "data folder".
        looks: what each host has there.
        unseen: pairs of hosts: the first does not see the file of the second. None where it need not be shared.
        needs_bytes: room for more checkpoints; 0: none is saved; None: unknown.
        key: of the config, which says where the folder is.
    """
    for where, pairs in blamed(unseen):
        others = list(dict.fromkeys(name for pair in pairs for name in pair if name != where[0]))
        of_first = f" of {where[0]}" if len(where) > 1 else ""
        text = f"the {what} {looks[where[0]]['path']}{of_first} is not that of {listed(others)}{either(where)}"
        expected = "one file system, which every host sees under the same path"
        mend = f"mount the shared file system there, or set {key} to a folder on one"
        yield Finding(WRONG, "folders", where, text, expected, mend)
    for host, look in looks.items():
        if look["error"]:
            text = f"cannot write in {look['exists']}, for the {what} {look['path']}: {look['error']}"
            mend = f"mount it read-write and give this user the right (ls -ld, mount), or set {key} to another folder"
            yield Finding(WRONG, "folders", (host,), text, "a writable folder", mend)
    yield from _room(what, looks, needs_bytes, key)


def _room(what: str, looks: Mapping[str, Mapping[str, Any]], needs_bytes: int | None, key: str) -> Iterator[Finding]:
    """One finding for hosts with the same path and size: most often that is one file system."""
    least = LEAST_FREE_BYTES if needs_bytes is None else needs_bytes
    short: dict[tuple[str, int], list[str]] = {}
    for host, look in looks.items():
        if look["free_bytes"] is not None and look["free_bytes"] < least:
            short.setdefault((look["exists"], look["all_bytes"]), []).append(host)
    for (path, _), hosts in short.items():
        free = min(looks[host]["free_bytes"] for host in hosts)
        text = f"{path} has {of_bytes(free)} free for the {what}"
        severity, expected = WARNING, of_bytes(least)
        if needs_bytes is not None:
            severity, expected = WRONG, f"{of_bytes(least)} for the checkpoints"
        mend = f"remove old checkpoints, lower checkpoint.keep_last, or set {key} to a larger disk"
        yield Finding(severity, "folders", tuple(hosts), text, expected, mend)


def judge_processes(
    hosts: Sequence[Host], left: Mapping[int, Sequence[Mapping[str, Any]]], mark: str | None
) -> Iterator[Finding]:
    """Processes that other runs have left on hosts.

    Args:
        hosts: with their facts.
        left: by the leader of a host.
        mark: of the run that is about to begin; None: unknown.
    """
    for host in hosts:
        by_mark: dict[str, list[Mapping[str, Any]]] = {}
        for one in left.get(host.leader, ()):
            by_mark.setdefault(one["mark"], []).append(one)
        for its, found in by_mark.items():
            shown = listed((f"process {one['pid']} ({one['command']})" for one in found), 2)
            text = f"the run {its} is still there: {shown}"
            severity, expected = WARNING, "a host without another run, which takes cores, devices and the network"
            if its == mark:
                severity, expected = WRONG, "nothing of an earlier start of this run"
            yield Finding(
                severity, "leftovers", (host.name,), text, expected, f"{command('launch', its, '--kill')}, on this host"
            )
