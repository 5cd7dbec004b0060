"""In: an open run with run.cluster. Out: prediction.json and a line before the first step; lines at the end of the run.
Does not predict (planner/prediction.py does) and does not measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codescent.base.errors import UserError
from codescent.clusters.files import load_cluster, software_of
from codescent.cost.price import price
from codescent.planner.prediction import beside, not_priced, price_json, said_before
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
        if reason := not_priced(self.run.plan):
            yield f"run.cluster: nothing is predicted: {reason}"
            return
        self.found = price_json(price(self.run.plan, cluster, software_of(cluster)))
        folder.write_prediction(self.found)
        yield said_before(self.found)
        kind = self.run.world.device.type
        if kind != cluster.device.kind:
            yield f"run.cluster: {name} has devices of the kind {cluster.device.kind}, and this run is on {kind}"

    def end(self) -> Iterator[str]:
        """Predicted beside measured."""
        if not self.found or self.run.folder is None:
            return
        rows = [row for row in self.run.folder.read_metrics() if row["step"] > self.run.first_step]
        yield from beside(
            self.found, [float(row["step_s"]) for row in rows], list(last_rows(self.run.folder.path).values())
        )
