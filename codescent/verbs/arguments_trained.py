"""In: a parser. Out: the arguments of subcommands that read run folders: sample, evaluate, plot, study.
Does not parse (arguments.py does), does not check arguments against each other, and does not import torch."""

from __future__ import annotations

import argparse

from codescent.base.device_kinds import AUTO, NAMES
from codescent.base.rank import LOOPBACK
from codescent.plan.flops import FlopFormula
from codescent.verbs.argument_types import (
    grammar,
    not_negative,
    path,
    path_or_hub,
    port,
    positive,
    stop_text,
    text,
    token_bias,
    whole,
)
from codescent.verbs.argument_words import CONFIG_HELP, DEVICE_HELP, OVERRIDES_HELP, TARGETS_HELP, checkpoint_arguments

MODEL_HELP = "run folder, a checkpoint in it, or a Hugging Face folder"
FORMULA_HELP = f"how FLOPs are counted for GFLOP/s and MFU (default {FlopFormula.ATTENTION})"


def sample(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent sample`."""
    add = verb.add_argument
    add("run", type=path, metavar="RUN", help="run folder")
    prompt_help = "text to continue; may be given several times"
    add("--prompt", dest="prompts", action="append", metavar="PROMPT", help=prompt_help)
    add("--tokens", type=positive, default=200, help="largest number of tokens to generate (default 200)")
    generation_arguments(verb)
    add("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    add("--num", type=positive, default=1, help="number of texts for each prompt (default 1)")
    checkpoint_arguments(verb)
    add("--device", choices=NAMES, default=AUTO, help=DEVICE_HELP)


def generation_arguments(verb: argparse.ArgumentParser) -> None:
    """Add how tokens are chosen."""
    add = verb.add_argument
    add("--temperature", type=float, default=0.8, help="0: always the most probable token (default 0.8)")
    add("--top-k", type=positive, help="sample only from the K most probable tokens")
    add("--top-p", type=float, help="sample only from the most probable tokens whose probabilities sum to this value")
    add("--min-p", type=float, help="sample only from tokens at least so many times as probable as the first")
    stop_help = "end a text before this text; may be given several times"
    add("--stop", type=stop_text, action="append", default=[], metavar="TEXT", help=stop_help)
    bias_help = "add BIAS to the logit of token ID, -inf: never choose it; may be given several times"
    add("--logit-bias", type=token_bias, action="append", default=[], metavar="ID=BIAS", help=bias_help)
    grammar_help = "what a text must be: json, json_schema=FILE, regex=EXPRESSION or lark=FILE"
    add("--grammar", type=grammar, metavar="KIND", help=grammar_help)


def chat(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent chat`."""
    add = verb.add_argument
    add("run", type=path, metavar="RUN", help=MODEL_HELP)
    add("--system", type=text, metavar="TEXT", help="what the model is told before the conversation")
    add("--tokens", type=positive, default=512, help="largest number of tokens of an answer (default 512)")
    generation_arguments(verb)
    add("--seed", type=int, default=0, help="the same seed and messages give the same answers (default 0)")
    checkpoint_arguments(verb)
    add("--device", choices=NAMES, default=AUTO, help=DEVICE_HELP)


def serve(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent serve`."""
    add = verb.add_argument
    add("run", type=path, metavar="RUN", help=MODEL_HELP)
    add("--host", type=text, default=LOOPBACK, help=f"address to listen at (default {LOOPBACK}: this machine alone)")
    add("--port", type=port, default=8000, help="port to listen at; 0: a free one (default 8000)")
    add("--name", type=text, help="name of the model in requests (default: that of the folder)")
    add("--rows", type=positive, default=16, help="texts that are generated at a time (default 16)")
    add("--waiting", type=whole, default=64, help="texts that may wait for that; more are refused (default 64)")
    token_help = "file with the token that clients must know (default: none on loopback, else ~/.codescent/serve_token)"
    add("--token-file", type=path, metavar="FILE", help=token_help)
    add("--log", type=path, metavar="FILE", help="write requests and answers into this file (default: none are kept)")
    grace_help = "seconds that running requests may take after SIGTERM (default 600)"
    add("--grace", type=not_negative, default=600.0, metavar="S", help=grace_help)
    checkpoint_arguments(verb)
    add("--device", choices=NAMES, default=AUTO, help=DEVICE_HELP)


def evaluate(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent evaluate`."""
    add = verb.add_argument
    folder_help = "run folder (with --tasks also a Hugging Face folder); without it, give --predictions"
    add("run", type=path, nargs="?", metavar="RUN", help=folder_help)
    add("--data", type=path, metavar="FILE", help="a text, or questions in SQuAD's format (default: validation split)")
    add("--predictions", type=path, metavar="FILE", help="answers to score, without a run: JSON {question id: text}")
    add("--json", action="store_true", help="print the scores as JSON")
    add("--tasks", type=text, metavar="NAME,...", help="tasks of lm-evaluation-harness, such as hellaswag,arc_easy")
    add("--tasks-folder", type=path, metavar="DIR", help="with --tasks: more tasks, as YAML files; may run code of DIR")
    add("--shots", type=whole, metavar="N", help="with --tasks: examples before each question (default: the task's)")
    add("--limit", type=positive, metavar="N", help="with --tasks: only the first N questions of each")
    add("--out", type=path, metavar="FILE", help="file for the model's answers (default: RUN/predictions.json)")
    checkpoint_arguments(verb)
    add("--device", choices=NAMES, default=AUTO, help=DEVICE_HELP)


def plot(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent plot`."""
    add = verb.add_argument
    add("runs", type=path, nargs="*", metavar="RUN", help="run folder, of a run that has ended or still trains")
    add("--out", type=path, required=True, metavar="FILE", help="picture to write: .png or .svg")
    add("--x", choices=("steps", "tokens", "time"), help="the only horizontal axis (default: the loss over each)")
    add = verb.add_argument_group("instead of runs").add_argument
    schedule_help = "the learning rate of each step of a config, with the overrides behind it; several in one picture"
    add("--schedule", type=text, nargs="+", metavar="CONFIG", help=schedule_help)


def report(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent report`."""
    add = verb.add_argument
    add("runs", type=path, nargs="*", metavar="RUN", help="run folders, or the folder of a study")
    add("--out", type=path, metavar="FILE", help="page to write (default: report.html); with --markdown a .md file")
    add("--markdown", action="store_true", help="print Markdown instead of a page, or write it to --out")
    add("--figures", type=path, metavar="FOLDER", help="also write each figure into a file of this folder")
    add("--format", choices=("svg", "png"), help="format of these files (default svg)")
    add("--formula", choices=[str(formula) for formula in FlopFormula], help=f"of a study: {FORMULA_HELP}")
    requests_help = "the log of `codescent serve --log`: report how the prompts of RUN's clients drift"
    add("--requests", type=path, metavar="FILE", help=requests_help)
    add = verb.add_argument_group("instead of a page: print what a profile says").add_argument
    add("--profile", type=path, metavar="RUN", help="run folder, of a run with profile.active")
    add("--window", type=positive, metavar="N", help="which window, with profile.repeat (default 1)")


def compare(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent compare`."""
    add = verb.add_argument
    add("runs", type=path, nargs="+", metavar="RUN", help="run folders A and B; with --with: all those of A")
    add("--with", dest="others", type=path, nargs="+", metavar="RUN", help="run folders of B")
    add("--warmup", type=whole, metavar="N", help="steps to leave out at the begin of each run (default: a tenth)")
    fail_help = "exit with 1 if a step of B surely takes more than so much longer, such as 3%%"
    add("--json", action="store_true", help="print what differs as JSON")
    add("--fail-above", type=text, metavar="PERCENT", help=fail_help)


def study(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent study`."""
    add = verb.add_argument
    add("file", type=path, metavar="FILE", help="study file, name of a shipped one, or the folder of a study: read it")
    add("--folder", type=path, metavar="DIR", help="folder of the study (default study-runs/NAME)")
    words = "another baseline: values of axes, such as ranks=1"
    json_help = "print what the study says as JSON, and progress to the standard error"
    add("--formula", choices=[str(formula) for formula in FlopFormula], help=FORMULA_HELP)
    add("--json", action="store_true", help=json_help)
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


def export(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent export`."""
    add = verb.add_argument
    add("run", type=path, metavar="RUN", help="run folder")
    add("folder", type=path, metavar="DIR", help="folder to create")
    checkpoint_arguments(verb)
    add("--dtype", choices=("fp64", "fp32", "bf16", "fp16"), help="number format (default: the run's)")
    size_help = "largest size of a file of tensors (default 5 GB; adapters are always one file)"
    add("--max-shard-bytes", type=positive, default=5_000_000_000, metavar="BYTES", help=size_help)
    add(
        "--adapters",
        dest="as_adapters",
        action="store_true",
        help="with lora.rank: write only the adapters (default: merged weights)",
    )


def import_(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `codescent import`."""
    add = verb.add_argument
    add("folder", type=path_or_hub, metavar="DIR", help="Hugging Face folder, or hf://OWNER/NAME of the hub")
    add("run", type=path, metavar="RUN", help="run folder to create")
    add("--config", type=text, default="finetune", help=f"config for keys that DIR does not decide: {CONFIG_HELP}")
    add("overrides", metavar="section.key=value", nargs="*", default=[], help=OVERRIDES_HELP)
