"""In: environment variables. Out: a copy in which a waiting OpenMP thread sleeps after a fraction of a millisecond.
Does not set the number of threads or restart the process: OpenMP reads the variables when torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

SPINS = "10000"
"""How often a waiting thread looks before it sleeps: 0.2 ms at 20 ns each. libgomp's default, 300,000, is 6 ms. The
gaps between the parallel loops of a step are shorter than 0.2 ms, and a time slice of another program (3 ms) is
longer. So alone on its cores no thread sleeps in a step, and beside other programs none burns their time.
"""


def with_short_spin(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` with GOMP_SPINCOUNT, unless the user has set how threads wait."""
    return dict(env) if any(name in env for name in VARIABLES) else {**env, "GOMP_SPINCOUNT": SPINS}
