"""In: runs, or a study. Out: what was run on what, in a line that stands in each of their figures.
Does not draw, and does not read run folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.plan import Plan
from codescent.plan.line import model_line
from codescent.report.run_tables import machine
from codescent.report.summary import Summary
from codescent.study.result import Study
from codescent.study.words import KIND_WORDS

MOST = 2
"""Different models, layouts and machines that are named; of more, their number."""
WITHOUT_PLAN = "a plan that this version cannot read"


def of_runs(known: Sequence[Summary]) -> str:
    """The models, layouts and machines of runs, each once."""
    machines = [machine(one.run.environment) for one in known if one.run.environment]
    found = (_each(map(_model, known)), _each(map(_layout, known)), f"on {_each(machines)}" if machines else "")
    return "; ".join(filter(None, found))


def of_study(study: Study) -> str:
    """The config, the models and the machine of a study. Its layouts are those of its points."""
    config = f"config {study.config}" if study.config else "a table that others measured"
    on = f"on {machine(study.machine)}" if study.machine else ""
    return "; ".join(filter(None, (config, _each(study.models), KIND_WORDS[study.kind], on)))


def _plan(one: Summary) -> Plan | None:
    """The plan of a run; None: an older version wrote it, or the file is damaged. The line then says so."""
    try:
        return one.run.plan
    except UserError:
        return None


def _model(one: Summary) -> str:
    plan = _plan(one)
    return WITHOUT_PLAN if plan is None else model_line(plan)


def _layout(one: Summary) -> str:
    """Batch, ranks and axes of a run."""
    plan = _plan(one)
    if plan is None:
        return ""
    ranks = counted(one.run.num_ranks, "rank")
    batch = f"global_batch_size={plan.work.global_batch_size}, {plan.work.precision}"
    return f"{batch}, {ranks}" + ("" if one.layout == ranks else f": {one.layout}")


def _each(texts: Iterable[str]) -> str:
    """Different texts, each once."""
    every = list(dict.fromkeys(filter(None, texts)))
    more = f" / and {len(every) - MOST} more" if len(every) > MOST else ""
    return " / ".join(every[:MOST]) + more
