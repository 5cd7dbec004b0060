"""In: a number of hosts, a rate. Out: `Hosts`: namespaces of one machine, on a switch; links shaped, lossy or cut.
Does not touch the machine's own network, and does not know what runs on a host. Needs root, iproute2 and util-linux."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from systems import die_with_parent

PREFIX = "slow"
"""Begin of the names of our namespaces; the process id of the harness and the host's number follow."""

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "sh")
DEVICE = "eth0"
WIRE = Path(__file__).with_name("lossy_wire.py")
BURST_MS, LEAST_BURST_BYTES = 2.0, 131_072
"""Bucket of the shaper. With two packets of segmentation offload the rate is even; half of it costs 5 % of the rate."""
QUEUE_MS = 50
"""Longest time that a packet waits in the shaper. Longer waits only delay TCP's control."""

CONGESTION = "reno"
"""TCP's congestion control on every host; every kernel has it, every namespace may use it. It fills the shaper's queue
without a loss. bbr probes for the rate: an all_reduce carried 0.93 to 0.97 of the link, less with several in flight."""


class HostsFailed(Exception):
    """A namespace could not be made or shaped. The message has the command and what it printed."""


def missing() -> str:
    """Why this machine cannot make hosts, in words; "" if it can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"there is no {' and no '.join(absent)}: install iproute2 and util-linux"
    try:
        with Hosts(2) as hosts:
            hosts.shape(100.0)
    except HostsFailed as failure:
        return f"this kernel or container refuses: {failure}"
    return ""


def address(host: int) -> str:
    """The IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def shaper(mbit: float) -> list[str]:
    """The words for `tc` that let `mbit` million bits a second through, counted with Ethernet's headers."""
    burst = max(LEAST_BURST_BYTES, int(mbit * 1e6 / 8 * BURST_MS / 1e3))
    return ["tbf", "rate", f"{mbit * 1e6:.0f}bit", "burst", f"{burst}b", "latency", f"{QUEUE_MS}ms"]


class Hosts:
    """Hosts 0 to n - 1 with a network, and a hostname, of their own. Use it in a `with`: its end removes them.

    Raises:
        HostsFailed: a command failed.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._switch = f"{PREFIX}{os.getpid()}sw"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        remove_left_behind()
        try:
            self._make()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _make(self) -> None:
        switch = self._switch
        self._add(switch)
        _do("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "bridge0", "up")
        for host in range(self.count):
            name, port = self.name(host), f"port{host}"
            self._add(name)
            _do("ip", "-n", name, "link", "add", DEVICE, "type", "veth", "peer", "name", port, "netns", switch)
            _do("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", DEVICE)
            _do("ip", "-n", name, "link", "set", DEVICE, "up")
            _do(*self.command(host, ["sh", "-c", f"echo {CONGESTION} > /proc/sys/net/ipv4/tcp_congestion_control"]))
            _do("ip", "-n", switch, "link", "set", port, "master", "bridge0")
            _do("ip", "-n", switch, "link", "set", port, "up")

    def _add(self, namespace: str) -> None:
        _do("ip", "netns", "add", namespace)
        self._stack.callback(_remove, namespace)
        _do("ip", "-n", namespace, "link", "set", "lo", "up")

    def name(self, host: int) -> str:
        """The namespace of a host."""
        return f"{PREFIX}{os.getpid()}h{host}"

    def shape(self, mbit: float | None) -> None:
        """Limit every link to `mbit` million bits a second in each direction; None: no limit."""
        for host in range(self.count):
            for namespace, device in ((self.name(host), DEVICE), (self._switch, f"port{host}")):
                if mbit is None:
                    _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "pfifo")
                else:
                    _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shaper(mbit))

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a host. Each part replaces itself: the process id stays."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{host}", *argv]
        return ["nsenter", f"--net=/run/netns/{self.name(host)}", "--", *inside]

    def start(
        self, host: int, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: IO[str], *, asks: bool = False
    ) -> subprocess.Popen[str]:
        """Start `argv` on a host; it ends with this process. `asks`: its input and output are pipes."""
        return subprocess.Popen(
            self.command(host, argv), env=dict(env), cwd=cwd, text=True, start_new_session=True,
            stdin=subprocess.PIPE if asks else subprocess.DEVNULL, stdout=subprocess.PIPE if asks else log, stderr=log,
            preexec_fn=die_with_parent,
        )  # fmt: skip

    def cut(self, host: int) -> None:
        """Cut the link of a host at the switch. Its device stays up, and nobody is told."""
        _do("ip", "-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def heal(self, host: int) -> None:
        """The link works again."""
        _do("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "bridge0")

    @contextmanager
    def lossy(self, delay_ms: float, mbit: float, loss: float) -> Iterator[list[int]]:
        """Connect hosts 0 and 1 by a wire (lossy_wire.py) in place of the switch: not every kernel has netem.

        At the end the list has the number of packets carried, and of those lost.
        """
        counts: list[int] = []
        argv = [sys.executable, str(WIRE), "wire0", "wire1", *map(str, (delay_ms, mbit, loss))]
        with subprocess.Popen(self.command(0, argv), stdout=subprocess.PIPE, text=True) as wire:
            assert wire.stdout is not None
            try:
                if wire.stdout.readline() != "open\n":
                    raise HostsFailed(f"{WIRE.name} has not opened its interfaces")
                for host in range(2):
                    name, device = self.name(host), f"wire{host}"
                    _do("ip", "-n", name, "link", "del", DEVICE)
                    _do("ip", "-n", self.name(0), "link", "set", device, "netns", name, "name", DEVICE)
                    _do("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", DEVICE)
                    _do("ip", "-n", name, "link", "set", DEVICE, "up")
                yield counts
            finally:
                wire.terminate()
                counts += map(int, wire.stdout.readline().split())

    def sent_bytes(self, host: int) -> int:
        """Bytes that left the host's link since it exists, with all headers."""
        done = _do(*self.command(host, ["cat", "/proc/net/dev"]))
        return transmitted(done, DEVICE)


def transmitted(text: str, device: str) -> int:
    """The transmitted bytes of a device, of the text of /proc/net/dev (proc(5)): the ninth number."""
    for line in text.splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == device:
            return int(numbers.split()[8])
    raise HostsFailed(f"/proc/net/dev has no {device}")


def rank_environment(env: Mapping[str, str], rank: int, ranks: int, port: int) -> dict[str, str]:
    """`env` with torchrun's variables for rank `rank` of `ranks`, a rank on each host; rank 0 listens on `port`."""
    return {
        **env, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0), "MASTER_PORT": str(port),
    }  # fmt: skip


def remove_left_behind() -> None:
    """Remove the namespaces of harnesses that were killed: no process has the number in their name."""
    for namespace, owner in owners(_do("ip", "netns", "list")):
        if not Path(f"/proc/{owner}").exists():
            _remove(namespace)


def owners(listed: str) -> Iterator[tuple[str, int]]:
    """Our namespaces in the output of `ip netns list`, with the process id of the harness that made each."""
    for line in listed.splitlines():
        found = re.fullmatch(rf"({PREFIX}(\d+)(?:sw|h\d+))(?: .*)?", line)
        if found:
            yield found[1], int(found[2])


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostsFailed(f"`{' '.join(words)}`: {done.stderr.strip() or done.returncode}")
    return done.stdout
