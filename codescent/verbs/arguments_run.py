"""In: a parser. Out: the arguments of subcommands that prepare, plan and train a run: train, plan, config, data, fetch.
Does not parse (arguments.py does), does not check arguments against each other, and does not import torch."""

from __future__ import annotations

import argparse

from codescent.base.sizes import memory_size
from codescent.verbs.argument_types import amount, not_negative, numbers, path, positive, text
from codescent.verbs.argument_words import CONFIG_HELP, OVERRIDES_HELP, config_arguments

MOST_KEYS = ("train.microbatch_size", "data.seq_len", "model.num_layers")
"""planner/most.py finds the largest value of these. It is not imported here: it would make `--help` slow."""
TRAIN_HELP = f"{CONFIG_HELP}; with --resume also the folder of the run"
CORPUS_HELP = (
    "a config: all that its run reads; squad; python-stdlib, shakespeare, openwebtext, or the path of a file (text, "
    "JSON lines, CSV, TSV, Parquet, Arrow), a folder or a glob; for a file of tensors (.h5, .pt, .safetensors): print "
    "its description"
)
TOKENIZER_HELP = "char (the default), byte, gpt2, bert[-cased][:VOCABULARY], bpe:VOCAB or a tokenizer's JSON file"
RESUME_AUTO = "--resume=auto"
"""An option of its own, not the folder `auto`, which is ./auto."""


def train(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent train`."""
    config_arguments(verb, meaning=TRAIN_HELP)
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


def plan(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent plan`."""
    config_arguments(verb)
    add = verb.add_argument
    add("--ranks", type=numbers, metavar="N", help="number of ranks to plan for (parallel.ranks); of --search several")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--operators", action="store_true", help="list what a rank computes in a step, with FLOPs and bytes")
    add(
        "--timeline", type=path, metavar="FILE", help="draw one step, or some: .png, .svg, or .json for ui.perfetto.dev"
    )
    balance_help = "FLOPs of a device while it sends a byte, for --timeline (default 1000; 0 if that hides computing)"
    add("--flops-per-byte", type=not_negative, metavar="N", help=balance_help)
    add = verb.add_argument_group("time and memory on a cluster, predicted").add_argument
    cluster_help = "machines: a shipped one (h100-sxm), here (the devices found), or a file (codescent docs clusters)"
    add("--cluster", type=text, metavar="NAME|here|FILE", help=cluster_help)
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


def config(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent config`."""
    config_arguments(verb, optional=True)
    add = verb.add_argument
    add("--keys", action="store_true", help="list every key, its default and its meaning")
    add("--list", action="store_true", help="list the shipped configs, with a line about each")
    add("--toml", action="store_true", help="print the values as TOML: a file that is read again")
    add("--json", action="store_true", help="print the same facts as JSON")
    add("--schema", action="store_true", help="print the JSON Schema of config files, for editors")
    new_help = "write a commented config to start from, and a schema beside it; an existing file is kept"
    add("--new", type=path, metavar="FILE", help=new_help)
    site_help = "what a cluster asks for: sites/NAME.toml, or a file; with site.key=value for single values"
    verb.add_argument("--site", type=text, metavar="NAME|FILE", help=site_help)
    verb.add_argument("--site-keys", action="store_true", help="list every key of a site and its meaning")


def fetch(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent fetch`."""
    fetch_help = "a config: all that it names of the hub; or hf://OWNER/NAME, hf://datasets/OWNER/NAME/PATH"
    config_arguments(verb, meaning=fetch_help)
    verb.add_argument("--dry-run", action="store_true", help="list the files and their sizes, and download none")


def docs(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent docs`."""
    verb.add_argument("page", type=text, nargs="?", metavar="PAGE", help="name of a page (default: list all of them)")


def data(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent data`."""
    add = verb.add_argument
    add("corpus", type=text, nargs="?", help=CORPUS_HELP)
    add("overrides", metavar="section.key=value", nargs="*", default=[], help=f"with a config: {OVERRIDES_HELP}")
    add("--tokenizer", type=text, help=TOKENIZER_HELP)
    add("--train-bpe", type=positive, metavar="VOCAB", help="train a BPE of this many tokens on the corpus")
    add("--folder", type=path, help="folder of prepared corpora (data.folder; default datasets)")
    add("--validation-fraction", type=float, help="fraction of the data used for validation (default 0.1)")
    key_help = "column or JSON key of the text (default: text, content or the only one of strings)"
    add("--text-key", type=text, help=key_help)
    add("--as-text", action="store_true", help="every file is plain text, whatever it looks like: JSON, CSV, questions")
    add("--workers", type=positive, metavar="N", help="number of threads (default: one per core)")
    add("--verify", action="store_true", help="read every token again and compare the shards' hashes")
    add = verb.add_argument_group("random numbers instead of a corpus (data.task tensors)").add_argument
    add("--synthetic", type=positive, metavar="SAMPLES", help="number of training samples to generate")
    add("--source", metavar="SxD", help="number and size of the source's vectors (default 1x512)")
    add("--target", metavar="TxD", help="number and size of the target's vectors (default 20x512)")
    add("--format", choices=("hdf5", "pt", "safetensors"), help="format of the file (default hdf5)")
    add("--seed", type=int, metavar="N", help="seed of the numbers, which are the same in every format (default 0)")


def explain(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent explain`."""
    add = verb.add_argument
    add("topic", metavar="TOPIC", type=text, nargs="?", help="what is explained; without it the topics are listed")
    config_arguments(
        verb, optional=True, meaning=f"{CONFIG_HELP}; for scaling also the folder of a study (default: a small example)"
    )
    add("--ranks", type=positive, metavar="N", help="number of ranks (parallel.ranks)")
    add("--out", type=path, metavar="FILE", help="write it: .html (a page to step through), .svg or .md")
    add("--lang", type=text, default="en", metavar="CODE", help="language: en (default) or es")
