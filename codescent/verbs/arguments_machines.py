"""In: a parser. Out: the arguments of subcommands that look at machines and layouts: launch, doctor, prove, measure.
Does not parse (arguments.py does), does not check arguments against each other, and does not import torch."""

from __future__ import annotations

import argparse

from codescent.base.device_kinds import AUTO, NAMES
from codescent.base.sizes import size_bytes
from codescent.launch.fault_script import EXAMPLE
from codescent.verbs.argument_types import names, nodes, numbers, path, positive, text, whole
from codescent.verbs.argument_words import CONFIG_HELP, DEVICE_HELP, TARGETS_HELP, config_arguments

SECONDS = 30
"""How long `measure` measures."""
FAULTS_HELP = f'lose ranks, and let others join, such as "{EXAMPLE}"; compare with the run left alone'
LAUNCH_HELP = "overrides of the config and the site, such as train.num_steps=100 site.time=04:00:00; words of a script"


def launch(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent launch`."""
    verb.add_argument("config", metavar="CONFIG|SCRIPT.py", type=text, help=f"{CONFIG_HELP}; or a script of yours")
    verb.add_argument("overrides", metavar="WORD", nargs="*", help=LAUNCH_HELP)
    add = verb.add_argument
    add("--to", type=text, metavar="TARGET", help=f"who starts the ranks: {TARGETS_HELP}")
    add("--nodes", type=nodes, metavar="N|A:B", help="machines; A:B: at least A, at most B (torchrun)")
    add("--devices", type=positive, metavar="N", help="ranks of each machine: one for each GPU")
    add("--hosts", type=text, metavar="HOST:SLOTS,...", help="the machines by name, with the ranks of each")
    add("--max-restarts", type=whole, metavar="N", help="how often torchrun starts all ranks again (default 0)")
    add("--site", type=text, metavar="NAME|FILE", help="what the cluster asks for: sites/NAME.toml, or a file")
    add("--times", type=positive, metavar="N", help="that many jobs of SLURM, one after the other (--submit)")
    what = verb.add_mutually_exclusive_group()
    what.add_argument("--out", type=path, metavar="FILE", help="file for the script (default: print it)")
    what.add_argument("--submit", action="store_true", help="give the script to the scheduler; RUN/jobs keeps it")
    add = verb.add_argument_group("jobs of a run: codescent launch RUN").add_argument
    add("--status", action="store_true", help="the state of each job that --submit has started")
    add(
        "--follow",
        action="store_true",
        help="print the log of the job that runs or waits as it grows, until it has ended",
    )
    add("--cancel", action="store_true", help="end the jobs that wait or run")
    kill_help = "end what the run has left: on the hosts of its jobs or on --hosts, by ssh; else on this machine"
    add("--kill", action="store_true", help=kill_help)


def doctor(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent doctor`."""
    config_arguments(verb, optional=True)
    add = verb.add_argument
    add("--link", type=text, metavar="RATE[,LATENCY][;...]", help="the network card that each host should have")
    add("--no-bandwidth", action="store_true", help="do not measure bandwidth: an answer within seconds")
    add("--wait", type=positive, default=30, metavar="SECONDS", help="for ranks that do not come (default 30)")
    add("--json", type=text, metavar="FILE|-", help="write everything as JSON; -: to standard output, nothing else")
    add = verb.add_argument_group("on other machines (else: on the ranks of a launcher, or here)").add_argument
    add("--hosts", type=text, metavar="HOST:SLOTS,...", help="start it there by ssh, with so many ranks on each")
    add("--to", type=text, metavar="TARGET", help=f"print the script with which others start it: {TARGETS_HELP}")
    add("--nodes", type=nodes, metavar="N", help="machines of the script")
    add("--devices", type=positive, metavar="N", help="ranks of each machine of the script")
    add("--site", type=text, metavar="NAME|FILE", help="what the cluster asks for: sites/NAME.toml, or a file")
    add("--out", type=path, metavar="FILE", help="file for the script of --to (default: print it)")


def prove(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent prove`."""
    config_arguments(verb, optional=True)
    add = verb.add_argument
    add("--ranks", type=numbers, default=[1, 2], metavar="N,...", help="numbers of ranks (default 1,2)")
    add("--layouts", metavar="KEY=VALUE,...;...", help="try only these layouts, such as dp_shard=2 (default: all)")
    add("--steps", type=positive, default=20, help="steps of each run (default 20)")
    add("--precision", choices=("fp64", "fp32"), default="fp64", help="number format (default fp64)")
    add("--resume", action="store_true", help="also resume a checkpoint of each layout in the next layout")
    add("--json", action="store_true", help="print the result as JSON, and progress to the standard error")
    add("--faults", metavar="FAULTS", help=FAULTS_HELP)
    add("--replay", metavar="RUN", help="apply again, in one process, what an asynchronous run has applied")


def collectives(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent collectives`."""
    add = verb.add_argument
    ranks_help = "number of ranks to start (default: one for each GPU of several, else 4)"
    add("--ranks", type=positive, metavar="N", help=ranks_help)
    add("--size", type=size_bytes, metavar="SIZE", help="of the tensor of the timed all-reduces (default 16MiB)")
    add("--timeout", type=positive, default=30, metavar="SECONDS", help="a longer call counts as hanging (default 30)")
    explain_help = "show instead what each rank holds after each step of our all-reduce, on 2 to 8 ranks"
    add("--explain", action="store_true", help=explain_help)
    add("--json", action="store_true", help="print what was found as JSON")


def measure(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent measure`."""
    add = verb.add_argument
    verb.set_defaults(may_restart=False)
    ranks_help = "number of ranks to start and to keep busy (default: one for each GPU, else 2)"
    add("--ranks", type=positive, metavar="N", help=ranks_help)
    add("--device", choices=NAMES, default=AUTO, help=DEVICE_HELP)
    add("--out", type=path, required=True, metavar="FILE.toml", help="cluster file to write")
    add("--seconds", type=positive, default=SECONDS, metavar="N", help=f"of measuring, about (default {SECONDS})")
    add = verb.add_argument_group("links from tables of nccl-tests").add_argument
    tables_help = "what all_reduce_perf or other programs of it have printed"
    add("--nccl-tests", type=path, nargs="+", metavar="FILE", help=tables_help)
    link = verb.add_mutually_exclusive_group()
    for name in ("inside", "between"):
        words = f"the tables are of the link {name} nodes (default: by the hosts that they name)"
        link.add_argument(f"--{name}", dest="link", action="store_true", const=name, help=words)
    add = verb.add_argument_group("constants from runs that have trained").add_argument
    add("--from", dest="runs", type=path, nargs="+", metavar="RUN", help="folders of runs, to fit constants on")
    constants_help = "which ones (default: those that change the predictions of these runs most)"
    add("--constants", type=names, metavar="NAME,...", help=constants_help)
    cluster_help = "put links or constants into a copy of this cluster file, and measure nothing"
    add("--cluster", type=text, metavar="NAME|FILE", help=cluster_help)
