"""In: the store of the ranks, or the address of torchrun's agent. Out: the first as a store for torch's process groups;
the values of the second. Does not keep or send a value (meeting/ and torch do)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from codescent.meeting.store import Store as OurStore
from codescent.meeting.store import StoreError

T = TypeVar("T")


class TorchStore(Store):
    """A store of ours for torch's process groups. Raises torch's DistStoreError where ours raises StoreError.

    torch holds only its C++ part: whoever makes one keeps it for as long as the process groups.
    """

    def __init__(self, ours: OurStore) -> None:
        super().__init__()
        self._ours = ours
        self._clones: list[TorchStore] = []

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return self._ours.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._ours.set_timeout(timeout)

    def clone(self) -> TorchStore:
        """Another client of the same server."""
        self._clones.append(TorchStore(_torchs(self._ours.clone)))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        _torchs(lambda: self._ours.set(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return _torchs(lambda: self._ours.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all values and return them."""
        return _torchs(lambda: self._ours.multi_get(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        _torchs(lambda: self._ours.wait(keys, timeout))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a number that begins at 0, and return the sum."""
        return _torchs(lambda: self._ours.add(key, amount))

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """Set the value if it equals `expected` (b"": has no value yet). Returns the value after the call."""
        return _torchs(lambda: self._ours.compare_set(key, expected, wanted))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return _torchs(lambda: self._ours.check(keys))

    def delete_key(self, key: str) -> bool:
        """Remove a value. Returns whether there was one."""
        return _torchs(lambda: self._ours.delete_key(key))

    deleteKey = delete_key


def _torchs(call: Callable[[], T]) -> T:
    try:
        return call()
    except StoreError as error:
        raise DistStoreError(str(error)) from error


class _Agent:
    """The store of torchrun's agent: see `AgentValues`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """See AgentValues."""
        _ours(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """See AgentValues."""
        return _ours(lambda: bytes(self._store.get(key)))

    def check(self, key: str) -> bool:
        """See AgentValues."""
        return _ours(lambda: bool(self._store.check([key])))


def open_agent(address: str, port: int, prefix: str, limit: timedelta) -> _Agent:
    """Open the store of torchrun's agent: see `OpenAgent`."""
    store = _ours(lambda: TCPStore(address, port, None, False, limit, wait_for_workers=False))
    return _Agent(PrefixStore(prefix, store))


def _ours(call: Callable[[], T]) -> T:
    try:
        return call()
    except DistError as error:
        raise StoreError(str(error)) from error
