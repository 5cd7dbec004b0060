"""In: an open run. Out: what people read before its first step: task, model, machine, where its weights come from.
Does not print or record it (report.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codescent import tasks
from codescent.base.counted import counted
from codescent.build.survival import nothing_to_compare
from codescent.config.contradictions import is_given
from codescent.huggingface.folder import Folder, inert_keys, spare_tensors
from codescent.models.lora.declare import is_adapter
from codescent.plan import AXES
from codescent.record.rows import strict
from codescent.train import threads
from codescent.train.continuing import length_of
from codescent.train.corpora import lines
from codescent.train.open import OpenRun


def introduction(run: OpenRun) -> Iterator[str]:
    """Lines on the task, the model, the batch and the machine. They come below those of `verbs.train.introduce`."""
    plan, found = run.plan, run.machine
    vocabulary = f", vocabulary {plan.model.vocab_size:,}" if plan.model.vocab_size else ""
    ranks = f"{found['world_size']} ranks, each " if found["world_size"] > 1 else ""
    name = found["processor"] if found["device"] == "cpu" else found["device"]
    for label, text in (
        ("task", tasks.task_line(plan)),
        (
            "model",
            f"{plan.model.kind}: {counted(plan.model.num_layers, 'layer')}, {plan.model.hidden_dim} channels"
            f"{vocabulary}; {plan.num_parameters:,} parameters",
        ),
        ("batch", f"{plan.work.tokens:,} tokens per step, {length_of(run)}"),
        (
            "device",
            f"{ranks}{run.world.device.type} ({name}), {counted(found['num_threads'], 'thread')}, "
            f"{plan.work.precision}, products {found['peak_flops_per_s'] / 1e9:,.0f} GFLOP/s"
            f"{threads.busy_said(found)}",
        ),
    ):
        yield f"{label:<8}{text}"
    yield from (f"{'corpus':<8}{line}" for line in lines(run))
    yield from (f"{'note':<8}{line}" for line in tasks.task_of_plan(plan).shortened(run.dataset, plan))
    if is_given(run.config, "train.check_every") and (line := nothing_to_compare(run.config.train.check_every, plan)):
        yield f"{'note':<8}{line}"


def description(run: OpenRun) -> dict[str, Any]:
    """The run as JSON data, for the functions of log.to and for trackers."""
    return {
        "name": run.config.run.name,
        "folder": str(run.path.absolute()),
        "first_step": run.first_step,
        "num_steps": run.config.train.num_steps,
        "num_parameters": run.plan.num_parameters,
        "plan": _headline(run),
        "config": run.config.model_dump(mode="json"),
        "environment": strict(run.machine),
    }


def _headline(run: OpenRun) -> dict[str, Any]:
    """The plan in a few numbers."""
    plan = run.plan
    return {
        "parameters": plan.num_parameters,
        "flops_per_step": plan.flops().total_flops,
        "tokens_per_step": plan.work.tokens,
        "samples_per_step": plan.work.global_batch_size,
        "microbatches": plan.work.num_microbatches,
        "ranks": run.world.this_rank.world_size,
        **{axis: plan.mesh.degree(axis) for axis in AXES},
    }


def drawn_weights(run: OpenRun) -> list[str]:
    """A line if the adapters of a new run are trained on weights that were drawn."""
    model = run.plan.model
    if model.weights is None and model.lora is not None:
        return ["no model.weights: adapters are trained with random weights, which stay frozen"]
    return []


def read_weights(run: OpenRun, weights: Folder) -> tuple[dict[str, Any], list[str]]:
    """The weights that a new run has read from a folder: for its event "start", and lines for people."""
    named = run.plan.model.weights
    held = [tensor.parameter for tensor in run.plan.tensors]
    adapters = sum(is_adapter(parameter) for parameter in held)
    own = [parameter for parameter in held if not is_adapter(parameter)]
    random = [parameter.name for parameter in own if not weights.has(parameter)]
    fingerprint = weights.fingerprint() if run.base is None else run.base["fingerprint"]
    new = f"; {counted(adapters, 'parameter')} of adapters: new" if adapters else ""
    rest = f"; initialised at random, as the folder lacks them: {', '.join(random)}" if random else ""
    line = f"weights of {counted(len(own) - len(random), 'parameter')} read from {named}{new}{rest}"
    return (
        {"folder": named, "fingerprint": fingerprint, "drawn": random},
        [line, *([spare_tensors(weights)] if weights.spare else []), *([inert_keys(weights)] if weights.inert else [])],
    )
