"""In: the words of a command line. Out: which verb is meant, and its arguments, checked one by one.
Does not do a verb (cli does), and imports nothing that is slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from codescent import __version__

Verb = Callable[[argparse.Namespace], int]
"""Does what the arguments say; returns the exit code."""

CONFIG_HELP = "a TOML file, or the name of a shipped config, such as default or gpt2_124m (all: docs/config.md)"
OVERRIDES_HELP = "values that override the file's, such as train.num_steps=100"


def parse(words: Sequence[str], does: Mapping[str, Verb]) -> argparse.Namespace:
    """The arguments, and under `verb` who does it.

    argparse takes a verb's `section.key=value` words only before its options; people write them anywhere.
    """
    top = parser(does)
    arguments, rest = top.parse_known_args(words)
    if rest and ("overrides" not in arguments or any(word.startswith("-") or "=" not in word for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def parser(does: Mapping[str, Verb]) -> argparse.ArgumentParser:
    """The verbs and their arguments."""
    top = argparse.ArgumentParser(
        prog="codescent",
        description="Many workers, one descent: train transformers on any number of devices, and know what it costs.",
    )
    top.add_argument("--version", action="version", version=f"codescent {__version__}")
    verbs = top.add_subparsers(metavar="VERB", required=True)

    train = _verb(verbs, "train", does, "train a model")
    _config_arguments(train)
    train.add_argument("--ranks", type=_positive, metavar="N", help="number of ranks to start here (parallel.ranks)")
    train.add_argument("--resume", action="store_true", help="continue the run from its last checkpoint")

    plan = _verb(verbs, "plan", does, "tell what a run will hold, send and compute, without running it")
    _config_arguments(plan)
    plan.add_argument("--ranks", type=_positive, metavar="N", help="number of ranks to plan for (parallel.ranks)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument(
        "--timeline", type=_path, metavar="FILE", help="draw a step's schedule: a .png, or a .json for ui.perfetto.dev"
    )

    _prove_arguments(_verb(verbs, "prove", does, "show that every layout walks the trajectory of one process"))

    config = _verb(verbs, "config", does, "show every value of a config and where it comes from")
    _config_arguments(config, optional=True)
    config.add_argument("--keys", action="store_true", help="list every key there is, its default and its meaning")

    _data_arguments(_verb(verbs, "data", does, "turn text into token shards, or make synthetic tensors"))
    _sample_arguments(_verb(verbs, "sample", does, "let a trained model write"))
    _evaluate_arguments(_verb(verbs, "evaluate", does, "score a trained model, or answers to questions"))
    _export_arguments(_verb(verbs, "export", does, "write a trained model as a Hugging Face folder"))
    _import_arguments(_verb(verbs, "import", does, "make a run of a Hugging Face folder"))
    return top


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    does: Mapping[str, Verb],
    text: str,
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(verb=does[name])
    return verb


def _config_arguments(verb: argparse.ArgumentParser, *, optional: bool = False) -> None:
    verb.add_argument("config", metavar="CONFIG", type=_text, help=CONFIG_HELP, nargs="?" if optional else None)
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help=OVERRIDES_HELP)


def _prove_arguments(prove: argparse.ArgumentParser) -> None:
    _config_arguments(prove)
    prove.add_argument("--ranks", type=_numbers, default=[1, 2], metavar="N,...", help="numbers of ranks (default 1,2)")
    prove.add_argument("--layouts", metavar="KEY=VALUE,...;...", help="these layouts only, such as dp_shard=2")
    prove.add_argument("--steps", type=_positive, default=20, help="steps of each run (default 20)")
    prove.add_argument("--precision", choices=("fp64", "fp32"), default="fp64", help="number format (default fp64)")
    prove.add_argument("--resume", action="store_true", help="also continue each layout's checkpoint in the next one")


def _data_arguments(data: argparse.ArgumentParser) -> None:
    data.add_argument(
        "corpus",
        type=_text,
        nargs="?",
        help="python-stdlib, shakespeare, openwebtext, or the path of a text file, folder, glob or JSONL file; a "
        "file of tensors (.h5, .pt, .safetensors) is looked at",
    )
    data.add_argument(
        "--tokenizer",
        type=_text,
        help="char (the default), byte, gpt2, bert[-cased][:VOCABULARY], bpe:VOCAB or a tokenizer's JSON file",
    )
    data.add_argument(
        "--train-bpe", type=_positive, metavar="VOCAB", help="train a BPE of so many tokens on the corpus"
    )
    data.add_argument("--folder", type=_path, default=Path("datasets"), help="where prepared corpora lie (data.folder)")
    data.add_argument("--validation-fraction", type=float, default=0.1, help="share kept for validation")
    data.add_argument("--text-key", default="text", help="which key of a JSONL line holds the text")
    data.add_argument("--workers", type=_positive, metavar="N", help="processes; default: one per core")
    tensors = data.add_argument_group("random numbers in the place of a corpus (data.task tensors)")
    tensors.add_argument("--synthetic", type=_positive, metavar="SAMPLES", help="make so many samples to train on")
    tensors.add_argument("--source", metavar="SxD", help="vectors and their numbers (default 1x512)")
    tensors.add_argument("--target", metavar="TxD", help="the same of the target (default 20x512)")
    tensors.add_argument("--format", choices=("hdf5", "pt", "safetensors"), help="how they are written (default hdf5)")
    tensors.add_argument("--seed", type=int, metavar="N", help="same seed, same numbers in every format (default 0)")
    data.add_argument("--verify", action="store_true", help="read every token again and compare the shards' hashes")


def _sample_arguments(sample: argparse.ArgumentParser) -> None:
    sample.add_argument("run", type=_path, metavar="RUN", help="run folder")
    sample.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    sample.add_argument("--tokens", type=_positive, default=200, help="tokens to write (default 200)")
    sample.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    sample.add_argument("--top-k", type=_positive, help="draw from the K likeliest tokens only")
    sample.add_argument("--top-p", type=float, help="draw from the likeliest tokens that make up this probability")
    sample.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    sample.add_argument("--num", type=_positive, default=1, help="texts for each prompt (default 1)")
    sample.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _evaluate_arguments(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("run", type=_path, nargs="?", metavar="RUN", help="run folder; without one, --predictions")
    evaluate.add_argument(
        "--data",
        type=_path,
        metavar="FILE",
        help="a text, or questions of SQuAD's form (default: the validation split)",
    )
    evaluate.add_argument(
        "--predictions", type=_path, metavar="FILE", help="answers to score, without a run: JSON {question id: text}"
    )
    evaluate.add_argument("--out", type=_path, metavar="FILE", help="where answers go (default: RUN/predictions.json)")
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    evaluate.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _export_arguments(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", type=_path, metavar="RUN", help="run folder")
    export.add_argument("folder", type=_path, metavar="DIR", help="folder to make")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    export.add_argument("--dtype", choices=("fp64", "fp32", "bf16", "fp16"), help="number format (default: the run's)")
    export.add_argument(
        "--max-shard-bytes",
        type=_positive,
        default=5_000_000_000,
        metavar="BYTES",
        help="largest file of tensors (default 5 GB; adapters are always one)",
    )
    export.add_argument(
        "--adapters", action="store_true", help="of a run with lora.rank: the adapters alone (default: merged weights)"
    )


def _import_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folder", type=_path, metavar="DIR", help="Hugging Face folder")
    verb.add_argument("run", type=_path, metavar="RUN", help="run folder to make")
    verb.add_argument("--config", type=_text, default="default", help=f"the rest of the run's config: {CONFIG_HELP}")
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help=OVERRIDES_HELP)


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
    return Path(_text(word))
