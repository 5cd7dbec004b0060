"""In: MASTER_ADDR, parallel.listen, this machine's network interfaces. Out: addresses to listen on and to connect to.
Does not listen or connect (sockets.py does). Interfaces for gloo and NCCL: interfaces.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from codescent.base.errors import UserError
from codescent.base.rank import AGENT_RUN, LOOPBACK, Rank
from codescent.meeting.interfaces import GLOO, interfaces, is_loopback, outside, shown

ALL = "all"
"""The value of parallel.listen for every interface."""
EVERY = "0.0.0.0"
SHOWN = 80
"""Most characters of a wrong name in a message."""
LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


def is_local(this_rank: Rank) -> bool:
    """Whether all ranks are on this machine."""
    return this_rank.local_world_size == this_rank.world_size


def has_first(this_rank: Rank) -> bool:
    """Whether rank 0 is on this machine for certain: all lower ranks are."""
    return this_rank.local_rank == this_rank.rank


def listening_address(this_rank: Rank, listen: str | None = None) -> str:
    """The address that rank 0 listens on.

    It is loopback if all ranks are on this machine. Otherwise it is the address of this machine from which packets to
    MASTER_ADDR leave.

    Args:
        this_rank: this process among the ranks.
        listen: parallel.listen; None: auto.

    Raises:
        UserError: ranks are on several machines, and MASTER_ADDR means this one alone; or there is no such interface.
    """
    if listen == ALL:
        return EVERY
    if listen is not None:
        return _of_interface(this_rank, listen)
    if is_local(this_rank):
        return LOOPBACK
    refuse_loopback(this_rank)
    given = this_rank.master_addr
    if names_loopback(given):
        return LOOPBACK if given in LOOPBACK_NAMES else given
    return outward(this_rank)


def outward(this_rank: Rank) -> str:
    """The address of this machine that the others reach, where ranks are on several machines.

    It is that of the route to MASTER_ADDR. Where this leads nowhere else, GLOO_SOCKET_IFNAME or a single interface
    decides: Debian's /etc/hosts maps a machine's own name to 127.0.1.1.

    Raises UserError: there are several interfaces.
    """
    address, found = route_to(this_rank.master_addr), outside()
    if not is_loopback(address):
        return address
    if (named := interfaces().get(os.environ.get(GLOO, ""))) is not None:
        return named
    if len(found) == 1:
        return next(iter(found.values()))
    raise UserError(
        f"{this_rank.here()}: the ranks are on several machines, but {this_rank.master_addr} resolves to {address} "
        "on this one, which no other machine can reach; set MASTER_ADDR to the address of this machine, or "
        f"parallel.listen (with an own loop {GLOO}) to the network interface that connects the machines, for every "
        f"rank; interfaces here: {shown(found)}"
    )


def addresses_of_first(this_rank: Rank, listen: str | None = None) -> list[str]:
    """The addresses at which rank 0 may listen, by its launcher's variables. They are IP addresses, never names.

    Raises:
        OSError: MASTER_ADDR cannot be resolved.
        UserError: as `listening_address`.
    """
    if is_local(this_rank):
        return [LOOPBACK if listen in (None, ALL) else listening_address(this_rank, listen)]
    refuse_loopback(this_rank, listen)
    return addresses_of(this_rank.master_addr)


def addresses_of(host: str) -> list[str]:
    """The addresses at which rank 0 may listen, by the name of its machine. Raises OSError: it cannot be resolved.

    A name that means loopback here may be this machine's own: rank 0 then listens at another of its addresses.
    """
    if names_loopback(host):
        return [LOOPBACK] if host in LOOPBACK_NAMES else [host]
    return [one for one in resolved(host) if not is_loopback(one)] or list(outside().values())


def means_this_machine(this_rank: Rank) -> bool:
    """Whether ranks are on several machines, and MASTER_ADDR is a name that means loopback here."""
    if is_local(this_rank) or names_loopback(this_rank.master_addr):
        return False
    try:
        return all(is_loopback(one) for one in resolved(this_rank.master_addr))
    except OSError:
        return False


def refuse_loopback(this_rank: Rank, listen: str | None = None) -> None:
    """Raise UserError if ranks are on several machines, and MASTER_ADDR is loopback.

    A user who names the loopback interface says that the machines share it, as containers may.
    """
    wanted = interfaces().get(listen or os.environ.get(GLOO, ""))
    if is_local(this_rank) or not names_loopback(this_rank.master_addr) or (wanted and is_loopback(wanted)):
        return
    raise UserError(
        f"{this_rank.here()}: MASTER_ADDR={this_rank.master_addr} is this machine alone, but only "
        f"{this_rank.local_world_size} of {this_rank.world_size} ranks are on it; {fix(this_rank)}. If all machines "
        f"are this one, export {GLOO}=lo, for every rank"
    )


def leads_here(this_rank: Rank, listen: str | None, address: str) -> bool:
    """Whether MASTER_ADDR leads to this machine, where rank 0 listens.

    Args:
        this_rank: this process among the ranks.
        listen: parallel.listen; None: auto.
        address: at which rank 0 listens.

    Raises:
        OSError: MASTER_ADDR cannot be resolved.
        UserError: it leads here, but not to the interface of parallel.listen.
    """
    found = resolved(this_rank.master_addr)
    if not any(map(is_mine, found)):
        return False
    reached = [one for one in found if not is_loopback(one)]  # else it is the own name, which others know better
    if listen is None or not reached or address in reached:
        return True
    raise UserError(
        f'{this_rank.here()}: parallel.listen = "{listen}" is {address} here, but '
        f"MASTER_ADDR={this_rank.master_addr} leads to {' or '.join(reached)}; "
        f"set MASTER_ADDR={address}, for every rank"
    )


def fix(this_rank: Rank) -> str:
    """Which address would do, in words."""
    found = outside()
    here = (
        f"{' or '.join(found.values())}" if found and has_first(this_rank) else "the address of the machine of rank 0"
    )
    if this_rank.agent_store or AGENT_RUN in os.environ:
        own = next(iter(found.values())) if len(found) == 1 else "ADDRESS"
        return (
            f"start torchrun on each machine with --local-addr and its address (here --local-addr={own}), and with "
            f"--master-addr or --rdzv-endpoint {here}"
        )
    return f"set MASTER_ADDR={here}, for every rank" if found and has_first(this_rank) else f"set MASTER_ADDR to {here}"


def names_loopback(host: str) -> bool:
    """Whether a value of MASTER_ADDR is loopback by itself. A host name that resolves to loopback is not."""
    return host in LOOPBACK_NAMES or is_loopback(host)


def resolved(host: str) -> list[str]:
    """The IP addresses of a name. Raises OSError: it is unknown here."""
    found = _looked_up(host, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def _looked_up(host: str, kind: socket.SocketKind) -> list[Any]:
    """What getaddrinfo finds, for any port. Raises OSError: the name is unknown, or none that a host can have."""
    with named(host):
        return socket.getaddrinfo(host, 9, type=kind)


@contextmanager
def named(host: str) -> Iterator[None]:
    """Raise OSError where Python raises UnicodeError: a part of the name is empty, too long, or no text."""
    try:
        yield
    except UnicodeError as error:
        raise OSError(f"{host[:SHOWN]!r} is no name that a host can have") from error


def is_mine(address: str) -> bool:
    """Whether this machine has an IP address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def route_to(host: str) -> str:
    """The address of this machine from which packets to `host` leave; LOOPBACK if `host` cannot be resolved."""
    try:
        family, _, _, _, target = _looked_up(host, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def _of_interface(this_rank: Rank, name: str) -> str:
    found = interfaces()
    if name not in found:
        raise UserError(
            f'{this_rank.here()}: parallel.listen = "{name}": no network interface of this machine; it has '
            f'{shown(found)}; "{ALL}" is every one'
        )
    return found[name]
