"""In: the network interfaces of this machine. Out: name, addresses and MTU of each that is up.
Does not send anything. Reads the kernel's answers for this network namespace, not /sys, which may be another's."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from typing import Any

from codescent.meeting.interfaces import interfaces as ipv4_addresses
from codescent.meeting.interfaces import ipv6_addresses

SIOCGIFFLAGS, SIOCGIFMTU = 0x8913, 0x8921  # linux/sockios.h
IFF_UP = 1


def interfaces() -> list[dict[str, Any]]:
    """Each interface that is up, in the kernel's order; none on systems other than Linux."""
    if sys.platform != "linux":
        return []
    four, six = ipv4_addresses(), _ipv6_addresses()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                flags = fcntl.ioctl(probe.fileno(), SIOCGIFFLAGS, request)
                mtu = fcntl.ioctl(probe.fileno(), SIOCGIFMTU, request)
            except OSError:  # it has gone since it was listed
                continue
            if struct.unpack_from("<H", flags, 16)[0] & IFF_UP:
                addresses = [four[name]] if name in four else []
                mtu_bytes = struct.unpack_from("<i", mtu, 16)[0]
                found.append({"name": name, "addresses": addresses + six.get(name, []), "mtu": mtu_bytes})
    return found


def _ipv6_addresses() -> dict[str, list[str]]:
    """IPv6 addresses by interface, without those of a single link (fe80::), which need a scope."""
    found: dict[str, list[str]] = {}
    for name, address in ipv6_addresses():
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return found
