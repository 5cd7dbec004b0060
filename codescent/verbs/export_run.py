"""In: a run. Out: a checkpoint of it as a Hugging Face folder (`codescent export`).
Does not know the names and axes in a Hugging Face folder (codescent/huggingface does)."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent import models
from codescent.base.dtypes import DTYPE_BYTES, NUMBER_FORMATS
from codescent.base.durable import write_synced
from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.base.published import published
from codescent.base.reading import read_text
from codescent.base.writing import make_folder
from codescent.huggingface import kind_of, peft
from codescent.huggingface.folded import FoldedWeights, plain_shape
from codescent.huggingface.folder import CONFIG, parts_of
from codescent.huggingface.kind import Kind
from codescent.huggingface.rounding import Rounding
from codescent.huggingface.tokens import GENERATION, Controls, tokenizer_files
from codescent.huggingface.write import Read, Shard, shards, write_weights
from codescent.inference.trained import Trained, Values, find
from codescent.record import TOKENIZER


def main(arguments: Namespace) -> int:
    """Export a run and print a summary."""
    say(export_run(**vars(arguments)))
    return 0


def export_run(
    run: Path,
    folder: Path,
    *,
    best: bool = False,
    step: int | None = None,
    ema: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    as_adapters: bool = False,
) -> list[str]:
    """Write a checkpoint as a folder that `transformers` loads. The folder appears when it is complete.

    Args:
        run: the run folder.
        folder: to create; must not exist.
        best: write the checkpoint with the lowest validation loss.
        step: write the checkpoint of this step. The default is the newest checkpoint.
        ema: the moving average of its weights, not the weights.
        dtype: fp64, fp32, bf16 or fp16; None: the run's precision.
        max_shard_bytes: largest size of a file of tensors, unless one tensor is larger.
        as_adapters: write only the trained adapters, as a folder of `peft`; otherwise adapters are merged.

    Returns:
        Lines to print.

    Raises:
        UserError: no such run or checkpoint, a kind of model that `transformers` lacks, `folder` exists, a full disk.
    """
    if os.path.lexists(folder):
        raise UserError(f"{folder}: exists already; give the name of a new folder")
    trained = find(run, best=best, step=step, ema=ema)
    name, shape, dtype = trained.resolved.model.kind, trained.resolved.shape, dtype or trained.config.train.precision
    with_mup = shape
    try:
        shape = plain_shape(shape)
        kind = kind_of(name, shape)
    except UserError as error:
        raise UserError(*(f"{run}: {problem}" for problem in error.problems)) from error
    if as_adapters:
        return _export_adapters(trained, folder, dtype, kind)
    values: Read = Values(trained).box
    if with_mup.mup_base_dim:
        values = FoldedWeights(name, with_mup, values).box
    parts = [part for of_one in parts_of(kind, shape).values() for part in of_one]
    zeros = {part.parameter.name for part in parts} - {parameter.name for parameter in trained.declared}
    files = shards(parts, NUMBER_FORMATS[dtype].code, max_shard_bytes)
    texts, ends = _texts(trained)
    texts = {CONFIG: json.dumps(_settings(kind, shape, dtype, ends), indent=2) + "\n", **texts}
    rounding = _publish(folder, files, dtype, values, zeros, texts)
    size = sum(shard.size_bytes for shard in files)
    where = f"{len(files)} files" if len(files) > 1 else files[0].file
    lines = [f"{trained.which} of {run}: {len(parts)} tensors, {size:,} bytes ({dtype}), {where}"]
    lines += rounding.lines()
    if zeros:
        lines.append(f"{len(zeros)} biases are zeros: this model has none, but a {name} of transformers needs them")
    if TOKENIZER not in texts:
        lines.append("no tokenizer: the run folder has none")
    return [*lines, str(folder)]


def _export_adapters(trained: Trained, folder: Path, dtype: str, kind: Kind) -> list[str]:
    """Write the trained adapters as a folder of `peft`. Returns lines to print."""
    lora, base, run = trained.resolved.model.lora, trained.resolved.model.weights, trained.folder.path
    if lora is None:
        raise UserError(f"{run}: has no adapters (lora.rank is not set); leave out --adapters")
    if base is None:
        why = "the adapters need this run's frozen random weights, which no other folder has"
        raise UserError(f"{run}: --adapters: {why}; leave it out to write merged weights")
    adapters = peft.Adapters(kind, trained.resolved.shape, lora)
    parts = adapters.parts
    if problems := [f"{run}: --adapters: {why}; leave it out" for why in adapters.refusals()]:
        raise UserError(*problems)
    size = sum(math.prod(part.shape) for part in parts) * DTYPE_BYTES[dtype]
    file = Shard(peft.ADAPTER_WEIGHTS, tuple(parts), size)
    texts, _ = _texts(trained)
    texts = {peft.ADAPTER_CONFIG: adapters.settings(trained.task.peft_task_type, base), **texts}
    rounding = _publish(folder, [file], dtype, Values(trained).trained, set(), texts)
    count = f"{len(parts)} tensors, {size:,} bytes ({dtype})"
    lines = [f"{trained.which} of {run}: adapters of rank {lora.rank}: {count}", *rounding.lines()]
    return [*lines, f"load them together with {base}", str(folder)]


def _publish(
    folder: Path, files: list[Shard], dtype: str, read: Read, zeros: set[str], texts: Mapping[str, str]
) -> Rounding:
    """Write a folder that appears when it is complete. Raises UserError: the dtype makes finite values infinite."""
    rounding = Rounding(dtype)
    with published(folder, sum(shard.size_bytes for shard in files)) as hidden:
        write_weights(hidden, files, NUMBER_FORMATS[dtype].code, read, zeros, rounding)
        rounding.check()
        for name, text in texts.items():
            if (inner := (hidden / name).parent) != hidden:
                make_folder(inner, hidden)
            write_synced(hidden / name, text, within=hidden)
    return rounding


def _texts(trained: Trained) -> tuple[dict[str, str], dict[str, Any]]:
    """The tokenizer's files and those of the task, by name, and the ids of the control tokens."""
    texts: dict[str, str] = {}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if trained.tokenizer is not None:
        seq_len = trained.resolved.shape.seq_len
        texts, ends = tokenizer_files(read_text(trained.folder.tokenizer), seq_len)
    if (controls := Controls.of_run(trained.folder.path)) is not None:
        texts, ends = controls.put(texts), dict(controls.ids)
    if trained.tokenizer is None:
        return texts, ends
    is_trained, eos = "imported" not in trained.saved.state, ends.get("eos_token_id")
    texts, ends = trained.task.export(trained.request, trained.tokenizer, texts, ends, is_trained=is_trained)
    if GENERATION in texts and ends.get("eos_token_id") != eos:  # `generate` stops by this file
        generation = {**json.loads(texts[GENERATION]), "eos_token_id": ends["eos_token_id"]}
        texts = {**texts, GENERATION: json.dumps(generation, indent=2) + "\n"}
    return texts, ends


def _settings(kind: Kind, shape: models.Shape, dtype: str, ends: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json."""
    written = kind.write(shape)
    return {
        "architectures": [kind.architectures(shape)[0]],
        "model_type": kind.model_type,
        **{theirs: getattr(shape, ours) for ours, theirs in kind.sizes.items()},
        **written,
        **{key: alike[0] for key, alike in kind.fixed.items()},
        **{key: end for key, end in ends.items() if end is not None or key not in written},
        "torch_dtype": NUMBER_FORMATS[dtype].torch,
    }
