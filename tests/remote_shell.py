"""In: hosts that are network namespaces. Out: a program `ssh` that runs words on one, by its address or name.
Does not encrypt and does not ask who you are: it is for tests, as root, on one machine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hosts

SSH = """#!/bin/bash
# ssh [OPTIONS] HOST WORDS: the words run by a shell on a host, as ssh does it
while [[ $1 == -* ]]; do
    case $1 in -o|-p|-l|-i|-F|-J) shift 2 ;; *) shift ;; esac
done
case $1 in
    NETWORK.*) number=$(( ${1##*.} - 1 )) ;;
    host*) number=${1#host} ;;
esac
shift
if [[ ! -e /run/netns/PREFIX$number ]]; then echo "ssh: no such host" >&2; exit 255; fi
exec nsenter --net="/run/netns/PREFIX$number" unshare --uts bash -c "hostname host$number; $*"
"""


def make_ssh(folder: Path, made: hosts.Hosts) -> Path:
    """Write the program `ssh` into a folder. Returns its path."""
    path = folder / "ssh"
    network = hosts.address(0).rpartition(".")[0]
    path.write_text(SSH.replace("NETWORK", network).replace("PREFIX", made.name(0).removesuffix("0")))
    path.chmod(0o755)
    return path
