"""In: the points of a study. Out: why a point cannot exist, in the words of `build`; the data of all points prepared.
Does not start a run: what only a machine can refuse, such as a missing device, makes a run fail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codescent.base.cores import available_cores
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.cost.flop_formulas import refused
from codescent.plan import FlopFormula, Plan
from codescent.preflight import absent, check, plan_of
from codescent.study.file import StudyFile
from codescent.study.points import Spec


def config_of(study: StudyFile, spec: Spec) -> Config:
    """The config of a point. Raises UserError: its values are wrong or contradict each other."""
    return load(study.study.config, spec.words).config


def refusals(study: StudyFile, specs: Sequence[Spec]) -> dict[str, str]:
    """Why points cannot exist, by name. Raises UserError: none of them can."""
    found = {spec.name: why for spec in specs if (why := _refused(study, spec))}
    if len(found) == len(specs):
        reasons = dict.fromkeys(found.values())
        raise UserError(f"{study.study.name}: no point can exist: {next(iter(reasons))}", *list(reasons)[1:4])
    return found


def check_formula(study: StudyFile, specs: Sequence[Spec], formula: FlopFormula) -> None:
    """Raise UserError: the formula cannot count the FLOPs of points; better now than after their runs."""
    if formula is not FlopFormula.EXECUTED:
        return  # no other needs more than each plan says
    for spec in specs:
        if why := refused(formula, plan_for(config_of(study, spec), spec.ranks)):
            raise UserError(f"{study.study.name}: {spec.name}: {why}")


def plan_for(config: Config, ranks: int) -> Plan:
    """The plan of a config; files of [data] that are not there yet are not needed."""
    return plan_of(config, ranks, without_data=bool(absent(config)))


def prepare(study: StudyFile, specs: Iterable[Spec]) -> dict[str, str]:
    """Prepare the data of points before any of them runs. Returns, by name, why the data refuses a point."""
    found = {}
    for spec in specs:
        try:
            check(config_of(study, spec), spec.ranks, resume=False, creates_folder=False)
        except UserError as error:
            found[spec.name] = "; ".join(error.problems)
    return found


def _refused(study: StudyFile, spec: Spec) -> str:
    """Why a point cannot exist; "": it can."""
    if spec.ranks % spec.nodes:
        return f"{counted(spec.ranks, 'rank')} do not divide into {counted(spec.nodes, 'machine')}"
    try:
        config = config_of(study, spec)
        plan_for(config, spec.ranks)
    except UserError as error:
        return "; ".join(error.problems)
    # Without a number of threads each rank has one at least; whether device "auto" is a CPU is known after the run.
    threads = config.train.num_threads or int(config.train.device == "cpu")
    wanted, cores = spec.ranks // spec.nodes * threads, available_cores()
    if study.study.oversubscribe or spec.nodes > 1 or wanted <= cores:
        return ""
    return f"{counted(wanted, 'thread')} on {counted(cores, 'core')}, and oversubscribe = false"
