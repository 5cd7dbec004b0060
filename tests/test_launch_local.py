"""In: small programs as ranks. Out: they start, end, fail, are stopped and die as `run_ranks` promises.
Does not train: the ranks are real processes, their signals real signals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest

from codescent.launch.group import Group
from codescent.launch.local import run_ranks

DRIVER = """
import os, signal, sys
from codescent.launch import local
{setup}
sys.exit(local.run_ranks([sys.executable, *sys.argv[2:]], int(sys.argv[1]), os.environ))
"""

PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])

def write(name, value):
    (folder / f".{name}").write_text(json.dumps(value))
    (folder / f".{name}").rename(folder / name)

def wait_for(name):
    end = time.monotonic() + 100  # so that nothing is left behind should the test be killed
    while not (folder / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)

def ready(**fields):
    write(f"rank-{rank}", {"pid": os.getpid(), "env": dict(os.environ), **fields})
"""

HANDLE = """
got = []
def handle(number, frame):
    got.append(number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, handle)
def save_when_asked():
    end = time.monotonic() + 100
    while not got and time.monotonic() < end:
        time.sleep(0.01)
    wait_for("save")
    write(f"saved-{rank}", got)
"""


def is_alive(process: psutil.Process) -> bool:
    """Not gone, nor dead and waiting for the system's first process to notice."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Launch:
    """A process that calls run_ranks, and the ranks it has started."""

    def __init__(
        self, folder: Path, ranks: int, program: str, setup: str = "", env: dict[str, str] | None = None
    ) -> None:
        self.folder, self.ranks = folder, ranks
        (folder / "program.py").write_text(PRELUDE + program)
        self.logs = folder / "tmp"
        self.logs.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER.format(setup=setup), str(ranks), str(folder / "program.py"), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": str(self.logs)} | (env or {}),
            start_new_session=True,  # as the foreground process group of a terminal
        )
        self.seen: set[psutil.Process] = set()

    def read(self, name: str) -> Any:
        self.until(lambda: (self.folder / name).exists(), name)
        return json.loads((self.folder / name).read_text())

    def until(self, condition: Callable[[], bool], what: str = "") -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, f"never happened: {what}"
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """Waits for every rank to be ready."""
        pids = [self.read(f"rank-{rank}")["pid"] for rank in range(self.ranks)]
        self.seen |= {psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)}
        self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return pids

    def let(self, name: str) -> None:
        (self.folder / name).touch()

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; nothing that was seen is left."""
        out, err = self.process.communicate(timeout=100)
        psutil.wait_procs([process for process in self.seen if is_alive(process)], timeout=10)
        assert [process for process in self.seen if is_alive(process)] == []
        return self.process.returncode, out, err

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for process in self.seen:
            if is_alive(process):
                process.kill()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(ranks: int, program: str, setup: str = "", env: dict[str, str] | None = None) -> Launch:
        started.append(Launch(tmp_path, ranks, program, setup, env))
        return started[-1]

    yield start
    for one in started:
        one.close()


Start = Callable[..., Launch]


# Starting and ending


def test_every_rank_knows_its_place_and_only_rank_0_is_heard(launch: Start) -> None:
    run = launch(3, "ready(stdin=sys.stdin.read()); print('hello from', rank)")
    environments = [run.read(f"rank-{rank}") for rank in range(3)]
    code, out, err = run.end()
    assert (code, out, err) == (0, "hello from 0\n", "")
    ports = set()
    for rank, seen in enumerate(environments):
        env = seen["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            "3",
            "3",
        )
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert ("CODESCENT_STORE_FD" in env) == (rank == 0)
        assert seen["stdin"] == ""
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 1
    assert list(run.logs.iterdir()) == []


def test_warnings_of_rank_0_are_shown_after_a_run_that_went_well(launch: Start) -> None:
    run = launch(2, "print('take care', rank, file=sys.stderr)")
    assert run.end() == (0, "", "take care 0\n")


def test_one_rank_is_a_launch_like_any_other(launch: Start) -> None:
    assert launch(1, "print(os.environ['WORLD_SIZE'])").end() == (0, "1\n", "")


def test_what_a_rank_started_does_not_outlive_it(launch: Start) -> None:
    program = "child = subprocess.Popen(['sleep', '600']); ready(child=child.pid); wait_for('go')"
    run = launch(2, program)
    run.pids()
    assert sum(process.name() == "sleep" for process in run.seen) == 2
    run.let("go")
    assert run.end()[0] == 0  # end() checks that no sleep is left


def test_threads_are_divided_among_the_ranks_unless_the_user_says_how_many() -> None:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    assert Group(cores).environment(0, 1, {})["OMP_NUM_THREADS"] == "1"
    assert Group(1).environment(0, 1, {})["OMP_NUM_THREADS"] == str(cores)
    assert Group(10 * cores).environment(0, 1, {})["OMP_NUM_THREADS"] == "1"
    assert Group(1).environment(0, 1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_the_user_may_choose_the_network_interface_but_not_the_rank() -> None:
    given = {
        "GLOO_SOCKET_IFNAME": "eth7",
        "RANK": "9",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "CODESCENT_STORE_FD": "5",
    }
    env = Group(2).environment(1, 4000, given)
    assert (env["GLOO_SOCKET_IFNAME"], env["RANK"], env["MASTER_PORT"]) == ("eth7", "1", "4000")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert "CODESCENT_STORE_FD" not in env


# The store's socket


def test_rank_0_serves_on_the_socket_it_was_given_and_on_this_machine_only(launch: Start) -> None:
    program = """
if rank == 0:
    listener = socket.socket(fileno=int(os.environ["CODESCENT_STORE_FD"]))
    ready(address=listener.getsockname())
    connection, _ = listener.accept()
    print(connection.recv(100).decode())
    wait_for("seen")
else:
    ready()
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    socket.create_connection(address, timeout=60).sendall(b"hello")
"""
    run = launch(2, program)
    port = int(run.read("rank-1")["env"]["MASTER_PORT"])
    assert run.read("rank-0")["address"] == ["127.0.0.1", port]
    processes = [psutil.Process(pid) for pid in (run.process.pid, run.pids()[0])]
    listening = [
        [tuple(c.laddr) for c in process.net_connections() if c.status == psutil.CONN_LISTEN] for process in processes
    ]
    assert listening == [[], [("127.0.0.1", port)]]
    run.let("seen")
    assert run.end() == (0, "hello\n", "")


def test_torch_meets_on_that_socket_and_listens_nowhere_else(launch: Start) -> None:
    program = """
import datetime, psutil, torch, torch.distributed as dist
env, minute = os.environ, datetime.timedelta(seconds=60)
fd = int(env["CODESCENT_STORE_FD"]) if rank == 0 else None
store = dist.TCPStore(
    env["MASTER_ADDR"], int(env["MASTER_PORT"]), 2, is_master=rank == 0, timeout=minute, master_listen_fd=fd
)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=minute)
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
dist.barrier()
write(f"sum-{rank}", {"total": total.item(), "listening": listening})
dist.destroy_process_group()
"""
    run = launch(2, program)
    code, _, err = run.end()
    assert code == 0, err
    for rank in range(2):
        seen = run.read(f"sum-{rank}")
        assert seen["total"] == 3.0
        assert set(seen["listening"]) == {"127.0.0.1"}


# Failing


def test_a_message_to_the_user_is_printed_once_and_its_exit_code_kept(launch: Start) -> None:
    run = launch(4, "print('model.num_headz: unknown key', file=sys.stderr); sys.exit(2)")
    assert run.end() == (2, "", "model.num_headz: unknown key\n")
    assert list(run.logs.iterdir()) == []


def test_a_run_that_cannot_go_on_is_told_once_too(launch: Start) -> None:
    run = launch(4, "print('error: runs/a: ended at step 9', file=sys.stderr); sys.exit(1)")
    assert run.end() == (1, "", "error: runs/a: ended at step 9\n")
    assert list(run.logs.iterdir()) == []


def test_the_message_of_one_rank_stops_the_others(launch: Start) -> None:
    program = """
ready()
if rank == 1:
    wait_for("fail")
    print("the shard is truncated", file=sys.stderr)
    sys.exit(2)
wait_for("never")
"""
    run = launch(3, program)
    run.pids()
    run.let("fail")
    assert run.end() == (2, "", "the shard is truncated\n")


def test_a_rank_that_raises_is_named_with_its_traceback_and_logs_are_kept(launch: Start) -> None:
    program = """
ready()
print("before", rank)
if rank == 1:
    raise ArithmeticError("loss is not finite")
wait_for("never")
"""
    run = launch(3, program)
    code, out, err = run.end()
    assert (code, out.count("before")) == (1, 0 if out == "" else 1)
    assert "ArithmeticError: loss is not finite" in err
    assert f"rank 1 of 3 (pid {run.read('rank-1')['pid']}) ended with exit code 1" in err
    (kept,) = run.logs.iterdir()
    assert str(kept) in err
    assert "before 1" in (kept / "rank-1.log").read_text()


def test_a_rank_killed_by_kill_9_is_named_with_the_signal_and_the_others_are_stopped(launch: Start) -> None:
    run = launch(3, "ready(); wait_for('never')")
    pids = run.pids()
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = run.end()
    assert code == 128 + 9
    assert f"rank 1 of 3 (pid {pids[1]}) was killed by SIGKILL (9); the kernel has counted no out-of-memory kill" in err


def test_ranks_that_fail_because_another_was_killed_are_not_blamed(launch: Start) -> None:
    program = """
ready()
wait_for("never" if rank == 2 else "fail")
raise ConnectionError("reset by peer")
"""
    run = launch(3, program)
    pids = run.pids()
    os.kill(run.process.pid, signal.SIGSTOP)  # the launcher is slow: it notices all three at the same time
    run.let("fail")
    run.until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids[:2]))
    os.kill(pids[2], signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGCONT)
    code, _, err = run.end()
    assert code == 128 + 9
    assert f"rank 2 of 3 (pid {pids[2]}) was killed by SIGKILL" in err
    assert "probably as a consequence: rank 0 ended with exit code 1; rank 1 ended with exit code 1" in err
    assert "ConnectionError" not in err


def test_a_message_to_the_user_explains_the_failures_around_it(launch: Start) -> None:
    program = """
ready()
if rank == 1:
    wait_for("late")
    print("disk full", file=sys.stderr)
    sys.exit(2)
write("late", 0)
raise ConnectionError("reset by peer")
"""
    assert launch(2, program).end() == (2, "", "disk full\n")


def test_a_crash_in_native_code_shows_the_python_stack(launch: Start) -> None:
    run = launch(
        2, "def deep():\n    os.abort()\nready()\nwait_for('rank-0')\nif rank == 1:\n    deep()\nwait_for('never')"
    )
    code, _, err = run.end()
    assert code == 128 + signal.SIGABRT
    assert "in deep" in err
    assert "was killed by SIGABRT (6)" in err


def test_a_rank_that_does_not_hear_sigterm_is_killed(launch: Start) -> None:
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
if rank == 0:
    wait_for("fail")
    sys.exit(3)
wait_for("never")
"""
    run = launch(3, program, setup="local.SETTLE_S = local.STOP_S = 0.2")
    run.pids()
    run.let("fail")
    assert run.end()[0] == 3


def test_a_long_log_is_cut_and_bytes_that_are_not_text_do_no_harm(launch: Start) -> None:
    program = "sys.stderr.buffer.write(b'x' * 100_000 + b'\\xff the end\\n'); sys.exit(1)"
    code, _, err = launch(1, program).end()
    assert code == 1
    assert err.startswith("[... 80010 bytes before this]\nxxx")
    assert "\ufffd the end\n" in err


def test_a_command_that_does_not_exist_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = psutil.Process().children()  # the session's forker of ranks, if a test has asked for it
    with pytest.raises(FileNotFoundError):
        run_ranks([str(tmp_path / "nothing")], 2, os.environ)
    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().children() == before


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become a user of few processes")
def test_more_ranks_than_the_machine_lets_start(launch: Start) -> None:
    setup = """
import resource, shutil, tempfile
class Folder:  # which this process removes itself: this Python may be closed to the other user
    def __init__(self, prefix):
        self.path, self.mark = local.Path(tempfile.mkdtemp(prefix=prefix)), {}
    def close(self, *, keep):
        shutil.rmtree(self.path)
local.TemporaryFolder = Folder
os.chmod(os.environ["TMPDIR"], 0o777)
resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
os.setuid(54321)
local.run_ranks(["sleep", "50"], 9, os.environ)
"""
    code, _, err = launch(9, "", setup=setup).end()
    assert code == 1
    assert "UserError: cannot start rank 2 of 9: Resource temporarily unavailable" in err


# Ending early

BEAT = """
from codescent.base.progress import OwnPage, Pages
own = OwnPage(Pages.of(os.environ), rank)
own.at(3.5 - rank, 0, "backward")
"""


def test_a_rank_that_stops_before_it_trains_does_not_keep_the_others(launch: Start) -> None:
    run = launch(2, "ready(); wait_for('never') if rank == 0 else sys.exit(130)")
    code, _, err = run.end()
    assert code == 130
    assert "rank 1 of 2" in err


def test_a_rank_that_ends_in_the_middle_of_its_steps_is_named(launch: Start) -> None:
    run = launch(2, BEAT + "ready(); wait_for('never') if rank == 0 else wait_for('go')")
    run.pids()
    run.let("go")
    code, _, err = run.end()
    assert code == 1
    assert re.search(r"rank 1 of 2 \(pid \d+\) ended with exit code 0 in the middle of its steps", err)


# Being stopped


def test_ctrl_c_reaches_each_rank_once_and_waits_for_them_to_save(launch: Start) -> None:
    run = launch(3, HANDLE + "ready(); save_when_asked(); sys.exit(130 if rank else 0)")
    run.pids()
    os.killpg(run.process.pid, signal.SIGINT)  # as the terminal does
    os.killpg(run.process.pid, signal.SIGINT)  # and once more, as by way of make
    run.let("save")
    saved = [run.read(f"saved-{rank}") for rank in range(3)]
    code, _, err = run.end()
    assert code == 130
    assert saved == [[signal.SIGINT]] * 3
    assert err == "codescent: SIGINT: waiting for the ranks to save and stop; Ctrl-C once more kills them\n"
    assert list(run.logs.iterdir()) == []


def test_a_second_ctrl_c_kills(launch: Start) -> None:
    run = launch(2, HANDLE + "ready(); save_when_asked()", setup="local.REPEAT_S = 0.0")
    run.pids()
    run.process.send_signal(signal.SIGINT)
    assert run.process.stderr is not None
    assert "once more kills" in run.process.stderr.readline()
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert (code, err) == (130, "codescent: the ranks were killed\n")
    assert not list(run.folder.glob("saved-*"))


@pytest.mark.parametrize(
    ("asked", "code", "saves"), [(signal.SIGTERM, 143, True), (signal.SIGHUP, 129, True), (signal.SIGTERM, 143, False)]
)
def test_a_scheduler_or_a_closed_terminal_asks_to_stop(
    launch: Start, asked: signal.Signals, code: int, saves: bool
) -> None:
    setup = "" if saves else "import functools; local.run_ranks = functools.partial(local.run_ranks, saves=False)"
    run = launch(2, HANDLE + "ready(); save_when_asked()", setup=setup)
    run.pids()
    for _ in range(3):
        run.process.send_signal(asked)
        run.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    run.let("save")
    assert [run.read(f"saved-{rank}") for rank in range(2)] == [[signal.SIGTERM]] * 2
    does = "save and stop" if saves else "stop"
    assert run.end() == (code, "", f"codescent: {asked.name}: waiting for the ranks to {does}\n")


def test_ctrl_c_before_the_ranks_can_handle_it_is_quiet(launch: Start) -> None:
    run = launch(2, "ready(); wait_for('never')")
    run.pids()
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert (code, err.count("\n")) == (130, 1)  # the line that says what is waited for; no traceback


def test_a_failure_while_saving_is_what_is_reported(launch: Start) -> None:
    program = HANDLE + "ready(); save_when_asked()\nif rank == 0: print('no space left', file=sys.stderr); sys.exit(2)"
    run = launch(2, program)
    run.pids()
    run.process.send_signal(signal.SIGTERM)
    run.let("save")
    code, _, err = run.end()
    assert (code, err.splitlines()[1:]) == (2, ["no space left"])


def test_after_nohup_a_closed_terminal_means_nothing(launch: Start) -> None:
    setup = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    run = launch(2, "ready(); wait_for('go'); print(rank)", setup=setup)
    run.pids()
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    run.let("go")
    assert run.end() == (0, "0\n", "")


def test_ctrl_c_works_in_a_background_job_of_a_script_too(launch: Start) -> None:
    setup = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    run = launch(2, HANDLE + "ready(); save_when_asked()", setup=setup)
    run.pids()
    run.let("save")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130


def test_ctrl_z_pauses_the_ranks_with_their_launcher(launch: Start) -> None:
    run = launch(2, "ready(); wait_for('go'); print('went on')")
    processes = [psutil.Process(pid) for pid in (run.process.pid, *run.pids())]
    run.process.send_signal(signal.SIGTSTP)
    run.until(lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes), "stopped")
    run.process.send_signal(signal.SIGCONT)
    run.until(lambda: all(process.status() != psutil.STATUS_STOPPED for process in processes), "went on")
    run.let("go")
    assert run.end() == (0, "went on\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_the_ranks_die_with_a_launcher_that_is_killed(launch: Start) -> None:
    run = launch(3, HANDLE + "ready(); wait_for('never')")  # the ranks would survive any signal they can handle
    run.pids()
    run.process.kill()
    run.process.wait()
    gone, alive = psutil.wait_procs(list(run.seen), timeout=30)
    assert (len(gone), alive) == (4, []), "three ranks, and who removes their folder"


def test_rank_0_prints_where_this_program_prints() -> None:
    """In a notebook Python does not print to descriptor 1."""
    with redirect_stdout(io.StringIO()) as printed:
        assert run_ranks([sys.executable, "-c", "print('first'); print('last')"], 1, os.environ) == 0
    assert printed.getvalue() == "first\nlast\n"


def test_signal_handlers_are_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGTSTP)
    before = [signal.getsignal(number) for number in numbers]
    assert run_ranks([sys.executable, "-c", "print('in')"], 1, os.environ) == 0
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert capfd.readouterr().out == "in\n"
