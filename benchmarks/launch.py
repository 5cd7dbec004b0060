"""In: hosts that this makes on one machine. Out: seconds from a command to a first step, beside torchrun; from USR1
to a checkpoint of GPT-2 124M. Needs root for several hosts, and writes only into a temporary folder."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import hosts
from measure import (
    SystemFailed,
    finish,
    hardware,
    machine_line,
    must,
    must_lines,
    parser,
    positive,
    say,
    table,
    write_json,
)
from work import GPT2_124M, codescent, environment, training, write_tokens

PORT = 29_500
POLL_S = 0.005
"""The error of a time."""
LIMIT_S = 300.0
MOST_TIMES_TORCHRUN = 1.1
STEPS_BEFORE_SIGNAL = 3
BATCH = "train.global_batch_size=1"

CONFIG = """# Written by a benchmark: a small model, so that a step takes no time
[run]
name = "{name}"

[model]
num_layers = 1
num_heads = 1
hidden_dim = 16
seq_len = 16

[data]
corpus = "corpus.txt"
tokenizer = "byte"

[train]
num_steps = 4
global_batch_size = 4
eval_every = 0

[checkpoint]
every = 0

[log]
tensorboard = false
metrics_every = 1
"""

SSH = """#!/bin/bash
# ssh -o ... HOST WORDS: the words run by a shell on a host of the benchmark
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
number=$(( ${host##*.} - 1 ))
exec nsenter --net=/run/netns/PREFIX$number unshare --uts bash -c "hostname host$number; $*"
"""

Start = Callable[[hosts.Hosts | None, int, Path, Mapping[str, str]], list[subprocess.Popen[str]]]


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time from a command to the first step, and from SIGUSR1 to a complete checkpoint.")
    parsed.add_argument("--hosts", type=positive, nargs="+", default=[1, 2, 4], help="numbers of hosts, a rank on each")
    parsed.add_argument("--rounds", type=positive, default=5, help="starts of each system, in turns")
    parsed.add_argument("--no-save", action="store_true", help="leave out the checkpoint of GPT-2 124M")
    return parsed.parse_args()


def script(folder: Path, number: int, env: Mapping[str, str]) -> Path:
    """The script of `codescent launch`, which is written before the clock starts: a person starts it."""
    where = ["--to", "local", "--devices", "1"]
    if number > 1:
        where = ["--to", "ssh", "--hosts", ",".join(f"{hosts.address(host)}:1" for host in range(number))]
    path = folder / "start.sh"
    path.unlink(missing_ok=True)
    words = codescent("launch", "run.toml", *where, "site.environment=none", "--out", str(path))
    done = subprocess.run(words, cwd=folder, env=dict(env), check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemFailed(f"codescent launch: {done.stderr}")
    return path


def by_script(
    made: hosts.Hosts | None, number: int, folder: Path, env: Mapping[str, str]
) -> list[subprocess.Popen[str]]:
    """One process: the script, on the first host."""
    words = ["bash", "start.sh"]
    return [_started(made, 0, words, folder, env)]


def by_torchrun(
    made: hosts.Hosts | None, number: int, folder: Path, env: Mapping[str, str]
) -> list[subprocess.Popen[str]]:
    """An agent of torchrun on each host, as a person types it. torch's fast path needs no rendezvous on one host."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", f"--nnodes={number}"]
    words += [f"--master-addr={hosts.address(0) if number > 1 else '127.0.0.1'}", f"--master-port={PORT}"]
    command = ["-m", "codescent", "train", "run.toml", "--resume=auto"]
    env = {**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0" if number > 1 else "lo"}
    of_host = [[f"--node-rank={host}", f"--local-addr={hosts.address(host)}"] for host in range(number)]
    own = of_host if number > 1 else [[]]
    return [_started(made, host, [*words, *own[host], *command], folder, env) for host in range(number)]


SYSTEMS: Mapping[str, Start] = {"codescent launch": by_script, "torchrun": by_torchrun}


def _started(
    made: hosts.Hosts | None, host: int, words: list[str], folder: Path, env: Mapping[str, str]
) -> subprocess.Popen[str]:
    with (folder / f"log-{host}").open("w") as log:
        if made is None:
            return subprocess.Popen(words, cwd=folder, env=dict(env), text=True, stdout=log, stderr=log)
        return made.start(host, words, env, folder, log)


def first_step_s(start: Start, made: hosts.Hosts | None, number: int, folder: Path, env: Mapping[str, str]) -> float:
    """Seconds from the command to the first row of metrics. Raises SystemFailed: it failed, or takes too long."""
    name = f"run-{time.monotonic_ns()}"
    (folder / "run.toml").write_text(CONFIG.format(name=name), encoding="utf-8")
    if start is by_script:
        script(folder, number, env)
    metrics, begun = folder / "runs" / name / "metrics.csv", time.monotonic()
    processes = start(made, number, folder, env)
    taken_s = wait_for(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") > 1, processes, folder)
    found_s = taken_s - begun
    for process in processes:
        if process.wait(LIMIT_S) != 0:
            raise SystemFailed((folder / "log-0").read_text())
    return found_s


def wait_for(is_there: Callable[[], bool], processes: list[subprocess.Popen[str]], folder: Path) -> float:
    """The moment at which it is there. Raises SystemFailed: a process failed before, or it takes too long."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        if is_there():
            return time.monotonic()
        if any(process.poll() not in (None, 0) for process in processes):
            break
        time.sleep(POLL_S)
    for process in processes:
        process.kill()
    raise SystemFailed("\n".join(log.read_text() for log in sorted(folder.glob("log-*"))))


def starts(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """For each number of hosts the seconds of each system, in turns."""
    for number in arguments.hosts:
        times: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        with place(number, folder) as (made, env):
            for turn in range(arguments.rounds + 1):
                for name, start in SYSTEMS.items():
                    taken_s = first_step_s(start, made, number, folder, env)
                    say(f"{number} hosts, {name}: {taken_s:.2f} s")
                    if turn > 0:  # the first turn fills the file cache
                        times[name].append(taken_s)
        yield {"hosts": number, "seconds": times, "medians": {name: statistics.median(t) for name, t in times.items()}}


@contextmanager
def place(number: int, folder: Path) -> Iterator[tuple[hosts.Hosts | None, dict[str, str]]]:
    """Hosts, and the environment in which ssh reaches them; one host is this machine."""
    with ExitStack() as stack:
        made = stack.enter_context(hosts.Hosts(number)) if number > 1 else None
        programs = folder / "programs"
        programs.mkdir(exist_ok=True)
        if made is not None:
            (programs / "ssh").write_text(SSH.replace("PREFIX", made.name(0).removesuffix("0")))
            (programs / "ssh").chmod(0o755)
        env = environment()
        yield made, {**env, "PATH": f"{programs}:{Path(sys.executable).parent}:{env['PATH']}"}


def saves(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds from SIGUSR1 to the checkpoint of GPT-2 124M, beside those of the save alone and of a step, by round."""
    tokens = write_tokens(folder, GPT2_124M.vocab_size)
    found = [save(training(GPT2_124M, tokens, run, BATCH), run, folder) for run in folders(folder, rounds)]
    return {name: [one[name] for one in found] for name in found[0]}


def folders(folder: Path, rounds: int) -> Iterator[Path]:
    """A run folder for each round. One of an earlier round is removed: a checkpoint is 1.5 GB."""
    for number in range(rounds):
        run = folder / f"saved-{number}"
        yield run
        shutil.rmtree(run)


def save(words: Sequence[str], run: Path, folder: Path) -> dict[str, float]:
    """One round of `saves`."""
    metrics = run / "metrics.csv"
    with (folder / "log-0").open("w") as log:
        process = subprocess.Popen(words, cwd=folder, env=environment(), text=True, stdout=log, stderr=log)
    rows = STEPS_BEFORE_SIGNAL + 1
    wait_for(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= rows, [process], folder)
    process.send_signal(signal.SIGUSR1)
    begun = time.monotonic()
    events = run / "events.jsonl"
    there_s = wait_for(lambda: '"checkpoint"' in events.read_text(), [], folder)
    if (code := process.wait(LIMIT_S)) != 75:
        raise SystemFailed(f"exit code {code}, not 75: {(folder / 'log-0').read_text()}")
    saved = next(one for one in map(json.loads, events.read_text().splitlines()) if one["kind"] == "checkpoint")
    step_s = max(float(row.split(",")[9]) for row in metrics.read_text().splitlines()[2:])
    return {"signal_to_checkpoint_s": there_s - begun, "save_s": saved["seconds"], "step_s": step_s}


def main() -> int:
    """Measure and print. Returns 1 if a system failed, 2 if hosts cannot be made."""
    arguments = arguments_of()
    if max(arguments.hosts) > 1 and (why := hosts.missing()):
        say(f"error: {why}; --hosts 1 needs none")
        return 2
    record = hardware()
    with tempfile.TemporaryDirectory(prefix="codescent-launch-") as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text("many workers, one descent\n" * 400, encoding="utf-8")
        entries = list(starts(arguments, folder))
        saved = None if arguments.no_save else saves(arguments.rounds, folder)
    claims = [
        must(f"{one['hosts']} hosts: first step, times torchrun", ratio(one), MOST_TIMES_TORCHRUN, at_least=False)
        for one in entries
    ]
    if saved is not None:
        alone_s = statistics.median(map(sum, zip(saved["save_s"], saved["step_s"], strict=True)))
        taken_s = statistics.median(saved["signal_to_checkpoint_s"])
        most_s = alone_s + 2 * POLL_S  # of the begin, and of the end
        claims.append(must("SIGUSR1 to checkpoint of 124M", taken_s, most_s, at_least=False, unit=" s"))
    header = ["hosts", *(f"{name} [s]" for name in SYSTEMS), "times"]
    rows = [
        [str(one["hosts"]), *(f"{one['medians'][name]:.2f}" for name in SYSTEMS), f"{ratio(one):.2f}"]
        for one in entries
    ]
    print(machine_line(record), "", table(header, rows), "", *must_lines(claims), sep="\n")
    result = {"benchmark": "launch", "hardware": record, "starts": entries, "save": saved, "musts": claims}
    write_json(arguments.json, result)
    return 0


def ratio(one: Mapping[str, Any]) -> float:
    """Of the medians: codescent's launch over torchrun by hand."""
    return float(one["medians"]["codescent launch"] / one["medians"]["torchrun"])


if __name__ == "__main__":
    finish(main)
