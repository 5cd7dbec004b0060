"""In: words of PALS's mpiexec, hosts that are namespaces. Out: ranks on them, with the variables that PALS sets.
Stands in for software that is not to be had. Its variables are those of docs/launch.md, seen in scripts of users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

PREFIX = "TESTS_PREFIX"
"""Variable with the begin of the names of the hosts' namespaces."""
LOGIN = ("PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS")
"""What ranks have without --envall and --env, as after a login."""


def main() -> int:
    """Start the ranks and wait for them. The first that fails ends the others; its exit code is that of the command."""
    parser = ArgumentParser(prog="mpiexec", allow_abbrev=False)
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--ppn", type=int, required=True)
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--envall", action="store_true")
    parser.add_argument("--cpu-bind")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--line-buffer", action="store_true")
    parser.add_argument("words", nargs="...")
    asked = parser.parse_args()
    env = {name: text for name, text in os.environ.items() if asked.envall or name in LOGIN}
    for given in asked.env:
        name, equals, text = given.partition("=")
        if not equals:
            parser.error(f"--env {given}: not NAME=VALUE")
        env[name] = text
    addresses = list(dict.fromkeys(asked.hostfile.read_text().split()))  # PBS names a host once for each of its ranks
    if asked.n > asked.ppn * len(addresses):
        parser.error(f"-n {asked.n}: more than {asked.ppn} on each of {len(addresses)} hosts")
    started = [
        subprocess.Popen(
            _on(os.environ[PREFIX], addresses[rank // asked.ppn], asked.words),
            env=env | {name: str(number) for name, number in _numbers(rank, asked.n, asked.ppn).items()},
        )
        for rank in range(asked.n)
    ]
    return _ended({process.pid: process for process in started})


def _on(prefix: str, address: str, words: list[str]) -> list[str]:
    """The words on a host, which has a name of its own."""
    host = int(address.rpartition(".")[2]) - 1
    inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{host}", *words]
    return ["nsenter", f"--net=/run/netns/{prefix}{host}", "--", *inside]


def _numbers(rank: int, ranks: int, per_node: int) -> dict[str, object]:
    """The variables of a rank."""
    node, local = divmod(rank, per_node)
    here = min(per_node, ranks - node * per_node)
    return {
        "PALS_APID": f"4711-{os.getpid()}", "PALS_RANKID": rank, "PALS_LOCAL_RANKID": local, "PALS_LOCAL_SIZE": here,
        "PALS_NODEID": node, "PMI_RANK": rank, "PMI_SIZE": ranks, "PMI_LOCAL_RANK": local, "PMI_LOCAL_SIZE": here,
    }  # fmt: skip


def _ended(started: dict[int, subprocess.Popen[bytes]]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: [os.kill(pid, number) for pid in started])
    code = 0
    while started:
        pid, status = os.wait()
        del started[pid]
        ended = os.waitstatus_to_exitcode(status)
        if ended and not code:
            code = ended if ended > 0 else 128 - ended
            for other in started:
                os.kill(other, signal.SIGTERM)
    return code


if __name__ == "__main__":
    sys.exit(main())
