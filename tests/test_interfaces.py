"""In: addresses of a machine, as a system names them. Out: its interfaces, and the one that has an address.
Does not choose an address (test_no_loopback.py does)."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil
import pytest

from codescent.base.errors import UserError
from codescent.doctor.processes import listener
from codescent.meeting import interfaces

MAC = {
    "lo0": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "fe80::1%lo0")],
    "en0": [(socket.AF_INET6, "fe80::8%en0"), (socket.AF_INET, "10.0.0.2"), (socket.AF_INET, "10.9.0.2")],
    "utun1": [],
}
"""As macOS shows them: other names than Linux, a zone in an address, several addresses of one interface."""


@pytest.fixture(autouse=True)
def _mac(monkeypatch: pytest.MonkeyPatch) -> None:
    class One:
        def __init__(self, family: socket.AddressFamily, address: str) -> None:
            self.family, self.address = family, address

    found = {name: [One(*one) for one in addresses] for name, addresses in MAC.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def test_interfaces_are_those_of_any_system() -> None:
    """Catches: no interface where there is no /proc; a later address in place of the first."""
    assert interfaces.interfaces() == {"lo0": "127.0.0.1", "en0": "10.0.0.2"}
    assert interfaces.outside() == {"en0": "10.0.0.2"}
    assert ("en0", ipaddress.IPv6Address("fe80::8")) in list(interfaces.ipv6_addresses())


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.0.0.2", "en0"), ("10.9.0.2", "en0"), ("::1", "lo0"), ("fe80::8%en0", "en0"), ("10.0.0.3", None)],
)
def test_the_interface_of_an_address(address: str, name: str | None) -> None:
    """Catches: a second address, or one with a zone, that belongs to no interface."""
    assert interfaces.interface_of(address) == name


def test_a_name_that_is_not_there_is_refused_on_any_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interfaces.GLOO, "eth0")
    with pytest.raises(UserError, match=r"no network interface of this machine; it has lo0 \(127.0.0.1\), en0"):
        interfaces.name_interface("rank 0", "10.0.0.2", is_local=False)


def test_who_listens_at_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener(port).startswith(f"process {os.getpid()} (")
    assert listener(port) == ""
