"""In: a job. Out: a component file of torchx, with the lines of .torchxconfig for it. torchx is not imported.
Does not run it."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.token import TOKEN
from codescent.base.visible import visible
from codescent.jobs.bash import Raw
from codescent.jobs.job import Job
from codescent.jobs.leftovers import MARK
from codescent.jobs.lines import begin, exit_file, passing_on, stop_at
from codescent.jobs.site import asked_devices, memory_bytes
from codescent.jobs.torchrun import options, patience

FIRST = "@FIRST@"
"""Stands for the host of the first replica, until the line is Python."""


def script(job: Job) -> str:
    """The component file: torchx run -s SCHEDULER FILE:train."""
    return "\n".join(_lines(job)) + "\n"


def _lines(job: Job) -> Iterator[str]:
    site = job.site
    yield from _docstring(job)
    yield ""
    yield "import secrets"
    yield ""
    yield "from torchx import specs"
    yield ""
    yield "COMMAND = [  # of a node. torchx replaces what follows a single dollar sign"
    for line in "\n".join(_bash(job)).split("\n"):
        yield f"    {_python(line)},"
    yield "]"
    yield ""
    yield ""
    yield "def train() -> specs.AppDef:"
    yield '    """Train on all nodes: an agent of torchrun on each."""'
    yield "    # the secret by which the ranks recognise each other, new for each job: it is in the job's environment"
    yield f"    env = {{{TOKEN!r}: secrets.token_hex(32), {MARK!r}: {job.mark.replace('$', '$$')!r}}}"
    yield "    role = specs.Role("
    yield f"        name={job.name!r},"
    yield f"        image={str(site.image)!r},"
    yield '        entrypoint="bash",'
    yield '        args=["-c", "\\n".join(COMMAND)],'
    yield "        env=env,"
    yield f"        num_replicas={job.nodes},"
    yield f"        max_retries={site.requeues},"
    cpu = (site.cores or 1) * job.devices
    gpu = job.devices if asked_devices(site, job.devices) else 0
    yield f"        resource=specs.Resource(cpu={cpu}, gpu={gpu}, memMB={_mb(site.memory)}),"
    yield "    )"
    yield f"    return specs.AppDef(name={job.name!r}, roles=[role])"


def _docstring(job: Job) -> Iterator[str]:
    lines = [f"{job.name}, {job.machines()}. Written for torchx by:", job.said, ""]
    lines += [f"torchx run -s SCHEDULER {job.saved_as or 'FILE.py'}:train {job.does}"]
    lines += ["Lines for .torchxconfig:", *_config(job)]
    text = "\n".join(map(visible, "\n".join(lines).splitlines())).replace("\\", "\\\\").replace('"', '\\"')
    yield from f'"""{text}\n"""'.split("\n")


def _python(line: str) -> str:
    """A line of bash as an expression of Python. torchx puts the name of the variable with the first host into it."""
    before, first, after = line.replace("$", "$$").partition(FIRST)
    if not first:
        return repr(before)
    return f"{before + '$${'!r} + specs.macros.rank0_env + {':=localhost}' + after!r}"


def _bash(job: Job) -> Iterator[str]:
    """What a node does: as the script of torchrun."""
    yield "set -eo pipefail"
    yield from begin(job)
    yield from stop_at(job)
    yield from exit_file("/tmp")
    yield from patience(job)
    words = ["torchrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.devices}", "--rdzv-backend=c10d"]
    where = "localhost:0" if job.nodes == 1 else f"{FIRST}:{job.port}"
    words += [f"--rdzv-id={job.name}", Raw(f'--rdzv-endpoint="{where}"')]
    yield from passing_on([*words, *options(job), *job.python])
    yield 'exit "$code"'


def _mb(memory: str | None) -> int:
    """The memory of a node in units of 1024 * 1024 bytes; -1: torchx asks for none."""
    return -1 if memory is None else max(1, memory_bytes(memory) // 2**20)


def _config(job: Job) -> Iterator[str]:
    site = job.site
    yield "    [slurm]"
    for key, value in (("partition", site.partition), ("time", site.time), ("mail-user", site.mail)):
        if value is not None:
            yield f"    {key} = {value}"
    if site.mail is not None:
        yield "    mail-type = ALL"
    yield f"    job_dir = {job.folder / 'torchx-jobs'}"
