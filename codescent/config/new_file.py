"""In: the keys, the shipped config `default`. Out: the text of a new config: commented, and ready to train.
Does not write the file (verbs/new_config.py does)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from codescent.config.effects import value_of
from codescent.config.load import DEFAULT, EXPECTED, load
from codescent.config.sections import SECTIONS
from codescent.config.words import KEYS, toml_value

OFTEN: Mapping[str, tuple[str, ...]] = {
    "run": ("name", "folder", "seed"),
    "model": ("kind", "preset", "weights", "num_layers", "num_heads", "hidden_dim", "seq_len", "dropout"),
    "lora": ("rank",),
    "data": ("corpus", "mixture", "task", "tokenizer", "folder", "validation_fraction"),
    "train": (
        *("num_steps", "num_epochs", "global_batch_size", "microbatch_size", "precision", "device"),
        *("eval_every", "eval_samples", "stop_after"),
    ),
    "optimizer": (
        *("kind", "learning_rate", "min_learning_rate", "warmup_steps", "schedule"),
        *("beta2", "weight_decay", "max_grad_norm"),
    ),
    "checkpoint": ("every", "keep_last"),
    "survive": ("on_divergence", "on_spike"),
    "parallel": ("ranks", "dp_replicate", "dp_shard", "zero_stage", "tp", "pp", "cp", "recompute"),
    "log": ("every", "sample_tokens", "sample_prompt", "sample_temperature", "tensorboard"),
    "profile": ("active",),
}
"""The keys of each section that people change most. A new file explains them, and names the others."""

WIDTH = 100
PAGE = "codescent docs config"


def new_file(name: str, schema: str) -> str:
    """The text of a new config.

    Values are those of the shipped config `default`, which trains within minutes and without a download. All other
    keys are comments with their defaults.

    Args:
        name: of its run.
        schema: path of the JSON Schema, relative to the file.

    Raises:
        UserError: no run can have this name.
    """
    base = load("default", [f"run.name={name}"])
    lines = [
        f"#:schema {schema}",
        "",
        *_comment(
            "A config of codescent. Its run is the one of the shipped config `default`: a small Llama learns Python "
            "from the sources of the standard library. A line that begins with # and a key has the default of the "
            "key: take the # away to change it."
        ),
        *_comment(
            f"Every key: `{PAGE}`, or `codescent config --keys`. Every value of this run: `codescent config FILE`."
        ),
    ]
    for section in SECTIONS:
        model = SECTIONS[section]
        lines += ["", *_comment(" ".join((model.__doc__ or "").split())), f"[{section}]"]
        given = [
            key
            for key in model.model_fields
            if base.origins[f"{section}.{key}"] != DEFAULT and f"{section}.{key}" != EXPECTED
        ]
        shown = [*OFTEN[section], *(key for key in given if key not in OFTEN[section])]
        for key in shown:
            full = f"{section}.{key}"
            lines += _lines(full, toml_value(value_of(base.config, full)) if key in given else None)
        if others := [key for key in model.model_fields if key not in shown]:
            lines += ["", *_comment(f"Others, which `{PAGE}#{section}` explains: {', '.join(others)}")]
    return "\n".join(lines) + "\n"


def _lines(full: str, value: str | None) -> Iterator[str]:
    """A key with its meaning above. `value` None: the default, as a comment."""
    key = KEYS[full]
    yield ""
    yield from _comment(f"{key.description} ({key.wanted}; default {key.default})")
    yield f"# {key.name} = {key.default}" if value is None else f"{key.name} = {value}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False, break_long_words=False
    )
