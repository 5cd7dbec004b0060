"""In: MASTER_ADDR, this machine's network interfaces. Out: the address that rank 0 listens on, the interface for gloo.
Does not listen or connect (store.py and rendezvous.py do)."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys

from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank

SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def is_local(place: Rank) -> bool:
    """Whether all ranks are on this machine."""
    return place.local_world_size == place.world_size


def listening_address(place: Rank) -> str:
    """The address that rank 0 listens on.

    It is loopback if all ranks are on this machine. Otherwise it is the address of this machine from which packets to
    MASTER_ADDR leave. If MASTER_ADDR is "localhost" or a loopback address, rank 0 listens there: containers on one
    machine may share their loopback interface.

    Raises:
        UserError: ranks are on several machines, and MASTER_ADDR is a host name that resolves to loopback here.
    """
    given = place.master_addr
    if is_local(place) or given == "localhost":
        return LOOPBACK
    if _is_loopback(given):
        return given
    address = route_to(given)
    if not _is_loopback(address):
        return address
    outside = {name: address for name, address in interfaces().items() if not _is_loopback(address)}
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if wanted in outside or len(outside) == 1:  # Debian's /etc/hosts maps a machine's own name to 127.0.1.1
        return outside.get(wanted) or next(iter(outside.values()))
    listed = ", ".join(f"{name} ({address})" for name, address in outside.items()) or "none found"
    raise UserError(
        f"rank {place.rank} of {place.world_size}: the ranks are on several machines, but {given} resolves to "
        f"{address} on this one, which no other machine can reach; set GLOO_SOCKET_IFNAME (with CUDA also "
        f"NCCL_SOCKET_IFNAME) to the network interface that connects the machines, for every rank; interfaces here: "
        f"{listed}"
    )


def route_to(host: str) -> str:
    """The address of this machine from which packets to `host` leave; LOOPBACK if `host` cannot be resolved."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by name; empty on systems other than Linux."""
    found: dict[str, str] = {}
    if sys.platform != "linux":
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def name_interface(place: Rank, address: str) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface of `address`, so that gloo listens on this interface only.

    A value that the user has set stays. On several machines without Linux, gloo uses the address of the host's name.

    Args:
        place: this process among the ranks.
        address: of this machine, from which this rank has connected to rank 0.

    Raises:
        UserError: ranks are on several machines, `address` has no interface, and the host's name resolves to loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if is_local(place):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        return
    name = next((name for name, found in interfaces().items() if found == address), None)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    elif _is_loopback(route_to(socket.gethostname())):
        raise UserError(
            f"rank {place.rank} of {place.world_size}: the ranks are on several machines, but the name of this one, "
            f"{socket.gethostname()}, resolves to loopback, which no other machine can reach; set GLOO_SOCKET_IFNAME "
            "(with CUDA also NCCL_SOCKET_IFNAME) to the network interface that connects the machines, such as eth0, "
            "for every rank"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name, not an address
        return False
