"""In: arguments of `codescent measure`. Out: a cluster file of this machine, or of those of a launcher.
Does not measure (measure/ does). Without a launcher this process starts the ranks, and imports no torch."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from codescent.base import cause
from codescent.base.cores import available_cores, refuse_more_ranks
from codescent.base.counted import counted
from codescent.base.device_kinds import AUTO, CPU, GPUS
from codescent.base.errors import UserError
from codescent.base.loopback import refuse_without_loopback
from codescent.base.output import say, warn
from codescent.base.parent import handed_on
from codescent.base.progress import PROGRESS_FD
from codescent.base.rank import Rank
from codescent.clusters.files import load_cluster
from codescent.launch.allocator import needs_restart, tuned_environment, with_expandable_segments
from codescent.launch.environment import read
from codescent.launch.local import run_ranks
from codescent.measure.file import cluster_of, refuse_tables, text_of, with_tables
from codescent.measure.nccl_tests import NcclTable, read_table
from codescent.measure.table import link_words, summary
from codescent.verbs.arguments_machines import SECONDS
from codescent.verbs.measure_runs import main as of_runs
from codescent.verbs.script_file import taken, write_new

if TYPE_CHECKING:
    from codescent.measure.machine_findings import MachineFindings

DEFAULT_RANKS = 2
TIMEOUT_S = 300.0
"""A rank that others wait for longer does not come any more."""
MOST_S = 3600
DEVICE_OPTION = "--device {}"
RANK_WORDS = {"ranks": None, "device": "auto", "seconds": SECONDS}
"""Options of ranks that measure, and what they are where nobody gives them."""


def main(arguments: Namespace) -> int:
    """Measure as a rank of a launcher, or on ranks that this process starts; or take tables or runs alone.

    Raises UserError: the arguments contradict each other, --out is there already, a table or a cluster cannot be read.
    """
    rank = read(os.environ)
    if rank is not None:
        cause.is_rank(rank)
    is_rank = rank is not None and (rank.world_size > 1 or PROGRESS_FD in os.environ)
    problems = [*_contradictions(arguments, rank if is_rank else None)]
    if rank is not None and is_rank and not problems:
        return _as_rank(arguments, rank)
    problems += taken(arguments.out)
    if arguments.runs is not None:
        return of_runs(arguments, problems)
    if arguments.cluster is not None:
        return _of_tables(arguments, problems)
    return _start(arguments, _tables(arguments, problems))


def _of_tables(arguments: Namespace, problems: list[str]) -> int:
    """Write the cluster of --cluster with the links of the tables."""
    cluster = None
    try:
        cluster = load_cluster(arguments.cluster)
    except UserError as error:
        problems += error.problems
    tables = _tables(arguments, problems)
    assert cluster is not None, "else there is a problem"
    refuse_tables(tables, cluster.devices, arguments.link or "")
    changed = with_tables(cluster, tables)
    write_new(arguments.out, text_of(changed, None))
    names = [name for name in ("inside", "between") if getattr(changed, name) != getattr(cluster, name)]
    say(f"link {name}  {link_words(getattr(changed, name))}; {changed.sources[f'links.{name}']}" for name in names)
    say([f"{arguments.out} is written"])
    return 0


def _contradictions(arguments: Namespace, rank: Rank | None) -> Iterator[str]:
    """Problems of the words alone, which all ranks find. `rank`: of a launcher, or of ours."""
    if arguments.out.suffix != ".toml":
        yield f"--out {arguments.out}: is a cluster file, whose name ends with .toml; give such a name"
    if arguments.link and not arguments.nccl_tests:
        yield f"--{arguments.link}: says what --nccl-tests has measured; give a table, or leave it out"
    if arguments.seconds > MOST_S:
        yield f"--seconds {arguments.seconds}: at most {MOST_S}, which is an hour"
    if arguments.constants is not None and arguments.runs is None:
        yield "--constants: are fitted to runs; give --from RUN..., or leave it out"
    if arguments.runs is not None and arguments.nccl_tests:
        yield "--nccl-tests: gives links, and --from constants; give one of them"
    if arguments.cluster is None and arguments.runs is None:
        if rank is not None and arguments.ranks not in (None, rank.world_size):
            yield (
                f"--ranks {arguments.ranks}: this process is rank {rank.rank} of {rank.world_size}, numbered by "
                f"{rank.launcher}, and starts no other ranks: leave out --ranks"
            )
        return
    by = "--cluster" if arguments.runs is None else "--from"
    if not arguments.nccl_tests and arguments.runs is None:
        what = "is a file for links of tables or for constants; give --nccl-tests or --from, or leave it out"
        yield f"--cluster {arguments.cluster}: {what}"
    given = [f"--{name}" for name, default in RANK_WORDS.items() if getattr(arguments, name) != default]
    if given:
        yield f"{' and '.join(given)}: with {by} no rank measures; leave it out"
    if rank is not None and rank.world_size > 1:
        yield f"{by}: {rank.world_size} ranks of {rank.launcher} would write one file; leave out the launcher"


def _tables(arguments: Namespace, problems: list[str]) -> dict[str, NcclTable]:
    """The tables by path. Raises UserError: with `problems`, and those of all tables."""
    tables = {}
    for path in arguments.nccl_tests or ():
        try:
            tables[str(path)] = read_table(path)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return tables


def _start(arguments: Namespace, tables: Mapping[str, NcclTable]) -> int:
    """Start the ranks on this machine, with the allocator of a run. Returns their exit code."""
    refuse_without_loopback()
    ranks = arguments.ranks or _default_ranks(arguments.device)
    refuse_more_ranks(f"--ranks {ranks}", ranks)
    refuse_tables(tables, ranks, arguments.link or "")
    cores = available_cores()
    if ranks > cores:
        warn(f"codescent: {counted(ranks, 'rank')} share {counted(cores, 'core')}, so each waits for the others")
    words = ["measure", "--ranks", str(ranks), "--out", str(arguments.out), "--seconds", str(arguments.seconds)]
    words += ["--device", arguments.device, *([f"--{arguments.link}"] if arguments.link else [])]
    words += ["--nccl-tests", *map(str, arguments.nccl_tests)] if arguments.nccl_tests else []
    env = tuned_environment(with_expandable_segments(os.environ))
    return run_ranks([sys.executable, "-P", "-m", "codescent", *words], ranks, env, saves=False)


def _default_ranks(device: str) -> int:
    """One for each GPU; on a CPU two, as one alone sends nothing."""
    if device == CPU:
        return DEFAULT_RANKS
    from codescent.base.device import count, found_kind

    kind = found_kind() if device == AUTO else device
    return (kind in GPUS and count(kind)) or DEFAULT_RANKS


def _as_rank(arguments: Namespace, rank: Rank) -> int:
    """Measure as one of the ranks. Rank 0 prints, and writes the file. Collective."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is saved before the end: it ends in any call, at once
    os.environ.update(with_expandable_segments(os.environ))  # before torch is imported
    if arguments.may_restart and needs_restart(os.environ):  # glibc reads its tunables when a process starts
        env = tuned_environment(os.environ) | handed_on()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
    from codescent.measure.ranks import measure
    from codescent.train.world import World

    facts = {"--seconds": arguments.seconds, "--device": arguments.device}
    with World(rank, arguments.device, None, TIMEOUT_S, facts, option=DEVICE_OPTION) as world:
        tables: dict[str, NcclTable] = {}
        world.from_first(lambda: tables.update(_looked_at(arguments, rank)))
        found = measure(world, arguments.seconds, _tell if world.is_first else lambda what: None)
        world.from_first(lambda: _finish(arguments, found, tables))
    return 0


def _looked_at(arguments: Namespace, rank: Rank) -> dict[str, NcclTable]:
    """What rank 0 looks at before anything is measured. Returns the tables."""
    tables = _tables(arguments, [*taken(arguments.out)])
    refuse_tables(tables, rank.local_world_size, arguments.link or "")
    return tables


def _tell(what: str) -> None:
    say([f"measuring {what}"])
    sys.stdout.flush()


def _finish(arguments: Namespace, found: MachineFindings | None, tables: Mapping[str, NcclTable]) -> None:
    """Rank 0: write the file, and print what is in it."""
    assert found is not None
    cluster = with_tables(cluster_of(arguments.out.stem, found), tables)
    write_new(arguments.out, text_of(cluster, found))
    say(["", found.where, *summary(found, cluster)])
    say([f"{arguments.out} is written: each number in it has its source and its spread"])
    sys.stdout.flush()
