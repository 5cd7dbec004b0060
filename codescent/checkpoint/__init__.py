"""In: named tensors, sharded over the ranks. Out: checkpoint folders, written atomically, and loaded tensors.
Does not know a model, a layout or an optimizer."""
