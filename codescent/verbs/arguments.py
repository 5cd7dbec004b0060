"""In: a command line. Out: the subcommand and its arguments, parsed. A "verb" is a subcommand in this package.
Does not run a subcommand (cli.py does), does not check arguments against each other, and does not import torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from codescent import __version__
from codescent.base.sizes import memory_size, size_bytes
from codescent.verbs.argument_types import (
    Parser,
    amount,
    names,
    nodes,
    numbers,
    path,
    path_or_hub,
    positive,
    text,
    whole,
)

MOST_KEYS = ("train.microbatch_size", "data.seq_len", "model.num_layers")
"""planner/most.py finds the largest value of these. It is not imported here: it would make `--help` slow."""

CONFIG_HELP = "a TOML file, or the name of a shipped config, such as default or gpt2_124m (list: docs/config.md)"
TRAIN_HELP = f"{CONFIG_HELP}; with --resume also the folder of the run"
OVERRIDES_HELP = "overrides of values in the file, such as train.num_steps=100"
CORPUS_HELP = (
    "python-stdlib, shakespeare, openwebtext, or the path of a text file, folder, glob or JSONL file; for a file of "
    "tensors (.h5, .pt, .safetensors): print its description"
)
TOKENIZER_HELP = "char (the default), byte, gpt2, bert[-cased][:VOCABULARY], bpe:VOCAB or a tokenizer's JSON file"
DEVICES = ("auto", "cpu", "cuda")
SITE = "site."
"""How an override of a site begins."""
SECONDS = 30
"""How long `measure` measures."""
RESUME_AUTO = "--resume=auto"
"""An option of its own, not the folder `auto`, which is ./auto."""
LAUNCH_HELP = "overrides of the config and the site, such as train.num_steps=100 site.time=04:00:00; words of a script"
TARGETS_HELP = "local, ssh, torchrun, mpirun, slurm, pbs, torchx or kubernetes"
LOCAL_RANK = re.compile(r"--local[-_]rank=([0-9]+)")  # torch.distributed.launch puts it before a rank's words
OVERRIDE = re.compile(r"\s*\w+\.\w+\s*=")
"""How an override begins. A path with "=" does not begin like this: it has a "/" before."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. The result has the name of the subcommand as `verb`. No words: print the help and exit.

    argparse accepts `section.key=value` words only before a subcommand's options, and CONFIG only as the first word;
    this function accepts them anywhere.
    """
    top, parsers = _parser()
    words, script_words = list(words), list[str]()
    said = words
    local_rank = LOCAL_RANK.fullmatch(words[0]) if list(words[1:2]) == ["train"] else None
    words = words[1:] if local_rank else words
    if words[:1] == ["train"]:  # --resume=RUN is --resume RUN
        named = (word.startswith("--resume=") and word != RESUME_AUTO for word in words)
        parts = (word.split("=", 1) if names_run else [word] for word, names_run in zip(words, named, strict=True))
        words = [word for part in parts for word in part]
    if not words:
        top.print_help()
        top.exit()
    if words[:1] == ["launch"] and "--" in words:
        at = list(words).index("--")
        words, script_words = words[:at], list(words[at + 1 :])
    arguments, rest = top.parse_known_args(words)
    if local_rank:
        arguments.local_rank = int(local_rank[1])
    if arguments.verb in ("launch", "doctor", "study"):  # they write scripts, which name the command
        arguments.said, arguments.script_words = said, script_words
    if config := _config_after_overrides(arguments, rest):
        arguments.overrides, arguments.config = [arguments.config, *arguments.overrides], config
        (arguments.overrides if config in arguments.overrides else rest).remove(config)
    if rest and ("overrides" not in arguments or any(word.startswith("-") or "=" not in word for word in rest)):
        values = {after for word, after in pairwise(rest) if word.startswith("-") and "=" not in word}
        unknown = [word for word in rest if word not in values or word.startswith("-")]
        hints = [hint for word in unknown if (hint := _hint(word, said, arguments, parsers[arguments.verb]))]
        top.error("; ".join([f"unrecognized arguments: {' '.join(rest)}", *dict.fromkeys(hints)]))
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _hint(word: str, said: Sequence[str], arguments: argparse.Namespace, verb: Parser) -> str:
    """What would be right instead of a word that no subcommand knows; empty: nobody knows."""
    if f"--resume={word}" in said:
        folder = f"--resume={word} names the folder of a run, which is given without a config"
        return f"did you mean {RESUME_AUTO}? {folder}"
    if word.startswith("--resume") and arguments.verb == "launch":
        return f"leave {word} out: the script has {RESUME_AUTO}"
    if word.startswith("-"):
        near = verb.near(word.partition("=")[0])
        return f"did you mean {near}?" if near else f"the options: codescent {arguments.verb} --help"
    if "overrides" not in arguments:
        return ""
    own = "; words of a script stand behind --" if arguments.verb == "launch" else ""
    return f"an override is section.key=value, such as train.num_steps=100{own}"


def _config_after_overrides(arguments: argparse.Namespace, rest: Sequence[str]) -> str | None:
    """The first word that is not an override, if an override stands in the place of CONFIG."""
    if "overrides" not in arguments or not OVERRIDE.match(getattr(arguments, "config", None) or ""):
        return None
    words = [*arguments.overrides, *rest]
    return next((word for word in words if not word.startswith("-") and not OVERRIDE.match(word)), None)


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of the subcommands by name."""
    top = Parser(
        prog="codescent",
        description="Many workers, one descent: train transformers on any number of devices, and know what it costs.",
    )
    top.add_argument("--version", action="version", version=f"codescent {__version__}")
    verbs = top.add_subparsers(metavar="COMMAND", required=True)
    parsers: dict[str, Parser] = {}
    for name, does, add_arguments in VERBS:
        verb = verbs.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".")
        verb.set_defaults(verb=name)
        add_arguments(verb)
        parsers[name] = verb
    return top, parsers


def _config_arguments(verb: argparse.ArgumentParser, *, optional: bool = False, meaning: str = CONFIG_HELP) -> None:
    verb.add_argument("config", metavar="CONFIG", type=text, help=meaning, nargs="?" if optional else None)
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help=OVERRIDES_HELP)


def _checkpoint_arguments(verb: argparse.ArgumentParser) -> None:
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")


def _train(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb, meaning=TRAIN_HELP)
    verb.set_defaults(may_restart=False, local_rank=None)
    ranks_help = "number of ranks to start on this machine (parallel.ranks)"
    verb.add_argument("--ranks", type=positive, metavar="N", help=ranks_help)
    resume_help = "continue the run from its last checkpoint: --resume runs/NAME"
    auto_help = "continue the run if it has begun, else begin it: the same command for each start of a job"
    resume = verb.add_mutually_exclusive_group()
    resume.add_argument("--resume", action="store_true", help=resume_help)
    resume.add_argument(RESUME_AUTO, dest="resume", action="store_true", const=None, help=auto_help)
    find_help = "try rising learning rates for 100 steps and suggest one; no run is written"
    verb.add_argument("--find-learning-rate", action="store_true", help=find_help)


def _plan(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb)
    add = verb.add_argument
    add("--ranks", type=numbers, metavar="N", help="number of ranks to plan for (parallel.ranks); of --search several")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--operators", action="store_true", help="list what a rank computes in a step, with FLOPs and bytes")
    add("--timeline", type=path, metavar="FILE", help="draw one step: .png, .svg, or .json for ui.perfetto.dev")
    balance_help = "FLOPs of a device in the time in which it sends a byte, for --timeline (default 1000)"
    add("--flops-per-byte", type=positive, metavar="N", help=balance_help)
    add = verb.add_argument_group("time and memory on a cluster, predicted").add_argument
    cluster_help = "machines: a shipped cluster such as h100-sxm, or a file (docs/clusters.md)"
    add("--cluster", type=text, metavar="NAME|FILE", help=cluster_help)
    add("--software", type=text, metavar="NAME", help="whose constants and traits of the file (default codescent)")
    with_help = "what if: another value of the cluster, such as links.between=100GB/s,5us; may be repeated"
    add("--with", dest="changes", type=text, action="append", metavar="KEY=VALUE", help=with_help)
    most_help = "the largest value of train.microbatch_size, data.seq_len or model.num_layers that fits"
    add("--most", choices=MOST_KEYS, metavar="KEY", help=most_help)
    add("--mtbf", type=amount, metavar="HOURS", help="mean time between failures of the run, for checkpoints")
    add("--save-s", type=amount, metavar="SECONDS", help="in which a checkpoint stops training, with --mtbf")
    add("--search", action="store_true", help="the fastest layouts: of all keys of a layout that CONFIG does not give")
    add(
        "--free",
        type=text,
        metavar="KEY,...",
        help="keys that --search may change although CONFIG gives them; all: each",
    )
    add("--out", type=path, metavar="FILE", help="config for the first layout of --search, on top of CONFIG")
    add = verb.add_argument_group("time on a network, simulated").add_argument
    link_help = "network card of each host, such as 49mbit,0.2ms or 6MB/s; of host 3 another: '49mbit; 3: 10mbit'"
    add("--link", type=text, metavar="RATE[,LATENCY][;...]", help=link_help)
    add("--compute-s", type=amount, metavar="SECONDS", help="arithmetic of a step, as a run without network has it")
    add("--flops-per-s", type=amount, metavar="N", help="instead of --compute-s: speed of a rank, such as 50e12")
    coding_help = "memory of a rank, such as 10GB/s, or 'here': measure how fast this CPU encodes what is exchanged"
    add("--coding", type=text, metavar="RATE|here", help=coding_help)
    add("--slow", type=text, metavar="'RANK: Nx,...'", help="ranks whose arithmetic takes longer, such as '3: 4x'")
    add("--per-host", type=positive, metavar="N", help="ranks that share a host and its card (default 1)")
    inside_help = "link of each rank inside its host, such as 50GB/s,5us; without it what stays in a host takes no time"
    add("--inside", type=text, metavar="RATE[,LATENCY]", help=inside_help)
    memory_help = "of the device of a rank, such as 8GB: a plan that does not fit has no time"
    add("--memory", type=memory_size, metavar="SIZE", help=memory_help)


def _launch(verb: argparse.ArgumentParser) -> None:
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


def _doctor(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb, optional=True)
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


def _prove(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb, optional=True)
    add = verb.add_argument
    add("--ranks", type=numbers, default=[1, 2], metavar="N,...", help="numbers of ranks (default 1,2)")
    add("--layouts", metavar="KEY=VALUE,...;...", help="try only these layouts, such as dp_shard=2 (default: all)")
    add("--steps", type=positive, default=20, help="steps of each run (default 20)")
    add("--precision", choices=("fp64", "fp32"), default="fp64", help="number format (default fp64)")
    add("--resume", action="store_true", help="also resume a checkpoint of each layout in the next layout")
    add("--replay", metavar="RUN", help="apply again, in one process, what an asynchronous run has applied")


def _collectives(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    ranks_help = "number of ranks to start (default: one for each CUDA device of several, else 4)"
    add("--ranks", type=positive, metavar="N", help=ranks_help)
    add("--size", type=size_bytes, metavar="SIZE", help="of the tensor of the timed all-reduces (default 16MiB)")
    add("--timeout", type=positive, default=30, metavar="SECONDS", help="a longer call counts as hanging (default 30)")
    explain_help = "show instead what each rank holds after each step of our all-reduce, on 2 to 8 ranks"
    add("--explain", action="store_true", help=explain_help)


def _measure(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    verb.set_defaults(may_restart=False)
    ranks_help = "number of ranks to start and to keep busy (default: one for each CUDA device, else 2)"
    add("--ranks", type=positive, metavar="N", help=ranks_help)
    add("--device", choices=DEVICES, default="auto", help="auto: CUDA if the machine has it (default auto)")
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


def _config(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb, optional=True)
    verb.add_argument("--keys", action="store_true", help="list every key, its default and its meaning")
    site_help = "what a cluster asks for: sites/NAME.toml, or a file; with site.key=value for single values"
    verb.add_argument("--site", type=text, metavar="NAME|FILE", help=site_help)
    verb.add_argument("--site-keys", action="store_true", help="list every key of a site and its meaning")


def _data(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("corpus", type=text, nargs="?", help=CORPUS_HELP)
    add("--tokenizer", type=text, help=TOKENIZER_HELP)
    add("--train-bpe", type=positive, metavar="VOCAB", help="train a BPE of this many tokens on the corpus")
    add("--folder", type=path, default=Path("datasets"), help="folder of prepared corpora (data.folder)")
    add("--validation-fraction", type=float, default=0.1, help="fraction of the data used for validation (default 0.1)")
    add("--text-key", default="text", help="key of the text in each JSONL line (default text)")
    add("--as-text", action="store_true", help="every file is plain text, whatever it looks like: JSON, CSV, questions")
    add("--workers", type=positive, metavar="N", help="number of processes (default: one per core)")
    add("--verify", action="store_true", help="read every token again and compare the shards' hashes")
    add = verb.add_argument_group("random numbers instead of a corpus (data.task tensors)").add_argument
    add("--synthetic", type=positive, metavar="SAMPLES", help="number of training samples to generate")
    add("--source", metavar="SxD", help="number and size of the source's vectors (default 1x512)")
    add("--target", metavar="TxD", help="number and size of the target's vectors (default 20x512)")
    add("--format", choices=("hdf5", "pt", "safetensors"), help="format of the file (default hdf5)")
    add("--seed", type=int, metavar="N", help="seed of the numbers, which are the same in every format (default 0)")


def _sample(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("run", type=path, metavar="RUN", help="run folder")
    prompt_help = "text to continue; may be given several times"
    add("--prompt", dest="prompts", action="append", metavar="PROMPT", help=prompt_help)
    add("--tokens", type=positive, default=200, help="largest number of tokens to generate (default 200)")
    add("--temperature", type=float, default=0.8, help="0: always the most probable token (default 0.8)")
    add("--top-k", type=positive, help="sample only from the K most probable tokens")
    add("--top-p", type=float, help="sample only from the most probable tokens whose probabilities sum to this value")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    add("--num", type=positive, default=1, help="number of texts for each prompt (default 1)")
    _checkpoint_arguments(verb)
    add("--device", choices=DEVICES, default="auto", help="auto: CUDA if the machine has it (default auto)")


def _evaluate(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("run", type=path, nargs="?", metavar="RUN", help="run folder; without it, give --predictions")
    add("--data", type=path, metavar="FILE", help="a text, or questions in SQuAD's format (default: validation split)")
    add("--predictions", type=path, metavar="FILE", help="answers to score, without a run: JSON {question id: text}")
    add("--out", type=path, metavar="FILE", help="file for the model's answers (default: RUN/predictions.json)")
    _checkpoint_arguments(verb)
    add("--device", choices=DEVICES, default="auto", help="auto: CUDA if the machine has it (default auto)")


def _plot(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("runs", type=path, nargs="+", metavar="RUN", help="run folder, of a run that has ended or still trains")
    add("--out", type=path, required=True, metavar="FILE", help="picture to write: .png or .svg")
    add("--x", choices=("steps", "tokens", "time"), help="the only horizontal axis (default: the loss over each)")


def _report(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("runs", type=path, nargs="*", metavar="RUN", help="run folders, or the folder of a study")
    add("--out", type=path, metavar="FILE", help="page to write (default: report.html); with --markdown a .md file")
    add("--markdown", action="store_true", help="print Markdown instead of a page, or write it to --out")
    add("--figures", type=path, metavar="FOLDER", help="also write each figure into a file of this folder")
    add("--format", choices=("svg", "png"), help="format of these files (default svg)")
    add = verb.add_argument_group("instead of a page: print what a profile says").add_argument
    add("--profile", type=path, metavar="RUN", help="run folder, of a run with profile.active")
    add("--window", type=positive, metavar="N", help="which window, with profile.repeat (default 1)")


def _compare(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("runs", type=path, nargs="+", metavar="RUN", help="run folders A and B; with --with: all those of A")
    add("--with", dest="others", type=path, nargs="+", metavar="RUN", help="run folders of B")
    add("--warmup", type=whole, metavar="N", help="steps to leave out at the begin of each run (default: a tenth)")
    fail_help = "exit with 1 if a step of B surely takes more than so much longer, such as 3%%"
    add("--fail-above", type=text, metavar="PERCENT", help=fail_help)


def _study(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("file", type=path, metavar="FILE", help="study file, name of a shipped one, or the folder of a study: read it")
    add("--folder", type=path, metavar="DIR", help="folder of the study (default study-runs/NAME)")
    words = "another baseline: values of axes, such as ranks=1"
    add("--baseline", nargs="+", default=[], metavar="AXIS=VALUE", help=words)
    what = verb.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the command of each run that is to do, and run none")
    what.add_argument("--collect", type=path, nargs="+", metavar="RUN", help="take finished runs of other machines")
    what.add_argument("--table", type=path, metavar="FILE.csv", help="evaluate a table that others measured")
    retry_help = "also run points again that have failed or had too little memory"
    what.add_argument("--retry", choices=("failed",), help=retry_help)
    add = verb.add_argument_group("with --list: a script for each run instead").add_argument
    add("--to", type=text, metavar="TARGET", help=f"who starts the ranks: {TARGETS_HELP}")
    add("--site", type=text, metavar="NAME|FILE", help="what the cluster asks for: sites/NAME.toml, or a file")


def _export(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("run", type=path, metavar="RUN", help="run folder")
    add("folder", type=path, metavar="DIR", help="folder to create")
    _checkpoint_arguments(verb)
    add("--dtype", choices=("fp64", "fp32", "bf16", "fp16"), help="number format (default: the run's)")
    size_help = "largest size of a file of tensors (default 5 GB; adapters are always one file)"
    add("--max-shard-bytes", type=positive, default=5_000_000_000, metavar="BYTES", help=size_help)
    add(
        "--adapters",
        dest="as_adapters",
        action="store_true",
        help="with lora.rank: write only the adapters (default: merged weights)",
    )


def _import(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("folder", type=path_or_hub, metavar="DIR", help="Hugging Face folder, or hf://OWNER/NAME of the hub")
    add("run", type=path, metavar="RUN", help="run folder to create")
    add("--config", type=text, default="finetune", help=f"config for keys that DIR does not decide: {CONFIG_HELP}")
    add("overrides", metavar="section.key=value", nargs="*", help=OVERRIDES_HELP)


def _fetch(verb: argparse.ArgumentParser) -> None:
    fetch_help = "a config: all that it names of the hub; or hf://OWNER/NAME, hf://datasets/OWNER/NAME/PATH"
    _config_arguments(verb, meaning=fetch_help)
    verb.add_argument("--dry-run", action="store_true", help="list the files and their sizes, and download none")


VERBS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("train", "train a model", _train),
    ("plan", "print memory, traffic and FLOPs of a run, without running it", _plan),
    ("launch", "write a script that starts a run on a cluster or on other machines", _launch),
    ("doctor", "look at machines before a run: network, names, folders, devices, limits, leftovers", _doctor),
    ("prove", "train with every layout and compare losses and gradient norms with one process", _prove),
    ("collectives", "show which collectives each backend of torch offers, and what an all-reduce does", _collectives),
    ("measure", "measure this machine, or those of a launcher, and write a cluster file", _measure),
    ("config", "print every value of a config and its origin", _config),
    ("data", "prepare a corpus as token shards, or generate synthetic tensors", _data),
    ("sample", "generate text with a trained model", _sample),
    ("evaluate", "score a trained model, or a file of answers to questions", _evaluate),
    ("plot", "draw loss, learning rate, gradient norm and speed of runs", _plot),
    ("report", "write what runs or a study say into one page: speed, limits, slow ranks, figures", _report),
    ("compare", "say what differs between runs: step time by part, losses, memory, config, machine", _compare),
    ("study", "measure one config at many points, and say how it scales", _study),
    ("export", "write a trained model as a Hugging Face folder", _export),
    ("import", "create a run from a Hugging Face folder", _import),
    ("fetch", "download weights, tokenizers and corpora of the hub, for machines without internet", _fetch),
)
"""Name, help text and arguments of each subcommand."""
