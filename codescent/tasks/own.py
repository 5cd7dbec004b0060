"""In: the name of a task class of the user, such as mymodule:MyTask; its open dataset. Out: the task; what is wrong
with its first samples.
Does not list the tasks of this package (tasks.TASKS does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from codescent.base import own_names
from codescent.base.own_names import is_own_name
from codescent.data.samples import AnyDataset, Samples
from codescent.plan import Plan
from codescent.tasks.task import Task

KEY = "data.task"
TRIED = 2
"""So many samples of each split are read before a run begins."""


def own_task(name: str) -> Task:
    """The task of this name; plans and run folders know it by the same name. Raises UserError: there is none."""
    task = own_names.instance(KEY, name, Task, needs=("kinds", "prepare", "open"))
    task.name = name
    return task


def wrong_samples(dataset: AnyDataset, plan: Plan) -> Iterator[str]:
    """Why the model cannot read the first samples of a task of the user; of other tasks nothing.

    Raises:
        UserError: a method of the dataset returns no samples.
    """
    if not is_own_name(plan.task.name):
        return
    known = set[str]()
    for split in ("train", "validation"):
        source = dataset.source(split, plan.work.seq_len, plan.work.positions(-1))
        numbers = np.arange(min(TRIED, source.num_samples))
        if len(numbers):
            losses = source.losses(numbers)
            found = [*_of_losses(losses, len(numbers)), *_of_samples(source.read(numbers), len(numbers), plan)]
            yield from (f"{KEY} = {plan.task.name}: {split} split: {one}" for one in found if one not in known)
            known.update(found)


def _of_losses(losses: object, count: int) -> Iterator[str]:
    if not (isinstance(losses, np.ndarray) and losses.dtype.kind == "i" and losses.shape == (count,)):
        yield f"losses of {count} samples are {_is_what(losses)}; must be an array of {count} whole numbers"


def _of_samples(samples: Samples, count: int, plan: Plan) -> Iterator[str]:
    """Problems of samples: types and sizes of their arrays, tokens outside of the vocabulary, missing extras."""
    extras: object = samples.extras
    if not isinstance(extras, Mapping):
        yield f"extras are {_is_what(extras)}; must be a dict of arrays"
        return
    arrays = {"inputs": samples.inputs, "targets": samples.targets, **extras}
    problems = [one for name, array in arrays.items() for one in _of_array(name, array, count, plan)]
    yield from problems
    if bool(samples.extras) is not plan.task.extras:
        yield (
            "samples have no extras, but the model reads some, such as lengths_B: how many positions are no padding"
            if plan.task.extras
            else f"samples have extras ({', '.join(samples.extras)}), but the task says extras = False"
        )
    elif not problems and not plan.task.extras and plan.model.vocab_size and int(samples.targets.min()) < 0:
        yield "a target below 0 has no loss; such samples need extras = True and the extra lengths_B"


def _of_array(name: str, array: object, count: int, plan: Plan) -> Iterator[str]:
    """What is wrong with an array of samples: the first problem."""
    work, tokens = plan.work, plan.model.vocab_size
    is_extra = name not in ("inputs", "targets")
    if not isinstance(array, np.ndarray) or not array.ndim or len(array) != count:
        yield f"{name} of {count} samples are {_is_what(array)}; must be an array of {count} rows"
    elif array.dtype != np.int64 and (tokens or is_extra):
        yield f"{name} are {_is_what(array)}; must have the dtype int64"
    elif is_extra:
        return
    elif name == "inputs" and array.shape[1 : 2 if tokens is None else None] != (work.seq_len,):
        yield f"{name} are {_is_what(array)}; must have {work.seq_len} positions: `seq_len` of `source`"
    elif name == "targets" and tokens and array.shape[1:] not in ((work.positions(-1),), (2,)):
        yield f"{name} are {_is_what(array)}; must have {work.positions(-1)} positions: `num_targets` of `source`"
    elif tokens and (beyond := int(array.max())) >= tokens:
        yield f"{name} have {beyond}; must be below {tokens}, the vocabulary of the model"
    elif name == "inputs" and tokens and (least := int(array.min())) < 0:
        yield f"{name} have {least}; a token is 0 or more"


def _is_what(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"of the type {type(value).__name__}"
