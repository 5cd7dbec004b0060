"""In: the name of a target. Out: its row: who starts the ranks there, what it needs of the site, what its script says.
Adding a target is a row here and a file for its script. Does not write files (verbs/launch.py does)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from codescent.jobs import hosts, kubernetes, mpirun, pbs, slurm, torchrun, torchx
from codescent.jobs.job import Job
from codescent.jobs.options import ASKED, problems
from codescent.jobs.site import LoadedSite, Site, in_environment


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

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the site that have an effect on its script."""
        return frozenset((*self.needs, *self.reads))


PLACE = ("modules", "before", "environment", "scratch", "interface", "time")
"""Keys of the lines before a command of bash."""
CHECKED = ("device_type", "node_devices", "devices", "memory")
"""Keys that the checks before a job read for every target (checks.py)."""
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
        torchx.script, ".py", ("image", "devices"),
        ("cores", "memory", "partition", "time", "mail", "requeues", "launcher"), True,
    ),
    "kubernetes": Target(
        kubernetes.script, ".yaml", ("image", "devices"),
        ("before", "time", "memory", "cores", "requeues", "volume"), True,
    ),
}  # fmt: skip
"""By the word of --to."""

WANTED: Mapping[str, str] = {
    "time": "the time limit of the job, such as site.time=04:00:00",
    "devices": 'a way to ask for devices, such as site.devices="{devices}"; site.devices=none: ranks compute on CPUs',
    "mpi": "which mpirun the hosts have: site.mpi=openmpi, mpich or intelmpi",
    "image": "the container image in which codescent is installed, such as site.image=registry/name:tag",
}
"""What to give where a target needs a key."""


def missing(name: str, loaded: LoadedSite) -> Iterator[str]:
    """A problem for each key that the target needs and nobody gave."""
    for key in TARGETS[name].needs:
        if getattr(loaded.site, key) is None:
            wanted = WANTED[key].replace("{devices}", ASKED.get(name, ""))
            yield f"--to {name} needs {wanted} (on the command line, or {key} in a file for --site)"


def contradictions(name: str, loaded: LoadedSite, *, is_chain: bool = False) -> Iterator[str]:
    """A problem for each value that the scheduler would not read as it is meant. `is_chain`: jobs follow each other."""
    return problems(name, loaded, TARGETS[name].keys, is_chain=is_chain)


def unread(name: str, loaded: LoadedSite) -> Iterator[str]:
    """A sentence for each key that was given and that the target does not read."""
    known = {*TARGETS[name].keys, *CHECKED}
    binds = name != "mpirun" or loaded.site.binding == "cores"
    for key in loaded.given():
        if key not in known or (key == "cores" and not binds):
            without = "" if key not in known else " without site.binding=cores"
            yield f"site.{key} ({loaded.origins[f'site.{key}']}) has no effect with --to {name}{without}"


def site_for(name: str, loaded: LoadedSite) -> Site:
    """The site as the script of a target reads it: keys that have no effect there have their defaults."""
    default = Site()
    others = {key: getattr(default, key) for key in Site.model_fields if key not in TARGETS[name].keys}
    return in_environment(loaded).model_copy(update=others)


def unknown(name: str | None) -> str:
    """Why there is no such target; "": there is."""
    if name is None:
        return f"give --to TARGET: {', '.join(TARGETS)}"
    if name in TARGETS:
        return ""
    near = difflib.get_close_matches(name.lower(), TARGETS, n=1)
    known = f"did you mean {near[0]}?" if near else f"the targets are {', '.join(TARGETS)}"
    return f"--to {name}: unknown target; {known}"
