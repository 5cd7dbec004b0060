"""In: sizes of a small Mixtral. Out: seconds of forward and backward of codescent and of transformers, with the same
weights in one process, in turns.
Does not update weights and does not send anything: ranks.py and zero_on_slow_links.py time ranks."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, table, write_json

sys.path.insert(0, str(ROOT))

from codescent import models
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.config.sections import Model
from codescent.huggingface import read
from codescent.huggingface.folder import keys_of_model, open_folder
from codescent.models import SIZES, shape_of

Step = Callable[[], float]
"""Forward and backward; returns the loss."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time forward and backward of a Mixtral by codescent and by transformers, with the same weights.")
    parsed.add_argument("--layers", type=positive, default=4, help="blocks")
    parsed.add_argument("--width", type=positive, default=512, help="channels")
    parsed.add_argument("--inner", type=positive, default=1024, help="channels of an expert")
    parsed.add_argument("--experts", type=positive, default=8, help="experts of a layer; a token has two")
    parsed.add_argument("--samples", type=positive, default=4, help="of 256 tokens")
    parsed.add_argument("--rounds", type=positive, default=9, help="turns of each")
    parsed.add_argument("--threads", type=positive, default=2, help="of torch")
    parsed.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of weights and activations")
    return parsed.parse_args()


def steps_of(arguments: argparse.Namespace, folder: Path) -> dict[str, Step]:
    """A step of each, on the same tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM  # noqa: PLC0415 - `--help` works without transformers

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "num_hidden_layers": arguments.layers, "hidden_size": arguments.width, "intermediate_size": arguments.inner,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048, "max_position_embeddings": 256,
        "num_local_experts": arguments.experts, "num_experts_per_tok": 2, "output_router_logits": False,
        "use_cache": False,
    }  # fmt: skip
    dtype = TORCH_DTYPE[arguments.precision]
    theirs: Any = MixtralForCausalLM(MixtralConfig(**sizes))
    theirs.save_pretrained(folder)
    keys = Model(**keys_of_model(folder)).model_dump()
    shape = shape_of("llama", {size: keys[size] for size in SIZES if size != "head"})
    ours, opened = models.construct(models.facts_of("llama", shape), "cpu"), open_folder(folder)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(read.box(opened, name, [slice(0, size) for size in parameter.shape]))
    ours, theirs = ours.to(dtype).train(), theirs.to(dtype).train()
    tokens_BT = torch.randint(0, 2048, (arguments.samples, 256))

    def of_codescent() -> float:
        ours.zero_grad()
        loss = ours(tokens_BT[:, :-1], tokens_BT[:, 1:], loss_scale=1.0 / tokens_BT[:, 1:].numel())
        loss.backward()
        return float(loss.detach()) / tokens_BT[:, 1:].numel()

    def of_transformers() -> float:
        theirs.zero_grad()
        loss = theirs(input_ids=tokens_BT, labels=tokens_BT).loss
        loss.backward()
        return float(loss.detach())

    return {"codescent": of_codescent, "transformers": of_transformers}


def main() -> int:
    """Measure and print."""
    arguments, record = arguments_of(), hardware()
    torch.set_num_threads(arguments.threads)
    seconds: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="codescent-experts-") as folder:
        steps = steps_of(arguments, Path(folder))
        for number in range(arguments.rounds + 1):
            for name, step in steps.items():
                begun = time.perf_counter()
                losses[name] = step()
                if number:  # the first turn warms up
                    seconds.setdefault(name, []).append(time.perf_counter() - begun)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratio = medians["transformers"] / medians["codescent"]
    claims = [must(f"{arguments.precision}, speed over that of transformers", ratio, 1)]
    rows = [[name, f"{1000 * median:.0f}", f"{losses[name]:.5f}"] for name, median in medians.items()]
    print(machine_line(record), "", table(("", "ms of a step", "loss"), rows), "", sep="\n")
    print("\n".join(must_lines(claims)))
    sizes = {name: value for name, value in vars(arguments).items() if name != "json"}
    result = {"benchmark": "experts", "hardware": record, "sizes": sizes, "seconds": seconds, "losses": losses}
    write_json(arguments.json, result | {"musts": claims})
    return 0


if __name__ == "__main__":
    finish(main)
