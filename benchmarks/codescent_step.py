"""In: sizes, a file of tokens, a device; numbers of steps on stdin. Out: seconds of codescent's steps on stdout.
Does not read a config file and does not write a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, cast

import torch
from measure import ROOT
from peer_step import BETAS, LEARNING_RATE, WEIGHT_DECAY, quiet_stdout, serve
from work import Work

sys.path.insert(0, str(ROOT))

from codescent.base.rank import Rank
from codescent.build import build
from codescent.config.sections import Config
from codescent.data.text.dataset import open_dataset
from codescent.operators.products import sum_wide, widen_bf16
from codescent.train.assemble import assemble
from codescent.train.compiling import chosen
from codescent.train.machine import try_bf16, try_matmul
from codescent.train.result import Pending
from codescent.train.stop import StopRequest
from codescent.train.world import World


def config_of(arguments: argparse.Namespace, work: Work) -> Config:
    """A config: the benchmark's values, and the defaults of codescent.config.sections for all other keys."""
    sizes = {
        "num_layers": work.num_layers, "num_heads": work.num_heads, "hidden_dim": work.hidden_dim,
        "vocab_size": work.vocab_size, "seq_len": work.max_seq_len,
    }  # fmt: skip
    values = {
        "model": {"kind": "gpt2", **sizes},
        "lora": {"rank": arguments.rank},
        "data": {
            "corpus": str(arguments.tokens.parent), "tokenizer": "gpt2", "seq_len": work.seq_len, "prefetch": 4,
        },
        "train": {
            "global_batch_size": work.batch_size, "precision": arguments.precision, "compile": arguments.compile,
            "head_chunk_tokens": arguments.head_chunk_tokens, "device": arguments.device, "num_steps": 1_000_000,
        },
        "optimizer": {
            "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "beta1": BETAS[0], "beta2": BETAS[1],
            "max_grad_norm": arguments.clip,
        },
    }  # fmt: skip
    return Config.model_validate(values)


def arguments_of(argv: list[str]) -> argparse.Namespace:
    """The command line; gpu_step.py writes it."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Take codescent's training steps, on request over a pipe."
    )
    parser.add_argument("--tokens", type=Path, required=True, help="train.bin, in a folder with val.bin; uint16 tokens")
    parser.add_argument("--work", type=Work.parse, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--compile", choices=("none", "blocks", "model"), default="blocks")
    parser.add_argument("--head-chunk-tokens", type=int, help="train.head_chunk_tokens; without it, auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, help="rank of the adapters; without it, no adapters")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=5)
    return parser.parse_args(argv)


def main() -> None:
    """Build plan and trainer as `codescent train` does, then take steps on request."""
    arguments = arguments_of(sys.argv[1:])
    answers = quiet_stdout()
    config = config_of(arguments, arguments.work)
    world = World(Rank(), arguments.device, None, timeout_s=600.0)
    dataset = open_dataset(arguments.tokens.parent)
    plan = build(config, dataset.vocab_size, 1)
    world.divide(plan)
    try_matmul("auto", world.device)
    widens = try_bf16(world.device, arguments.precision)
    widen_bf16(widens is not None and widens["choice"] == "fp32")
    sum_wide()
    with StopRequest(alone=True) as stop:
        compiles = chosen(config.train, plan, world)["choice"]  # also sets which functions are compiled alone
        trainer = assemble(config, plan, world, dataset, 0, stop, compiles)
        taken = 0
        before: Pending | None = None

        def step() -> None:
            """As train/loop.py: the result of the step before is read when this one is launched."""
            nonlocal taken, before
            launched = trainer.executor.launch(taken, LEARNING_RATE)
            if before is not None:
                before.read()
            taken, before = taken + 1, launched

        serve(step, arguments.warmup, arguments.device, answers)
        trainer.close()
    cast(Any, torch.distributed).destroy_process_group()


if __name__ == "__main__":
    main()
