"""In: the ranks of a job, the options of its site. Out: contradictions: more ranks than devices on a node, and options
that name another number of ranks than the script starts. Does not look at the config's layout (checks.py does)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from codescent.base.counted import counted
from codescent.jobs.findings import Preflight
from codescent.jobs.site import NONE
from codescent.jobs.targets import TARGETS

HOSTS = (
    "-H", "-host", "--host", "-hosts", "--hosts", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f",
)  # fmt: skip
MPI = ("-n", "-np", "--n", "--np", "-c", "-N", "-ppn", "--ppn", "-perhost", *HOSTS)
PALS = ("-n", "-np", "--np", "-ppn", "--ppn", "--hosts", "--hostfile")
SLURM = ("-n", "--ntasks", "-N", "--nodes", "--ntasks-per-node")
TORCHRUN = ("--nproc-per-node", "--nproc_per_node", "--nnodes")
COUNTS: Mapping[str, Sequence[str]] = {
    "mpirun": MPI, "pbs": PALS, "slurm": SLURM, "torchrun": TORCHRUN, "torchx": TORCHRUN,
}  # fmt: skip
"""Options of site.launcher that name hosts, or a number of ranks or nodes, by target."""


def problems(asked: Preflight) -> Iterator[str]:
    """Why the numbers contradict each other, each with what would do."""
    yield from _too_many(asked)
    yield from _options(asked)
    yield from _ranks(asked)


def notes(asked: Preflight) -> Iterator[str]:
    """A sentence if the config has another number of ranks, which no rank of a launcher reads."""
    config = asked.config
    if config is None or config.parallel.ranks in (1, *asked.shape.possible) or any(_of_ranks(asked)):
        return
    yield f"parallel.ranks = {config.parallel.ranks} is not read here: {_starts(asked)}"


def _too_many(asked: Preflight) -> Iterator[str]:
    """Nodes with more ranks than devices."""
    site, shape = asked.site, asked.shape
    most = site.node_devices
    if most is None or site.devices == NONE:
        return
    over = [at for at, slots in enumerate(shape.slots) if slots > most]
    if not over:
        return
    have = f"a node has {counted(most, 'device')} (site.node_devices), one for each rank"
    if shape.hosts and shape.least_nodes is None:
        named = ", ".join(f"{shape.hosts[at]}:{shape.slots[at]}" for at in over)
        yield f"--hosts {named}: {have}; give each host at most {most} slots"
        return
    slots = shape.slots[0]
    nodes = -(-asked.ranks // most)
    each = asked.ranks // nodes
    hosts = ",".join(f"node{number}:{each}" for number in range(1, nodes + 1))
    on_more = f"--nodes {nodes} --devices {each}" if TARGETS[asked.target].schedules else f"--hosts {hosts}"
    fits = shape.least_nodes is None and asked.ranks % nodes == 0 and asked.target != "local"
    yield f"--devices {slots}: {have}; give --devices {most}{f', or {on_more} for {asked.ranks} ranks' if fits else ''}"


def _options(asked: Preflight) -> Iterator[str]:
    """Options that say again, or otherwise, how many ranks there are, or on which hosts."""
    given = [("site.launcher", asked.site.launcher, COUNTS.get(asked.target, ()))]
    if asked.target == "slurm":
        given.append(("site.options", [word for line in asked.site.options for word in shlex.split(line)], SLURM))
    for key, words, names in given:
        for at, word in enumerate(words):
            option, value = _split(word, words[at + 1 :])
            if option in names:
                shown = f"{option} {value}".rstrip()
                yield f"{key}: {shown}: {_starts(asked)}; leave it out{_instead(asked, option, value)}"


def _split(word: str, after: Sequence[str]) -> tuple[str, str]:
    """An option and its value: "--np=2", "-np 2", "-n2", or "-np" and the next word."""
    glued = re.fullmatch(r"(-[nNc])(\d+)", word)
    if glued:
        return glued[1], glued[2]
    option, _, value = word.replace("=", " ", 1).partition(" ")
    return option, value or next(iter(after), "")


def _of_ranks(asked: Preflight) -> Iterator[str]:
    """The words of the command line that set parallel.ranks."""
    return (word for word in asked.words if word.partition("=")[0].strip() == "parallel.ranks")


def _ranks(asked: Preflight) -> Iterator[str]:
    for word in _of_ranks(asked):
        value = word.partition("=")[2].strip()
        if asked.config is not None and asked.config.parallel.ranks not in asked.shape.possible:
            yield f"{word}: {_starts(asked)}; leave it out{_instead(asked, '-np', value)}"


def _starts(asked: Preflight) -> str:
    """How many ranks the script starts, and why."""
    shape = asked.shape
    if shape.hosts and shape.least_nodes is None:
        places = ",".join(f"{host}:{slots}" for host, slots in zip(shape.hosts, shape.slots, strict=True))
        return f"the script starts a rank on each slot of {places}, which is {counted(asked.ranks, 'rank')}"
    nodes = len(shape.slots)
    return f"the script starts {counted(asked.ranks, 'rank')}: {counted(nodes, 'node')} with {shape.slots[0]} each"


def _instead(asked: Preflight, option: str, value: str) -> str:
    """How to ask for the number of ranks that an option names; "" if it names nodes, or as many ranks."""
    if option not in ("-n", "-np", "--n", "--np", "-c", "--ntasks") or not value.isdecimal():
        return ""
    wanted, shape = int(value), asked.shape
    if not 0 < wanted < asked.ranks or shape.least_nodes is not None:
        return ""
    nodes = len(shape.slots)
    each, rest = divmod(wanted, nodes)
    if shape.hosts and not rest and each <= min(shape.slots):
        places = ",".join(f"{host}:{each}" for host in shape.hosts)
        return f"; for {counted(wanted, 'rank')}: --hosts {places}"
    if not shape.hosts and not rest:
        on_nodes = f"--nodes {nodes} " if TARGETS[asked.target].schedules else ""
        return f"; for {counted(wanted, 'rank')}: {on_nodes}--devices {each}"
    return f"; for {counted(wanted, 'rank')}: fewer nodes or slots"
