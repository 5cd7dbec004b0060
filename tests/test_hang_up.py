"""In: connections of this process. Out: `hang_up` shuts them, and nothing else; when a rank is called.
Loses no rank: tests/faults/test_restart.py does."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from codescent.base.call import Call, CalledAnew, raise_if_called
from codescent.base.progress import Pages, shared_memory
from codescent.train.hang_up import Alarm, hang_up
from codescent.train.stop import StopRequest

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pages() -> Iterator[Pages]:
    descriptor = shared_memory(2)
    yield Pages(descriptor, 2)
    os.close(descriptor)


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")
def test_shuts_connections_alone_and_leaks_no_descriptor(tmp_path: Path) -> None:
    """Fault: each call doubles the open files, and keeps their locks; or a listener is shut, which ends gloo."""
    with socket.create_server(("127.0.0.1", 0)) as listener, (tmp_path / "file").open("w") as file:
        peer = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
        before = descriptors()
        in_a_child(hang_up)
        assert descriptors() == before
        file.write("still open")
        again = socket.create_connection(listener.getsockname())
        for one in (peer, served, again):
            one.close()


def in_a_child(act: Callable[[], None]) -> None:
    """Call it in a process of its own that has the same connections, as the test's own may need its others."""
    child = os.fork()
    if child == 0:
        try:
            open_before = descriptors()
            act()
            os._exit(descriptors() - open_before)
        except BaseException:
            os._exit(100)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_wait_ends(pages: Pages) -> None:
    """Fault: a rank waits for another one that has died, until its time-out of half an hour."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)  # an alarm shuts no such connection
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
    alarm = Alarm(pages)
    try:
        assert alarm.follow(0) == Call()
        threading.Timer(0.2, lambda: setattr(pages, "call", Call(1, {os.getpid(): 0}, urgent=1))).start()
        peer.settimeout(30)
        assert peer.recv(1) == b""
        assert alarm.rings
        assert StopRequest(alone=False).is_requested()
        with pytest.raises(CalledAnew):
            raise_if_called(agreed=True)
        assert alarm.follow(1).places == {os.getpid(): 0}
        assert not StopRequest(alone=False).is_requested()
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
    finally:
        alarm.close()
        for one in (ours, theirs, peer, served):
            one.close()


def test_a_call_that_is_not_urgent_waits_for_the_end_of_a_step(pages: Pages) -> None:
    """Fault: a rank that joins breaks off the step of the others; or who has agreed to a meeting leaves it."""
    alarm = Alarm(pages)
    try:
        alarm.follow(0)
        pages.call = Call(1, {os.getpid(): 0, 1: 1})
        time.sleep(0.2)
        assert StopRequest(alone=False).is_requested()
        assert not alarm.rings
        raise_if_called(agreed=True)
        with pytest.raises(CalledAnew):
            raise_if_called()
    finally:
        alarm.close()
    raise_if_called()


def test_a_loss_is_heard_behind_a_later_call(pages: Pages) -> None:
    """Fault: a rank joins just after a loss, and a rank that reads this call alone waits for the dead one."""
    alarm = Alarm(pages)
    try:
        alarm.follow(0)
        pages.call = Call(2, {os.getpid(): 0, 1: 1}, urgent=1)
        assert alarm.rings
        alarm.follow(0)
        assert not alarm.rings
    finally:
        alarm.close()
