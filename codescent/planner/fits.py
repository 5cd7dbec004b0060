"""In: a config. Out: whether each rank of a plan has room on the devices of run.cluster, for build/shrunk.py.
Does not count bytes (cost/stage_memory.py does) and looks at no machine."""

from __future__ import annotations

from codescent.build.shrunk import Fits
from codescent.config.sections import Config
from codescent.cost.price import memory_of
from codescent.cost.stage_memory import Fitting
from codescent.plan import Plan
from codescent.planner.prediction import cluster_of_run, software_of_run


def fits_cluster(config: Config) -> Fits | None:
    """Whether a plan may fit; None: run.cluster names no cluster, so nothing is known. What is tight may fit.

    Raises:
        UserError: all problems of the cluster file.
    """
    cluster = cluster_of_run(config)
    if cluster is None:
        return None
    software = software_of_run(cluster, config)

    def fits(plan: Plan) -> bool:
        verdicts = (stage.verdict(cluster.device, calibrated=True) for stage in memory_of(plan, cluster, software))
        return Fitting.TOO_LARGE not in verdicts

    return fits
