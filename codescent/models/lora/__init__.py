"""In: the declared parameters of a model. Out: the same with adapters, declared and as modules.
Does not know a kind of model."""
