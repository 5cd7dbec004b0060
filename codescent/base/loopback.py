"""In: nothing. Out: whether processes of this machine reach each other at the loopback address, else one sentence.
Does not configure an interface."""

from __future__ import annotations

import errno
import socket

from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK

ABSENT = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
"""What the kernel says of an address without an interface, or whose interface is down."""
FIX = "`ip link set lo up` brings it up, as root; a sandbox (unshare -n) has one of its own"


def missing_loopback() -> str:
    """Why no process of this machine reaches another one at 127.0.0.1; "": one does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, 9))  # sends nothing
        except OSError as error:
            if error.errno in ABSENT:
                return f"this machine has no loopback interface that is up ({LOOPBACK}: {error.strerror})"
    return ""


def refuse_without_loopback() -> None:
    """Raise UserError where ranks of this machine would look for each other in vain."""
    if why := missing_loopback():
        raise UserError(f"{why}, where the ranks of one machine meet; {FIX}")
