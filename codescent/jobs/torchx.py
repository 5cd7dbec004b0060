"""In: a job. Out: a component file of torchx, with the lines of .torchxconfig for it. torchx is not imported.
Does not run it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from codescent.jobs.job import PORT, Job
from codescent.jobs.torchrun import SIGNALS


def script(job: Job) -> str:
    """The component file: torchx run -s SCHEDULER FILE:train."""
    return "\n".join(_lines(job)) + "\n"


def _lines(job: Job) -> Iterator[str]:
    site, file = job.site, job.saved_as or "FILE.py"
    yield f'"""{job.name}, {job.shape()}. Written for torchx by:'
    yield f"{job.said}".replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    yield ""
    yield f"torchx run -s SCHEDULER {file}:train begins the run, and the same continues it."
    yield "Lines for .torchxconfig:"
    yield from _config(job)
    yield '"""'
    yield ""
    yield "from torchx import specs"
    yield ""
    yield ""
    yield "def train() -> specs.AppDef:"
    yield '    """Train on all nodes: an agent of torchrun on each."""'
    yield "    # the first replica: torchx names the variable in which a scheduler puts its host"
    yield '    first = "$${" + specs.macros.rank0_env + ":=localhost}"'
    yield "    command = ("
    for line in _agent(job):
        yield f"        {line}"
    yield "    )"
    yield "    role = specs.Role("
    yield f"        name={job.name!r},"
    yield f"        image={(site.image or '')!r},"
    yield '        entrypoint="bash",'
    yield '        args=["-c", command],'
    yield f"        env={{'CODESCENT_MARK': {job.mark!r}}},"
    yield f"        num_replicas={job.nodes},"
    yield f"        max_retries={site.requeues},"
    cpu = (site.cores or 1) * job.devices
    yield f"        resource=specs.Resource(cpu={cpu}, gpu={_devices(job)}, memMB={_mb(job)}),"
    yield "    )"
    yield f"    return specs.AppDef(name={job.name!r}, roles=[role])"


def _agent(job: Job) -> Iterator[str]:
    """The command of a node, as lines of a Python string. torchx replaces what follows a dollar sign."""
    words = ["torchrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.devices}", "--rdzv-backend=c10d"]
    words += [f"--rdzv-id={job.name}", f"--max-restarts={job.restarts}", f"--signals-to-handle={SIGNALS}"]
    yield repr(f"{shlex.join([*words, *job.site.launcher])} --rdzv-endpoint=".replace("$", "$$"))
    yield f"+ first + {f':{PORT} '!r}"
    yield f"+ {shlex.join(job.python).replace('$', '$$')!r}"


def _devices(job: Job) -> int:
    return 0 if job.site.devices in (None, "none") else job.devices


def _mb(job: Job) -> int:
    """The memory of a node in MB; -1: torchx asks for none."""
    text = job.site.memory or ""
    number, unit = text.rstrip("bBi"), 1.0
    for letter, factor in (("K", 1e-3), ("M", 1.0), ("G", 1e3), ("T", 1e6)):
        if number.upper().endswith(letter):
            number, unit = number[:-1], factor
    return round(float(number) * unit) if number.replace(".", "", 1).isdigit() else -1


def _config(job: Job) -> Iterator[str]:
    site = job.site
    yield "    [slurm]"
    for key, value in (("partition", site.partition), ("time", site.time), ("mail-user", site.mail)):
        if value is not None:
            yield f"    {key} = {value}"
    if site.mail is not None:
        yield "    mail-type = ALL"
    yield f"    job_dir = {job.folder / 'torchx-jobs'}"
