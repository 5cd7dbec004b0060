"""In: a study that was measured. Out: the lesson on scaling, of its points and the laws fitted to them.
Does not evaluate the study (codescent/study does) and does not draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_seconds, of_share
from codescent.base.errors import UserError
from codescent.explain.content import Chart, ChartLine, Lesson, LessonFrame, TextTable
from codescent.explain.language import Language
from codescent.explain.laws import law_meanings, law_name, law_says
from codescent.results import Interval
from codescent.study.evaluate import UNSUITABLE
from codescent.study.result import Group, Kind, Point, PointState, Study

GROWS = (Kind.STRONG, Kind.WEAK, Kind.THREADS)
"""Kinds of studies in which the number of workers grows."""


def lesson_of_study(study: Study, say: Language) -> Lesson:
    """The lesson. Raises UserError: no number of workers grows in the study, or nothing is measured yet."""
    if study.kind not in GROWS:
        kinds = ", ".join(GROWS)
        raise UserError(f"{study.name}: in a study of kind {study.kind} no number of workers grows; {kinds} have one")
    groups = [(group, points) for group in study.groups if (points := _done(group))]
    if not groups:
        raise UserError(
            f"{study.name}: no point is measured beside its baseline yet; run codescent study with its file"
        )
    frames = [frame for group, points in groups for frame in _frames(study, group, points, say)]
    machine = ", ".join(str(study.machine[name]) for name in ("processor", "device") if study.machine.get(name))
    return Lesson(
        topic="scaling",
        title=say("How a run scales"),
        about=_about(study, say),
        config="; ".join(filter(None, (f"{study.name} ({study.kind})", study.config, machine))),
        frames=frames,
        see=(
            ("codescent explain scaling", say("the same lesson, of simulated ranks")),
            ("codescent docs study", say("what each law says, and when it can be trusted")),
        ),
    )


def _about(study: Study, say: Language) -> str:
    if study.kind is Kind.THREADS:
        return say("More threads share a step. How much faster does it get, and why not more?")
    return say("More ranks share a step, or do more in it. How much faster does it get, and why not more?")


def _done(group: Group) -> list[Point]:
    """The points with a speed-up, by number of workers."""
    found = [one for one in group.points if one.workers is not None and one.speed_up.total is not None]
    return sorted(found, key=lambda one: one.workers or 0)


def _frames(study: Study, group: Group, points: Sequence[Point], say: Language) -> Iterator[LessonFrame]:
    def title(words: str) -> str:
        return f"{group.label}: {words}" if group.label else words

    speeds = {one.workers or 0: one.speed_up.total.value for one in points if one.speed_up.total is not None}
    shares = {one.workers or 0: one.efficiency.total.value for one in points if one.efficiency.total is not None}
    holds = {
        Kind.STRONG: say("Same batch: the ranks share the samples of a step (strong scaling)."),
        Kind.WEAK: say("Batch grows: each rank keeps its samples (weak scaling)."),
        Kind.THREADS: say("The threads of one rank share a step."),
    }[study.kind]
    lost = [_without(one, say) for one in group.points if one not in points]
    marks = [f"{one.name}: {say.told(mark.kind.value, **dict(mark.values))}" for one in points for mark in one.marks]
    slower = [one for one in points if one.serial_share is not None and one.serial_share.value > 1]
    yield LessonFrame(
        title(say("What was measured")),
        (holds,),
        (_table(study, points, say),),
        (
            say("Efficiency is the speed-up divided by the growth of the workers since the baseline."),
            *(say("A serial share above 100 % means: slower than the baseline.") for _ in slower[:1]),
            *lost,
            *marks,
        ),
    )
    if len(points) < 2:
        return
    lines = [
        ChartLine(say("measured"), [(float(workers), speed) for workers, speed in speeds.items()]),
        ChartLine(say("ideal"), [(float(workers), speed / shares[workers]) for workers, speed in speeds.items()]),
        *(
            ChartLine(law_name(fit.law, say), [(float(workers), speed) for workers, speed in fit.curve.items()])
            for fit in group.fits
            if fit.curve
        ),
    ]
    yield LessonFrame(title(say("The curves")), (), (Chart(lines, _unit(study, say), say("speed-up")),))
    fits = [fit for fit in group.fits if not fit.said.startswith(UNSUITABLE)]
    rows = [(law_name(fit.law, say), law_says(fit, say)) for fit in fits]
    if rows:
        heads = (say("law"), say("what it says"))
        yield LessonFrame(title(say("The laws")), law_meanings(say), (TextTable(heads, rows),))


def _table(study: Study, points: Sequence[Point], say: Language) -> TextTable:
    heads = (_unit(study, say), say("a step"), say("speed-up"), say("efficiency"), say("serial share"))
    rows = []
    for one in points:
        step, efficiency, serial = one.step_s.total, one.efficiency.total, one.serial_share
        rows.append((
            str(one.workers),
            "" if step is None else of_seconds(step.value),
            _of_interval(one.speed_up.total, say),
            "" if efficiency is None else of_share(efficiency.value),
            "" if serial is None else of_share(serial.value),
        ))  # fmt: skip
    return TextTable(heads, rows, numbers=range(5))


def _without(one: Point, say: Language) -> str:
    """Why a point is not in the table."""
    if one.state is PointState.DONE:
        return say("{name}: its baseline is not measured", name=one.name)
    state = {
        PointState.FAILED: say("failed"),
        PointState.OUT_OF_MEMORY: say("out of memory"),
        PointState.REFUSED: say("refused"),
        PointState.TO_DO: say("not run yet"),
    }[one.state]
    why = f" ({one.why})" if one.why else ""  # in the words of the run
    return f"{one.name}: {state}{why}"


def _unit(study: Study, say: Language) -> str:
    """What the workers are."""
    return {"ranks": say("ranks"), "threads": say("threads")}.get(study.unit, study.unit)


def _of_interval(found: Interval | None, say: Language) -> str:
    """A number, with its interval of 95 % if it has one."""
    if found is None:
        return ""
    value = f"{found.value:.2f}"
    if not found.low < found.high:
        return value
    return say("{value} ({low} to {high})", value=value, low=f"{found.low:.2f}", high=f"{found.high:.2f}")
