"""In: names of two interfaces, delay, rate, loss. Out: these interfaces (taps), with such a wire between them.
Stands for netem, which not every kernel has. Runs as a process; does not choose the namespaces or the addresses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
QUEUE_S = 0.05
"""Longest time that a packet waits for the rate; a further one is lost."""
MOST_PACKETS = 64
LARGEST = 65_600


def tap(name: str) -> int:
    """A new interface of this namespace. It ends with this process, into whatever namespace it is moved."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22s", name.encode(), IFF_TAP | IFF_NO_PI, b""))
    return file


class Direction:
    """Packets under way from one end to the other."""

    def __init__(self, source: int, target: int, delay_s: float, bytes_per_s: float, loss: float, seed: int) -> None:
        self.source, self._target = source, target
        self._delay_s, self._bytes_per_s, self._loss = delay_s, bytes_per_s, loss
        self._random = random.Random(seed)
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._free_s = 0.0
        self.carried = self.lost = 0

    def take(self) -> None:
        for _ in range(MOST_PACKETS):
            try:
                packet = os.read(self.source, LARGEST)
            except BlockingIOError:
                return
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s)
            if self._random.random() < self._loss or self._free_s - now_s > QUEUE_S:
                self.lost += 1
                continue
            self._free_s += len(packet) / self._bytes_per_s
            self._waiting.append((self._free_s + self._delay_s, packet))

    def give(self) -> float:
        """Deliver what is due. Returns the seconds until the next packet is."""
        while self._waiting:
            left_s = self._waiting[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            with contextlib.suppress(OSError):  # the other end is down, or full
                os.write(self._target, self._waiting.popleft()[1])
                self.carried += 1
        return 60.0


def main() -> None:
    names, (delay_ms, mbit, loss) = sys.argv[1:3], map(float, sys.argv[3:6])
    ends = [tap(name) for name in names]
    ways = [Direction(ends[side], ends[1 - side], delay_ms / 1e3, mbit * 1e6 / 8, loss, seed=side) for side in range(2)]
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    print("open", flush=True)
    while not ended:
        soonest_s = min(way.give() for way in ways)
        ready, _, _ = select.select(ends, [], [], min(soonest_s, 0.5))
        for way in ways:
            if way.source in ready:
                with contextlib.suppress(OSError):  # not up yet
                    way.take()
    print(sum(way.carried for way in ways), sum(way.lost for way in ways), flush=True)


if __name__ == "__main__":
    main()
