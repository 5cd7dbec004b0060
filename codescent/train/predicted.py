"""In: an open run with run.cluster. Out: prediction.json and a line before the first step; lines at the end of the run.
Does not predict (planner/prediction.py does) and does not measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codescent.base.errors import UserError
from codescent.clusters.files import load_cluster, software_of
from codescent.cost.price import price
from codescent.planner.prediction import as_run, beside, not_priced, price_json, said_before
from codescent.record.memory import last_rows
from codescent.train.open import OpenRun


class Predicted:
    """The prediction of a run, on rank 0. A run without run.cluster has none, and says nothing."""

    def __init__(self, run: OpenRun) -> None:
        self.run, self.found = run, dict[str, Any]()

    def begin(self) -> Iterator[str]:
        """Predict, and write prediction.json. What cannot be priced is said, and the run goes on."""
        name, folder = self.run.config.run.cluster, self.run.folder
        if name is None or folder is None:
            return
        try:
            cluster = load_cluster(name)
        except UserError as error:  # the file has gone since the run was checked
            yield f"run.cluster: {error}; nothing is predicted"
            return
        config, plan, kind = self.run.config, self.run.plan, self.run.world.device.type
        if reasons := list(not_priced(plan, cluster, "auto")):
            yield f"run.cluster: nothing is predicted: {'; '.join(reasons)}"
            return
        software = as_run(software_of(cluster), config, cluster.device.kind)
        try:
            self.found = price_json(price(plan, cluster, software))
        except UserError as error:  # no FLOP/s in this number format
            yield f"run.cluster: nothing is predicted: {error}"
            return
        folder.write_prediction(self.found)
        yield said_before(self.found)
        if kind != cluster.device.kind:
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
