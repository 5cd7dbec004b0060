"""In: names of hosts. Out: the address of a host, as others reach it; the address of this one, towards another.
Does not connect. Scripts run it: `python3 -P -m codescent.jobs.address`. It waits for a name that is not known yet."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
import time
from collections.abc import Sequence

from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.rank import LOOPBACK
from codescent.meeting.addresses import route_to
from codescent.meeting.interfaces import interfaces

LOOK_S = 1.0


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
    except UnicodeError as error:  # an empty part, or one that is too long
        raise UserError(f"{host}: this is no name of a host: its parts have 1 to 63 characters") from error


def _awaited(host: str, wait_s: float) -> str:
    """The address of a host whose name may become known only now. Raises UserError: it has not, after `wait_s`."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            return _resolved(host)
        except UserError:
            if time.monotonic() >= end_s:
                raise
        time.sleep(LOOK_S)


def main(words: Sequence[str] | None = None) -> int:
    """Print the address. Returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="codescent.jobs.address", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("host")
    parser.add_argument("peer", nargs="?", default="", help="a host that has to reach it")
    parser.add_argument("--towards", action="store_true", help="this machine's address, from which HOST is reached")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="how long HOST may be unknown")
    asked = parser.parse_args(words)
    try:
        found = _awaited(asked.host, asked.wait) if asked.wait or asked.towards else ""
        print(route_to(found) if asked.towards else found or address_of(asked.host, asked.peer))
    except UserError as error:
        warn(*(f"error: {problem}" for problem in error.problems))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
