"""In: hosts that are network namespaces. Out: `Cluster`: a real SLURM, slurmctld on the last, slurmd on others.
Does not know what the jobs do. Needs root and SLURM's programs; leaves the machine's own SLURM and munge alone."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hosts
from systems import die_with_parent

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
NODES = 3
WAIT_S = 60.0
"""Longest wait for what takes seconds on an idle machine."""

# A requeued job waits for as long as credentials of its last start are valid: cred_expire, at least 5 seconds.
# KillWait: from SIGTERM to SIGKILL. Nodes are given more cores than the machine has (config_overrides).
CONF = """
ClusterName=tests
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,requeue_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={silent_s}
KillWait=30
MinJobAge=600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 MaxTime=INFINITE GraceTime=30 OverSubscribe=NO
PartitionName=high Nodes=ALL State=UP PriorityTier=9 MaxTime=INFINITE PreemptMode=OFF
"""


def missing() -> str:
    """Why this machine cannot have such a cluster, in words; "" if it can."""
    if reason := hosts.missing():
        return reason
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"there is no {' and no '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return ""


class Cluster:
    """Nodes host0 to host2, and host3 where slurmctld runs and jobs are submitted. Use it in a `with`.

    Attributes:
        folder: of the cluster: its config, its logs.
        env: for all commands.
        silent_s: a node whose slurmd does not answer for so long is down.
        disks: of a host, a folder that it sees in place of another one: a disk with locks of its own.
        hosts: the namespaces.
    """

    def __init__(self, folder: Path, silent_s: int = 60, disks: Mapping[int, tuple[Path, Path]] | None = None) -> None:
        self.folder, self.silent_s, self.disks = folder, silent_s, disks or {}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path, "OMP_NUM_THREADS": "1"}
        self.hosts = hosts.Hosts(NODES + 1)
        self._daemons: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self.hosts.__enter__()
        try:
            self._configure()
            self._start_daemons()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _configure(self) -> None:
        named = [(f"host{host}", hosts.address(host)) for host in range(NODES + 1)]
        nodes = "\n".join(f"NodeName={name} NodeAddr={at} CPUs=4 RealMemory=4000" for name, at in named[:NODES])
        text = CONF.format(
            controller=named[NODES][0], address=named[NODES][1], folder=self.folder, nodes=nodes, silent_s=self.silent_s
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in named))
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        for name in ("state", *(f"spool.host{host}" for host in range(NODES))):
            (self.folder / name).mkdir()

    def _start_daemons(self) -> None:
        at = self.folder
        self._daemon(
            NODES, "munged", "--foreground", "--force", f"--socket={at}/munge.socket", f"--key-file={at}/munge.key",
            f"--pid-file={at}/munged.pid", f"--seed-file={at}/munged.seed", f"--log-file={at}/munged.log",
        )  # fmt: skip
        self.wait(lambda: (at / "munge.socket").exists(), "munged")
        self._daemon(NODES, "slurmctld", "-D")
        for host in range(NODES):
            self._daemon(host, "slurmd", "-D", "-N", f"host{host}")
        self.wait(
            lambda: self.tried("sinfo", "-h", "-o", "%T %D", "-p", "low").stdout == f"idle {NODES}\n", "the nodes"
        )

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """The words that run `words` on a host, where the hosts' names mean their addresses."""
        seen = f"mount --bind {shlex.join(map(str, self.disks[host]))}; " if host in self.disks else ""
        inside = f'hostname "$0"; mount --bind "$1" /etc/hosts; {seen}shift; exec "$@"'
        space = ["unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", inside, f"host{host}"]
        namespace = f"--net=/run/netns/{self.hosts.name(host)}"
        return ["nsenter", namespace, "--", *space, str(self.folder / "hosts"), *words]

    def _daemon(self, host: int, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("a") as log:
            self._daemons.append(
                subprocess.Popen(
                    self.command(host, words),
                    env=self.env,
                    cwd=self.folder,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            )

    def tried(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """A command on the machine where jobs are submitted, to its end."""
        return subprocess.run(
            self.command(NODES, words), env={**self.env, **env}, cwd=cwd, text=True, capture_output=True, check=False,
            timeout=WAIT_S,
        )  # fmt: skip

    def called(self, *words: str, cwd: Path | None = None, **env: str) -> str:
        """What such a command prints; it must succeed."""
        done = self.tried(*words, cwd=cwd, **env)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """The number of a job."""
        return self.called("sbatch", "--parsable", *options, str(script), cwd=script.parent).strip()

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState; "" if there is none."""
        words = self.called("scontrol", "--oneliner", "show", "job", job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def ended(self, job: str, seconds: float = WAIT_S) -> tuple[str, str]:
        """Wait for a job's end. Returns its state and its exit code, such as ("FAILED", "143:0")."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE")
        self.wait(lambda: self.field(job, "JobState") in over, f"job {job}", seconds)
        return self.field(job, "JobState"), self.field(job, "ExitCode")

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
        """Wait until something holds. Fails with the logs of the cluster."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"{what}: not after {seconds:.0f} seconds\n{self.logs()}"
            assert all(daemon.poll() is None for daemon in self._daemons), self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of the logs of the daemons."""
        names = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-800:]}" for path in names)

    def processes(self, host: int) -> list[int]:
        """The processes on a host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.hosts.name(host)], text=True, capture_output=True, check=False
        ).stdout
        return [int(word) for word in listed.split()]

    def _end(self) -> None:
        """End all that runs on the hosts, and remove them. No process of a namespace of ours is anybody else's."""
        for host in range(NODES + 1):
            for pid in self.processes(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            daemon.wait(timeout=WAIT_S)
        self.hosts.__exit__(None, None, None)
