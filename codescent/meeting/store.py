"""In: keys, small values (text or bytes). Out: what a store of all ranks offers (`Store`), and one of a single rank.
Does not reach another process (store_client.py does)."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Self


class StoreError(RuntimeError):
    """The store has ended, does not answer, or has no value for a key in time."""


class NotSet(StoreError):
    """A key has no value in time. The store answers."""


class Store(ABC):
    """Small values that all ranks of a run read and write. Its methods may be called by several threads.

    Every method raises StoreError if the store has ended or does not answer.

    Attributes:
        timeout: how long `get`, `multi_get` and `wait` wait.
    """

    timeout: timedelta

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a number that begins at 0, and return the sum."""

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """Set the value if it equals `expected` (b"": has no value yet). Returns the value after the call."""

    @abstractmethod
    def there(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether it has a value."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove a value. Returns whether there was one."""

    @abstractmethod
    def clock(self) -> int:
        """The time of the clock of rank 0, in nanoseconds since 1970."""

    @abstractmethod
    def clone(self) -> Store:
        """Another client of the same values."""

    @abstractmethod
    def close(self) -> None:
        """Close this client and its clones."""

    @abstractmethod
    def waited(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """Wait for all values and return them. Raises StoreError: one was not set within the timeout."""

    def wait_for_end(self, seconds: float) -> None:  # noqa: B027 - a single rank waits for nobody
        """Wait until rank 0 has ended, or so many seconds. All ranks have an error then, which rank 0 prints."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get`, `multi_get` and `wait` wait."""
        self.timeout = timeout

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. Raises StoreError: it was not set within the timeout."""
        return self.waited([key], self.timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all values and return them. Raises StoreError: one was not set within the timeout."""
        return self.waited(keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values. Raises StoreError: one was not set within the timeout."""
        self.waited(keys, timeout or self.timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self.there(keys))


class LocalStore(Store):
    """The store of a single rank: values in the memory of this process."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._values: dict[str, bytes] = {}
        self._change = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        """See Store."""
        with self._change:
            self._values[key] = as_bytes(value)
            self._change.notify_all()

    def add(self, key: str, amount: int) -> int:
        """See Store."""
        with self._change:
            total = int(self._values.get(key, b"0")) + amount
            self.set(key, str(total))
            return total

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """See Store."""
        with self._change:
            if self._values.get(key, b"") == as_bytes(expected):
                self.set(key, wanted)
            return self._values.get(key, as_bytes(expected))

    def there(self, keys: Sequence[str]) -> list[bool]:
        """See Store."""
        return [key in self._values for key in keys]

    def delete_key(self, key: str) -> bool:
        """See Store."""
        return self._values.pop(key, None) is not None

    def clock(self) -> int:
        """See Store."""
        return time.time_ns()

    def clone(self) -> Self:
        """See Store."""
        return self

    def close(self) -> None:
        """See Store."""

    def waited(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """See Store."""
        with self._change:
            if not self._change.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                missing = (key for key in keys if key not in self._values)
                raise NotSet(not_set(timeout, sorted(missing)))
            return [self._values[key] for key in keys]


def as_bytes(value: str | bytes) -> bytes:
    """A value as it is kept."""
    return value.encode() if isinstance(value, str) else bytes(value)


def not_set(timeout: timedelta, missing: Sequence[str]) -> str:
    """Words of the error of a wait in vain."""
    return f"not set after {timeout.total_seconds():g} s: {', '.join(missing)}"
