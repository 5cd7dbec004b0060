"""In: a training of a small GPT-2 on one rank. Out: how many files of the package one batch goes through.
Does not measure time: benchmarks/measuring.py does."""

from __future__ import annotations

from pathlib import Path

from forker import Forker

MODEL = ("models/", "operators/")
"""What a model computes. Another model has other files."""


def test_the_way_of_one_batch_on_one_rank_is_short(forker: Forker, project: Path) -> None:
    """From the launch of a step at which nothing is due to the launch of the next one.

    A crossing is a function that calls a function of another file. A pair of functions counts once, however often the
    step calls it: once for each layer, instruction or micro-batch. Lower the numbers when you can.
    """
    words = ["run.name=batch", "train.num_steps=8", "train.eval_every=0", "log.every=100"]
    ((files, crossings),) = forker.call("batch_ranks:steady_step", project, words=words)
    beside_model = [file for file in files if not file.startswith(MODEL)]
    pairs = [found for found in crossings if not any(name.startswith(MODEL) for name in found[:2])]
    said = [
        f"{len(beside_model)} files and {len(pairs)} crossings ({sum(number for *_, number in pairs)} calls); with the "
        f"model {len(files)} files and {len(crossings)} crossings ({sum(number for *_, number in crossings)} calls)",
        *files,
        *(f"{caller} -> {callee} ({number} times)" for caller, callee, number in crossings),
    ]
    print("\n".join(said))
    assert len(beside_model) <= 28
    assert len(pairs) <= 58
    assert len(files) <= 40
    assert len(crossings) <= 96
