"""In: the words of a command line. Out: a verb done, its exit code: 0 done, 2 what the user gave cannot be used.
Does not hold logic: each verb is a few calls; what is slow to import (torch, rich) a verb imports when it needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from codescent import __version__
from codescent.errors import UserError
from codescent.place import Place

if TYPE_CHECKING:
    from codescent.configfile import Resolved
    from codescent.data.dataset import Dataset
    from codescent.data.question_source import QuestionDataset
    from codescent.data.tensor_dataset import TensorDataset

CONFIG_HELP = "a TOML file, or the name of a shipped config, such as default or gpt2_124m (all: docs/config.md)"
OVERRIDES_HELP = "values that override the file's, such as train.num_steps=100"


def run(words: Sequence[str], *, may_restart: bool = False) -> int:
    """Run one verb and return the exit code; what the user can mend is told in plain lines, without a traceback.

    Args:
        words: the command line, without the program's name.
        may_restart: this process is the program and nothing else, so `train` may start it anew to tune its allocator.
    """
    arguments = _parse(words)
    arguments.may_restart = may_restart
    verb: Callable[[argparse.Namespace], int] = arguments.verb
    try:
        return verb(arguments)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`codescent ... | head`): nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """argparse takes a verb's `section.key=value` words only before its options; people write them anywhere."""
    top = parser()
    arguments, rest = top.parse_known_args(words)
    if rest and ("overrides" not in arguments or any(word.startswith("-") or "=" not in word for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def parser() -> argparse.ArgumentParser:
    """The verbs and their arguments."""
    top = argparse.ArgumentParser(
        prog="codescent",
        description="Many workers, one descent: train transformers on any number of devices, and know what it costs.",
    )
    top.add_argument("--version", action="version", version=f"codescent {__version__}")
    verbs = top.add_subparsers(metavar="VERB", required=True)

    train = _verb(verbs, "train", _train, "train a model")
    _config_arguments(train)
    train.add_argument("--ranks", type=_positive, metavar="N", help="number of ranks to start here (parallel.ranks)")
    train.add_argument("--resume", action="store_true", help="continue the run from its last checkpoint")

    plan = _verb(verbs, "plan", _plan, "tell what a run will hold, send and compute, without running it")
    _config_arguments(plan)
    plan.add_argument("--ranks", type=_positive, metavar="N", help="number of ranks to plan for (parallel.ranks)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument(
        "--timeline", type=_path, metavar="FILE", help="draw a step's schedule: a .png, or a .json for ui.perfetto.dev"
    )

    _prove_arguments(_verb(verbs, "prove", _prove, "show that every layout walks the trajectory of one process"))

    config = _verb(verbs, "config", _config, "show every value of a config and where it comes from")
    _config_arguments(config, optional=True)
    config.add_argument("--keys", action="store_true", help="list every key there is, its default and its meaning")

    _data_arguments(_verb(verbs, "data", _data, "turn text into token shards, or make synthetic tensors"))
    _sample_arguments(_verb(verbs, "sample", _sample, "let a trained model write"))
    _evaluate_arguments(_verb(verbs, "evaluate", _evaluate, "score a trained model, or answers to questions"))
    _export_arguments(_verb(verbs, "export", _export, "write a trained model as a Hugging Face folder"))
    _import_arguments(_verb(verbs, "import", _import, "make a run of a Hugging Face folder"))
    return top


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    function: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(verb=function)
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
        help="largest file of tensors (default 5 GB)",
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


def _load(arguments: argparse.Namespace) -> Resolved:
    from codescent.configfile import load

    overrides = list(arguments.overrides)
    if getattr(arguments, "ranks", None) is not None:
        overrides.append(f"parallel.ranks={arguments.ranks}")
    return load(arguments.config, overrides)


def _train(arguments: argparse.Namespace) -> int:
    from codescent.launch.allocator import needs_restart, tuned_environment
    from codescent.launch.environment import read

    config = _load(arguments).config
    place = read(os.environ)
    if place is not None and arguments.ranks not in (None, place.world_size):
        raise UserError(
            f"--ranks {arguments.ranks}: this process is rank {place.rank} of {place.world_size}, numbered by "
            f"{place.launcher}, and starts no others: leave --ranks away, or have {arguments.ranks} started there"
        )
    if place is None and config.parallel.ranks > 1:
        return _train_on_ranks(arguments, config.parallel.ranks)
    if arguments.may_restart and config.train.allocator == "auto" and needs_restart(os.environ):
        # glibc reads its tunables when a process starts: start again, once, as the same process.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], tuned_environment(os.environ))
    return _train_here(arguments, place or Place())


def _train_on_ranks(arguments: argparse.Namespace, ranks: int) -> int:
    """Everything that can be refused is refused here, and the corpus prepared, before a single rank is started."""
    from codescent.launch.allocator import tuned_environment
    from codescent.launch.local import run_ranks
    from codescent.preflight import check

    resolved = _load(arguments)
    check(resolved.config, ranks, resume=arguments.resume)
    command = [sys.executable, "-P", "-m", "codescent", "train", arguments.config, *arguments.overrides]
    if arguments.resume:
        command.append("--resume")
    tuned = resolved.config.train.allocator == "auto"
    environment = tuned_environment(os.environ) if tuned else dict(os.environ)
    return run_ranks([*command, "--ranks", str(ranks)], ranks, environment)


def _train_here(arguments: argparse.Namespace, place: Place) -> int:
    from codescent.cost.compute import step_flops
    from codescent.models import GENERATING, kind_of
    from codescent.train.loop import train

    config = _load(arguments).config
    outcome = train(config, place, lambda plan: step_flops(plan).total_flops, resume=arguments.resume)
    if place.rank == 0 and outcome.exit_code == 0:
        writes = kind_of(config.model.kind, config.model.preset) in GENERATING
        _finish(outcome.folder, config.log.sample_tokens, config.run.seed, writes=writes)
    return outcome.exit_code


def _finish(folder: Path, sample_tokens: int, seed: int, *, writes: bool) -> None:
    """What a person wants to see at the end: what the model writes, and where the run is."""
    if sample_tokens:
        from codescent.sample import sample_run

        print("\nA sample of what it writes now:\n")
        sample_run(folder, tokens=sample_tokens, temperature=0.8, seed=seed, device="cpu")
    more = f"; more text: codescent sample {folder}" if writes else ""
    print(f"\nThe run is in {folder} (metrics.csv, plan.json, checkpoints){more}")


def _plan(arguments: argparse.Namespace) -> int:
    import json

    from codescent.preflight import plan_of
    from codescent.show import show_plan
    from codescent.timeline import draw_plan, refusals

    config = _load(arguments).config
    if arguments.timeline is not None and (problems := list(refusals(arguments.timeline))):
        raise UserError(*problems)
    plan = plan_of(config, config.parallel.ranks)
    if arguments.timeline is not None:
        draw_plan(plan, arguments.timeline)
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        show_plan(plan)
    return 0


def _prove(arguments: argparse.Namespace) -> int:
    from codescent.prove import prove

    same = prove(
        arguments.config,
        arguments.overrides,
        arguments.ranks,
        arguments.layouts,
        arguments.steps,
        arguments.precision,
        resume=arguments.resume,
    )
    return 0 if same else 1


def _config(arguments: argparse.Namespace) -> int:
    from codescent.config import keys_markdown
    from codescent.show import show_config

    if arguments.keys:
        print(keys_markdown())
    if arguments.config is not None:
        show_config(_load(arguments))
    elif not arguments.keys:
        raise UserError("codescent config: give a CONFIG to show, or --keys")
    return 0


def _data(arguments: argparse.Namespace) -> int:
    from codescent.data.question_source import QuestionDataset
    from codescent.data.tensor_dataset import is_tensors

    tensors = arguments.synthetic is not None or (arguments.corpus is not None and is_tensors(arguments.corpus))
    if (arguments.synthetic is None) == (arguments.corpus is None):
        raise UserError("codescent data: give a corpus, or --synthetic SAMPLES")
    of_text, of_tensors = ("tokenizer", "train_bpe", "workers"), ("source", "target", "format", "seed")
    for name in (*(of_text if tensors else ()), *(() if arguments.synthetic else of_tensors)):
        if getattr(arguments, name) is not None:
            why = "tensors are no text" if name in of_text else "only --synthetic makes tensors"
            raise UserError(f"--{name.replace('_', '-')}: {why}; leave it out")
    dataset = _tensors(arguments) if tensors else _tokens(arguments)
    if arguments.verify and not isinstance(
        dataset, QuestionDataset
    ):  # of which every byte is compared when it is opened
        dataset.verify()
    for line in dataset.summary():
        print(line)
    if arguments.verify:
        print("verified: every file is as it was made")
    print(dataset.path)
    return 0


def _tokens(arguments: argparse.Namespace) -> Dataset | QuestionDataset:
    from codescent.data.dataset import open_dataset
    from codescent.data.prepare import prepare
    from codescent.data.question_source import is_question_folder, open_questions

    if is_question_folder(Path(arguments.corpus)):
        return open_questions(Path(arguments.corpus))
    path = prepare(
        arguments.corpus,
        arguments.tokenizer,
        arguments.folder,
        train_bpe=arguments.train_bpe,
        validation_fraction=arguments.validation_fraction,
        text_key=arguments.text_key,
        num_workers=arguments.workers,
        progress=True,
    )
    return open_dataset(path)


def _tensors(arguments: argparse.Namespace) -> TensorDataset:
    from codescent.data.tensor_dataset import open_tensors
    from codescent.data.tensor_prepare import make_recipe, parse_sizes, prepare_synthetic

    if arguments.synthetic is None:
        return open_tensors(arguments.corpus, arguments.validation_fraction)
    sizes = parse_sizes(arguments.source or "1x512", arguments.target or "20x512")
    recipe = make_recipe(arguments.synthetic, sizes, arguments.seed or 0, arguments.validation_fraction)
    path = prepare_synthetic(recipe, arguments.format or "hdf5", arguments.folder, progress=True)
    return open_tensors(str(path), arguments.validation_fraction)


def _sample(arguments: argparse.Namespace) -> int:
    from codescent.sample import sample_run

    sample_run(
        arguments.run,
        prompts=arguments.prompt,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        num=arguments.num,
        device=arguments.device,
    )
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    if (arguments.run is None) == (arguments.predictions is None):
        raise UserError("codescent evaluate: give a RUN, or --predictions FILE with --data FILE")
    if arguments.predictions is not None:
        if arguments.data is None:
            raise UserError("codescent evaluate --predictions: give the questions too: --data dev-v1.1.json")
        for name in ("out", "best", "step"):
            if getattr(arguments, name):
                raise UserError(f"--{name}: of a run; --predictions FILE has none: leave it out")
        from codescent.evaluate.predictions import score_files

        said = score_files(arguments.predictions, arguments.data)
    else:
        from codescent.evaluate.run import evaluate_run

        said = evaluate_run(
            arguments.run,
            data=arguments.data,
            out=arguments.out,
            best=arguments.best,
            step=arguments.step,
            device=arguments.device,
        )
    for line in said:
        print(line)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from codescent.interchange import export_run

    for line in export_run(
        arguments.run,
        arguments.folder,
        best=arguments.best,
        step=arguments.step,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_bytes,
    ):
        print(line)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from codescent.interchange import import_folder

    for line in import_folder(arguments.folder, arguments.run, _load(arguments)):
        print(line)
    return 0
