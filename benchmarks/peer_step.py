"""In: a peer's name, sizes, a file of tokens; numbers of steps on stdin. Out: seconds of the peer's steps on stdout.
Does not contain code of a peer: it imports nanoGPT from the user's checkout, transformers and peft as installed."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from products import products
from systems import MARK
from work import Work

LEARNING_RATE, WEIGHT_DECAY, BETAS = 6e-4, 0.1, (0.9, 0.95)
"""nanoGPT's defaults (train.py), given to every peer."""


@dataclass
class Peer:
    """A peer's model and optimizer, and a function that computes its loss from model, tokens and targets."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def nanogpt(arguments: argparse.Namespace, work: Work) -> Peer:
    """nanoGPT's GPT with nanoGPT's optimizer groups; with biases, as in GPT-2."""
    sys.path.insert(0, str(arguments.checkout))
    peer = importlib.import_module("model")
    config = peer.GPTConfig(
        block_size=work.max_seq_len,
        vocab_size=work.vocab_size,
        n_layer=work.num_layers,
        n_head=work.num_heads,
        n_embd=work.hidden_dim,
        dropout=0.0,
        bias=True,
    )
    module = peer.GPT(config).to(arguments.device)
    optimizer = module.configure_optimizers(WEIGHT_DECAY, LEARNING_RATE, BETAS, arguments.device)
    return Peer(module, optimizer, lambda model, tokens, targets: model(tokens, targets)[1])


def transformers(arguments: argparse.Namespace, work: Work) -> Peer:
    """transformers' GPT2LMHeadModel with torch's AdamW; fused if it is the default of transformers' Trainer."""
    peer = importlib.import_module("transformers")
    config = peer.GPT2Config(
        vocab_size=work.vocab_size,
        n_positions=work.max_seq_len,
        n_embd=work.hidden_dim,
        n_layer=work.num_layers,
        n_head=work.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    module = peer.GPT2LMHeadModel(config).to(arguments.device)
    fused = "fused" in str(peer.TrainingArguments.__dataclass_fields__["optim"].default)
    return Peer(module, adamw(module, fused=fused), transformers_loss)


def peft(arguments: argparse.Namespace, work: Work) -> Peer:
    """transformers' GPT2LMHeadModel with peft's adapters on every matrix of its blocks.

    With bf16 the frozen weights are bf16, too, as in a model that is loaded in bf16.
    """
    peer = importlib.import_module("peft")
    base = transformers(arguments, work).module
    if arguments.precision == "bf16":
        base = base.to(torch.bfloat16)
    matrices = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    config = peer.LoraConfig(
        r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=matrices, fan_in_fan_out=True
    )
    module = peer.get_peft_model(base, config)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    return Peer(module, optimizer, transformers_loss)


def transformers_loss(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of transformers. Targets are shifted already, so that it counts as many tokens as other peers."""
    loss = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def adamw(module: torch.nn.Module, *, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=fused)


def batches(file: Path, work: Work, device: str) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A function that reads a batch of random windows from a memory-mapped uint16 file, as nanoGPT's script does."""

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.memmap(file, dtype=np.uint16, mode="r")
        starts = torch.randint(len(tokens) - work.seq_len, (work.batch_size,)).tolist()
        windows = [torch.from_numpy(tokens[s : s + work.seq_len + 1].astype(np.int64)) for s in starts]
        windows_BT = torch.stack(windows)
        if device == "cuda":
            windows_BT = windows_BT.pin_memory().to(device, non_blocking=True)
        return windows_BT[:, :-1].contiguous(), windows_BT[:, 1:].contiguous()

    return read


def stepper(peer: Peer, arguments: argparse.Namespace, work: Work) -> Callable[[], None]:
    """A function that takes one full step: batch, forward, backward, clipping if --clip, AdamW, gradients freed."""
    module = torch.compile(peer.module) if arguments.compile else peer.module
    assert isinstance(module, torch.nn.Module)
    read = batches(arguments.tokens, work, arguments.device)

    def step() -> None:
        tokens, targets = read()
        casting: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if arguments.precision == "bf16":
            casting = torch.autocast(arguments.device, dtype=torch.bfloat16)
        with casting:
            loss = peer.loss(module, tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if arguments.clip > 0:
            torch.nn.utils.clip_grad_norm_(module.parameters(), arguments.clip)
        peer.optimizer.step()
        peer.optimizer.zero_grad(set_to_none=True)

    return step


def distributed(peer: Peer) -> Peer:
    """Wrap the model in torch's DistributedDataParallel with its defaults. The ranks come from torchrun's variables."""
    torch.distributed.init_process_group("gloo")
    return Peer(torch.nn.parallel.DistributedDataParallel(peer.module), peer.optimizer, peer.loss)


def arguments_of(argv: list[str]) -> argparse.Namespace:
    """The command line; peers.py, ranks.py and lora.py write it."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Take training steps of a peer's GPT-2, on request over a pipe."
    )
    parser.add_argument("--peer", choices=("nanogpt", "transformers", "peft", "products", "bound"), required=True)
    parser.add_argument("--rank", type=int, default=8, help="rank of peft's adapters")
    parser.add_argument("--checkout", type=Path, help="nanoGPT's checkout")
    parser.add_argument("--tokens", type=Path, required=True, help="file of uint16 tokens")
    parser.add_argument("--work", type=Work.parse, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=2)
    return parser.parse_args(argv)


def take(step: Callable[[], None], num_steps: int, device: str) -> float:
    """Take `num_steps` steps. Returns the mean seconds of a step; a CUDA device is waited for."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / num_steps


def serve(step: Callable[[], None], warmup: int, device: str, answers: TextIO) -> None:
    """Take the warm-up steps and print "ready". Then answer each line of stdin: a number of steps, or "memory".

    The answer is the mean seconds of a step, or the peak memory on the device in bytes.
    """
    for _ in range(warmup):
        step()
    print(MARK, "ready", file=answers)
    for line in sys.stdin:
        if line.strip() == "memory":
            print(MARK, torch.cuda.max_memory_allocated(), file=answers)
        else:
            print(MARK, take(step, int(line), device), file=answers)


def quiet_stdout() -> TextIO:
    """Return a line-buffered stdout for answers. All other output goes to stderr, the log, after this call."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def main() -> None:
    """Build the peer, then take steps on request."""
    arguments = arguments_of(sys.argv[1:])
    answers = quiet_stdout()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1337 + int(os.environ.get("RANK", "0")))
    if arguments.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True  # as nanoGPT's script does
    if arguments.peer == "products":
        step = products(arguments.work, arguments.precision)
    elif arguments.peer == "bound":
        step = importlib.import_module("bound").bound(arguments.work, arguments.precision)
    else:
        makers = {"nanogpt": nanogpt, "transformers": transformers, "peft": peft}
        peer = makers[arguments.peer](arguments, arguments.work)
        step = stepper(distributed(peer) if arguments.ddp else peer, arguments, arguments.work)
    serve(step, arguments.warmup, arguments.device, answers)


if __name__ == "__main__":
    main()
