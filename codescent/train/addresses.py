"""In: where rank 0 is said to be. Out: which address of this machine the other ranks reach, and on which interface.
Does not listen or connect (store and rendezvous do)."""

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
    """Where rank 0 listens: loopback if all ranks are here, else the address by which this machine reaches MASTER_ADDR.

    An address of loopback, or localhost, is taken at its word: the machines may share it, as containers do.

    Raises:
        UserError: ranks are on several machines, and MASTER_ADDR, another name, stands for loopback here.
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
    if wanted in outside or len(outside) == 1:  # Debian writes a machine's own name beside 127.0.1.1
        return outside.get(wanted) or next(iter(outside.values()))
    there = ", ".join(f"{name} ({address})" for name, address in outside.items()) or "none is found"
    raise UserError(
        f"rank {place.rank} of {place.world_size}: the ranks are on several machines, and {given} stands for {address} "
        f"here, where no other reaches it; set GLOO_SOCKET_IFNAME (with CUDA NCCL_SOCKET_IFNAME, too) to the network "
        f"interface between them, for every rank; there are: {there}"
    )


def route_to(host: str) -> str:
    """The address of this machine from which packets to `host` leave; LOOPBACK if the name is not known here."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by name; empty where the system does not tell."""
    found: dict[str, str] = {}
    if sys.platform != "linux":
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def name_interface(place: Rank, address: str) -> None:
    """Have gloo listen on the interface of `address`, where it reached rank 0, and nowhere else.

    What the user has set stands. Elsewhere than on Linux gloo goes by the host's name.

    Raises:
        UserError: ranks are on several machines, and nothing says by which interface.
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
            f"rank {place.rank} of {place.world_size}: the ranks are on several machines, and the name of this one, "
            f"{socket.gethostname()}, stands for loopback, where no other reaches it; set GLOO_SOCKET_IFNAME (with "
            "CUDA NCCL_SOCKET_IFNAME, too) to the network interface between them, such as eth0, for every rank"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False
