"""In: a config. Out: the run folder's path, the layout and the plan; or all errors that are found before ranks start.
Does not import torch or start a process. `codescent plan` and the process that starts local ranks call it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from codescent import tasks
from codescent.base import own_names
from codescent.base.command import command, how_to_tune
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.extra import install, is_installed
from codescent.base.refusal import Change
from codescent.base.secret import warnings
from codescent.build import (
    Began,
    build,
    check_own_names,
    check_sizes,
    needs_vocab_size,
    on_resume,
    resolve,
    saved_plan,
    task_request,
)
from codescent.build.accept import changed
from codescent.build.own import unread_keys
from codescent.build.rates_so_far import SCHEDULE_KEYS, same_rates
from codescent.checkpoint.folders import by_step
from codescent.config import decided, effects
from codescent.config.contradictions import beyond_the_run
from codescent.config.load import LoadedConfig, flat
from codescent.config.mixture import MIXTURE, place_of
from codescent.config.own_keys import own_names_in
from codescent.config.sections import Config
from codescent.config.words import KEYS, toml_value
from codescent.data.mixture import uses, without_samples
from codescent.data.samples import AnyDataset
from codescent.hub.cache import weights_place
from codescent.huggingface.folder import fitting, open_folder
from codescent.huggingface.named import DATA_KEYS, keys_of_run, obtain_all
from codescent.huggingface.peft_folder import open_merged, open_start
from codescent.plan import DECAY_STEPS, SCALE_RANKS, Plan, Scalar
from codescent.planner.prediction import cluster_of_run
from codescent.planner.search import auto
from codescent.record import RunFolder
from codescent.record.beginning import is_free, refuse_taken
from codescent.tasks.own import wrong_samples


def run_folder(config: Config) -> Path:
    """The path of the run folder: run.folder, or runs/NAME."""
    return config.run.folder if config.run.folder is not None else Path("runs") / config.run.name


def is_begun(config: Config) -> bool:
    """Whether there is anything in the place of the run folder: the run, or what must not be overwritten."""
    return not is_free(run_folder(config))


class Checked(NamedTuple):
    """What is known of a run before its ranks start.

    Attributes:
        plan: of the run.
        chosen: the keys of a layout that was chosen, as words of a command line. A rank that is given them has no other
            choice, so it does not search. It still says and records the layout, as under every launcher.
        config: with the layout that was chosen.
        vocab_size: of the data.
    """

    plan: Plan
    chosen: list[str]
    config: Config
    vocab_size: int | None


def laid_out(config: Config, world_size: int, *, without_data: bool = False) -> tuple[Config, str]:
    """The config with a layout, and a line on it; the config as it is and "" if it gives its layout. See `plan_of`.

    Raises:
        UserError: see `planner.search.auto.layout_of`.
    """
    if not auto.is_open(config):
        return config, ""
    found, vocab_size = _with_data(config, world_size, without_data=without_data)
    chosen = auto.layout_of(found, vocab_size, world_size)
    return changed(config, chosen.change), chosen.said


def obtain_named(config: Config, *, resume: bool) -> None:
    """Download what the run reads of a hub, as far as the cache lacks it. Raises UserError: see `obtain_all`."""
    has_adapters = effects.value_of(config, "lora.rank") is not None
    obtain_all(config, keys_of_run(resumes=resume, has_adapters=has_adapters))


def plan_of(config: Config, world_size: int, *, without_data: bool = False) -> Plan:
    """Build the plan of a config, with its layout (`laid_out`). The corpus is prepared only if the plan depends on it:
    on the size of its vocabulary ("char"), or on the steps of its epochs (parallel.average_every).

    Without a prepared corpus the number of steps in `train.num_epochs` is unknown, and so is `decay_steps`.

    Args:
        config: of the run.
        world_size: number of ranks.
        without_data: do not look at the files of [data], see `absent`.

    Raises:
        UserError: all problems of the config, or a corpus that cannot be prepared.
    """
    config, _ = laid_out(config, world_size, without_data=without_data)
    found, vocab_size = _with_data(config, world_size, without_data=without_data)
    try:
        return build(found, vocab_size, world_size)
    except UserError as error:
        raise decided.as_given(error, config) from error


def _with_data(config: Config, world_size: int, *, without_data: bool) -> tuple[Config, int | None]:
    """The config with what data decides, and its vocabulary, as far as `plan_of` needs and knows them."""
    vocab_size = vocabulary_of(config, world_size, without_data=without_data)
    dataset = None
    if not without_data and decided.averages_in_epochs(config):
        check_sizes(config, world_size)
        obtain_all(config, DATA_KEYS)
        dataset = tasks.prepare_and_open(task_request(config), progress=True)
    elif not without_data and decided.needs_samples(config):
        dataset = prepared(config)
    return (config, vocab_size) if dataset is None else (settled(config, dataset), dataset.vocab_size)


def vocabulary_of(config: Config, world_size: int, *, without_data: bool = False) -> int | None:
    """The tokens of the vocabulary, as `build` takes it; see `plan_of`, also for the errors."""
    check_own_names(config)
    request = task_request(config)
    vocab_size = None if without_data else tasks.task_of(request).vocab_size(request)
    if vocab_size is None and needs_vocab_size(config):
        check_sizes(config, world_size)
        obtain_all(config, DATA_KEYS)
        return tasks.prepare_and_open(task_request(config), progress=True).vocab_size
    return vocab_size


def absent(config: Config) -> list[str]:
    """A sentence for each file of [data] that is not there, if the plan does not need it; otherwise none.

    A plan does not need the files if the config gives the size of the vocabulary.
    """
    if needs_vocab_size(config):
        return []
    request = task_request(config)
    missing = {key: request.named.get(key.removeprefix("data."), file) for key, file in tasks.absent(request).items()}
    return [f"{key}: {file} is not there yet; the plan does not need it" for key, file in missing.items()]


def without_effect(loaded: LoadedConfig) -> list[str]:
    """Sentences: keys that are given and have no effect, because another key, the task or the model rules them out.

    A key that needs more ranks than the run has is left out: one file serves one rank and many.
    """
    config = loaded.config
    found = dict(effects.without_effect(config))
    try:
        found |= {key: why for key, why in unread_keys(config) if not effects.is_default(config, key)}
        of_task = dict(tasks.without_effect(task_request(config)))
    except UserError:  # the run is refused, and the refusal says why
        of_task = {}
    found |= {key: why for key, why in of_task.items() if not effects.is_default(config, key)}
    keys = [*(key for key in KEYS if key in found), *(key for key in found if place_of(key) is not None)]
    return [
        *loaded.replaced,
        *(
            f"{loaded.origins[MIXTURE if place_of(key) else key]}: {key} = "
            f"{toml_value(effects.value_of(config, key))} has no effect: it {found[key]}"
            for key in keys
        ),
    ]


def notes(loaded: LoadedConfig) -> list[str]:
    """Sentences for the user before the run: `without_effect`, secrets, and what a task finds odd in its corpus."""
    try:
        found = list(tasks.remarks(task_request(loaded.config)))
    except UserError:  # the run is refused, and the refusal says why
        found = []
    values = [(name, str(value)) for name, value in flat(loaded.config).items()]
    where = ((f"{loaded.origins.get(name, MIXTURE)}: {name}", text) for name, text in values)
    return [*without_effect(loaded), *warnings(where, "run folders are"), *found]


def plan_with(config: Config, dataset: AnyDataset, world_size: int, began: Began | None = None) -> tuple[Config, Plan]:
    """Build the plan of a config for an open dataset.

    `began`: how the run to resume began: messages advise only what continues it; None: a new run.

    Returns:
        The config, with numbers in train.num_steps and train.global_batch_size where train.num_epochs and
        train.global_batch_tokens were given instead; and its plan.

    Raises:
        UserError: all problems of the config, or splits that are too short for it; run.cluster is no cluster.
    """
    cluster_of_run(config)  # a wrong one is refused before the run begins
    given, config = config, settled(config, dataset)
    try:
        plan = build(config, dataset.vocab_size, world_size)
    except UserError as error:
        told = decided.as_given(error, given)
        if began is not None:
            told = on_resume(told, config, dataset.vocab_size, world_size, began)
        raise told from error
    if problems := [*tasks.task_of_plan(plan).misfits(dataset, plan), *wrong_samples(dataset, plan)]:
        raise UserError(*problems)
    problems = [f"{keys[0]}: {problem}" for keys, problem in beyond_the_run(config)]  # epochs are steps now
    problems += too_short(config, dataset, plan)
    if problems:
        raise UserError(*problems)
    return decided.without_tokens(config), plan


def too_short(config: Config, dataset: AnyDataset, plan: Plan) -> list[str]:
    """Why the splits of an open dataset have too few samples for a run."""
    work, size, problems = plan.work, plan.work.global_batch_size, list[str]()
    train, validation = (dataset.source(name, work.seq_len, work.positions(-1)) for name in ("train", "validation"))
    if train.num_samples < size:
        samples = f"{counted(train.num_samples, 'sample')} of {counted(work.seq_len, 'position')}"
        problems.append(
            f"{dataset.path}: the training split has {samples}, fewer than train.global_batch_size = {size}; lower it "
            "or data.seq_len, or use a longer corpus"
        )
    if config.train.eval_every and (empty := without_samples(validation)):
        request = task_request(config)
        more = tasks.task_of(request).more_validation(request)
        problems += [
            f"{where}: the validation split has no sample of {work.seq_len} positions; {more}, lower data.seq_len, or "
            "set train.eval_every = 0"
            for where in (f"{MIXTURE}.{name}" if name else dataset.path for name in empty)
        ]
    return problems


def settled(config: Config, dataset: AnyDataset) -> Config:
    """The config with the numbers that an open dataset decides: samples of a step, number of steps."""
    if not decided.needs_samples(config) and config.train.global_batch_tokens is None:
        return config
    try:
        resolved = resolve(config, dataset.vocab_size)
    except UserError:  # `build` raises it, with all other problems
        return config
    config = decided.with_samples(config, resolved.sample_tokens)
    source = dataset.source("train", resolved.seq_len, resolved.sample_tokens)
    return decided.with_steps(config, source.num_samples)


def steps_in_words(config: Config, *, without_data: bool = False) -> str:
    """The number of steps of a run for `codescent plan`, with the epochs that decide it. See `plan_of`.

    Raises:
        UserError: the data is prepared, and damaged.
    """
    epochs = config.train.num_epochs
    if epochs is None:
        return f"{config.train.num_steps:,}"
    dataset = None if without_data else prepared(config)
    if dataset is None:
        return f"{counted(epochs, 'epoch')}, unknown until the data is prepared, which `codescent train` does first"
    return f"{settled(config, dataset).train.num_steps:,} in {counted(epochs, 'epoch')}"


def mixture_in_words(config: Config, plan: Plan, *, without_data: bool = False) -> list[str]:
    """A line for each corpus of a mixture, for `codescent plan`: its share, and its epochs by the end of the run.

    Raises:
        UserError: the data is prepared, and damaged.
    """
    request = task_request(config)
    if not request.corpora:
        return []
    dataset = None if without_data else prepared(config)
    if dataset is None:
        total = sum(request.weights.values())
        shares = {name: f"{weight / total:.1%} of the samples" for name, weight in request.weights.items()}
        unknown = "epochs unknown until the data is prepared"
        return [f"{name}: {shares.get(name, 'share by its size')}, {unknown}" for name in request.corpora]
    source = dataset.source("train", plan.work.seq_len, plan.work.positions(-1))
    num_steps = settled(config, dataset).train.num_steps
    return [use.in_words() for use in uses(source, plan.work.global_batch_size, num_steps)]


def prepared(config: Config) -> AnyDataset | None:
    """The dataset of a config, if it is prepared already. Raises UserError: it is damaged."""
    request = task_request(config)
    task = tasks.task_of(request)
    path = task.locate(request)
    return None if path is None else task.open(request, path)


def check(config: Config, world_size: int, *, resume: bool, creates_folder: bool = True) -> Checked:
    """Prepare the data, choose a layout if the config gives none, and check the run before any rank is started.

    Args:
        creates_folder: whether a new run creates its run folder, so that no other may be there.

    Raises:
        UserError: the run cannot begin, or cannot be resumed, with this config and data.
    """
    path = run_folder(config)
    folder = RunFolder.open(path) if resume else None
    if folder is None and creates_folder:
        refuse_taken(path)
    check_own_names(config)
    if folder is None:
        check_sizes(config, world_size)
    request = task_request(config)
    dataset = tasks.prepare_and_open(dataclasses.replace(request, pinned=pin(request, folder)), progress=True)
    saved = None if folder is None else saved_plan(folder)
    chosen = auto.layout_of(settled(config, dataset), dataset.vocab_size, world_size, saved)
    began = None if saved is None else Began.of(saved)
    config, plan = plan_with(changed(config, chosen.change), dataset, world_size, began)
    check_weights(plan, dataset, resume=resume)
    if folder is not None:
        check_same_trajectory(folder, plan, dataset, config.train.num_steps)
        check_same_files(request, folder, dataset)
    return Checked(plan, Change(chosen.keys).words(), config, dataset.vocab_size)


def request_with_kept(request: tasks.TaskRequest, folder: RunFolder) -> tasks.TaskRequest:
    """The request with the task's files in the run folder."""
    return dataclasses.replace(request, run=folder.path, kept=folder.read_task_files(tasks.task_of(request).files))


def refuse_moved(config: Config) -> None:
    """Raise UserError if files or code that a resumed run needs, beside the corpus, are not there any more.

    The message has overrides with their new places. `check_same_trajectory` compares the contents there.
    """
    if lost := list(_lost_code(config)):
        raise UserError(*lost)
    request = task_request(config)
    weights, has_adapters = request.model.weights, effects.value_of(config, "lora.rank") is not None
    missing = {key: Path(file) for key, file in tasks.absent(request).items() if not key.endswith(".corpus")}
    if isinstance(weights, Path) and has_adapters and not weights.is_dir():
        missing = {"model.weights": weights, **missing}
    useless = dict(tasks.without_effect(request)) if missing else {}
    before = {key: str(effects.value_of(config, key)) for key in missing if key not in useless}
    if before:
        listed = ", ".join(f"{key} = {value}" for key, value in before.items())
        now = (
            f"{key}={value.replace(str(missing[key]), _in_new(missing[key], weights))}" for key, value in before.items()
        )
        raise UserError(
            f"{run_folder(config)}: no such folder or file: {listed}; if it was moved to a folder NEW, add to the "
            f"command: {' '.join(now)}"
        )


def _lost_code(config: Config) -> Iterator[str]:
    """A problem for each name of the user's code whose module is not found, with the files that the run had."""
    names = own_names_in(config)
    had = RunFolder.open(run_folder(config)).read_environment().get("own_code", {}) if names else {}
    for key, name in names.items():
        if problem := own_names.missing(key, name):
            files = ", ".join((had.get(key) or {}).get("files", ()))
            yield f"{problem}; the run had {files}" if files else problem


def _in_new(file: Path, weights: Path | str | None) -> str:
    """A path with NEW in place of the folder model.weights. Elsewhere a folder is NEW itself, and a file is in NEW."""
    if isinstance(weights, Path) and file.absolute().is_relative_to(weights):
        return str("NEW" / file.absolute().relative_to(weights))
    return f"NEW/{file.name}" if file.suffix else "NEW"


def pin(request: tasks.TaskRequest, folder: RunFolder | None) -> Mapping[str, Any]:
    """The values that rank 0 decides for all ranks before the data is prepared: see `Task.pin`.

    Args:
        request: of the run.
        folder: of the run to resume; None: a new run.

    Raises:
        UserError: a file of the task (a chat template) cannot be read, or has changed since the run began.
    """
    return tasks.task_of(request).pin(request if folder is None else request_with_kept(request, folder))


def imported(run: Path) -> UserError:
    """The error for a run that cannot be resumed because it was imported."""
    missing = [key for event in RunFolder.open(run).read_events() for key in event.get("missing", ())]
    return UserError(
        f"{run}: was imported and has no training steps: there is nothing to resume; begin a run with its weights"
        f"{how_to_tune(run, missing)}"
    )


def check_same_files(request: tasks.TaskRequest, folder: RunFolder, dataset: AnyDataset) -> None:
    """Check that the data fits the task's files in the folder of a run to resume.

    Raises:
        UserError: the data or the files have changed.
    """
    if problems := list(tasks.task_of(request).refuse_resume(request_with_kept(request, folder), dataset)):
        raise UserError(*problems)


def check_weights(plan: Plan, dataset: AnyDataset, *, resume: bool) -> None:
    """Check the folder model.weights of a run. A resumed run needs it only if it trains adapters.

    Raises:
        UserError: the folder is damaged, has other sizes than the model or another tokenizer, or lacks parameters that
            stay frozen; the library that quantizes is not installed.
    """
    model = plan.model
    if model.lora is not None and model.lora.quantize and not is_installed("bitsandbytes"):
        raise UserError(
            f'lora.quantize = "{model.lora.quantize}" needs bitsandbytes, which is not installed: {install("qlora")}'
        )
    if model.weights is None or (resume and model.lora is None):
        return
    named = str(plan.task.identity["tokenizer"])
    folder = fitting(weights_place(model.weights), model, dataset.tokenizer_text, named)
    if model.adapters is not None:
        open_merged(Path(model.adapters), folder)
    if model.lora is not None and model.lora.start is not None and not resume:
        open_start(Path(model.lora.start), folder, model.lora)
    declared = [tensor.parameter for tensor in plan.tensors]
    missing = [parameter.name for parameter in declared if not (parameter.trained or folder.has(parameter))]
    if missing:
        layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in missing))
        raise UserError(
            f"model.weights = {model.weights}: has no {', '.join(missing)}, which with lora.rank would keep their "
            f"random values; add {layers} to lora.whole to train them"
        )


def check_same_trajectory(
    folder: RunFolder, plan: Plan, dataset: AnyDataset, num_steps: int
) -> dict[str, tuple[Scalar, Scalar]]:
    """Check that a run can be resumed with a plan: with this plan, the steps so far would have had the same losses.

    The layout, logging and the number of stored checkpoints may change, and the place of files with the same content
    (`_is_moved`). In two cases the keys of the optimizer may change, too, but not its kind. One: the run has failed,
    because numbers were not finite (`ruined_step`). Two: its schedule has ended, and the command gives it more steps.
    The schedule may always change where no step so far had another rate: a constant run goes on with a decay.

    Args:
        folder: the run.
        plan: of the command.
        dataset: of the command.
        num_steps: of the command.

    Returns:
        Each key of the optimizer that changes: (old value, new value).

    Raises:
        UserError: each other key that differs, with both values.
    """
    saved = saved_plan(folder)
    differs = {
        key: values for key, values in saved.differing(plan).items() if not _is_moved(key, folder, plan, dataset)
    }
    free = [key for key in differs if "optimizer." in key and key != "optimizer.kind"]  # its state was saved
    changes = {}
    if free and ruined_step(folder) is not None:
        changes = {key: differs[key] for key in free}
    elif free and _schedule_is_over(folder, saved.trajectory().get(DECAY_STEPS), num_steps):
        changes = {key: differs[key] for key in free if key.startswith("optimizer.")}
    elif free and SCHEDULE_KEYS.issuperset(free) and same_rates(saved, plan, _steps_done(folder)):
        changes = {key: differs[key] for key in free}
    problems = [
        f"{key}: the run in {folder.path} has {old!r}, this config {new!r}{_keep_rates(key, old, new, num_steps)}"
        for key, (old, new) in differs.items()
        if key not in changes
    ]
    if problems:
        same = f"give the same values to continue {folder.path}, or start a new run.name"
        raise UserError(*problems, f"{same}{_new_phase(differs, folder)}")
    return changes


def _new_phase(differs: Iterable[str], folder: RunFolder) -> str:
    """How to go on with another mixture: its weights decide the samples of every step, so it is another run."""
    if not any(key.startswith(MIXTURE) for key in differs):
        return ""
    out = f"{folder.path}-weights"
    begin = f"{command('export', folder.path, out)}, then model.weights={out}"
    return f"; for a phase with another mixture begin a run with its weights: {begin}"


def _is_moved(key: str, folder: RunFolder, plan: Plan, dataset: AnyDataset) -> bool:
    """Whether the file or folder that a key names has the content with which the run began: only its place differs."""
    task = tasks.task_of_plan(plan)
    if (name := task.kept.get(key)) is not None:
        return task.carry(dataset).get(name, "") == folder.read_task_files([name]).get(name)
    if key != "model.weights" or plan.model.weights is None:
        return False
    began = next((event for event in folder.read_events() if event.get("kind") == "start"), {})
    weights, now = began.get("weights"), open_folder(weights_place(plan.model.weights), plan.model)
    return isinstance(weights, dict) and now.fingerprint() == weights.get("fingerprint")


def _steps_done(folder: RunFolder) -> int:
    """The steps of the newest checkpoint."""
    return max(by_step(folder.checkpoints), default=0)


def _schedule_is_over(folder: RunFolder, decay_steps: Scalar, num_steps: int) -> bool:
    """Whether a run has ended at or after the end of its decay, before step `num_steps`."""
    step = ended_at(folder)
    return step is not None and isinstance(decay_steps, int) and decay_steps <= step < num_steps


def ended_at(folder: RunFolder) -> int | None:
    """The last step of a run that has taken all its steps, or has ended early; None: it was interrupted, or goes on."""
    kinds = ("start", "resume", "end")
    last: dict[str, Any] = next((one for one in reversed(folder.read_events()) if one.get("kind") in kinds), {})
    step = last.get("step")
    return step if last.get("kind") == "end" and isinstance(step, int) else None


def _keep_rates(key: str, old: Scalar, new: Scalar, num_steps: int) -> str:
    """What else to give if only train.num_steps differs, which decides where the schedule ends; or the ranks."""
    if key == SCALE_RANKS:
        return f"; add optimizer.scale_ranks={old}, which keeps the learning rate"
    if key != DECAY_STEPS or new != num_steps or old is None:
        return ""
    return (
        f"; add optimizer.decay_steps={old}, which keeps the schedule: from step {old} on the learning rate is "
        "optimizer.min_learning_rate; after its last step the run may go on with another schedule"
    )


def ruined_step(folder: RunFolder) -> int | None:
    """The step after which the weights were bad, if the run failed for this reason and was not resumed; else None."""
    for event in reversed(folder.read_events()):
        if event.get("kind") in ("failed", "start", "resume"):
            ruined: int | None = event.get("ruined_step")
            return ruined
    return None
