"""In: a run whose samples need numbers of the model with its initial weights. Out: these numbers, for every sample.
Does not know what they are: the head computes them (`Part.compare`). It computes them once, before the first step."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from codescent.base.device import offered, wide_dtype
from codescent.base.errors import UserError
from codescent.base.output import note
from codescent.base.sealed import digest
from codescent.data.file_array import open_npy
from codescent.data.loader import InOrder
from codescent.data.prepared import (
    SPLITS,
    checked_description,
    describe,
    existing,
    hash_problems,
    prepared,
    refuse_damaged,
    write_array,
)
from codescent.data.samples import ReferencedSource, References
from codescent.huggingface.initial import start_of
from codescent.huggingface.merged import open_weights
from codescent.plan import AXES, Plan
from codescent.train.execute import Executor
from codescent.train.open import OpenRun
from codescent.train.validate import samples_at_once
from codescent.train.world import World

FORMAT = "codescent references 1"
NUMBERS = "references.npy"
WHAT = "references"


class _Description(BaseModel):
    """description.json of a folder of references."""

    model_config = ConfigDict(strict=True)

    format: Literal["codescent references 1"]
    key: dict[str, Any]
    files: dict[str, str]


class ReferenceFiles:
    """The references of a run, beside its prepared corpus: one folder for each split, on the machine of rank 0.

    Its name holds a digest of all that they depend on (`key_of`). So runs that differ in their loss or layout share
    them. Every rank gets them from rank 0.
    """

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        preference = run.plan.objective.preference
        self.wanted = preference is not None and preference.referenced
        self.lacking: list[str] = []
        if not self.wanted:
            return
        self._read: dict[str, References] = {}  # on rank 0
        self._weights: str = run.world.from_first(self._identity)
        self.lacking = run.world.from_first(self._look)
        if run.world.this_rank.rank in run.plan.mesh:  # another one computes nothing
            for split in SPLITS:
                if split not in self.lacking and self._source(split).references is None:
                    self._source(split).refer(self._shared(split))

    def compute(self, executor: Executor) -> None:
        """Compute what is lacking, with the weights that the parts of the executor have. Collective."""
        for split in self.lacking:
            source, found = self._source(split), np.zeros((0, 0))
            if self.run.world.is_first:
                note(f"computing the reference of {source.num_samples:,} samples ({split}), once")
            if executor.chunks:
                found = _computed(executor, source)
                source.refer(found)
            self.run.world.from_first(partial(self._keep, split, found))
        self.lacking = []

    def _source(self, split: str) -> ReferencedSource:
        source = self.run.source(split)
        assert isinstance(source, ReferencedSource), "the objective needs a reference, and the samples have none"
        return source

    def _key(self, split: str) -> dict[str, Any]:
        return key_of(self.run.plan, self._source(split).key, self._weights)

    def _identity(self) -> str:
        """A hash of the initial weights, merged and new adapters included. Random ones follow from the seed."""
        plan = self.run.plan
        if plan.model.weights is None:
            return digest([plan.seed])
        weights = open_weights(plan.model)
        identity, start = self.run.base or weights.identity(), start_of(plan.model, weights.folder)
        of_start = None if start is None else start.fingerprint
        return digest([plan.seed, identity["fingerprint"], identity.get("adapters"), of_start])

    def _folder(self, split: str) -> Path:
        return self.run.dataset.path.parent / f"references-{digest([FORMAT, self._key(split)])[:16]}"

    def _look(self) -> list[str]:
        """Read what there is, on rank 0; return the splits that lack it. Raises UserError: a folder is damaged."""
        for split in SPLITS:
            if self._source(split).references is None and (folder := existing(self._folder(split), _verify)):
                files: dict[str, str] = checked_description(folder, _Description, WHAT)["files"]
                self._read[split] = open_npy(folder / NUMBERS, files[NUMBERS])[:]
        return [split for split in SPLITS if split not in self._read and self._source(split).references is None]

    def _shared(self, split: str) -> References:
        """The numbers of a split on every rank of the mesh, read on rank 0. Collective."""
        plan, world = self.run.plan, self.run.world
        assert plan.objective.preference is not None
        shape, wide = (self._source(split).num_samples, plan.objective.preference.sums), wide_dtype(world.device)
        values = torch.zeros(shape, dtype=wide, device=world.device)
        if world.is_first:
            values += torch.from_numpy(self._read.pop(split)).to(world.device, wide)
        return _everywhere(world, plan, values)

    def _keep(self, split: str, found: References) -> None:
        key = self._key(split)

        def make(folder: Path) -> None:
            write_array(folder / NUMBERS, found)
            describe(folder, {"format": FORMAT, "key": key}, [NUMBERS])

        prepared(self._folder(split), make, _verify)


def refuse_without_run(plan: Plan) -> None:
    """Raise UserError: samples need numbers or answers of the model, and this command is no run."""
    if plan.objective.needs_run:
        raise UserError(
            f'data.task = "{plan.task.name}": its loss reads what the model itself has computed of the samples, and '
            "only `codescent train` does that; give a few steps there (train.num_steps), or another data.task here"
        )


def key_of(plan: Plan, samples: str, weights: str) -> dict[str, Any]:
    """What the references of samples depend on, as JSON data. `samples`, `weights`: hashes of them."""
    model, work = plan.model, plan.work
    sizes = {name: str(size) for name, size in model.sizes.items()}
    quantize = "" if model.lora is None else model.lora.quantize
    of_model = {"kind": model.kind, "sizes": sizes, "weights": weights, "quantize": quantize}
    products = [work.precision, work.fp8, work.fp8_emulated]
    return {"samples": samples, "model": of_model, "products": products}


def _verify(folder: Path) -> None:
    """Raise UserError: the folder is damaged."""
    description = checked_description(folder, _Description, WHAT)
    refuse_damaged(folder, hash_problems(folder, description["files"]))


def _everywhere(world: World, plan: Plan, values: torch.Tensor) -> References:
    """The sum over all ranks of the mesh: each has a part of the values, and 0 elsewhere. Collective."""
    return world.sum_over(values, plan.mesh.joint(*AXES)).cpu().double().numpy()


def _computed(executor: Executor, source: ReferencedSource) -> References:
    """The numbers of all samples of a source. Each data-parallel rank reads its share. Collective."""
    plan, world = executor.plan, executor.world
    preference = plan.objective.preference
    assert preference is not None
    part, parts = world.share(plan)
    mine = np.arange(source.num_samples)[part::parts]
    size = samples_at_once(plan, executor.device)
    passes = math.ceil(math.ceil(source.num_samples / parts) / size)
    values = torch.zeros(source.num_samples, preference.sums, dtype=executor.loss_sum.dtype, device=executor.device)
    pins = offered(executor.device).pins
    at = world.this_rank.rank
    # Ranks of tp and of cp have computed the same numbers, and only the last stage has any.
    counts = plan.counts_loss(at) and plan.mesh.coordinates(at)["cp"] == 0
    with executor.evaluating() as evaluate, InOrder(source, mine, size, passes, pin_memory=pins) as loader:
        for number in range(passes):
            rows = mine[number * size : (number + 1) * size]
            found = evaluate(loader.next().batches[0])
            if len(rows) and counts and found.ndim:
                values[torch.from_numpy(rows).to(values.device)] = found
    return _everywhere(world, plan, values)
