"""In: a model's parameter list, or its torch module. Out: the list (declare.py) or the module (module.py) with LoRA.
Does not depend on the kind of model."""
