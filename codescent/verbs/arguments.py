"""In: a command line. Out: the subcommand and its arguments, parsed. A "verb" is a subcommand in this package.
Does not run a subcommand (cli.py does), does not check arguments against each other, and does not import torch."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from codescent import __version__
from codescent.verbs import arguments_machines, arguments_run, arguments_trained
from codescent.verbs.argument_types import Parser
from codescent.verbs.arguments_run import RESUME_AUTO

LEVELS: Mapping[str, str] = {"-q": "WARNING", "--quiet": "WARNING", "-v": "DEBUG", "--verbose": "DEBUG"}
"""Options of every command, which may stand before it, too, and the levels of messages that they give."""
SITE = "site."
"""How an override of a site begins."""
LOCAL_RANK = re.compile(r"--local[-_]rank=([0-9]+)")  # torch.distributed.launch puts it before a rank's words
OVERRIDE = re.compile(r"\s*\w+\.\w+\s*=")
"""How an override begins. A path with "=" does not begin like this: it has a "/" before."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. The result has the name of the subcommand as `verb`. No words: print the help and exit.

    argparse accepts `section.key=value` words only before a subcommand's options, and CONFIG only as the first word;
    this function accepts them anywhere.
    """
    top, parsers = make_parser()
    at = next((index for index, word in enumerate(words) if word not in LEVELS), 0)
    words, script_words = [*words[at : at + 1], *words[:at], *words[at + 1 :]], list[str]()  # -q train is train -q
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
    if not words[0].startswith("-") and words[0] not in parsers:
        near = difflib.get_close_matches(words[0], parsers, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}? " if near else ""
        top.error(f"there is no command {words[0]}; {meant}The commands: {', '.join(parsers)}")
    arguments, rest = top.parse_known_args(words)
    if local_rank:
        arguments.local_rank = int(local_rank[1])
    if arguments.verb in ("launch", "doctor", "study"):  # they write scripts, which name the command
        arguments.said, arguments.script_words = said, script_words
    if config := _config_after_overrides(arguments, rest):
        arguments.overrides, arguments.config = [arguments.config, *arguments.overrides], config
        (arguments.overrides if config in arguments.overrides else rest).remove(config)
    elif _begins_with_override(arguments) and parsers[arguments.verb].needs("config"):
        first = arguments.config
        parsers[arguments.verb].error(f"no CONFIG: {first} is an override; give a config first, such as default")
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


def _begins_with_override(arguments: argparse.Namespace) -> bool:
    """Whether an override stands in the place of CONFIG."""
    return "overrides" in arguments and OVERRIDE.match(getattr(arguments, "config", None) or "") is not None


def _config_after_overrides(arguments: argparse.Namespace, rest: Sequence[str]) -> str | None:
    """The first word that is not an override, if an override stands in the place of CONFIG."""
    if not _begins_with_override(arguments):
        return None
    words = [*arguments.overrides, *rest]
    return next((word for word in words if not word.startswith("-") and not OVERRIDE.match(word)), None)


def make_parser() -> tuple[Parser, dict[str, Parser]]:
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
        _add_levels(verb)
        parsers[name] = verb
    return top, parsers


def _add_levels(verb: Parser) -> None:
    """Every command says less or more, by the same options."""
    levels = verb.add_mutually_exclusive_group()
    for level, what in (
        ("WARNING", "print warnings, errors and the result, no progress"),
        ("DEBUG", "print details, too: files that are read, processes, times"),
    ):
        options = [option for option, one in LEVELS.items() if one == level]
        levels.add_argument(*options, dest="log_level", action="store_true", const=level, help=what)
    verb.set_defaults(log_level=None)


VERBS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("train", "train a model", arguments_run.train),
    ("plan", "print memory, traffic and FLOPs of a run, without running it", arguments_run.plan),
    ("launch", "write a script that starts a run on a cluster or on other machines", arguments_machines.launch),
    (
        "doctor",
        "look at machines before a run: network, names, folders, devices, limits, leftovers",
        arguments_machines.doctor,
    ),
    (
        "prove",
        "train with every layout and compare losses and gradient norms with one process",
        arguments_machines.prove,
    ),
    ("explain", "show what a strategy does with your model, step by step", arguments_run.explain),
    (
        "collectives",
        "show which collectives each backend of torch offers, and what an all-reduce does",
        arguments_machines.collectives,
    ),
    ("measure", "measure this machine, or those of a launcher, and write a cluster file", arguments_machines.measure),
    ("config", "print every value of a config and its origin", arguments_run.config),
    ("data", "prepare a corpus, or all that the run of a config reads", arguments_run.data),
    ("sample", "generate text with a trained model", arguments_trained.sample),
    ("chat", "talk with a trained model in the terminal", arguments_trained.chat),
    ("serve", "answer requests for a trained model: OpenAI's API, and a page to chat", arguments_trained.serve),
    ("evaluate", "score a trained model, or a file of answers to questions", arguments_trained.evaluate),
    ("plot", "draw loss, learning rate, gradient norm and speed of runs", arguments_trained.plot),
    (
        "report",
        "write what runs or a study say into one page: speed, limits, slow ranks, figures",
        arguments_trained.report,
    ),
    (
        "compare",
        "say what differs between runs: step time by part, losses, memory, config, machine",
        arguments_trained.compare,
    ),
    ("study", "measure one config at many points, and say how it scales", arguments_trained.study),
    ("export", "write a trained model as a Hugging Face folder", arguments_trained.export),
    ("import", "create a run from a Hugging Face folder", arguments_trained.import_),
    (
        "fetch",
        "download weights, tokenizers and corpora of the hub, for machines without internet",
        arguments_run.fetch,
    ),
    ("docs", "print a page of the documentation, or list the pages", arguments_run.docs),
)
"""Name, help text and arguments of each subcommand."""
