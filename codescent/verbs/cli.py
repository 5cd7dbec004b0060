"""In: the words of a command line. Out: a verb done, its exit code: 0 done, 2 what the user gave cannot be used.
Does not hold logic: each verb is a few calls; what is slow to import (torch, rich) a verb imports when it needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.verbs.arguments import Verb, parse

if TYPE_CHECKING:
    from codescent.config.load import Resolved
    from codescent.tasks import Corpus


def run(words: Sequence[str], *, may_restart: bool = False) -> int:
    """Run one verb and return the exit code; what the user can mend is told in plain lines, without a traceback.

    Args:
        words: the command line, without the program's name.
        may_restart: this process is the program and nothing else, so `train` may start it anew to tune its allocator.
    """
    arguments = parse(words, VERBS)
    arguments.may_restart = may_restart
    verb: Verb = arguments.verb
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


def _load(arguments: argparse.Namespace) -> Resolved:
    from codescent.config.load import load

    overrides = list(arguments.overrides)
    if getattr(arguments, "ranks", None) is not None:
        overrides.append(f"parallel.ranks={arguments.ranks}")
    resolved = load(arguments.config, overrides)
    if resolved.config.data.task is not None:
        _check_task(resolved.config.data.task, resolved.origins["data.task"])
    return resolved


def _check_task(name: str, origin: str) -> None:
    from codescent.tasks import named

    try:
        named(name)
    except UserError as error:
        raise UserError(*(f"{origin}: {problem}" for problem in error.problems)) from error


def _train(arguments: argparse.Namespace) -> int:
    from codescent.launch.allocator import needs_restart, tuned_environment
    from codescent.launch.environment import read

    config = _load(arguments).config
    place = read(os.environ)
    # One task of a launcher, such as the shell of `srun --pty bash`, is free to start ranks of its own.
    alone = place is None or place.world_size == 1
    if place is not None and not alone and arguments.ranks not in (None, place.world_size):
        raise UserError(
            f"--ranks {arguments.ranks}: this process is rank {place.rank} of {place.world_size}, numbered by "
            f"{place.launcher}, and starts no others: leave --ranks away, or have {arguments.ranks} started there"
        )
    if alone and config.parallel.ranks > 1:
        return _train_on_ranks(arguments, config.parallel.ranks)
    if arguments.may_restart and config.train.allocator == "auto" and needs_restart(os.environ):
        # glibc reads its tunables when a process starts: start again, once, as the same process.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], tuned_environment(os.environ))
    return _train_here(arguments, place or Rank())


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


def _train_here(arguments: argparse.Namespace, place: Rank) -> int:
    from codescent.models import GENERATING, kind_of
    from codescent.train.loop import train

    config = _load(arguments).config
    outcome = train(config, place, resume=arguments.resume)
    if place.rank == 0 and outcome.exit_code == 0:
        writes = kind_of(config.model.kind, config.model.preset) in GENERATING
        _finish(outcome.folder, config.log.sample_tokens, config.run.seed, writes=writes)
    return outcome.exit_code


def _finish(folder: Path, sample_tokens: int, seed: int, *, writes: bool) -> None:
    """What a person wants to see at the end: what the model writes, and where the run is."""
    if sample_tokens:
        from codescent.verbs.sample import sample_run

        print("\nA sample of what it writes now:\n")
        sample_run(folder, tokens=sample_tokens, temperature=0.8, seed=seed, device="cpu")
    more = f"; more text: codescent sample {folder}" if writes else ""
    print(f"\nThe run is in {folder} (metrics.csv, plan.json, checkpoints){more}")


def _plan(arguments: argparse.Namespace) -> int:
    import json

    from codescent.preflight import plan_of
    from codescent.verbs.show import show_plan
    from codescent.verbs.timeline import draw_plan, refusals

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
    from codescent.verbs.prove import prove

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
    from codescent.config.words import keys_markdown
    from codescent.verbs.show import show_config

    if arguments.keys:
        print(keys_markdown())
    if arguments.config is not None:
        show_config(_load(arguments))
    elif not arguments.keys:
        raise UserError("codescent config: give a CONFIG to show, or --keys")
    return 0


def _data(arguments: argparse.Namespace) -> int:
    from codescent import tasks

    if (arguments.synthetic is None) == (arguments.corpus is None):
        raise UserError("codescent data: give a corpus, or --synthetic SAMPLES")
    opened = None if arguments.corpus is None else tasks.open_corpus(arguments.corpus, arguments.validation_fraction)
    vectors = arguments.corpus is None or (opened is not None and opened.vocab_size is None)
    of_text, of_tensors = ("tokenizer", "train_bpe", "workers"), ("source", "target", "format", "seed")
    for name in (*(of_text if vectors else ()), *(() if arguments.synthetic else of_tensors)):
        if getattr(arguments, name) is not None:
            why = "tensors are no text" if name in of_text else "only --synthetic makes tensors"
            raise UserError(f"--{name.replace('_', '-')}: {why}; leave it out")
    dataset = opened or (_tokens(arguments) if arguments.synthetic is None else _tensors(arguments))
    if arguments.verify:
        dataset.verify()
    for line in dataset.summary():
        print(line)
    if arguments.verify:
        print("verified: every file is as it was made")
    print(dataset.path)
    return 0


def _tokens(arguments: argparse.Namespace) -> Corpus:
    from codescent.data.text.dataset import open_dataset
    from codescent.data.text.prepare import prepare

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


def _tensors(arguments: argparse.Namespace) -> Corpus:
    from codescent.tasks.tensors.dataset import open_tensors
    from codescent.tasks.tensors.prepare import make_recipe, parse_sizes, prepare_synthetic

    sizes = parse_sizes(arguments.source or "1x512", arguments.target or "20x512")
    recipe = make_recipe(arguments.synthetic, sizes, arguments.seed or 0, arguments.validation_fraction)
    path = prepare_synthetic(recipe, arguments.format or "hdf5", arguments.folder, progress=True)
    return open_tensors(str(path), arguments.validation_fraction)


def _sample(arguments: argparse.Namespace) -> int:
    from codescent.verbs.sample import sample_run

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
        from codescent.tasks.answers.predictions import score_files

        said = score_files(arguments.predictions, arguments.data)
    else:
        from codescent.verbs.evaluate import evaluate_run

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
    from codescent.verbs.exchange import export_run

    for line in export_run(
        arguments.run,
        arguments.folder,
        best=arguments.best,
        step=arguments.step,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_bytes,
        as_adapters=arguments.adapters,
    ):
        print(line)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from codescent.verbs.exchange import import_folder

    for line in import_folder(arguments.folder, arguments.run, _load(arguments)):
        print(line)
    return 0


VERBS: Mapping[str, Verb] = {
    "train": _train,
    "plan": _plan,
    "prove": _prove,
    "config": _config,
    "data": _data,
    "sample": _sample,
    "evaluate": _evaluate,
    "export": _export,
    "import": _import,
}
