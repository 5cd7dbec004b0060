"""In: shaped hosts, a payload per second. Out: the shaper's rate at which two ranks' all_reduce carries this payload.
Does not start training, and knows no method."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import DEVICE, Hosts, rank_environment
from measure import SystemFailed, say
from systems import MARK
from work import environment

PORT = 29_400
"""Port of rank 0 on its own host, where no other program listens."""

WITHIN = 0.01
"""Largest allowed distance of the measured payload from the wanted one, as a fraction."""

TRIES = 8
MEASURED_S = 4.0
"""Seconds that a reduction takes in a calibration: long beside the shaper's bucket."""
MEASURES = 4

OVERHEAD = 1.045
"""First guess of bytes on the link over bytes of payload: headers of Ethernet, IP and TCP are 66 of 1,514 bytes."""


@dataclass(frozen=True)
class Calibrated:
    """A calibrated link.

    Attributes:
        wanted_mbit: payload of an all_reduce of two ranks, in million bits a second, that was asked for.
        payload_mbit: the measured one.
        shaper_mbit: rate of the shaper, with headers.
    """

    wanted_mbit: float
    payload_mbit: float
    shaper_mbit: float

    @property
    def payload_mb_s(self) -> float:
        """Million bytes of payload a second."""
        return self.payload_mbit / 8

    def to_json(self) -> dict[str, Any]:
        """The three rates."""
        return {
            "wanted_mbit": self.wanted_mbit,
            "payload_mbit": self.payload_mbit,
            "shaper_mbit": self.shaper_mbit,
        }


def next_rate(shaper_mbit: float, measured_mbit: float, wanted_mbit: float) -> float:
    """The shaper's next rate: payload is taken as proportional to it. At most doubled, at least halved."""
    return shaper_mbit * min(2.0, max(0.5, wanted_mbit / measured_mbit))


def find_rate(measured: Callable[[float], float], wanted_mbit: float) -> Calibrated:
    """Try rates until `measured(rate)` is within WITHIN of `wanted_mbit`; the nearest after TRIES.

    Raises:
        SystemFailed: the nearest is off by more than five times WITHIN.
    """
    rate, links = wanted_mbit * OVERHEAD, list[Calibrated]()
    for _ in range(TRIES):
        links.append(Calibrated(wanted_mbit, measured(rate), rate))
        if abs(links[-1].payload_mbit / wanted_mbit - 1) <= WITHIN:
            return links[-1]
        rate = next_rate(rate, links[-1].payload_mbit, wanted_mbit)
    nearest = min(links, key=lambda link: abs(link.payload_mbit / wanted_mbit - 1))
    if abs(nearest.payload_mbit / wanted_mbit - 1) > 5 * WITHIN:
        raise SystemFailed(
            f"no rate of the shaper gives {wanted_mbit:g} Mbit/s of payload: nearest {nearest.payload_mbit:.1f}"
        )
    return nearest


class Pair:
    """Two ranks on the first two hosts that reduce tensors on request. Use it in a `with`.

    Raises:
        SystemFailed: a rank ended.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._ranks: list[subprocess.Popen[str]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Pair:
        program = [sys.executable, str(Path(__file__).with_name("reduce_rank.py"))]
        env = {**environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
        self._log = self._stack.enter_context((self._folder / "pair.log").open("w", encoding="utf-8"))
        self._stack.callback(self._end)
        for rank in range(2):
            variables = rank_environment(env, rank, 2, PORT)
            self._ranks.append(self._hosts.start(rank, program, variables, self._folder, self._log, asks=True))
        self._answers()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        for process in self._ranks:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.kill()
            process.wait()

    def seconds(self, size: int) -> float:
        """Seconds of an all_reduce of `size` bytes, on the slower rank."""
        for process in self._ranks:
            assert process.stdin is not None
            print(size, file=process.stdin, flush=True)
        return max(map(float, self._answers()))

    def _answers(self) -> list[str]:
        return [next(self._words(process)) for process in self._ranks]

    def _words(self, process: subprocess.Popen[str]) -> Iterator[str]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield line.split()[1]
        raise SystemFailed(f"a rank of the calibration ended:\n{(self._folder / 'pair.log').read_text()[-2000:]}")

    def payload_mbit(self, size: int) -> float:
        """Payload of an all_reduce of `size` bytes in million bits a second: the best of MEASURES.

        Other work on the machine can only slow it. With a median the link would become faster than asked for.
        """
        return 8 * size / 1e6 / min(self.seconds(size) for _ in range(MEASURES))


def calibrate(hosts: Hosts, wanted_mbit: float, folder: Path) -> Calibrated:
    """Shape the links of all hosts such that two ranks' all_reduce carries `wanted_mbit`. They stay so."""
    size = max(10_000_000, int(wanted_mbit * 1e6 / 8 * MEASURED_S) // 4 * 4)
    with Pair(hosts, folder) as pair:

        def measured(rate: float) -> float:
            hosts.shape(rate)
            payload = pair.payload_mbit(size)
            say(f"shaper {rate:.2f} Mbit/s: an all_reduce of {size / 1e6:.0f} MB carries {payload:.2f} Mbit/s")
            return payload

        return find_rate(measured, wanted_mbit)
