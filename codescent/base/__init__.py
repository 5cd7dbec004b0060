"""In: nothing. Out: small helpers for all other packages: user errors, safe file writes, CPU cores, rank numbers.
Does not know a model, a task, a strategy or a plan."""
