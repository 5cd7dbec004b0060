"""In: sizes. Out: the model's declared parameters (declare, without torch) and its module.
Does not know a layout."""
