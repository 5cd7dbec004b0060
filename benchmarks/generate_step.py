"""In: a folder of weights, a device, prompts' sizes; numbers on stdin. Out: seconds of a generation on stdout.
Does not contain code of a peer: transformers is imported as installed. Draws nothing: the likeliest token is taken."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import ROOT
from peer_step import quiet_stdout, serve
from work import random_tokens

sys.path.insert(0, str(ROOT))

from codescent import models
from codescent.huggingface.folder import open_folder
from codescent.models.generate import generate
from codescent.train.initial import InitialValues

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Generate = Callable[[], list[list[int]]]  # the new tokens of each prompt


def codescent(arguments: argparse.Namespace, prompts: list[list[int]]) -> Generate:
    """codescent's decoder and its generator, which always has a cache."""
    folder = open_folder(arguments.weights)
    facts = models.facts_of(folder.kind.name, folder.shape)
    values = InitialValues(0, replace(facts, weights=str(arguments.weights)), arguments.precision)
    parameters = models.parameters_of(folder.kind.name, folder.shape)
    module = models.construct(facts)
    whole = {p.name: values.box(p, tuple(slice(0, size) for size in p.shape)) for p in parameters}
    module.load_state_dict(whole, assign=True)
    module.to(arguments.device, DTYPES[arguments.precision])

    def run() -> list[list[int]]:
        steps = list(generate(module, prompts, arguments.new_tokens, temperature=0.0))
        return [[token for token in row if token is not None] for row in zip(*steps)]

    return run


def transformers(arguments: argparse.Namespace, prompts: list[list[int]]) -> Generate:
    """transformers' model and `generate`, with a cache; one of a fixed size is compiled by `generate` itself."""
    peer = importlib.import_module("transformers")
    module = peer.AutoModelForCausalLM.from_pretrained(arguments.weights)
    module = module.to(arguments.device, DTYPES[arguments.precision]).eval()
    module.generation_config.eos_token_id = None  # every text has as many tokens
    more: dict[str, Any] = {"cache_implementation": "static"} if arguments.static_cache else {}
    tokens_BT = torch.tensor(prompts, device=arguments.device)
    words = {"attention_mask": torch.ones_like(tokens_BT), "pad_token_id": 0, "do_sample": False, "use_cache": True}

    def run() -> list[list[int]]:
        found: torch.Tensor = module.generate(tokens_BT, max_new_tokens=arguments.new_tokens, **words, **more)
        return [row[tokens_BT.shape[1] :] for row in found.tolist()]

    return run


def arguments_of(argv: list[str]) -> argparse.Namespace:
    """The command line; gpu_generate.py writes it."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Generate tokens with a cache, on request over a pipe."
    )
    parser.add_argument("--system", choices=("codescent", "transformers"), required=True)
    parser.add_argument("--weights", type=Path, required=True, help="folder with config.json and model.safetensors")
    parser.add_argument("--vocab-size", type=int, required=True, help="prompts are random ids below it")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts at once")
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--static-cache", action="store_true", help="of transformers: a cache of a fixed size")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--write", type=Path, required=True, help="file for the first new tokens, as JSON")
    return parser.parse_args(argv)


def main() -> None:
    """Load the weights, then generate on request."""
    arguments = arguments_of(sys.argv[1:])
    answers = quiet_stdout()
    size = arguments.batch_size, arguments.prompt_len
    prompts: list[list[int]] = random_tokens(arguments.vocab_size, size[0] * size[1]).reshape(size).tolist()
    run = {"codescent": codescent, "transformers": transformers}[arguments.system](arguments, prompts)

    def step() -> None:
        found = run()
        if not arguments.write.exists():
            arguments.write.write_text(json.dumps(found), encoding="utf-8")

    with torch.no_grad():
        serve(step, arguments.warmup, arguments.device, answers)


if __name__ == "__main__":
    main()
