"""In: nothing. Out: the files of a tiny model, of its tokenizer and of a data set, as a hub serves them.
Does not serve them (hub_server.py does)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tokenizers as library
import torch
from transformers import GPT2Config, GPT2LMHeadModel

MODEL, DATASET = "tiny-lab/gpt2-tiny", "tiny-lab/rhymes"
WORDS = ("many", "workers", "one", "descent", "loss", "gradient", "step", "rank", "sum", "mean")
SHORT = (
    *("train.num_steps=2", "train.global_batch_size=2", "train.eval_every=0", "data.seq_len=16"),
    *("train.device=cpu", "train.num_threads=1", "log.sample_tokens=0", "log.tensorboard=false"),
    *("train.allocator=system", "train.compile=none", "optimizer.warmup_steps=1", "train.matmul=exact"),
)
"""Overrides of a run of two steps."""


def tokenizer() -> str:
    """A byte-level BPE without merges, with an end token."""
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    inner = library.Tokenizer(library.models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    inner.add_special_tokens([library.AddedToken("<|endoftext|>", special=True, normalized=False)])
    return str(inner.to_str())


def model_files(*, shard_bytes: str = "5GB", seed: int = 0) -> dict[str, bytes]:
    """A GPT-2 of two layers with random weights, its tokenizer, and what a repository has beside them."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=257, bos_token_id=256, eos_token_id=256
    )
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size=shard_bytes)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    files |= {"tokenizer.json": tokenizer().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    return {
        **files,
        "README.md": b"a tiny model",
        "pytorch_model.bin": b"pickled" * 1000,
        "flax_model.msgpack": b"x" * 4000,
    }


def corpus_files() -> dict[str, bytes]:
    """A data set with two texts."""
    train = "".join(f"{WORDS[one % 10]} {WORDS[one * 7 % 10]} {WORDS[one * 3 % 10]}\n" for one in range(400))
    return {"data/train.txt": train.encode(), "data/test.txt": train[:600].encode(), "README.md": b"rhymes"}
