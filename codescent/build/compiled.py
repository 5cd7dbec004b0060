"""In: a model and its layout. Out: why torch.compile compiles none of its blocks, whatever the device.
Does not look for a device or try its compiler (train/compiling.py does)."""

from __future__ import annotations

from collections.abc import Iterator

from codescent import models
from codescent.strategies.strategy import Candidate


def refusals(run: Candidate) -> Iterator[str]:
    """Why blocks of this plan are not compiled; a config that names them is refused for the same reasons."""
    kind = run.model.kind
    if why := models.uncompiled(kind, models.shape_of_facts(run.model)):
        yield f'model.kind = "{kind}" {why}'
    if run.model.lora is not None and run.model.lora.quantize:
        yield f'lora.quantize = "{run.model.lora.quantize}": matrices are unpacked by bitsandbytes, outside of a graph'
    if run.work.fp8:
        yield f'train.fp8 = "{run.work.fp8}": products in fp8 are not verified in compiled blocks'
    if run.mesh.pp > 1 and run.layout.schedule == "zero-bubble":
        yield 'parallel.schedule = "zero-bubble": compiled layers cannot delay the gradients of weights'
    if run.layout.recompute == "products" and run.mesh.cp > 1:
        yield 'parallel.recompute = "products" with cp: messages divide a block, and its products would not be kept'
