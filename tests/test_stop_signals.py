"""In: runs and own loops, by each launcher that needs no scheduler; SIGUSR1 twice, SIGCONT between. Out: one save, exit
code 75, and the same losses, bit for bit, as without a stop. Does not test when ranks fail (test_running does)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import codescent, environment, losses, make_project, started_by, train
from test_running import ENDLESS, Run

from codescent.base.stopping import LATER
from codescent.own import stopping
from codescent.record import RunFolder

TIMEOUT_S = 300
HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--signals-to-handle={HANDLED}"]
SCRIPT = """
import sys, time, torch, codescent
ranks = codescent.init("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
codescent.distribute(model, optimizer, sys.argv[2])
extra = codescent.load("saved", model, optimizer, missing_ok=True)
step = extra["step"] if extra else 0
while step < int(sys.argv[1]):
    step += 1
    torch.manual_seed(1000 * step + ranks.rank)
    inputs = torch.randn(4, 8)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    mean = ranks.mean(loss)
    if ranks.is_first:
        with open("losses", "a") as file:
            file.write(f"{step} {mean.hex()}\\n")
    time.sleep(0.02)
    if ranks.stopping():
        codescent.save("saved", model, optimizer, step=step)
        ranks.stop()
ranks.print("all steps")
"""


def agent(ranks: int) -> list[str]:
    return [sys.executable, "-m", "codescent.launch.agent", "--ranks", str(ranks), "--"]


def torchrun(ranks: int) -> list[str]:
    return [*TORCHRUN, "--nproc-per-node", str(ranks)]


def shake(process: subprocess.Popen[str]) -> None:
    """As SLURM does it: a signal, SIGCONT, and the same signal once more."""
    for number in (signal.SIGUSR1, signal.SIGCONT, signal.SIGUSR1):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        time.sleep(0.05)


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.close()


# codescent train


@pytest.mark.slow
@pytest.mark.parametrize("by", ["one process", "local ranks", "agent", "torchrun"])
def test_a_run_is_saved_once_and_continues_to_the_same_losses(tmp_path: Path, runs: list[Run], by: str) -> None:
    make_project(tmp_path)
    ranks = 1 if by == "one process" else 2
    ranks_of = ["--ranks", str(ranks)]
    words = [sys.executable, "-m", "codescent", "train", "run.toml", *ENDLESS]
    command = {
        "one process": words,
        "local ranks": [*words, *ranks_of],
        "agent": [*agent(2), *words],
        "torchrun": [*torchrun(2), *words[1:]],
    }[by]
    file = tmp_path / "code"
    runs.append(run := Run(tmp_path, ranks, command, CODESCENT_EXIT_FILE=str(file)))
    run.steps()
    shake(run.process)
    code, _, err = run.end()
    # torchrun ends with 1 after a signal, whatever the ranks end with.
    assert (code, file.read_text()) == (by == "torchrun", f"{LATER}\n"), err
    events = RunFolder.open(tmp_path / "runs" / "endless").read_events()
    kinds = [event["kind"] for event in events]
    assert (kinds.count("checkpoint"), kinds.count("stop")) == (1, 1)
    step = next(event["step"] for event in events if event["kind"] == "stop")
    last = [f"train.num_steps={step + 2}", *ranks_of]
    done = codescent(tmp_path, "train", "run.toml", *ENDLESS, *last, "--resume=auto")
    assert done.returncode == 0, done.stderr
    wanted = train(tmp_path, "wanted", *(word for word in ENDLESS if not word.startswith("run.name")), *last)
    found = RunFolder.open(tmp_path / "runs" / "endless")
    assert [row["step"] for row in found.read_metrics()] == list(range(1, step + 3))
    assert losses(found) == losses(wanted)


def test_a_stop_is_no_failure_for_torchrun(tmp_path: Path) -> None:
    """Nor does it start the ranks again: by the time limit no signal comes to torchrun."""
    make_project(tmp_path)
    file = tmp_path / "code"
    prepared = codescent(tmp_path, "data", "corpus.txt", "--tokenizer", "byte")
    assert prepared.returncode == 0, prepared.stderr
    command = [*torchrun(2), "--max-restarts=3", "-m", "codescent", "train", "run.toml", *ENDLESS, "--resume=auto"]
    env = environment(CODESCENT_EXIT_FILE=str(file), CODESCENT_STOP_AT=str(int(time.time())))
    done = subprocess.run(
        command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, file.read_text()) == (0, f"{LATER}\n"), done.stderr
    kinds = [event["kind"] for event in RunFolder.open(tmp_path / "runs" / "endless").read_events()]
    assert (kinds.count("start"), kinds.count("stop"), kinds.count("resume")) == (1, 1, 0)


# Own loops


class Loop:
    """A script with its own loop, under a launcher."""

    def __init__(self, folder: Path, command: list[str], steps: int, strategy: str = "ddp", **env: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "loop.py").write_text(SCRIPT)
        words = [*command, "loop.py", str(steps), strategy]
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(**env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def losses(self) -> list[str]:
        file = self.folder / "losses"
        return file.read_text().splitlines() if file.exists() else []

    def takes(self, steps: int) -> None:
        """Wait until so many steps are done. From the first one on the loop listens to signals."""
        end = time.monotonic() + TIMEOUT_S
        while len(self.losses()) < steps:
            assert time.monotonic() < end
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    made: list[Loop] = []
    yield made
    for loop in made:
        loop.close()


COMMANDS = {
    "one process": [sys.executable],
    "agent": [*agent(2), sys.executable],
    "torchrun": torchrun(2),
}


@pytest.mark.parametrize(
    ("by", "strategy"),
    [
        ("one process", "ddp"),
        pytest.param("agent", "zero3", marks=pytest.mark.slow),
        pytest.param("torchrun", "ddp", marks=pytest.mark.slow),
    ],
)
def test_a_loop_is_saved_once_and_continues_to_the_same_losses(
    tmp_path: Path, loops: list[Loop], by: str, strategy: str
) -> None:
    folder, file = tmp_path / "one", tmp_path / "code"
    loops.append(loop := Loop(folder, COMMANDS[by], 10**6, strategy, CODESCENT_EXIT_FILE=str(file)))
    loop.takes(3)
    shake(loop.process)
    code, _, err = loop.end()
    assert (code, file.read_text()) == (by == "torchrun", f"{LATER}\n"), err
    rank = "" if by == "one process" else " to rank 0"
    assert err.count(f"codescent: stopped by SIGUSR1{rank}; to be started again\n") == 1
    (saved,) = (folder / "saved").iterdir()
    step = int(saved.name.removeprefix("step_"))
    assert len(loop.losses()) == step
    for each in (folder, tmp_path / "wanted"):
        loops.append(again := Loop(each, COMMANDS[by], step + 3, strategy))
        code, out, err = again.end()
        assert (code, out) == (0, "all steps\n"), err
    assert loop.losses() == again.losses()
    assert len(again.losses()) == step + 3


@pytest.mark.slow
def test_a_loop_without_the_file_ends_with_the_code(tmp_path: Path, loops: list[Loop]) -> None:
    codes = {}
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        loops.append(loop := Loop(tmp_path / number.name, [sys.executable], 10**6))
        loop.takes(2)
        loop.process.send_signal(number)
        code, _, err = loop.end()
        codes[number.name] = code
        assert f"codescent: {number.name}: the script is asked to save and to stop\n" in err
    assert codes == {"SIGUSR2": 75, "SIGTERM": 143, "SIGINT": 130}


def test_a_signal_to_one_rank_stops_the_loops_of_all(tmp_path: Path, loops: list[Loop]) -> None:
    """Without the file no launcher is told anything: the rank's exit code says that it has stopped on request."""
    loops.append(loop := Loop(tmp_path / "loop", COMMANDS["agent"], 10**6))
    loop.takes(2)
    started_by(loop.process.pid)[1].send_signal(signal.SIGUSR1)
    code, _, err = loop.end()
    assert code == LATER, err
    assert "codescent: stopped by SIGUSR1 to rank 1; to be started again" in err


@pytest.mark.parametrize("by", ["one process", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_loop_knows_the_time_limit(tmp_path: Path, loops: list[Loop], by: str) -> None:
    loops.append(loop := Loop(tmp_path / "loop", COMMANDS[by], 10**6, CODESCENT_STOP_AT=str(int(time.time()))))
    code, _, err = loop.end()
    assert code == LATER, err
    assert "codescent: stopped by the time limit of the job (CODESCENT_STOP_AT=" in err
    assert len(loop.losses()) == 1


def run_script(folder: Path, text: str, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    words = [*(command or (sys.executable,)), "script.py"]
    return subprocess.run(
        words, cwd=folder, env=environment(**env), text=True, capture_output=True, timeout=TIMEOUT_S, check=False
    )


BEGIN = """
import os, signal, sys, threading, codescent
ranks = codescent.init("cpu")
def me(number):
    os.kill(os.getpid(), number)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_loop_that_never_asks_ends_at_the_first_signal(tmp_path: Path, number: signal.Signals) -> None:
    done = run_script(tmp_path, BEGIN + f"me({int(number)}); print('goes on')")
    assert (done.returncode, done.stdout) == (-number, "")


def test_what_a_script_does_wrong_is_said(tmp_path: Path) -> None:
    done = run_script(tmp_path, BEGIN + "ranks.stop()")
    assert done.returncode == 2
    assert "codescent: ranks.stop: nothing asks the ranks to stop" in done.stderr
    done = run_script(tmp_path, BEGIN, CODESCENT_STOP_AT="soon")  # nobody asks
    assert done.returncode == 0
    done = run_script(tmp_path, BEGIN + "ranks.stopping()", CODESCENT_STOP_AT="soon")
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert 'CODESCENT_STOP_AT: given "soon"; must be seconds since 1970' in done.stderr
    done = run_script(tmp_path, BEGIN + "ranks.stopping(); me(signal.SIGTERM); assert ranks.stopping()")
    assert done.returncode == 0
    assert "SIGTERM has asked the ranks to stop, and the script has ended without ranks.stop()" in done.stderr


def test_a_handler_of_the_script_stays_and_others_come_back(tmp_path: Path) -> None:
    program = """
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append("mine"))
assert not ranks.stopping()
me(signal.SIGUSR1)
assert got == ["mine"] and not ranks.stopping()
ranks.close()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print("well")
"""
    done = run_script(tmp_path, BEGIN + program)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_a_handler_in_native_code_stays(tmp_path: Path) -> None:
    """Scripts have faulthandler print the stack of a rank that hangs."""
    program = """
import faulthandler
faulthandler.register(signal.SIGUSR1)
assert not ranks.stopping()
me(signal.SIGUSR1)
assert not ranks.stopping()
ranks.close()
me(signal.SIGUSR1)
print("well")
"""
    done = run_script(tmp_path, BEGIN + program)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert done.stderr.count("most recent call first") == 2


NATIVE = """
#include <signal.h>
#include <unistd.h>
static void said(int number) { write(1, "native\\n", 7); }
__attribute__((constructor)) static void before_python(void) { signal(SIGUSR2, said); signal(SIGTERM, said); }
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD, and cc")
def test_a_handler_from_before_python_stays(tmp_path: Path) -> None:
    """Python cannot put it back: codescent replaces it only where a run must listen, and then leaves its own there."""
    program = """
from codescent.results.start import stopped_by_signals
from codescent.train.stop import StopRequest
assert signal.getsignal(signal.SIGUSR2) is None
assert not ranks.stopping()
me(signal.SIGUSR2)
assert not ranks.stopping()
ranks.close()
with stopped_by_signals():
    pass
with StopRequest(alone=True):
    pass
print("well")
"""
    (tmp_path / "native.c").write_text(NATIVE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "native.so", "native.c"], cwd=tmp_path, check=True)
    done = run_script(tmp_path, BEGIN + program, LD_PRELOAD=str(tmp_path / "native.so"))
    assert (done.returncode, done.stdout) == (0, "native\nwell\n"), done.stderr


def test_where_the_kernel_does_not_say_who_handles_signals_python_alone_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # whatever ran before in this process
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Name: python\nThreads: 1\n")
    assert not stopping._is_handled(signal.SIGUSR1)


def test_forked_workers_end_by_the_signals_that_ask_the_script_to_stop(tmp_path: Path) -> None:
    """A pool of multiprocessing ends its workers by SIGTERM, and waits for them."""
    program = """
import multiprocessing
ranks.stopping()
pool = multiprocessing.get_context("fork").Pool(2)
print(pool.map(abs, [-1, 2]))
pool.terminate()
pool.join()
assert not ranks.stopping()
"""
    done = run_script(tmp_path, BEGIN + program)
    assert (done.returncode, done.stdout) == (0, "[1, 2]\n"), done.stderr


def test_the_way_out_of_a_script_is_pythons_own(tmp_path: Path) -> None:
    """`with`, `finally` and atexit run."""
    program = """
import atexit
import codescent, os, signal
atexit.register(print, "atexit")
with codescent.init("cpu") as ranks:
    try:
        ranks.stopping()
        os.kill(os.getpid(), signal.SIGUSR1)
        if ranks.stopping():
            ranks.stop()
    finally:
        print("finally")
"""
    done = run_script(tmp_path, program)
    assert (done.returncode, done.stdout) == (LATER, "finally\natexit\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_wait_for_the_others_before_they_end(tmp_path: Path) -> None:
    program = """
import codescent, time
from pathlib import Path
ranks = codescent.init("cpu")
if ranks.rank == 0:
    time.sleep(1)
    Path("written").touch()
ranks.world.leave()
assert Path("written").exists()
"""
    assert run_script(tmp_path, program, *COMMANDS["agent"]).returncode == 0
