"""In: a job. Out: a script with torchrun, which runs on each node: its agents find each other.
Does not start it."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.rank import LOOPBACK
from codescent.jobs.bash import Raw, command, exports, head, quoted, run_variables, setting
from codescent.jobs.job import PORT, Job

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
"""The agent passes them on. By itself it knows the first four."""


ADDRESS = ("python3", "-m", "codescent.jobs.address")


def script(job: Job) -> str:
    """The script."""
    lines = [*head(job, "torchrun", list(_use(job))), ""]
    static = job.nodes > 1 and job.least_nodes is None
    if static:
        lines += [f"node=${{1:?give the number of this node, 0 to {job.nodes - 1}}}", ""]
    lines += [*setting(job), *exports(_variables(job)), *(_here(job) if job.nodes > 1 else []), ""]
    lines.append(command(["exec", *agent(job, Raw('"$node"') if static else "0"), *job.python]))
    return "\n".join(lines) + "\n"


def _use(job: Job) -> Iterator[str]:
    file = job.saved_as or "FILE"
    if job.nodes == 1:
        yield f"bash {file} begins the run, and the same continues it."
    elif job.least_nodes is not None:
        yield f"Run it on each node: CODESCENT_TOKEN=... bash {file}. {job.least_nodes} to {job.nodes} nodes may come."
        yield "The same continues the run."
    else:
        for node, host in enumerate(job.hosts):
            yield f"On {host}: CODESCENT_TOKEN=... bash {file} {node}"
        yield "The same continues the run."
    if job.nodes > 1:
        yield "CODESCENT_TOKEN is any text that is hard to guess, the same on all nodes. A shared home needs none."


def _variables(job: Job) -> list[tuple[str, str, str]]:
    """On several nodes each would draw a token of its own."""
    return [one for one in run_variables(job) if job.nodes == 1 or one[1] != "CODESCENT_TOKEN"]


def _here(job: Job) -> Iterator[str]:
    """The addresses of the first node and of this one: agents go by names, which may mean loopback."""
    hosts = dict.fromkeys((job.hosts[0], job.hosts[-1]))
    yield "# the addresses of the first node and of this one: their names may mean loopback"
    yield f"master=$({command([*ADDRESS, *hosts])})"
    yield f'here=$({command([*ADDRESS, "--towards"])} "$master")'


def agent(job: Job, node: str) -> list[str]:
    """The words of torchrun up to the script. `node`: the number of this node."""
    words = ["torchrun", f"--nproc-per-node={job.devices}" if len(set(job.slots)) == 1 else _slots(job)]
    if job.nodes == 1:
        words += ["--nnodes=1", f"--master-addr={LOOPBACK}", f"--master-port={PORT}"]
    elif job.least_nodes is None:
        words += [f"--nnodes={job.nodes}", Raw(f"--node-rank={node}"), Raw('--master-addr="$master"')]
        words += [f"--master-port={PORT}", Raw('--local-addr="$here"')]
    else:
        words += [f"--nnodes={job.least_nodes}:{job.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={job.name}"]
        words += [Raw(f'--rdzv-endpoint="$master:{PORT}"'), Raw('--local-addr="$here"')]
        words.append(Raw('--rdzv-conf="is_host=$([ "$here" = "$master" ] && echo 1 || echo 0)"'))
    if job.restarts:
        words.append(f"--max-restarts={job.restarts}")
    return [*words, f"--signals-to-handle={SIGNALS}", *job.site.launcher]


def _slots(job: Job) -> str:
    """The slots of this node, from its number."""
    return Raw(f'--nproc-per-node="$(set -- {" ".join(map(quoted, map(str, job.slots)))}; shift "$node"; echo "$1")"')
