"""In: train.compile. Out: compiled blocks and models follow the eager run. Slow: a compiler has to warm up.
Does not measure speed: benchmarks do."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import losses, make_project, train


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_follows_eager(tmp_path: Path, precision: str) -> None:
    make_project(tmp_path)
    expected = train(tmp_path, "eager", f"train.precision={precision}")
    tolerance = {"fp32": 1e-4, "bf16": 2e-2}[precision]
    for what in ("blocks", "model"):
        run = train(tmp_path, what, f"train.precision={precision}", f"train.compile={what}")
        assert losses(run) == pytest.approx(losses(expected), rel=tolerance)
