"""In: runs and an evaluated study. Out: the report about them: what is said first, then sections of details.
Does not write HTML or Markdown, and does not draw before a figure is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from codescent.base.amounts import of_share
from codescent.base.counted import counted
from codescent.report import corpora, findings, predicted, ran, run_figures, run_tables, study_figures, study_tables
from codescent.report.content import Item, Listing, Picture, Report, ReportSection, Timeline, Words
from codescent.report.slow import SLOW
from codescent.report.summary import Summary, summaries
from codescent.report.traced import traced
from codescent.report.walk import StepTimeline, computed, measured
from codescent.results import Run
from codescent.study.result import Study

MOST_BOXES = 5000
"""Boxes of all timelines of a page: about 0.8 MB."""
MOST_RANKS = 64
"""Ranks of a timeline."""
MOST_CONFIGS = 3
"""Configs that are shown whole."""

HOW = (
    "Speeds of a run are medians over the steps after the warm-up: a tenth of the steps, at least 5 and at most 50. "
    "In a study it is the number that its study file names. "
    "Intervals are 95 %, of the steps of one run: another run of the same config may lie outside. `codescent study` "
    "repeats runs, and `codescent compare` says whether two differ.",
    "The parts of a step (forward, backward, communication, bubble, optimizer, data, other) are means over the rows of "
    "ranks.csv after the warm-up, and sum to the step. Computing means forward and backward.",
    "Bubble is the waiting that remains when the instruction lists of the Plan are walked at the measured seconds and "
    "messages take no time. The rest of the waiting is communication.",
    f"A rank is called slow if its passes take more than {of_share(SLOW)} longer than those of the other ranks of its "
    f"part of the model. The others must also wait at least {of_share(findings.WAITED)} of a step longer than it does. "
    "A stage of one rank is compared by the FLOPs of the Plan.",
    "mfu is the speed in model FLOPs, divided by the peak of matrix products that was measured on the same devices.",
)


def report(runs: Sequence[Run], study: Study | None = None) -> Report:
    """The report about runs, or about a study and its runs. Raises UserError: a file of a run folder is damaged."""
    known = summaries(runs) if study is None else summaries(runs, 2, study.warmup)
    title = study.name if study is not None else ", ".join(one.name for one in known[:3])
    title += f" and {len(known) - 3} more" if study is None and len(known) > 3 else ""
    pictures = [] if study is None else list(study_figures.pictures(study))
    first = [picture for picture in pictures if picture.name in study_figures.FIRST]
    others = [picture for picture in pictures if picture not in first]
    answers = findings.answers(known) if study is None else study_tables.answers(study, known)
    config = ran.of_runs(known) if study is None else ran.of_study(study)
    return Report(
        title,
        list(_about(known, study)),
        [answer for answer in answers if answer.sentences],
        [_told(section, config) for section in _sections(known, study, others) if section.items],
        [replace(picture, config=config) for picture in first],
    )


def _told(section: ReportSection, config: str) -> ReportSection:
    """The section whose figures say what was run."""
    items = [replace(item, config=config) if isinstance(item, Picture) else item for item in section.items]
    return replace(section, items=items)


def _about(known: Sequence[Summary], study: Study | None) -> Iterator[str]:
    """What was run on what."""
    if study is not None:
        yield study_tables.about(study)
    plans = [one.run.plan for one in known if one.run.plan is not None]
    models = dict.fromkeys(
        f"{plan.model.kind} with {plan.num_parameters:,} parameters, {plan.work.global_batch_size} samples of "
        f"{plan.work.seq_len} positions a step, {plan.work.precision}"
        for plan in plans
    )
    few = list(models)[:2]
    if few:
        yield f"{'; '.join(few)}{f'; and {len(models) - 2} more' if len(models) > 2 else ''}."
    machines = dict.fromkeys(run_tables.machine(one.run.environment) for one in known if one.run.environment)
    yield from (f"{said}." for said in list(machines)[:3])


def _sections(known: Sequence[Summary], study: Study | None, figures: Sequence[Picture]) -> Iterator[ReportSection]:
    if study is not None:
        items: list[Item] = [*study_tables.tables(study), *predicted.points_table(study), *figures]
        yield ReportSection("study", "The study", [*items, *study_tables.fits(study)])
    pictures = list(run_figures.pictures(known, parts=study is None))
    losses = [picture for picture in pictures if picture.name.startswith("loss")]
    memory = [picture for picture in pictures if picture.name.startswith("memory")]
    times = [picture for picture in pictures if picture not in losses and picture not in memory]
    yield ReportSection("runs", "The runs", [run_tables.overview(known), *losses] if known else [])
    yield ReportSection("corpora", "The corpora", list(corpora.tables(known)))
    yield ReportSection("differences", "What differs between the configs", list(run_tables.differences(known)))
    yield ReportSection("time", "Where the time goes", [*run_tables.parts(known), *times])
    yield ReportSection("ranks", "Slow ranks", list(_stragglers(known)))
    yield ReportSection("timeline", "One step, rank by rank", list(timelines(known)))
    yield ReportSection("plan", "The Plan beside the measurement", list(run_tables.prediction(known)))
    yield ReportSection("predicted", "Predicted beside measured", list(predicted.items(known, study)))
    yield ReportSection("memory", "Memory", [*run_tables.memory(known), *memory])
    yield ReportSection("machine", "Machine and software", list(run_tables.machines(known, study)))
    configs = [Listing(f"config.toml of {one.name}", one.run.folder.config_text) for one in known[:MOST_CONFIGS]]
    yield ReportSection("how", "How this was measured", [Words(HOW, listed=True), *configs])


def _stragglers(known: Sequence[Summary]) -> Iterator[Item]:
    several = [one for one in known if len(one.ranks) > 1]
    if not several:
        return
    if table := run_tables.stragglers(several):
        yield table
    else:
        yield Words([f"{counted(len(several), 'run')} with several ranks: no rank is slower than the others."])


def timelines(known: Sequence[Summary]) -> Iterator[Timeline | Words]:
    """One step of each run with several ranks, until there are MOST_BOXES; a sentence says which runs are left out."""
    left, out = MOST_BOXES, []
    seen: dict[str, int] = {}
    for one in known:
        timeline = _timeline(one) if len(known) == 1 or len(one.ranks) > 1 else None
        if timeline is None:
            continue
        plan = one.run.plan
        key = repr((plan.mesh, plan.layout, plan.work, plan.model.sizes)) if plan is not None else ""
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            continue
        boxes = sum(len(walk.boxes) for walk in timeline.walks)
        if boxes > left:
            out.append(one.name)
            continue
        left -= boxes
        yield timeline
    if repeats := sum(times - 1 for times in seen.values()):
        yield Words([f"Of runs with one layout and model the first is shown: {counted(repeats, 'run')} left out."])
    if out:
        names = ", ".join(out[:5]) + (f" and {len(out) - 5} more" if len(out) > 5 else "")
        yield Words(
            [f"Left out, because the page would become too large: {names}. A report of such a run alone has it."]
        )


def _timeline(one: Summary) -> Timeline | None:
    """The step of a run, computed and measured; None: ranks.csv or the plan does not say it."""
    plan, ranks = one.run.plan, one.ranks
    if plan is None or len(ranks) != plan.mesh.world_size:
        return None
    compute_s = sum(rank.compute_s for rank in ranks) / len(ranks)
    recorded, why = traced(one.run.folder.path, plan)
    walks = [_first(recorded or measured(plan, ranks))]
    if plan.mesh.pp > 1 and compute_s > 0:
        walks.insert(0, computed(plan, compute_s))
    ending = f" The first {MOST_RANKS} of {len(ranks)} ranks are shown." if len(ranks) > MOST_RANKS else ""
    return Timeline(one.name, walks, f"{why}{ending}".strip(), ran.of_runs([one]))


def _first(walk: StepTimeline) -> StepTimeline:
    """The timeline of the first MOST_RANKS ranks."""
    ranks = list(walk.ranks)[:MOST_RANKS]
    return StepTimeline(
        walk.title, walk.source, walk.step_s, ranks, [box for box in walk.boxes if box.rank in set(ranks)]
    )


def file_name(name: str) -> str:
    """A name of letters, digits, dashes and underscores, for the file of a figure."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:60] or "run"
