"""In: a folder of weights, a device, prompts' sizes; numbers on stdin. Out: seconds of a generation on stdout.
Does not contain code of a peer: transformers is imported as installed. Draws nothing: the likeliest token is taken."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import ROOT
from peer_step import quiet_stdout, serve
from work import random_tokens

sys.path.insert(0, str(ROOT))


from codescent import models
from codescent.base.cores import memory_bytes
from codescent.huggingface.folder import open_folder
from codescent.huggingface.initial import InitialValues
from codescent.inference.engine import Engine
from codescent.inference.layouts import store_for_few_tokens_
from codescent.inference.open import COPIES_SHARE, capacity_of
from codescent.inference.request import Sampling
from codescent.models.decoder import Decoder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Generate = Callable[[], list[list[int]]]  # the new tokens of each prompt


class Work(NamedTuple):
    """What a turn generates: after each prompt so many new tokens."""

    prompts: list[list[int]]
    new_tokens: list[int]


def work_of(arguments: argparse.Namespace) -> Work:
    """Random prompts. With --mixed both lengths differ: from a sixteenth of the longest on, shuffled."""
    rows, longest, most = arguments.batch_size, arguments.prompt_len, arguments.new_tokens
    draw = random.Random(1337)
    lengths, news = [longest] * rows, [most] * rows
    if arguments.mixed:
        lengths, news = ([max(1, size * (row + 1) // rows) for row in range(rows)] for size in (longest, most))
        draw.shuffle(lengths)
        draw.shuffle(news)
    tokens = random_tokens(arguments.vocab_size, sum(lengths)).tolist()
    ends = list(accumulate(lengths))
    return Work([tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)], news)


def codescent(arguments: argparse.Namespace, work: Work) -> Generate:
    """codescent's decoder and its engine. No page of an earlier turn is used again."""
    folder = open_folder(arguments.weights)
    facts = models.facts_of(folder.kind.name, folder.shape)
    values = InitialValues(0, replace(facts, weights=str(arguments.weights)), arguments.precision)
    parameters = models.parameters_of(folder.kind.name, folder.shape)
    module = models.construct(facts)
    whole = {p.name: values.box(p, tuple(slice(0, size) for size in p.shape)) for p in parameters}
    module.load_state_dict(whole, assign=True)
    module.to(arguments.device, DTYPES[arguments.precision]).eval()
    assert isinstance(module, Decoder)
    if arguments.device == "cpu":  # as `open_engine` does
        store_for_few_tokens_(module, int(COPIES_SHARE * memory_bytes()))
    engine = Engine(module, None, capacity_of(module, len(work.prompts)))
    samplings = [Sampling(0.0, max_new_tokens=number) for number in work.new_tokens]

    def run() -> list[list[int]]:
        engine.forget()
        found: dict[int, list[int]] = {}
        for outputs in engine.texts(work.prompts, samplings):
            for output in outputs:
                assert output.token is not None
                found.setdefault(output.request, []).append(output.token)
        return [found[request] for request in sorted(found)]

    return run


def transformers(arguments: argparse.Namespace, work: Work) -> Generate:
    """transformers' model and `generate`, with a cache; one of a fixed size is compiled by `generate` itself.

    Prompts of different lengths are padded on the left, as its documentation says. All rows go on until the last one
    has its tokens: no token ends a text.
    """
    peer = importlib.import_module("transformers")
    module = peer.AutoModelForCausalLM.from_pretrained(arguments.weights)
    module = module.to(arguments.device, DTYPES[arguments.precision]).eval()
    module.generation_config.eos_token_id = None  # every text has as many tokens
    more: dict[str, Any] = {"cache_implementation": "static"} if arguments.static_cache else {}
    width = max(map(len, work.prompts))
    padded = [[0] * (width - len(prompt)) + prompt for prompt in work.prompts]
    masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in work.prompts]
    tokens_BT, mask_BT = (torch.tensor(rows, device=arguments.device) for rows in (padded, masks))
    words = {"attention_mask": mask_BT, "pad_token_id": 0, "do_sample": False, "use_cache": True}

    def run() -> list[list[int]]:
        found: torch.Tensor = module.generate(tokens_BT, max_new_tokens=max(work.new_tokens), **words, **more)
        return [row[width : width + number] for row, number in zip(found.tolist(), work.new_tokens, strict=True)]

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
    parser.add_argument("--mixed", action="store_true", help="prompts and texts of different lengths, up to these")
    parser.add_argument("--threads", type=int, help="of torch; if not given, torch decides")
    parser.add_argument("--static-cache", action="store_true", help="of transformers: a cache of a fixed size")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--write", type=Path, required=True, help="file for the first new tokens, as JSON")
    return parser.parse_args(argv)


def main() -> None:
    """Load the weights, then generate on request."""
    arguments = arguments_of(sys.argv[1:])
    answers = quiet_stdout()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    run = {"codescent": codescent, "transformers": transformers}[arguments.system](arguments, work_of(arguments))

    def step() -> None:
        found = run()
        if not arguments.write.exists():
            arguments.write.write_text(json.dumps(found), encoding="utf-8")

    with torch.no_grad():
        serve(step, arguments.warmup, arguments.device, answers)


if __name__ == "__main__":
    main()
