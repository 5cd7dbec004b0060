"""In: an open run with run.cluster. Out: prediction.json and a line before the first step; lines at the end of the run.
Does not predict (planner/prediction.py does) and does not measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codescent.base.errors import UserError
from codescent.cost.price import price
from codescent.planner.prediction import (
    beside,
    cluster_of_run,
    not_priced,
    price_json,
    said_before,
    software_of_run,
)
from codescent.record.memory import last_rows
from codescent.train.open import OpenRun


class Predicted:
    """The prediction of a run, on rank 0. A run without run.cluster has none, and says nothing."""

    def __init__(self, run: OpenRun) -> None:
        self.run, self.found = run, dict[str, Any]()

    def begin(self) -> Iterator[str]:
        """Predict, and write prediction.json. What cannot be priced is said, and the run goes on."""
        config, folder = self.run.config, self.run.folder
        if folder is None:
            return
        try:
            cluster = cluster_of_run(config)
        except UserError as error:  # the file has gone since the run was checked
            yield f"{error}; nothing is predicted"
            return
        if cluster is None:
            return
        plan, kind = self.run.plan, self.run.world.device.type
        if reasons := list(not_priced(plan, cluster, "auto")):
            yield f"run.cluster: nothing is predicted: {'; '.join(reasons)}"
            return
        try:
            self.found = price_json(price(plan, cluster, software_of_run(cluster, config)))
        except UserError as error:  # no FLOP/s in this number format
            yield f"run.cluster: nothing is predicted: {error}"
            return
        folder.write_prediction(self.found)
        yield said_before(self.found)
        if kind != cluster.device.kind:
            name = config.run.cluster
            yield f"run.cluster: {name} has devices of the kind {cluster.device.kind}, and this run is on {kind}"

    def end(self) -> Iterator[str]:
        """Predicted beside measured."""
        if not self.found or self.run.folder is None:
            return
        rows = [row for row in self.run.folder.read_metrics() if row["step"] > self.run.first_step]
        fullest: dict[int, Any] = {}
        for rank, row in last_rows(self.run.folder.path).items():
            stage = self.run.plan.role(rank)
            if stage not in fullest or (row["peak_bytes"] or 0) > (fullest[stage]["peak_bytes"] or 0):
                fullest[stage] = row
        yield from beside(self.found, [float(row["step_s"]) for row in rows], fullest)
