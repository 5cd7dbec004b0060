"""In: a job. Out: a script with torchrun, which runs on each node: its agents find each other.
Does not start it."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.rank import LOOPBACK
from codescent.base.stopping import EXIT_FILE
from codescent.jobs.bash import Raw, command
from codescent.jobs.job import Job
from codescent.jobs.lines import ADDRESS, NOT_ALIVE, exit_file, head, left_behind, passing_on, setting, variables

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
"""The agent passes them on. By itself it knows the first four."""


def script(job: Job) -> str:
    """The script."""
    lines = [*head(job, "torchrun", [*_use(job), left_behind(job)]), ""]
    if _is_static(job):
        lines += [f"node=${{1:?give the number of this node, 0 to {job.nodes - 1}}}", ""]
    draws = job.nodes == 1  # each of several nodes would draw another one
    lines += [*setting(job), *variables(job, token=draws), *_meeting(job), ""]
    lines += [*exit_file(), *patience(job), ""]
    words = [*_agent(job), *options(job), *job.python]
    lines += [*passing_on(words, meanwhile=_ending(job)), 'exit "$code"']
    return "\n".join(lines) + "\n"


def _is_static(job: Job) -> bool:
    """Whether there are several nodes, whose number does not change."""
    return job.nodes > 1 and job.least_nodes is None


def _use(job: Job) -> Iterator[str]:
    file = job.saved_as or "FILE"
    if job.nodes == 1:
        yield f"bash {file} {job.does}"
    elif job.least_nodes is not None:
        yield f"Run it on each node: CODESCENT_TOKEN=... bash {file}. {job.least_nodes} to {job.nodes} nodes may come."
        yield "The same continues the run."
    else:
        for node, host in enumerate(job.hosts):
            yield f"On {host}: CODESCENT_TOKEN=... bash {file} {node}"
        yield "The same continues the run."
    if job.nodes > 1:
        yield "CODESCENT_TOKEN is any text that is hard to guess, the same on all nodes. A shared home needs none."


def _meeting(job: Job) -> Iterator[str]:
    """Where the agents meet. They go by names, which may mean loopback, so they are told addresses."""
    if job.nodes > 1:
        hosts = dict.fromkeys((job.hosts[0], job.hosts[-1]))
        yield "# the addresses of the first node and of this one: their names may mean loopback"
        yield f"master=$({command([*ADDRESS, *hosts])})"
        yield f'here=$({command([*ADDRESS, "--towards"])} "$master")'
    yield "# the port of this run on the first node; if it is taken, set MASTER_PORT on all nodes"
    yield f"port=${{MASTER_PORT:-{job.port}}}"


def patience(job: Job) -> Iterator[str]:
    """Variables of the agents. The first is an option since torch 2.13; as a variable, older ones do not refuse it."""
    if job.trains:
        yield "# how long torchrun lets the ranks save before it kills them, from torch 2.13 on; before, it is 30 s"
        yield f"export PET_SHUTDOWN_TIMEOUT={job.grace_s}"
    if job.least_nodes is not None:
        yield "# without it a node that comes later waits for a key that nobody writes, and all wait for the node"
        yield "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def _ending(job: Job) -> list[str]:
    """End the agent when its ranks have saved. By itself it waits for the agents of all nodes."""
    if job.nodes == 1:
        return []
    return [
        "# when the ranks have saved, this agent would wait 5 minutes for one that a signal has ended already",
        f'(while [ ! -s "${EXIT_FILE}" ]; do sleep 1; kill -0 "$launcher" || exit; done',
        f' kill -TERM "$launcher") >/dev/null 2>&1 {NOT_ALIVE} &',
    ]


def _agent(job: Job) -> list[str]:
    """The words of torchrun that say where the ranks are."""
    words = ["torchrun", f"--nproc-per-node={job.devices}" if len(set(job.slots)) == 1 else _slots(job)]
    if job.nodes == 1:
        return [*words, "--nnodes=1", f"--master-addr={LOOPBACK}", Raw('--master-port="$port"')]
    if job.least_nodes is None:
        words += [f"--nnodes={job.nodes}", Raw('--node-rank="$node"'), Raw('--master-addr="$master"')]
        return [*words, Raw('--master-port="$port"'), Raw('--local-addr="$here"')]
    words += [f"--nnodes={job.least_nodes}:{job.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={job.name}"]
    words += [Raw('--rdzv-endpoint="$master:$port"'), Raw('--local-addr="$here"')]
    return [*words, Raw('--rdzv-conf="is_host=$([ "$here" = "$master" ] && echo 1 || echo 0)"')]


def options(job: Job) -> list[str]:
    """Further words of torchrun."""
    restarts = [f"--max-restarts={job.restarts}"] if job.restarts else []
    return [*restarts, f"--signals-to-handle={SIGNALS}", *job.site.launcher]


def _slots(job: Job) -> str:
    """The slots of this node, from its number."""
    return Raw(f'--nproc-per-node="$(set -- {" ".join(map(str, job.slots))}; shift "$node"; echo "$1")"')
