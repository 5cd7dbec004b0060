"""In: the parser of a subcommand. Out: arguments that several subcommands have: CONFIG, overrides, a checkpoint.
Does not know which subcommand has which arguments (arguments_*.py do)."""

from __future__ import annotations

import argparse

from codescent.verbs.argument_types import text

CONFIG_HELP = (
    "a TOML file, or the name of a shipped config, such as default or gpt2_124m (list: codescent config --list)"
)
OVERRIDES_HELP = "overrides of values in the file, such as train.num_steps=100"
DEVICE_HELP = "auto: the first kind of GPU that the machine has, else cpu (default auto)"
TARGETS = ("local", "ssh", "torchrun", "mpirun", "slurm", "pbs", "torchx", "kubernetes")
TARGETS_HELP = f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}"


def config_arguments(verb: argparse.ArgumentParser, *, optional: bool = False, meaning: str = CONFIG_HELP) -> None:
    """Add CONFIG and overrides."""
    verb.add_argument("config", metavar="CONFIG", type=text, help=meaning, nargs="?" if optional else None)
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", default=[], help=OVERRIDES_HELP)


def checkpoint_arguments(verb: argparse.ArgumentParser) -> None:
    """Add --best and --step."""
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    verb.add_argument(
        "--ema", action="store_true", help="the moving average of its weights (train.ema), not the weights"
    )
