"""In: the words of a command line. Out: the verb and its arguments, checked one by one.
Does not run a verb (cli.py does) and imports nothing slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from codescent import __version__
from codescent.base.home import expanded, unknown_home
from codescent.base.visible import visible

CONFIG_HELP = "a TOML file, or the name of a shipped config, such as default or gpt2_124m (all: docs/config.md)"
OVERRIDES_HELP = "values that override the file's, such as train.num_steps=100"
CORPUS_HELP = (
    "python-stdlib, shakespeare, openwebtext, or the path of a text file, folder, glob or JSONL file; a file of "
    "tensors (.h5, .pt, .safetensors) is described"
)
TOKENIZER_HELP = "char (the default), byte, gpt2, bert[-cased][:VOCABULARY], bpe:VOCAB or a tokenizer's JSON file"
DEVICES = ("auto", "cpu", "cuda")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the name of the verb as `verb`.

    argparse accepts `section.key=value` words only before a verb's options; users write them anywhere.
    """
    top = _parser()
    arguments, rest = top.parse_known_args(words)
    if rest and ("overrides" not in arguments or any(word.startswith("-") or "=" not in word for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="codescent",
        description="Many workers, one descent: train transformers on any number of devices, and know what it costs.",
    )
    top.add_argument("--version", action="version", version=f"codescent {__version__}")
    verbs = top.add_subparsers(metavar="VERB", required=True)
    for name, text, add_arguments in VERBS:
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        verb.set_defaults(verb=name)
        add_arguments(verb)
    return top


def _config_arguments(verb: argparse.ArgumentParser, *, optional: bool = False) -> None:
    verb.add_argument("config", metavar="CONFIG", type=_text, help=CONFIG_HELP, nargs="?" if optional else None)
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help=OVERRIDES_HELP)


def _checkpoint_arguments(verb: argparse.ArgumentParser) -> None:
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")


def _train(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb)
    verb.set_defaults(may_restart=False)
    verb.add_argument("--ranks", type=_positive, metavar="N", help="number of ranks to start here (parallel.ranks)")
    verb.add_argument("--resume", action="store_true", help="continue the run from its last checkpoint")


def _plan(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb)
    add = verb.add_argument
    add("--ranks", type=_positive, metavar="N", help="number of ranks to plan for (parallel.ranks)")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--timeline", type=_path, metavar="FILE", help="draw one step: .png, .svg, or .json for ui.perfetto.dev")


def _prove(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb)
    add = verb.add_argument
    add("--ranks", type=_numbers, default=[1, 2], metavar="N,...", help="numbers of ranks (default 1,2)")
    add("--layouts", metavar="KEY=VALUE,...;...", help="these layouts only, such as dp_shard=2")
    add("--steps", type=_positive, default=20, help="steps of each run (default 20)")
    add("--precision", choices=("fp64", "fp32"), default="fp64", help="number format (default fp64)")
    add("--resume", action="store_true", help="also continue each layout's checkpoint in the next one")


def _config(verb: argparse.ArgumentParser) -> None:
    _config_arguments(verb, optional=True)
    verb.add_argument("--keys", action="store_true", help="list every key, its default and its meaning")


def _data(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("corpus", type=_text, nargs="?", help=CORPUS_HELP)
    add("--tokenizer", type=_text, help=TOKENIZER_HELP)
    add("--train-bpe", type=_positive, metavar="VOCAB", help="train a BPE of this many tokens on the corpus")
    add("--folder", type=_path, default=Path("datasets"), help="folder of prepared corpora (data.folder)")
    add("--validation-fraction", type=float, default=0.1, help="share used for validation")
    add("--text-key", default="text", help="key of a JSONL line that holds the text")
    add("--workers", type=_positive, metavar="N", help="processes; default: one per core")
    add("--verify", action="store_true", help="read every token again and compare the shards' hashes")
    add = verb.add_argument_group("random numbers instead of a corpus (data.task tensors)").add_argument
    add("--synthetic", type=_positive, metavar="SAMPLES", help="number of training samples to make")
    add("--source", metavar="SxD", help="vectors of the source and their size (default 1x512)")
    add("--target", metavar="TxD", help="vectors of the target and their size (default 20x512)")
    add("--format", choices=("hdf5", "pt", "safetensors"), help="format of the file (default hdf5)")
    add("--seed", type=int, metavar="N", help="same seed, same numbers in every format (default 0)")


def _sample(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("run", type=_path, metavar="RUN", help="run folder")
    prompt_help = "text to continue; may be given several times"
    add("--prompt", dest="prompts", action="append", metavar="PROMPT", help=prompt_help)
    add("--tokens", type=_positive, default=200, help="tokens to write (default 200)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    add("--top-k", type=_positive, help="draw from the K likeliest tokens only")
    add("--top-p", type=float, help="draw from the likeliest tokens that make up this probability")
    add("--seed", type=int, default=0, help="same seed, same text (default 0)")
    add("--num", type=_positive, default=1, help="texts for each prompt (default 1)")
    add("--device", choices=DEVICES, default="auto")


def _evaluate(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("run", type=_path, nargs="?", metavar="RUN", help="run folder; without one, --predictions")
    add("--data", type=_path, metavar="FILE", help="a text, or questions in SQuAD's format (default: validation split)")
    add("--predictions", type=_path, metavar="FILE", help="answers to score, without a run: JSON {question id: text}")
    add("--out", type=_path, metavar="FILE", help="file for the answers (default: RUN/predictions.json)")
    _checkpoint_arguments(verb)
    add("--device", choices=DEVICES, default="auto")


def _export(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("run", type=_path, metavar="RUN", help="run folder")
    add("folder", type=_path, metavar="DIR", help="folder to make")
    _checkpoint_arguments(verb)
    add("--dtype", choices=("fp64", "fp32", "bf16", "fp16"), help="number format (default: the run's)")
    size_help = "largest file of tensors (default 5 GB; adapters are always one)"
    add("--max-shard-bytes", type=_positive, default=5_000_000_000, metavar="BYTES", help=size_help)
    add(
        "--adapters",
        dest="as_adapters",
        action="store_true",
        help="with lora.rank: the adapters alone (default: merged weights)",
    )


def _import(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("folder", type=_path, metavar="DIR", help="Hugging Face folder")
    add("run", type=_path, metavar="RUN", help="run folder to make")
    add("--config", type=_text, default="default", help=f"the rest of the run's config: {CONFIG_HELP}")
    add("overrides", metavar="section.key=value", nargs="*", help=OVERRIDES_HELP)


VERBS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("train", "train a model", _train),
    ("plan", "tell what a run will hold, send and compute, without running it", _plan),
    ("prove", "show that every layout walks the trajectory of one process", _prove),
    ("config", "show every value of a config and where it comes from", _config),
    ("data", "turn text into token shards, or make synthetic tensors", _data),
    ("sample", "let a trained model write", _sample),
    ("evaluate", "score a trained model, or answers to questions", _evaluate),
    ("export", "write a trained model as a Hugging Face folder", _export),
    ("import", "make a run of a Hugging Face folder", _import),
)
"""Name, meaning and arguments of each verb."""


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def _numbers(word: str) -> list[int]:
    return [_positive(part.strip()) for part in word.split(",")]


def _text(word: str) -> str:
    if not word.strip():
        raise argparse.ArgumentTypeError("is empty")
    return word


def _path(word: str) -> Path:
    if problem := unknown_home(_text(word)):
        raise argparse.ArgumentTypeError(f"{word}: {problem}")
    return expanded(word)


class _Parser(argparse.ArgumentParser):
    """Prints the user's words such that a terminal does not obey them."""

    def error(self, message: str) -> NoReturn:
        super().error(visible(message))
