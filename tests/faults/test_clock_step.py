"""In: a run with survive.on_loss, whose wall clock is set forward and back by hours. Out: nothing else changes.
The clock is that of the run's processes alone: a library before libc adds what a file says. Monotonic clocks go on."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from surviving import Started

from codescent.record import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD, and cc"),
]

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *ahead_s;
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_AHEAD"), O_RDONLY);
    void *found = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (file < 0 || found == MAP_FAILED) abort();
    ahead_s = found;
    close(file);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME && ahead_s) now->tv_sec += *ahead_s;
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""
HOUR_S = 3600


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Set the clock of processes that this test starts: so many seconds ahead."""
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=tmp_path, check=True)
    (tmp_path / "ahead").write_bytes(struct.pack("l", 0))
    monkeypatch.setenv("CLOCK_AHEAD", str(tmp_path / "ahead"))
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "clock.so"))
    with (tmp_path / "ahead").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield lambda seconds: struct.pack_into("l", memory, 0, seconds)


def test_a_clock_that_is_set_ends_nothing_and_no_wait(tmp_path: Path, step: Callable[[int], None]) -> None:
    """Fault: a lease, a deadline, a heartbeat or the window of losses is over because somebody has set the clock; or,
    set back, it lasts an hour longer."""
    run = Started(tmp_path, 2, "survive.lease_s=3", "checkpoint.asynchronous=true")
    run.until(lambda: run.rows() > 8)
    step(HOUR_S)
    run.until(lambda: run.rows() > 16)
    run.kill(1)
    run.until(lambda: bool(run.events("resume")))
    step(-HOUR_S)
    run.until(lambda: run.rows() > 28)
    run.kill(0)
    run.until(lambda: len(run.events("resume")) > 1)
    run.is_like_a_run_alone()
    events = list(RunFolder.open(run.folder).read_events())
    kinds = {str(one["kind"]) for one in events}
    assert not kinds & {"hang", "stop", "failed", "error"}, kinds
    writers = [one["writer"] for one in events if one["kind"] in ("start", "resume")]
    assert writers == [1, 2, 3], "nobody has lost the lease"
    times = [datetime.fromisoformat(str(one["wall_time"])).timestamp() for one in events]
    assert max(times) - min(times) > 1.9 * HOUR_S, "the clock of the run was set"
