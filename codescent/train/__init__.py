"""In: a plan and a config. Out: a trained model in a run folder.
Does not decide anything that the plan could have decided."""
