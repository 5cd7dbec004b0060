"""In: a plan and a config. Out: a trained model in a run folder.
Does not decide what a step does: the plan does."""
