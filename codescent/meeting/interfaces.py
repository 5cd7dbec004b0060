"""In: this machine, an address of it. Out: its network interfaces; gloo and NCCL are told which one they use.
Does not choose an address (addresses.py does)."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping

import psutil

from codescent.base.errors import UserError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interfaces() -> dict[str, str]:
    """The first IPv4 address of each network interface that has one, by name."""
    found: dict[str, str] = {}
    for name, address in _addresses(socket.AF_INET):
        found.setdefault(name, address)
    return found


def outside() -> dict[str, str]:
    """Those that other machines may reach."""
    return {name: address for name, address in interfaces().items() if not is_loopback(address)}


def shown(found: Mapping[str, str]) -> str:
    """Interfaces in a sentence."""
    return ", ".join(f"{name} ({address})" for name, address in found.items()) or "none found"


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 or IPv6 address; None: it is not known."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6
    return next((name for name, found in _addresses(family) if ipaddress.ip_address(found) == wanted), None)


def ipv6_addresses() -> Iterator[tuple[str, ipaddress.IPv6Address]]:
    """Each IPv6 address of this machine, after the name of its interface."""
    return ((name, ipaddress.IPv6Address(address)) for name, address in _addresses(socket.AF_INET6))


def _addresses(family: socket.AddressFamily) -> Iterator[tuple[str, str]]:
    """Each address of one family, without its zone, after the name of its interface."""
    for name, addresses in psutil.net_if_addrs().items():
        yield from ((name, one.address.partition("%")[0]) for one in addresses if one.family == family)


def is_loopback(address: str) -> bool:
    """Whether an IP address is loopback. A host name is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def name_interface(who: str, address: str, *, is_local: bool) -> list[str]:
    """Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of `address`: both listen on this one only.

    Values that the user has set stay; NCCL then takes the interface of gloo.

    Args:
        who: this rank, in messages.
        address: of this machine, from which this rank has connected to rank 0.
        is_local: whether all ranks are on this machine.

    Returns the variables that it has set. They name an interface of this run, so the end of the run removes them.

    Raises:
        UserError: the user has named an interface that is not there; or ranks are on several machines, `address` has
            no interface, and the host's name means loopback.
    """
    _refuse_unknown(who, os.environ.get(GLOO, ""))
    name = os.environ.get(GLOO) or interface_of(address)
    if name is None and is_local:
        name = "lo0" if sys.platform == "darwin" else "lo"
    if name is not None:
        own = {GLOO: name, NCCL: f"={name}"}  # exactly this one: without "=", eth1 is also eth10
        absent = [variable for variable in own if variable not in os.environ]
        os.environ.update((variable, own[variable]) for variable in absent)
        return absent
    if _own_name_is_loopback():
        raise UserError(
            f"{who}: the ranks are on several machines, but the name of this one, {socket.gethostname()}, resolves to "
            f"loopback, which no other machine can reach; set {GLOO} (with CUDA also {NCCL}) to the network interface "
            "that connects the machines, such as eth0, for every rank"
        )
    return []


def unknown_to_gloo(value: str, names: Collection[str]) -> list[str]:
    """The parts of GLOO_SOCKET_IFNAME that are none of these interfaces. gloo wants whole names; NCCL does not."""
    return [part for part in value.rstrip(",").split(",") if part not in names]


def _refuse_unknown(who: str, value: str) -> None:
    """Raise UserError if GLOO_SOCKET_IFNAME names an interface that is not there: gloo's own error does not say so."""
    found = interfaces()
    names = {*found, *(name for name, _ in ipv6_addresses())}
    if value and unknown_to_gloo(value, names):
        raise UserError(
            f"{who}: {GLOO}={value}: no network interface of this machine; it has {shown(found)}; give whole names, or "
            "unset it"
        )


def _own_name_is_loopback() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return True
    return all(is_loopback(str(one[4][0])) for one in found)
