"""In: the name of a target. Out: its row: who starts the ranks there, what it needs of the site, what its script says.
Adding a target is a row here and a file for its script. Does not write files (verbs/launch.py does)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from codescent.jobs import hosts, kubernetes, mpirun, pbs, slurm, torchrun, torchx
from codescent.jobs.job import Job
from codescent.jobs.site import LoadedSite


@dataclass(frozen=True)
class Target:
    """A way to start a run's ranks.

    Attributes:
        script: the text for a job.
        suffix: of its file.
        needs: keys of the site that it cannot do without.
        reads: further keys that it uses.
        schedules: a scheduler chooses the machines; False: hosts are given, where there are several.
        uneven: hosts may have different numbers of ranks.
        elastic: nodes may come and go.
    """

    script: Callable[[Job], str]
    suffix: str
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    schedules: bool = False
    uneven: bool = False
    elastic: bool = False


PLACE = ("modules", "before", "environment", "scratch", "interface", "time")
"""Keys of the lines before a command of bash."""
SCHEDULER = (*PLACE, "account", "partition", "memory", "cores", "options", "mail", "container", "binding", "launcher",
             "requeues")  # fmt: skip

TARGETS: Mapping[str, Target] = {
    "local": Target(hosts.local, ".sh", reads=(*PLACE, "container")),
    "ssh": Target(hosts.ssh, ".sh", reads=(*PLACE, "container"), uneven=True),
    "torchrun": Target(torchrun.script, ".sh", reads=(*PLACE, "launcher"), uneven=True, elastic=True),
    "mpirun": Target(
        mpirun.script, ".sh", ("mpi",), (*PLACE, "container", "binding", "cores", "launcher"), uneven=True
    ),
    "slurm": Target(slurm.script, ".sbatch", ("time", "devices"), (*SCHEDULER, "qos"), True),
    "pbs": Target(pbs.script, ".pbs", ("time", "devices"), SCHEDULER, True),
    "torchx": Target(
        torchx.script, ".py", ("image",),
        ("devices", "cores", "memory", "partition", "time", "mail", "requeues", "launcher"), True,
    ),
    "kubernetes": Target(
        kubernetes.script, ".yaml", ("image", "devices"),
        ("before", "time", "memory", "cores", "requeues", "launcher", "volume"), True,
    ),
}  # fmt: skip
"""By the word of --to."""

WANTED: Mapping[str, str] = {
    "time": "the time limit of the job, such as site.time=04:00:00",
    "devices": 'how devices are asked for, such as site.devices="{devices}"; site.devices=none: ranks compute on CPUs',
    "mpi": "which mpirun the hosts have: site.mpi=openmpi, mpich or intelmpi",
    "image": "the container image in which codescent is installed, such as site.image=registry/name:tag",
}
"""What to give where a target needs a key."""

ASKED = {"slurm": "--gpus-per-node={n}", "pbs": "ngpus={n}", "kubernetes": "nvidia.com/gpu: {n}"}
"""How devices are often asked for."""


def missing(name: str, loaded: LoadedSite) -> Iterator[str]:
    """A problem for each key that the target needs and nobody gave."""
    for key in TARGETS[name].needs:
        if getattr(loaded.site, key) is None:
            wanted = WANTED[key].replace("{devices}", ASKED.get(name, ""))
            yield f"--to {name} needs {wanted} (on the command line, or {key} in a file for --site)"


TWICE = re.compile(r"--gpus|--gres=\S*gpu|\bngpus=")
"""Options that ask for devices."""


def contradictions(name: str, loaded: LoadedSite) -> Iterator[str]:
    """A problem for each option that asks for devices, for which site.devices asks already."""
    for option in loaded.site.options if {"options", "devices"} <= {*TARGETS[name].needs, *TARGETS[name].reads} else ():
        if loaded.site.devices is not None and TWICE.search(option):
            yield (
                f"site.devices ({loaded.origins['site.devices']}) and site.options ({loaded.origins['site.options']}: "
                f"{option}) both ask for devices; give one of them: site.devices"
            )


def unread(name: str, loaded: LoadedSite) -> Iterator[str]:
    """A sentence for each key that was given and that the target does not read."""
    known = {*TARGETS[name].needs, *TARGETS[name].reads}
    for key in loaded.given():
        if key not in known:
            yield f"site.{key} ({loaded.origins[f'site.{key}']}) has no effect with --to {name}"
