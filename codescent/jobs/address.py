"""In: names of hosts. Out: the address of a host, as others reach it; the address of this one, towards another.
Does not connect. Scripts run it, as `python3 -m codescent.jobs.address`."""

from __future__ import annotations

import ipaddress
import socket
import sys

from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.rank import LOOPBACK
from codescent.train.addresses import route_to
from codescent.train.interfaces import interfaces


def address_of(host: str, peer: str = "") -> str:
    """The IP address of `host` as `peer` reaches it: loopback if both are the same.

    Debian maps a machine's own name to 127.0.1.1. Where the name means loopback, the address is that from which packets
    to `peer` leave, or that of the only interface.

    Raises UserError: a name is unknown, or the address is not.
    """
    if host == peer:
        return LOOPBACK
    found = _resolved(host)
    if not ipaddress.ip_address(found).is_loopback:
        return found
    outside = {name: one for name, one in interfaces().items() if not ipaddress.ip_address(one).is_loopback}
    if peer and not ipaddress.ip_address(there := route_to(_resolved(peer))).is_loopback:
        return there
    if len(outside) == 1:
        return next(iter(outside.values()))
    listed = ", ".join(f"{name} ({one})" for name, one in outside.items()) or "none"
    raise UserError(f"{host} means {found} here, which no other machine reaches; its interfaces: {listed}; give one")


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(f"{host}: this name is unknown here ({error.strerror}): give the host's address") from error


def main() -> int:
    """Print the address. Returns the exit code."""
    words = sys.argv[1:]
    if len(words) not in (1, 2):
        warn("usage: python3 -m codescent.jobs.address HOST [PEER] | --towards HOST")
        return 2
    try:
        print(route_to(_resolved(words[1])) if words[0] == "--towards" else address_of(*words))
    except UserError as error:
        warn(*(f"error: {problem}" for problem in error.problems))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
