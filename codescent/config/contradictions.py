"""In: a config. Out: values that are valid alone and contradict each other, each with the problem in words.
Does not check what depends on ranks, presets or corpora (build does), or keys without effect (effects.py does)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from codescent.base.counted import counted
from codescent.base.device_kinds import AUTO, kind_of
from codescent.base.nearest import nearest_divisors
from codescent.config.mixture import MIXTURE, mixture_contradictions
from codescent.config.rate_schedules import refused_schedule

if TYPE_CHECKING:
    from codescent.config.sections import Config

INSTEAD = (
    ("train.num_epochs", "train.num_steps"),
    ("train.global_batch_tokens", "train.global_batch_size"),
    (MIXTURE, "data.corpus"),
)
"""Pairs of keys: where the first one is given, it decides the second one."""

Contradiction = tuple[tuple[str, ...], str]
"""Keys whose values contradict each other, and the problem. Messages print it after the first key."""


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Contradictions that do not depend on world size, preset or corpus. build finds the others."""
    optimizer, train = config.optimizer, config.train
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            ("optimizer.min_learning_rate", "optimizer.learning_rate"),
            f"given {optimizer.min_learning_rate}, which is above optimizer.learning_rate ({optimizer.learning_rate}); "
            "the learning rate decays towards it",
        )
    if train.num_epochs is not None:  # else with the steps, in `beyond_the_run`
        yield from refused_schedule(optimizer, None)
    yield from _device_contradictions(config)
    yield from _lora_contradictions(config)
    yield from _quantized_contradictions(config)
    if config.train.fp8 != "none" and config.train.precision != "bf16" and not config.train.fp8_emulated:
        yield (
            ("train.fp8", "train.precision"),
            f'given "{config.train.fp8}", but train.precision is "{config.train.precision}": products in fp8 have '
            'results in bf16; set train.precision to "bf16", or train.fp8_emulated to true',
        )
    yield from _restart_contradictions(config)
    yield from _checkpoint_contradictions(config)
    yield from _loss_contradictions(config)
    yield from _spike_contradictions(config)
    yield from mixture_contradictions(config)
    for first, second in INSTEAD:
        if is_given(config, first) and is_given(config, second):
            yield (first, second), f"given, and {second} too: the first decides the second; give one of the two"
    if train.num_epochs is None:  # else the steps are not known yet
        yield from beyond_the_run(config)
    size, samples = train.microbatch_size, train.global_batch_size
    if size is not None and train.global_batch_tokens is None and samples % size:
        yield (
            ("train.microbatch_size", "train.global_batch_size"),
            f"given {size}, which does not divide train.global_batch_size ({samples}); "
            f"the nearest smaller value that does is {nearest_divisors(samples, size)[0]}",
        )


def beyond_the_run(config: Config) -> Iterator[Contradiction]:
    """What does not fit into `train.num_steps`: a schedule of the learning rate, a window of the profile."""
    yield from refused_schedule(config.optimizer, config.train.num_steps)
    train = config.train
    if train.ema and train.ema_every > train.num_steps:
        yield (
            ("train.ema_every", "train.num_steps"),
            f"given {train.ema_every}, so the average would stay at the initial weights in the {train.num_steps} steps "
            f"of the run (train.num_steps); give at most {train.num_steps}",
        )
    yield from late_windows(config)


def late_windows(config: Config) -> Iterator[Contradiction]:
    """A problem if a window of the profile ends after the last step, `train.num_steps`."""
    profile, steps = config.profile, config.train.num_steps
    last = profile.repeat * (profile.wait + profile.warmup + profile.active)
    if profile.active and last > steps:
        windows = f"{profile.repeat} x " if profile.repeat > 1 else ""
        yield (
            ("profile.active", "train.num_steps"),
            f"{windows}({profile.wait} wait + {profile.warmup} warmup + {profile.active} active) = {last} steps, but "
            f"the run has {steps} (train.num_steps): record fewer steps, or take at least {last}",
        )


def is_given(config: Config, key: str) -> bool:
    """Whether a file or a command line gives the key a value other than "auto"."""
    section, name = key.split(".")
    values = getattr(config, section)
    return name in values.model_fields_set and getattr(values, name) is not None


def _lora_contradictions(config: Config) -> Iterator[Contradiction]:
    """Keys of [lora] without lora.rank, and other keys that exclude adapters."""
    lora = config.lora
    if lora.rank is None:
        for name, field in type(lora).model_fields.items():
            if getattr(lora, name) != field.default:
                yield (f"lora.{name}", "lora.rank"), "given, but lora.rank is not: there are no adapters"
        return
    if lora.weights is not None and config.model.weights is None:
        yield ("lora.weights", "model.weights"), "given, but model.weights is not: adapters belong to frozen weights"
    if config.train.compile == "model":
        yield (
            ("train.compile", "lora.rank"),
            'given "model", but lora.rank is set: the compiler cannot begin gradients after the embedding, which is '
            'not trained; set train.compile to "blocks"',
        )
    if lora.dropout and config.parallel.data_parallel > 1:
        yield (
            ("lora.dropout", "parallel.data_parallel"),
            f"given {lora.dropout}, but parallel.data_parallel is {config.parallel.data_parallel}, which copies layers "
            f"without the keys of their dropout; set parallel.ranks to {config.parallel.data_parallel} instead of "
            "data_parallel, or lora.dropout to 0.0",
        )
    if config.parallel.offload == "optimizer":
        yield (
            ("parallel.offload", "lora.rank"),
            'given "optimizer", but lora.rank is set: the optimizer has state for the adapters only, which is small; '
            'set parallel.offload to "none", or to "all" (also weights, with dp_shard and zero_stage 3)',
        )


def _quantized_contradictions(config: Config) -> Iterator[Contradiction]:
    """Keys by which quantized matrices would have to move."""
    quantize, parallel = config.lora.quantize, config.parallel
    others = {"offload": ("none", "stay on the device"), "data_parallel": (1, "have scales that torch would not copy")}
    for name, (only, why) in others.items():
        if quantize != "none" and getattr(parallel, name) != only:
            yield (
                ("lora.quantize", f"parallel.{name}"),
                f'given "{quantize}", but parallel.{name} is {json.dumps(getattr(parallel, name))}, and quantized '
                f'matrices {why}; set it to {json.dumps(only)}, or lora.quantize to "none"',
            )


def _checkpoint_contradictions(config: Config) -> Iterator[Contradiction]:
    """Saves beside training, in runs whose workers may die or come while one is under way."""
    if not config.checkpoint.asynchronous:
        return
    parallel = config.parallel
    others = {
        "servers": (parallel.servers != 0, "set it to 0"),
        "updates": (parallel.updates != "synchronous", 'set it to "synchronous"'),
    }
    for name, (excludes, what) in others.items():
        if excludes:
            yield (
                ("checkpoint.asynchronous", f"parallel.{name}"),
                f"given true, but with parallel.{name} = {json.dumps(getattr(parallel, name))} ranks take steps alone "
                f"and may be lost while a save is under way: {what}, or checkpoint.asynchronous to false",
            )


def _loss_contradictions(config: Config) -> Iterator[Contradiction]:
    """Two rules for a rank that dies."""
    if config.survive.on_loss != "stop" and config.parallel.restarts:
        yield (
            ("survive.on_loss", "parallel.restarts"),
            f'given "{config.survive.on_loss}", but with parallel.restarts = {config.parallel.restarts} a worker of '
            'servers that has died is started again alone: set it to 0, or survive.on_loss to "stop"',
        )


def _spike_contradictions(config: Config) -> Iterator[Contradiction]:
    """Runs in which a spike cannot be refused, or in which there is no checkpoint to go back to."""
    survive, parallel, checkpoint = config.survive, config.parallel, config.checkpoint
    if survive.on_spike == "none":
        return
    others = {
        "servers": (parallel.servers != 0, "0"),
        "average_every": (parallel.average_every != 0, "0"),
        "gossip": (parallel.gossip != "none", '"none"'),
    }
    for name, (excludes, instead) in others.items():
        if excludes:
            yield (
                ("survive.on_spike", f"parallel.{name}"),
                f'given "{survive.on_spike}", but with parallel.{name} = {json.dumps(getattr(parallel, name))} ranks '
                f'update without the loss of all: set it to {instead}, or survive.on_spike to "none"',
            )
    if survive.on_spike != "rollback":
        return
    if not checkpoint.every:
        yield (
            ("survive.on_spike", "checkpoint.every"),
            'given "rollback", but checkpoint.every is 0: there is no checkpoint to go back to; set it to a number of '
            "steps",
        )
        return
    if config.train.num_epochs is None and survive.rollback_steps >= config.train.num_steps:
        yield (
            ("survive.rollback_steps", "train.num_steps"),
            f"given {survive.rollback_steps}, but the run has {counted(config.train.num_steps, 'step')} "
            "(train.num_steps): no checkpoint can be so old; set it to less",
        )
        return
    oldest = (checkpoint.keep_last - 1) * checkpoint.every + 1
    if oldest < survive.rollback_steps:
        yield (
            ("survive.rollback_steps", "checkpoint.keep_last", "checkpoint.every"),
            f"given {survive.rollback_steps}, but just after a save the oldest checkpoint is {counted(oldest, 'step')} "
            f"old (checkpoint.keep_last = {checkpoint.keep_last}, checkpoint.every = {checkpoint.every}): set "
            f"checkpoint.keep_last to {-(-(survive.rollback_steps - 1) // checkpoint.every) + 1}",
        )


def _restart_contradictions(config: Config) -> Iterator[Contradiction]:
    """Runs that end when a worker dies, so that none can be started again."""
    parallel = config.parallel
    if not parallel.restarts:
        return
    others = {
        "servers": (parallel.servers in (0, "workers"), "must be a number of ranks that only serve, such as 1"),
        "updates": (
            parallel.updates == "synchronous",
            'each step waits for each worker; set it to "asynchronous", with parallel.staleness = 0 for equal losses',
        ),
        "average_every": (parallel.average_every != 0, "an optimizer dies with its worker; set it to 0"),
        "wire": (parallel.wire != "none", 'a residual dies with its worker; set it to "none"'),
    }
    for name, (excludes, why) in others.items():
        if excludes:
            yield (
                ("parallel.restarts", f"parallel.{name}"),
                f"given {parallel.restarts}, but the death of a worker ends a run with parallel.{name} = "
                f"{json.dumps(getattr(parallel, name))}: {why}; or set parallel.restarts to 0",
            )


def _device_contradictions(config: Config) -> Iterator[Contradiction]:
    """Keys that need CUDA or exclude torch.compile. With train.device = "auto" each rank checks its device later."""
    train, parallel = config.train, config.parallel
    kind = kind_of(train.device)
    if train.device != AUTO and not kind.own_memory and parallel.offload != "none":
        yield (
            ("parallel.offload", "train.device"),
            f'given "{parallel.offload}", but train.device is "{kind.name}", which computes in host memory: there is '
            'nothing to offload; set it to "none"',
        )
    if train.device != AUTO and not kind.copies_modules and parallel.data_parallel > 1:
        yield (
            ("parallel.data_parallel", "train.device"),
            f'given {parallel.data_parallel}, but train.device is "{kind.name}", and torch.nn.DataParallel divides a '
            f"batch over CUDA devices; for several ranks set parallel.ranks to {parallel.data_parallel}, without it",
        )
    if train.deterministic and not kind.deterministic:
        yield (
            ("train.deterministic", "train.device"),
            f'given true, but train.device is "{kind.name}": torch does not say which of its kernels are '
            'deterministic; set it to false, or train.device to "cpu"',
        )
    if train.device != AUTO and not kind.backend and parallel.ranks > 1:
        yield (
            ("parallel.ranks", "train.device"),
            f'given {parallel.ranks}, but train.device is "{kind.name}", and torch has no collectives there; set it to '
            '1, or train.device to "cpu"',
        )
    yield from _graph_contradictions(config)
    if train.compile not in (None, "none") and parallel.pp > 1 and parallel.schedule == "zero-bubble":
        yield (
            ("parallel.schedule", "train.compile"),
            f'given "zero-bubble", but train.compile is "{train.compile}": compiled layers compute all gradients at '
            'once and cannot delay those of weights; set train.compile to "none", or parallel.schedule to "1f1b"',
        )
    if train.compile not in (None, "none") and parallel.recompute == "products" and parallel.cp > 1:
        yield (
            ("parallel.recompute", "train.compile"),
            f'given "products", but train.compile is "{train.compile}" and parallel.cp {parallel.cp}: messages divide '
            'a block, so the products inside of compiled code cannot be kept; set parallel.recompute to "full", or '
            'train.compile to "none"',
        )
    if train.compile not in (None, "none") and parallel.data_parallel > 1:
        yield (
            ("parallel.data_parallel", "train.compile"),
            f'given {parallel.data_parallel}, but train.compile is "{train.compile}": torch.nn.DataParallel copies '
            'modules in every step, and compiled modules cannot be copied; set train.compile to "none", or '
            f"parallel.ranks to {parallel.data_parallel} instead of data_parallel",
        )


def _graph_contradictions(config: Config) -> Iterator[Contradiction]:
    """Keys that exclude CUDA graphs. A graph has fixed addresses and no message, and its results live until the next
    replay."""
    train, parallel = config.train, config.parallel
    if not train.cuda_graphs:
        return
    kind = kind_of(train.device)
    without_graphs = train.device != AUTO and not kind.graphs
    others = {
        ("train", "device"): (without_graphs, f"there are none on {kind.a_device}"),
        ("train", "compile"): (train.compile == "model", "the head of a whole model reads its gradients in forward"),
        ("parallel", "offload"): (parallel.offload != "none", "weights and gradients change their addresses"),
        ("parallel", "data_parallel"): (parallel.data_parallel > 1, "compiled modules cannot be copied"),
        **{
            ("parallel", axis): (
                getattr(parallel, axis) > 1,
                "a block then has messages, or activations of several passes",
            )
            for axis in ("pp", "dp_shard", "ep", "cp", "tp")
        },
    }
    for (section, name), (excludes, why) in others.items():
        if excludes:
            value = getattr(getattr(config, section), name)
            yield (
                ("train.cuda_graphs", f"{section}.{name}"),
                f"given true, but {section}.{name} is {value!r}: {why}; set train.cuda_graphs to false",
            )
