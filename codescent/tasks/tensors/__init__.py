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


_WANTED = (
    f"not tensors: give a file whose name ends in {', '.join(SUFFIXES)}, a folder that `codescent data --synthetic` "
    "made, or synthetic:SAMPLES"
)


class Tensors(Task):
    """Predict the vectors of a target. The model reads the source's vectors and the target's."""

    name = "tensors"
    aim = "predict the vectors of the target"
    form = "tensors"
    mixes = False  # files of tensors say nothing by which their vectors could be compared
    kinds = ("transformer",)
    undivided = "a sample is vectors, and its length is fixed"
    reads = ("format",)
    ignores = (
        "data.tokenizer",
        "data.text_key",
        "data.as_text",
        "train.head_chunk_tokens",
        "train.label_smoothing",
        "train.z_loss",
    )
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

    def unused(self, request: TaskRequest) -> Iterator[tuple[str, str]]:
        """See `Task`."""
        corpus = request.data.corpus
        if corpus.startswith(PREFIX) and request.data.format in (None, "memory"):
            yield "data.verify", f"is for files, and {corpus} is in memory"
        if is_prepared(expanded(corpus)):
            yield "data.validation_fraction", f"is for other tensors: {corpus} has its own validation split"

    def refuse_other(self, request: TaskRequest, name: str) -> Iterator[str]:
        """See `Task`."""
        corpus = request.data.corpus
        if is_tensors(corpus):
            yield f'data.task = "{name}": data.corpus = "{corpus}" is tensors, not text; leave data.task out'

    def facts(self, request: TaskRequest, shape: models.Shape) -> TaskFacts:
        """See `Task`."""
        given = [name for name in (request.data.corpus, request.data.validation) if name is not None]
        synthetic = any(name.startswith(PREFIX) or is_prepared(expanded(name)) for name in given)
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
        if data.validation is not None and not is_tensors(data.validation):
            raise UserError(f"data.validation = {data.validation!r}: {_WANTED}")
        if data.corpus.startswith(PREFIX):
            if data.format in (None, "memory"):
                return Path(data.corpus)
            return prepare_synthetic(_recipe(request), data.format, data.folder, progress=progress)
        if not is_tensors(data.corpus):
            raise UserError(f"data.corpus = {data.corpus!r}: {_WANTED}")
        stored = read_description(path)["storage"] if is_prepared(path) else format_of(path)
        if data.format not in (None, "memory", stored):
            raise UserError(
                f'data.format = "{data.format}": {data.corpus} is {stored}; leave data.format out, or take "memory" to '
                "read it whole"
            )
        return path

    def open(self, request: TaskRequest, path: Path) -> TensorDataset:
        """See `Task`; data.validation gives all samples of a file, or the validation split of a folder."""
        data, whole = request.data, request.data.format == "memory"
        fraction = data.validation_fraction if data.validation is None else 0.0
        if data.corpus.startswith(PREFIX) and not is_prepared(path):
            dataset = in_memory(_recipe(request), data.corpus)
        else:
            dataset = open_tensors(str(path), fraction, whole=whole)
        if data.validation is None:
            return dataset
        if data.validation.startswith(PREFIX):
            return dataset.validated_on(in_memory(_validation_recipe(request, data.validation), data.validation))
        return dataset.validated_on(open_tensors(data.validation, 1.0, whole=whole))

    def open_corpus(self, corpus: str, validation_fraction: float) -> TensorDataset | None:
        """See `Task`."""
        return open_tensors(corpus, validation_fraction) if is_tensors(corpus) else None

    def beforehand(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """See `Task`: random numbers that no file has."""
        data = request.data
        for key, name in (("corpus", data.corpus), ("validation", data.validation or "")):
            if name.startswith(PREFIX) and (key == "validation" or data.format in (None, "memory")):
                in_file = ' (data.format = "hdf5" writes them to a file)' if key == "corpus" else ""
                yield f"data.{key} = {name}: a run makes these random numbers in memory: nothing is prepared{in_file}"

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
    samples, seed = parse(request.data.corpus)
    return make_recipe(samples, _sizes(request), seed, request.data.validation_fraction)


def _validation_recipe(request: TaskRequest, validation: str) -> Synthetic:
    """Synthetic tensors with SAMPLES in the validation split. No training sample of any seed is among them."""
    samples, seed = parse(validation)
    return Synthetic(samples, samples, _sizes(request), seed)


def _sizes(request: TaskRequest) -> Sizes:
    """The sizes of a sample that the model reads."""
    model = request.model
    given = {name: getattr(model, name) for name in models.SIZES if name != "head"}
    shape = models.shape_of(request.kind, given, model.preset, bias=model.bias, dropout=model.dropout)
    source_len, target_len = shape.streams
    return Sizes(source_len, target_len, shape.hidden_dim)
