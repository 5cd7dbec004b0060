"""In: collectives of a plan. Out: what each is for, in words of a language; those that are alike as one.
Does not decide what is sent (strategies do): their English words are the keys here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from codescent.explain.language import Language
from codescent.plan.traffic import Traffic

Said = Callable[[Language, tuple[str, ...]], str]
WORDS: dict[str, Said] = {
    r"gradients, bucket (\d+)": lambda say, found: say("gradients, bucket {number}", number=found[0]),
    r"gradients, bucket (\d+), (.+)": lambda say, found: say(
        "gradients, bucket {number}, {part}", number=found[0], part=found[1]
    ),
    r"weights of block (\d+)": lambda say, found: say("weights of block {number}", number=found[0]),
    r"weights of the root": lambda say, found: say("weights of embedding and head"),
    r"gradients of block (\d+)": lambda say, found: say("gradients of block {number}", number=found[0]),
    r"gradients of the root": lambda say, found: say("gradients of embedding and head"),
    r"partial gradients of (\d+) replicated tensors?": lambda say, found: say(
        "partial gradients of tensors that are on all ranks: {number}", number=found[0]
    ),
    r"gradients of (\d+) replicated tensors?": lambda say, found: say(
        "gradients of tensors that are on all ranks: {number}", number=found[0]
    ),
    r"loss, stop request and gradient norm": lambda say, found: say("loss, stop request, norm of the gradients"),
    r"keys and values": lambda say, found: say("keys and values"),
    r"gradients of keys and values": lambda say, found: say("gradients of keys and values"),
    r"inputs of matrices divided by columns": lambda say, found: say("inputs of the first matrices"),
    r"outputs of matrices divided by rows": lambda say, found: say("outputs of the second matrices"),
    r"gradients of inputs": lambda say, found: say("gradients of inputs"),
    r"gradients of outputs": lambda say, found: say("gradients of outputs"),
    r"inputs, recomputed": lambda say, found: say("inputs, recomputed"),
    r"outputs, recomputed": lambda say, found: say("outputs, recomputed"),
    r"gradients of the head's rows": lambda say, found: say("gradients of the head's rows"),
    r"sums over all heads, of norms": lambda say, found: say("sums over all heads, of norms"),
    r"largest logits": lambda say, found: say("largest logits"),
    r"sums of exponentials, logits of the targets": lambda say, found: say("sums for softmax, logits of the targets"),
    r"logits of all positions": lambda say, found: say("logits of all positions"),
}
"""By pattern of the whole text: how it is said. What no pattern fits is shown as the plan has it: rarer methods."""


def purpose(record: Traffic, say: Language) -> str:
    """What a collective is for."""
    for pattern, said in WORDS.items():
        if found := re.fullmatch(pattern, record.what):
            return said(say, found.groups())
    return record.what


def joined(records: Iterable[Traffic]) -> Iterator[Traffic]:
    """Collectives that send the same, in the same instruction, to the same ranks, are one that runs more often."""
    found: dict[Traffic, int] = {}
    for record in records:
        alike = replace(record, times=1, depths=(0, 0), stage=None)
        found[alike] = found.get(alike, 0) + record.times
    for alike, times in found.items():
        yield replace(alike, times=times)
