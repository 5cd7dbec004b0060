"""In: a run, the devices that it has. Out: the rules of docs/which.md, in order, each tried as a plan.
Does not simulate and prices nothing."""
