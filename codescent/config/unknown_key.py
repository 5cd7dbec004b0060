"""In: a section or a key that no config has. Out: what to say: the one that was probably meant, or all that there are.
Does not find unknown keys (load.py does)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from codescent.config.sections import SECTIONS
from codescent.config.words import KEYS

FOREIGN_NAMES: Mapping[str, str] = {
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.hidden_dim",
    "d_model": "model.hidden_dim",
    "block_size": "model.seq_len",
    "context": "model.seq_len",
    "batch_size": "train.global_batch_size",
    "max_iters": "train.num_steps",
    "steps": "train.num_steps",
    "epochs": "train.num_epochs",
    "max_epochs": "train.num_epochs",
    "num_train_epochs": "train.num_epochs",
    "total_batch_size": "train.global_batch_tokens",
    "patience": "train.stop_after",
    "early_stopping_patience": "train.stop_after",
    "dtype": "train.precision",
    "eval_interval": "train.eval_every",
    "gradient_accumulation_steps": "train.microbatch_size",
    "lr": "optimizer.learning_rate",
    "grad_clip": "optimizer.max_grad_norm",
    "warmup_iters": "optimizer.warmup_steps",
    "lr_decay_iters": "optimizer.decay_steps",
    "min_lr": "optimizer.min_learning_rate",
    "out_dir": "run.folder",
    "dataset": "data.corpus",
}
"""Key names of other training programs, for suggestions. They are spelled too differently for a fuzzy search."""


def _owners(key: str) -> str:
    """The full names of all keys called `key`, as "a.key or b.key"; "" if there is none."""
    return " or ".join(name for name in KEYS if key and name.endswith(f".{key}"))


def unknown_section(section: str, key: str = "") -> str:
    """Text for an unknown section, with the key or the section that was probably meant."""
    near = difflib.get_close_matches(section.lower(), SECTIONS, n=1)
    meant = _owners(key) or (f"[{near[0]}]" if near else "")
    hint = f"did you mean {meant}?" if meant else f"sections are {', '.join(SECTIONS)}"
    return f"unknown section; {hint}"


def unknown_key(section: str, key: str) -> str:
    """Text for an unknown key, with the key that was probably meant. `section` is "" above the first section."""
    lowered = key.lower().replace("-", "_")
    what = f"unknown key in [{section}]" if section else "unknown key"
    if owners := _owners(lowered):
        return f"{what if section else 'is outside a section'}; did you mean {owners}?"
    own = {entry.name: name for name, entry in KEYS.items() if entry.section == section}
    every = {entry.name: name for name, entry in KEYS.items()}
    near = [own[name] for name in difflib.get_close_matches(lowered, own, n=1)]
    near = near or [every[name] for name in difflib.get_close_matches(lowered, every, n=1, cutoff=0.75)]
    if meant := FOREIGN_NAMES.get(lowered) or next(iter(near), ""):
        return f"{what}; did you mean {meant}?"
    if section:
        return f"{what}; its keys are {', '.join(own)}"
    return f"{what}; at the top of a file only base is valid; all other keys belong to a section: {', '.join(SECTIONS)}"
