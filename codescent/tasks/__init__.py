"""In: a corpus. Out: samples of it for a task, and how good a model is at that task.
Does not train, and does not know a layout."""
