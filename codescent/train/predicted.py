"""In: an open run with run.cluster. Out: prediction.json and a line before the first step; lines at the end of the run.
Does not predict (planner/prediction.py does) and does not measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codescent.base.device_kinds import kernels_of
from codescent.base.errors import UserError
from codescent.clusters.files import load_cluster
from codescent.cost.price import price
from codescent.planner.beside import beside
from codescent.planner.measured import measured_step
from codescent.planner.prediction import not_priced, price_json, said_before, software_of_run
from codescent.train.open import OpenRun


class Predicted:
    """The prediction of a run, on rank 0. A run without run.cluster has none, and says nothing."""

    def __init__(self, run: OpenRun) -> None:
        self.run, self.found = run, dict[str, Any]()

    def begin(self) -> Iterator[str]:
        """Predict, and write prediction.json. What cannot be priced is said, and the run goes on."""
        name, folder = self.run.config.run.cluster, self.run.folder
        if folder is None:
            return
        reason = "" if name is None else self._predict(name)
        if name is None or reason:
            folder.remove_prediction()  # that of an earlier start
            yield from [f"run.cluster: nothing is predicted: {reason}"] if reason else []
            return
        folder.write_prediction(self.found)
        yield said_before(self.found)
        kind, predicted = kernels_of(self.run.world.device.type), self.found["device_kind"]
        if kind != predicted:
            yield f"run.cluster: {name} has devices of the kind {predicted}, and this run is on {kind}"

    def _predict(self, name: str) -> str:
        """Why nothing can be predicted; empty: it is `found`."""
        config, plan = self.run.config, self.run.plan
        try:
            cluster = load_cluster(name)  # the file may have gone since the run was checked
            if reasons := list(not_priced(plan, cluster, "auto")):
                return "; ".join(reasons)
            self.found = price_json(price(plan, cluster, software_of_run(cluster, config)))
        except UserError as error:  # or there are no FLOP/s in this number format
            return str(error)
        return ""

    def end(self) -> Iterator[str]:
        """Predicted beside measured."""
        run, folder = self.run, self.run.folder
        if not self.found or folder is None:
            return
        rows = folder.read_metrics()
        steps, seconds = ([row[name] for row in rows] for name in ("step", "step_s"))
        of_ranks, memory = folder.iter_ranks(), folder.last_memory()
        yield from beside(self.found, measured_step(steps, seconds, of_ranks, memory, run.plan, run.first_step))
