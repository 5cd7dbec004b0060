"""In: a file of tensors, or sizes of random ones. Out: the task "tensors": predict the vectors of the target sequence.
Does not build samples: dataset.py does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from codescent import models
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.data.samples import AnyDataset
from codescent.plan import Plan, TaskFacts
from codescent.tasks.task import Task, TaskRequest
from codescent.tasks.tensors.dataset import (
    TensorDataset,
    in_memory,
    is_prepared,
    is_tensors,
    open_tensors,
    read_description,
)
from codescent.tasks.tensors.files import SUFFIXES, format_of
from codescent.tasks.tensors.prepare import folder_of, make_recipe, prepare_synthetic
from codescent.tasks.tensors.synthetic import PREFIX, Sizes, Synthetic, parse

if TYPE_CHECKING:
    from codescent.config.sections import Data


class Tensors(Task):
    """Predict the vectors of a target. The model reads the source's vectors and the target's."""

    name = "tensors"
    kinds = ("transformer",)
    reads = ("format",)
    ignores = ("data.tokenizer", "data.text_key", "train.head_chunk_tokens")
    unit = "vectors"

    def made_for(self, data: Data) -> bool:
        """See `Task`."""
        return data.format is not None or is_tensors(data.corpus)

    def refuse(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`."""
        if request.model.embedding != "none":
            yield (
                f'model.embedding: data.task = "{self.name}" has vectors, and embeddings are looked up by tokens; give '
                'model.embedding = "none"'
            )

    def refuse_other(self, request: TaskRequest, name: str) -> Iterator[str]:
        """See `Task`."""
        corpus = request.data.corpus
        if is_tensors(corpus):
            yield f'data.task = "{name}": data.corpus = "{corpus}" is tensors, not text; leave data.task out'

    def facts(self, request: TaskRequest, shape: models.Shape) -> TaskFacts:
        """See `Task`."""
        corpus = request.data.corpus
        synthetic = corpus.startswith(PREFIX) or is_prepared(expanded(corpus))
        return replace(super().facts(request, shape), synthetic=synthetic)

    def vocab_size(self, request: TaskRequest) -> None:
        """None: samples are vectors."""

    def locate(self, request: TaskRequest) -> Path | None:
        """See `Task`."""
        data = request.data
        if not data.corpus.startswith(PREFIX) or data.format in (None, "memory"):
            return self.prepare(request, progress=False)  # which writes nothing
        path = folder_of(_recipe(request), data.format, data.folder)
        return path if is_prepared(path) else None

    def prepare(self, request: TaskRequest, *, progress: bool) -> Path:
        """See `Task`. Synthetic tensors are written now if data.format is a file format and no file exists."""
        data = request.data
        path = expanded(data.corpus)
        if data.corpus.startswith(PREFIX):
            if data.format in (None, "memory"):
                return Path(data.corpus)
            return prepare_synthetic(_recipe(request), data.format, data.folder, progress=progress)
        if not is_tensors(data.corpus):
            raise UserError(
                f"data.corpus = {data.corpus!r}: not tensors: give a file whose name ends in {', '.join(SUFFIXES)}, a "
                "folder that `codescent data --synthetic` made, or synthetic:SAMPLES"
            )
        stored = read_description(path)["storage"] if is_prepared(path) else format_of(path)
        if data.format not in (None, "memory", stored):
            raise UserError(
                f'data.format = "{data.format}": {data.corpus} is {stored}; leave data.format out, or take "memory" to '
                "read it whole"
            )
        return path

    def open(self, request: TaskRequest, path: Path) -> TensorDataset:
        """See `Task`."""
        data = request.data
        if data.corpus.startswith(PREFIX) and not is_prepared(path):
            return in_memory(_recipe(request), data.corpus)
        return open_tensors(str(path), data.validation_fraction, whole=data.format == "memory")

    def open_corpus(self, corpus: str, validation_fraction: float) -> TensorDataset | None:
        """See `Task`."""
        return open_tensors(corpus, validation_fraction) if is_tensors(corpus) else None

    def misfits(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """See `Task`."""
        assert isinstance(dataset, TensorDataset)
        sizes, work = dataset.sizes, plan.work
        for key, wanted, found, what in (
            ("model.source_len", work.positions(0), sizes.source_len, "vectors of the source"),
            ("model.target_len", work.positions(-1), sizes.target_len, "vectors of the target"),
            ("model.hidden_dim", plan.model.hidden_dim, sizes.width, "numbers of a vector"),
        ):
            if wanted != found:
                yield f"{key} = {wanted}: a sample of {dataset.path} has {found} {what}; give {key} = {found}"


def _recipe(request: TaskRequest) -> Synthetic:
    """Synthetic tensors of the sizes that the model reads."""
    model = request.model
    given = {name: getattr(model, name) for name in models.SIZES if name != "head"}
    shape = models.shape_of(request.kind, given, model.preset, bias=model.bias, dropout=model.dropout)
    samples, seed = parse(request.data.corpus)
    source_len, target_len = shape.streams
    return make_recipe(samples, Sizes(source_len, target_len, shape.hidden_dim), seed, request.data.validation_fraction)
